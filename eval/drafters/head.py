"""A trained head as a drafter: Medusa (no state but a feature) and the heads that go step by step (heads/base.py).

A head with a cache of its own, prompt of 7, k = 4 (entry t = feature g_t with the embedding of x_{t+1}):

    start     entries 0..6 from true features; the last one drafts d_1
    propose   d_1..d_3 are fed with the head's own features (entries 7..9); d_4 is not fed
    commit    back to 7 entries, then one entry per kept token from the target's true features: after a full
              acceptance entries 7..11 = (g_7, d_1) .. (g_10, d_4), (g_11, own), so d_4 is fed, not skipped
"""

from typing import Any

import torch
from torch import Tensor, nn

from eval import verify
from eval.drafter import Ask, Drafter, Proposal, empty
from eval.warpers import warp
from heads.medusa import Medusa
from heads.packed import PackedLinear
from heads.target import Target, TargetOutput


class DraftVocabulary:
    """Draft logits [..., D] -> target ids and q over V: zero outside D, zero on ids the tokenizer does not have."""

    def __init__(self, head: Any, target: Target) -> None:
        self.vocab_size = head.vocab_size
        self.ids = head.to_target(torch.arange(head.draft_vocab_size))  # [D], ascending
        self.real = int((self.ids < target.spec.tokenizer_size).sum())  # padding rows of the embedding come last

    def greedy(self, logits: Tensor) -> Tensor:
        return self.ids[logits[..., : self.real].argmax(-1)]

    def probs(self, logits: Tensor, ask: Ask) -> Tensor:
        """The law sampled drafts come from, through the same warpers as the target's p. fp32 [..., V]."""
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., self.ids[: self.real]] = logits[..., : self.real]
        return warp(full, ask.warpers)

    def confidence(self, logits: Tensor) -> Tensor:
        """Probability of the most likely draft token, before any warper, rows [k, D] -> [k] fp32."""
        return logits[..., : self.real].float().softmax(-1).amax(-1)

    def choose(self, logits: Tensor, ask: Ask) -> tuple[Tensor, Tensor | None]:
        """Rows [k, D] -> tokens [k], q [k, V] where it is needed."""
        probs = self.probs(logits, ask) if ask.sampled or ask.with_probs else None
        if not ask.sampled or probs is None:
            return self.greedy(logits), probs
        return verify.sample(probs, torch.rand(probs.shape[:-1], generator=ask.generator)), probs


class MedusaDrafter:
    """All heads read the feature of the position that produced the newest token."""

    def __init__(self, head: Medusa, target: Target) -> None:
        self.head, self.max_draft, self.taps = head.eval(), head.max_draft, head.taps
        self.vocabulary = DraftVocabulary(head, target)
        self.last = torch.empty(0)
        self.lm_head: PackedLinear | None = None
        if head.config.shared_lm_head and packable(head, target):
            # k rows at once: the packed product costs about one row, F.linear about two
            self.lm_head = PackedLinear(*target.lm_head(head.target_rows()))

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.last = output.last[:, -1]

    def propose(self, k: int, ask: Ask) -> Proposal:
        k = min(k, self.max_draft)
        if self.lm_head is None:
            logits = self.head.draft_logits(self.last, k)[0]
        else:
            logits = self.lm_head(torch.cat([self.head.hidden(self.last, i) for i in range(k)])).float()
        if ask.min_confidence > 0:
            reached = self.vocabulary.confidence(logits).cumprod(0)
            logits = logits[: int((reached >= ask.min_confidence).sum())]
        return Proposal(*self.vocabulary.choose(logits, ask))

    def commit(self, tokens: list[int], output: TargetOutput) -> None:
        self.last = output.last[:, -1]


