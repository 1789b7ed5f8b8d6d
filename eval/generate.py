"""One decoding loop for everything: prefill -> propose -> target pass -> verify -> commit. Plain decoding is k = 0."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eval import stop, verify
from eval.cache import AttentionMasks, KVCache
from eval.drafter import Ask, Drafter, Proposal, empty
from eval.warpers import Warpers, biased, seen_by_row, warp
from heads.target import Target, TargetOutput

RULES = ("auto", "greedy", "match", "one-hot", "rejection", "strict")


@dataclass
class Decoding:
    """How a sequence is decoded. A token's law never depends on k, rule, proposal or drafter: all rules are exact."""

    k: int = 0  # draft tokens per round, 0 = plain
    max_new_tokens: int = 64
    warpers: Warpers = field(default_factory=Warpers)
    proposal: str = "greedy"  # greedy: most likely draft tokens; sampled: drawn from q through the same warpers
    rule: str = "auto"
    seed: int = 0
    record_alpha: bool = False  # needs q at every step: not in timed runs
    stop_strings: tuple[str, ...] = ()
    min_confidence: float = 0.0  # adaptive draft length of the heads (see Ask); 0 = always k

    def resolved_rule(self) -> str:
        """auto: greedy at temperature 0, rejection for sampled drafts, sample-and-match for deterministic ones."""
        if self.warpers.temperature == 0:
            return "greedy"
        if self.rule != "auto":
            return self.rule
        return "rejection" if self.proposal == "sampled" and self.k > 0 else "match"


@dataclass
class Generation:
    """A decoded sequence: ids, steps [[K_s, a_s]], seconds per part, why it ended ("eos", "length", "stop")."""

    output_ids: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    stop: str = "length"
    alpha_sum_min: list[list[float]] = field(default_factory=list)
    alpha_greedy: list[list[float]] = field(default_factory=list)


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    decoding: Decoding,
    masks: AttentionMasks | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> Generation:
    """Decode one prompt (token ids). `decode` (ids -> text) is needed for stop strings only.

    Raises ValueError for an empty prompt or one that fills the context.
    """
    room = target.spec.max_position_embeddings - len(prompt)
    if not prompt or room < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens: the context holds {target.spec.max_position_embeddings}")
    budget = min(decoding.max_new_tokens, room)
    found = Generation()
    if budget < 1:
        return found
    masks = masks or AttentionMasks(target)
    taps = drafter.taps if drafter is not None else ()
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(verify.mix(decoding.seed, len(prompt)))
    # the draft knows no penalty: q stays the law it draws from, which is all that exactness asks
    drafting = dataclasses.replace(decoding.warpers, repetition_penalty=1.0)
    ask = Ask(decoding.proposal == "sampled", drafting, generator, decoding.record_alpha, decoding.min_confidence)
    cache = KVCache(capacity=max(256, len(prompt) + budget + decoding.k))

    output = forward(target, cache, masks, prompt, taps)
    cache.keep([len(prompt)])
    logits = target.logits(output.last[0, -1:])
    prefix = _prefix(decoding, prompt, logits)
    _, own, _ = judge(empty(), logits, decoding, generator, len(prompt), prefix)
    if prefix is not None:
        prefix[own] = True
    ended = _emit(found, [own], target, budget, decoding, decode)
    if drafter is not None and not ended:
        drafter.start(prompt, own, output)
    found.prefill_s = _now(target) - began

    while not ended:
        t0 = _now(target)
        K = min(decoding.k, budget - len(found.output_ids))  # never draft what could not be emitted
        proposal = drafter.propose(K, ask) if drafter is not None and K > 0 else empty()
        t1 = _now(target)
        output = forward(target, cache, masks, [own, *proposal.tokens.tolist()], taps)
        position = len(prompt) + len(found.output_ids)
        logits = target.logits(output.last[0])
        accepted, own, target_probs = judge(proposal, logits, decoding, generator, position, prefix)
        t2 = _now(target)
        tokens = [*proposal.tokens[:accepted].tolist(), own]
        if prefix is not None:
            prefix[tokens] = True
        cache.keep([cache.lengths[0] + 1 + accepted])
        _record(found, proposal, accepted, target_probs, decoding)
        ended = _emit(found, tokens, target, budget, decoding, decode)
        t3 = _now(target)
        if drafter is not None and not ended:
            kept = accepted + 1
            drafter.commit(
                tokens, TargetOutput(output.last[:, :kept], None if output.taps is None else output.taps[:, :kept])
            )
        t4 = _now(target)
        found.draft_s += t1 - t0 + t4 - t3
        found.verify_s += t2 - t1
        found.other_s += t3 - t2
    return found


