"""One decoding loop for everything: prefill -> propose -> target pass -> verify -> commit.

Plain decoding has no drafter, a chain is a tree of width 1, one prompt is a batch of 1. `concurrency` sequences are
decoded at once; where one ends, the next prompt is read into its place (continuous refill). Two prompts at once out of
three, rounds left to right, the second prompt shorter:

    row 0    prompt 0  round  round  round  round  end
    row 1    prompt 1  round  end    prompt 2  round ...

Rows of a batch share nothing but the pass: each has its own length, acceptance, seed and steps.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eval.cache import AttentionMasks, KVCache, Trees
from eval.decoding import RULES, Decoding, Generation
from eval.drafter import Drafter, Kept, Proposal, empty, share
from eval.sequence import Sequence as Decoded
from heads.target import Target, TargetOutput

__all__ = ["RULES", "Decoding", "Generation", "forward", "generate", "generate_batch", "read"]


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    decoding: Decoding,
    masks: AttentionMasks | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> Generation:
    """Decode one prompt (token ids); see generate_batch."""
    return generate_batch(target, drafter, [prompt], [decoding], 1, masks, decode)[0]


@torch.inference_mode()
def generate_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    decodings: Sequence[Decoding],
    concurrency: int,
    masks: AttentionMasks | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> list[Generation]:
    """Decode prompts (token ids), at most `concurrency` at once, each by its own decoding; answers in their order.

    `decode` (ids -> text) is needed for stop strings only. Raises ValueError, before anything is decoded, for an empty
    prompt or one that fills the context.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency={concurrency}: give at least 1")
    every = [Decoded(target, p, d, decode) for p, d in zip(prompts, decodings, strict=True)]
    pending = deque(sequence for sequence in every if not sequence.ended)
    batch = Batch(target, drafter, masks or AttentionMasks(target), list(pending), concurrency)
    while batch.refill(pending):
        batch.round()
    return [sequence.found for sequence in every]