class BlockDrafter:
    """A head that drafts in one go from a context it keeps: true slots are absorbed, the newest token is the anchor."""

    def __init__(self, head: Any, target: Target) -> None:
        self.head, self.max_draft, self.taps = head.eval(), head.max_draft, head.taps
        self.target = target
        self.vocabulary = DraftVocabulary(head, target)
        self.cache = head.new_cache()
        self.last, self.newest = torch.empty(0), 0

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.cache = self.head.new_cache()
        self.commit([first], output)

    def propose(self, k: int, ask: Ask) -> Proposal:
        anchor = self.target.embed(torch.tensor([self.newest]))
        logits = self.head.draft_logits(self.last, min(k, self.max_draft), self.cache, anchor)[0]
        if ask.min_confidence > 0:
            reached = self.vocabulary.confidence(logits).cumprod(0)
            logits = logits[: int((reached >= ask.min_confidence).sum())]
        return Proposal(*self.vocabulary.choose(logits, ask))

    def commit(self, tokens: list[int], output: TargetOutput) -> None:
        self.head.absorb(self.cache, output.last, output.taps)
        self.last, self.newest = output.last[:, -1], tokens[-1]


class StepDrafter:
    """EAGLE, MTP, recurrent heads; `cache.lengths` = sequence length - 1 after start and after every commit.

    A head without a cache reads the newest true slot alone, and its pointer stays at 0.
    """

    def __init__(self, head: Any, target: Target) -> None:
        self.head, self.max_draft, self.taps = head.eval(), head.max_draft, head.taps
        self.target = target
        self.vocabulary = DraftVocabulary(head, target)
        self.cache = head.new_cache()
        self.hidden = torch.empty(0)  # [1, 1, *] output of the newest true slot

    def start(self, prompt: list[int], first: int, output: TargetOutput) -> None:
        self.cache = self.head.new_cache()
        self._feed([*prompt[1:], first], output)

    def propose(self, k: int, ask: Ask) -> Proposal:
        k = min(k, self.max_draft)
        hidden, tokens, probs = self.hidden, [], []
        true_lengths, reached = self.cache.lengths, 1.0
        for i in range(k):
            logits = self.head.logits(hidden[0], i)
            if ask.min_confidence > 0:
                reached *= float(self.vocabulary.confidence(logits))
                if reached < ask.min_confidence:
                    break
            token, q = self.vocabulary.choose(logits, ask)
            tokens.append(token)
            probs.append(q)
            if i + 1 < k:
                feature, embedding = self.head.feed(hidden), self.target.embed(token.unsqueeze(0))
                hidden = self.head.advance(self.cache, feature, embedding, step=i + 1)
        self.cache.crop(true_lengths)  # what the head made of its own features is thrown away
        kept = [q for q in probs if q is not None]
        return Proposal(torch.cat(tokens), torch.cat(kept) if kept else None) if tokens else empty()

    def commit(self, tokens: list[int], output: TargetOutput) -> None:
        self._feed(tokens, output)

    def _feed(self, tokens: list[int], output: TargetOutput) -> None:
        feature, embeddings = self.head.feature(output.last, output.taps), self.target.embed(torch.tensor([tokens]))
        if not self.head.uses_cache:
            feature, embeddings = feature[:, -1:], embeddings[:, -1:]
        self.hidden = self.head.advance(self.cache, feature, embeddings)[:, -1:]


def drafter_for(head: Any, target: Target) -> Drafter:
    """The drafter of a head (already attached to its target)."""
    if head.parallel:
        return BlockDrafter(head, target) if head.uses_cache else MedusaDrafter(head, target)
    return StepDrafter(head, target)


def packable(head: nn.Module, target: Target) -> bool:
    return target.device.type == "cpu" and all(p.dtype == torch.float32 for p in head.parameters())


def pack(head: Any, target: Target) -> Any:
    """Give a head's linears (float32, CPU) the target's fast path, so that neither side of a speedup is handicapped.

    The head drafts only from here on: its weights no longer appear in a state dict.
    """
    if not packable(head, target):
        return head
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "fc":  # fuse() casts to fc's weight dtype; one small product
                setattr(module, name, PackedLinear(child.weight, child.bias))
    head.pack_lm_head()
    return head


def untrained(head: Any, target: Target, seed: int = 0) -> Any:
    """A head of the same configuration and vocabulary with random weights: the floor a trained one must beat."""
    vocab = (head.d2t, head.t2d) if head.draft_vocab_size < head.vocab_size else None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = type(head)(head.config, target.spec, vocab)
        with torch.no_grad():
            for parameter in fresh.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return fresh.attach(target).eval()
