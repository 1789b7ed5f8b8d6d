"""A separate, smaller language model as the drafter (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).

It has its own KV cache, one row per slot. `fed` are the ids whose keys the cache holds; after a round the pointer goes
back to what fed and the true text have in common. Four drafts of which two are accepted, then of which all are:

    fed  .. x_n d_1 d_2 d_3       (the last draft is never fed)      text .. x_n d_1 d_2 y     next pass reads [y]
    fed  .. x_n d_1 d_2 d_3                                          text .. d_3 d_4 y         next pass reads [d_4, y]

With the target's tokenizer it drafts target ids, sampled ones through the target's warpers with q kept. With another
tokenizer its text is aligned (eval/align.py), and the drafts are deterministic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.align import Aligned, Bridge, same_ids
from eval.cache import AttentionMasks, KVCache
from eval.drafter import Ask, Kept, Proposal, point_mass
from eval.drafters.step import Step
from eval.drafters.truncated import truncated
from heads.target import Target, TargetOutput, TargetSettings

STEPS_PER_TOKEN = 4  # most draft tokens spent on one token of a target with another tokenizer


@dataclass
class DraftModelSettings:
    """Which model drafts: `id` as for a target, or, without one, the target's own first `layers` layers."""

    id: str = ""
    revision: str | None = None
    layers: int = 8

    def load(self, target: Target) -> Target:
        """Raises ValueError where the model is missing or `layers` does not fit."""
        if not self.id:
            return truncated(target, self.layers)
        settings = TargetSettings(self.id, self.revision, target.spec.dtype)
        return Target.load(settings, chat=False).to(target.device)


class DraftModel:
    """Drafts of all slots in one pass. Raises ValueError for a model whose text cannot be aligned with the target's."""

    taps: tuple[int, ...] = ()
    max_draft = 64
    reads_rows = False

    def __init__(self, model: Target, target: Target) -> None:
        self.model, self.masks = model, AttentionMasks(model)
        self.vocab_size = target.spec.vocab_size
        self.bridge = None
        if not same_ids(target.tokenizer, model.tokenizer):
            self.bridge = Bridge(target.tokenizer, model.tokenizer, model.spec.name)
        # padding rows of either embedding mean nothing to the other model
        self.real = min(model.spec.tokenizer_size, target.spec.tokenizer_size, model.spec.vocab_size, self.vocab_size)
        self.context = model.spec.max_position_embeddings
        self.cache = KVCache(1)
        self.fed: dict[int, list[int]] = {}
        self.text: dict[int, list[int]] = {}  # draft ids of the true sequence
        self.aligned: dict[int, Aligned] = {}

    def start(self, slot: int, prompt: list[int], first: int, output: TargetOutput) -> None:
        if slot >= len(self.cache.lengths):
            self.cache = widened(self.cache, slot + 1)
        self.cache.lengths[slot], self.fed[slot] = 0, []
        self.text[slot] = [*prompt, first]
        if self.bridge is not None:
            self.aligned[slot] = Aligned(self.bridge, self.text[slot])
            self.text[slot] = list(self.aligned[slot].draft_ids)
        if len(self.text[slot]) > 1 and self._fits(slot, 1):
            self.read({slot: self.text[slot][:-1]})

    def propose(self, slots: list[int], asks: list[Ask]) -> list[Proposal]:
        runs: dict[int, Step | _Text] = {}
        feed: dict[int, list[int]] = {}
        for slot, ask in zip(slots, asks, strict=True):
            aligned = self.aligned.get(slot)
            runs[slot] = Step(ask, self.vocab_size) if aligned is None else _Text(ask, self, aligned)
            if self._fits(slot, runs[slot].most):
                self._roll_back(slot)
                feed[slot] = self.text[slot][len(self.fed[slot]) :]
        while feed:
            logits = self.read(feed)
            taken = {slot: runs[slot].take(row) for slot, row in logits.items()}
            feed = {slot: [token] for slot, token in taken.items() if token is not None}
        return [runs[slot].proposal() for slot in slots]

    def commit(self, slots: list[int], kept: list[Kept]) -> None:
        for slot, left in zip(slots, kept, strict=True):
            if self.bridge is None:
                self.text[slot] += left.tokens
            else:
                self.aligned[slot].extend(left.tokens)
                self.text[slot] = list(self.aligned[slot].draft_ids)

    def read(self, feed: dict[int, list[int]]) -> dict[int, Tensor]:
        """One pass over ragged new ids of some slots -> logits [real] after each slot's last id.

        Rows between those of the slots take part with padding: past their pointer, so never seen.
        """
        first, last, T = min(feed), max(feed) + 1, max(map(len, feed.values()))
        rows = [feed.get(slot, [0]) for slot in range(first, last)]
        device = self.model.device
        ids = torch.tensor([row + [0] * (T - len(row)) for row in rows], device=device)
        with self.cache.rows(first, last) as cache:
            output = self.model.forward(
                ids,
                cache=cache,
                positions=cache.positions(T, device).clamp(max=self.context - 1),  # of padding
                mask=self.masks(cache, T, device),
            )
        for slot, new in feed.items():
            self.cache.lengths[slot] += len(new)
            self.fed[slot] += new
        ends = [len(feed[slot]) - 1 for slot in feed]
        logits = self.model.logits(output.last[[slot - first for slot in feed], ends])[:, : self.real]
        return dict(zip(feed, logits, strict=True))

    def _fits(self, slot: int, steps: int) -> bool:
        """Whether the draft's own context has room for the text and `steps` drafts, one at least."""
        return steps > 0 and 0 < len(self.text[slot]) <= self.context - steps

    def _roll_back(self, slot: int) -> None:
        """Keep what was fed of the true text; the text's last token is always left to be fed."""
        fed, text = self.fed[slot], self.text[slot]
        n = max(min(len(fed), len(text) - 1), 0)
        if fed[:n] != text[:n]:
            n = next(i for i in range(n) if fed[i] != text[i])
        self.fed[slot], self.cache.lengths[slot] = fed[:n], n


class _Text:
    """A chain in the draft's ids, proposed as the whole target tokens that it spells."""

    def __init__(self, ask: Ask, drafter: DraftModel, aligned: Aligned) -> None:
        self.ask, self.aligned, self.vocab_size = ask, aligned, drafter.vocab_size
        self.eos_ids = drafter.model.eos_ids
        self.most = STEPS_PER_TOKEN * (ask.budget + 1) if aligned.ready and ask.budget > 0 else 0
        self.drafted: list[int] = []
        self.found: list[int] = []

    def take(self, logits: Tensor) -> int | None:
        token = int(logits.argmax())
        ended = token in self.eos_ids
        if not ended:
            self.drafted.append(token)
        self.found = self.aligned.whole(self.drafted, ended)
        return None if ended or len(self.found) >= self.ask.budget or len(self.drafted) >= self.most else token

    def proposal(self) -> Proposal:
        return point_mass(self.found[: self.ask.budget], self.vocab_size, self.ask)


def widened(cache: KVCache, batch: int) -> KVCache:
    """A cache of more rows that holds what `cache` held."""
    wider = KVCache(batch, cache.capacity)
    wider.lengths[: len(cache.lengths)] = cache.lengths
    for held, new in ((cache.keys, wider.keys), (cache.values, wider.values)):
        for old in held:
            new.append(old.new_zeros(batch, *old.shape[1:]))
            new[-1][: len(old)] = old
    return wider