def forward(target: Target, cache: KVCache, masks: AttentionMasks, ids: list[int], taps: tuple[int, ...]) -> Any:
    """One target pass of one sequence at the cache's pointer; rows for ids, nothing committed."""
    tokens = torch.tensor([ids], device=target.device)
    return target.forward(
        tokens,
        taps=taps,
        cache=cache,
        positions=cache.positions(len(ids), target.device),
        mask=masks(cache, len(ids), target.device),
    )


def judge(
    proposal: Proposal,
    logits: Tensor,
    decoding: Decoding,
    generator: torch.Generator,
    position: int,
    prefix: Tensor | None = None,
) -> tuple[int, int, Tensor | None]:
    """Verify one chain: logits [K+1, V] -> (accepted, own token, p [K+1, V] or None where greedy needs none).

    `position` is the place in the sequence of draft token 0; `prefix` [V] marks the tokens before it (penalties).
    """
    rule = decoding.resolved_rule()
    draft = proposal.tokens.unsqueeze(0)
    K, V = draft.shape[1], logits.shape[-1]
    seen = None if prefix is None else seen_by_row(prefix, proposal.tokens.tolist(), range(K))
    if rule == "greedy":
        verdict = verify.match(draft, biased(logits, decoding.warpers, seen).argmax(-1).cpu().unsqueeze(0))
        return int(verdict.accepted), int(verdict.own), None
    target_probs = warp(logits, decoding.warpers, seen).cpu().unsqueeze(0)
    if rule in ("match", "strict"):
        verdict = verify.sample_and_match(draft, target_probs, decoding.seed, position)
    else:
        u = torch.rand(1, K + 1, generator=generator)
        if rule == "one-hot":
            verdict = verify.chain_one_hot(draft, target_probs, u)
        else:
            draft_probs = proposal.probs if proposal.probs is not None else target_probs.new_empty(0, V)
            verdict = verify.rejection(draft, target_probs, draft_probs.unsqueeze(0), u)
    return int(verdict.accepted), int(verdict.own), target_probs[0]


def _prefix(decoding: Decoding, prompt: list[int], logits: Tensor) -> Tensor | None:
    """Which tokens occurred so far, bool [V]; None where no penalty asks."""
    if decoding.warpers.repetition_penalty == 1:
        return None
    prefix = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    prefix[prompt] = True
    return prefix


def _record(
    found: Generation, proposal: Proposal, accepted: int, target_probs: Tensor | None, decoding: Decoding
) -> None:
    found.steps.append([len(proposal.tokens), accepted])
    if decoding.record_alpha and target_probs is not None and proposal.probs is not None:
        overlap, greedy = verify.alphas(proposal.tokens, target_probs, proposal.probs)
        # a position counts where its prefix was accepted: elsewhere p is conditioned on text that is not emitted
        found.alpha_sum_min.append([round(x, 5) for x in overlap[: accepted + 1]])
        found.alpha_greedy.append([round(x, 5) for x in greedy[: accepted + 1]])


def _emit(
    found: Generation,
    tokens: list[int],
    target: Target,
    budget: int,
    decoding: Decoding,
    decode: Callable[[list[int]], str] | None,
) -> bool:
    """Append what a round really emits; true when the answer has ended. The last step's a_s counts emitted drafts."""
    kept, ended = stop.cut(tokens, target.eos_ids, budget - len(found.output_ids))
    found.output_ids.extend(kept)
    if decoding.stop_strings and decode is not None:
        texts = ["", *(decode(found.output_ids[: i + 1]) for i in range(len(found.output_ids)))]
        pieces = [text[len(before) :] for before, text in zip(texts, texts[1:], strict=False)]
        if cutting := stop.cut_at_string(pieces, decoding.stop_strings):
            gone = len(found.output_ids) - cutting[1]
            del found.output_ids[cutting[1] :]
            kept, ended = kept[: max(len(kept) - gone, 0)], "stop"
    if found.steps and found.steps[-1][1] > len(kept):
        found.steps[-1][1] = len(kept)
    if ended:
        found.stop = ended
    return ended is not None


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize()  # kernels run behind: without it the next part would be charged
    return time.perf_counter()
