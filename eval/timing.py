"""What a target pass costs by number of tokens, and a draft by number of tokens. Interleaved, median, seconds."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from eval.cache import AttentionMasks, KVCache, Trees
from eval.drafter import Ask, Drafter, Kept, share
from eval.generate import forward, read
from eval.warpers import Warpers
from heads.target import Target, TargetOutput

MOST_ROWS = 1024  # more than any proposal has, for drafters that read the target's token after every row


def median_seconds(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Each job once per round, round after round, so that a slow moment of the machine hits all of them."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            if turn:  # the first round warms up
                found[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


@torch.inference_mode()
def target_pass(
    target: Target, prompt: list[int], sizes: Sequence[int] = range(1, 17), repeats: int = 5
) -> dict[str, float]:
    """Seconds of a pass of each number of tokens over a cache holding `prompt`, LM head of every row included."""
    masks, cache = AttentionMasks(target), KVCache()
    read(target, cache, masks, prompt, ())
    cache.keep([len(prompt)])

    def job(n: int) -> Callable[[], object]:
        ids = [prompt[i % len(prompt)] for i in range(n)]
        return lambda: target.logits(forward(target, cache, masks, [ids], Trees([list(range(n - 1))])).last[0])

    return median_seconds({str(n): job(n) for n in sizes}, repeats)


@torch.inference_mode()
def draft(target: Target, drafter: Drafter, prompt: list[int], k: int, repeats: int = 7) -> tuple[float, float]:
    """(seconds per drafted token, seconds per round that do not grow with k) of a drafter.

    The fixed part holds taking in the features of two kept tokens (a usual round).
    """
    cache = KVCache()
    output = read(target, cache, AttentionMasks(target), prompt, drafter.taps)
    cache.keep([len(prompt)])
    share(drafter, cache, lambda: {0: 0})
    two = TargetOutput(output.last[:, -2:], None if output.taps is None else output.taps[:, -2:])
    drafter.start(0, prompt, prompt[0], output)
    rows = torch.tensor(prompt * (MOST_ROWS // len(prompt) + 1)) if drafter.reads_rows else None
    kept = Kept(prompt[:2], two, rows)

    def propose(n: int) -> Callable[[], object]:
        return lambda: drafter.propose([0], [Ask(n, False, Warpers(), torch.Generator())])

    jobs = {"1": propose(1), "k": propose(k), "commit": lambda: drafter.commit([0], [kept])}
    found = median_seconds(jobs, repeats)
    step = max((found["k"] - found["1"]) / (k - 1), 0.0) if k > 1 else found["1"]
    return step, max(found["1"] - step, 0.0) + found["commit"]