class Batch:
    """The sequences being decoded: row r of the target's cache holds `live[r]`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        masks: AttentionMasks,
        sequences: Sequence[Decoded],
        concurrency: int,
    ) -> None:
        self.target, self.drafter, self.masks = target, drafter, masks
        self.taps = drafter.taps if drafter is not None else ()
        rows = min(concurrency, len(sequences))
        longest = max((len(s.prompt) + s.budget + s.decoding.depth() for s in sequences), default=0)
        self.cache = KVCache(rows, max(256, longest))
        self.live: list[Decoded] = []
        self.free = list(range(rows))  # slots of the drafter
        share(drafter, self.cache, lambda: {s.slot: row for row, s in enumerate(self.live)})

    def refill(self, pending: deque[Decoded]) -> bool:
        """Free the rows of ended sequences and read waiting prompts into them; false when nothing is left to decode."""
        for row in reversed(range(len(self.live))):
            if not self.live[row].ended:
                continue
            self.free.append(self.live[row].slot)
            if started := self._start(pending, row):
                self.live[row] = started
                continue
            last = self.live.pop()
            if row < len(self.live):  # rows stay without gaps: a pass then reads the cache through a view
                self.cache.move(len(self.live), row)
                self.live[row] = last
        while self.free and (started := self._start(pending, len(self.live))):
            self.live.append(started)
        return bool(self.live)

    def _start(self, pending: deque[Decoded], row: int) -> Decoded | None:
        """Read the next prompt into a cache row; those that end with their first token need none."""
        while pending:
            s = pending.popleft()
            began = _now(self.target)
            self.cache.lengths[row] = 0
            with self.cache.rows(row, row + 1):
                output = read(self.target, self.cache, self.masks, s.prompt, self.taps)
            self.cache.lengths[row] = len(s.prompt)
            s.first(self.target.logits(output.last[0, -1:]))
            if not s.ended:
                s.slot = self.free.pop()
                if self.drafter is not None:
                    self.drafter.start(s.slot, s.prompt, s.own, output)
            s.found.prefill_s = _now(self.target) - began
            s.found.wall_s = -began if not s.ended else s.found.prefill_s
            if not s.ended:
                return s
        return None

    def round(self) -> None:
        """Draft, one target pass, verify, keep: every live sequence emits at least one token."""
        live, target = self.live, self.target
        t0 = _now(target)
        proposals = self._propose()
        t1 = _now(target)
        trees = Trees([proposal.parents for proposal in proposals])
        ids = [[s.own, *proposal.tokens.tolist()] for s, proposal in zip(live, proposals, strict=True)]
        with self.cache.rows(0, len(live)):
            output = forward(target, self.cache, self.masks, ids, trees, self.taps)
        counts = [len(row) for row in ids]
        logits = target.logits(real_rows(output.last, counts)).split(counts)
        best = self._best(logits)
        settled = [
            s.settle(proposal, own, top) for s, proposal, own, top in zip(live, proposals, logits, best, strict=True)
        ]
        t2 = _now(target)
        kept = []
        for row, (s, (path, tokens)) in enumerate(zip(live, settled, strict=True)):
            self.cache.accept(row, path)
            if self.drafter is not None and not s.ended:
                kept.append((s.slot, Kept(tokens, path_rows(output, row, path), self._rows(best[row]))))
        t3 = _now(target)
        if self.drafter is not None and kept:
            self.drafter.commit([slot for slot, _ in kept], [left for _, left in kept])
        t4 = _now(target)
        for s in live:
            s.found.draft_s += (t1 - t0 + t4 - t3) / len(live)
            s.found.verify_s += (t2 - t1) / len(live)
            s.found.other_s += (t3 - t2) / len(live)
            if s.ended:
                s.found.wall_s += t4

    def _propose(self) -> list[Proposal]:
        proposals = [empty()] * len(self.live)
        if self.drafter is None:
            return proposals
        asks = [s.ask(len(self.live), self.drafter.max_draft) for s in self.live]
        drafting = [row for row, ask in enumerate(asks) if ask.budget > 0]
        if drafting:
            found = self.drafter.propose([self.live[row].slot for row in drafting], [asks[row] for row in drafting])
            for row, proposal in zip(drafting, found, strict=True):
                proposals[row] = proposal
        return proposals

    def _best(self, logits: Sequence[Tensor]) -> list[list[int] | None]:
        """The most likely token after every row, where anyone reads it."""
        reads = self.drafter is not None and self.drafter.reads_rows
        wanted = [reads or s.decoding.warpers.temperature == 0 for s in self.live]
        return [own.argmax(-1).tolist() if asked else None for own, asked in zip(logits, wanted, strict=True)]

    def _rows(self, best: list[int] | None) -> Tensor | None:
        return torch.tensor(best) if self.drafter is not None and self.drafter.reads_rows else None


def read(
    target: Target, cache: KVCache, masks: AttentionMasks, prompt: list[int], taps: tuple[int, ...]
) -> TargetOutput:
    """One target pass over a text of one sequence at the cache's pointer; nothing committed."""
    return target.forward(
        torch.tensor([prompt], device=target.device),
        taps=taps,
        cache=cache,
        positions=cache.positions(len(prompt), target.device),
        mask=masks(cache, len(prompt), target.device),
    )


def forward(
    target: Target,
    cache: KVCache,
    masks: AttentionMasks,
    ids: Sequence[list[int]],
    trees: Trees,
    taps: tuple[int, ...] = (),
) -> TargetOutput:
    """One target pass: ids of each sequence's newest token and its drafts -> rows [B, T], nothing committed.

    Rows past a sequence's own ids are padding: whatever they hold, nothing reads them.
    """
    tokens = torch.tensor([[*row, *[0] * (trees.T - len(row))] for row in ids], device=target.device)
    return target.forward(
        tokens,
        taps=taps,
        cache=cache,
        positions=trees.positions(cache, target.device),
        mask=masks(cache, trees, target.device),
    )


def real_rows(last: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows [B, T, H] without padding, one sequence after the other: [sum of counts, H]."""
    if min(counts) == last.shape[1]:
        return last.flatten(0, 1)
    return torch.cat([last[b, :n] for b, n in enumerate(counts)])


def path_rows(output: TargetOutput, row: int, path: list[int]) -> TargetOutput:
    """Features after the newest token and after each accepted draft of one sequence."""
    rows: slice | list[int] = [0, *path]
    if path == list(range(1, len(path) + 1)):
        rows = slice(0, len(path) + 1)  # a chain: a view
    taps = None if output.taps is None else output.taps[row : row + 1, rows]
    return TargetOutput(output.last[row : row + 1, rows], taps)


def _now(target: Target) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize()  # kernels run behind: without it the next part would be charged
    return time.perf_counter()
