"""What a decoding round spends outside the two models: Python, masks, acceptance, bookkeeping.

    python -m scripts.profile_decode                          the embedded target, chain of 4 and trees of 60 nodes
    python -m scripts.profile_decode --target FOLDER --tokens 64

CPU seconds of this process (one thread), so that other work on the machine does not count. An EAGLE-3 head with random
weights drafts: what it accepts does not matter here. The last line of standard output is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from data.vocab import build
from eval.drafters.head import drafter_for, pack, untrained
from eval.generate import Batch, Decoding, generate_batch
from eval.tree import Dynamic, Shape, sparse_tree
from eval.warpers import Warpers
from heads.eagle3 import Eagle3, Eagle3Config
from heads.target import Target, TargetSettings

TREE_60 = sparse_tree([[0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02]] * 6, 60)
CASES: dict[str, tuple[Shape | None, float, int]] = {
    "plain": (None, 0.0, 1),
    "chain of 4": (None, 0.0, 1),
    "chain of 4, T = 1": (None, 1.0, 1),
    "static tree of 60": (TREE_60, 0.0, 1),
    "dynamic tree of 60": (Dynamic(6, 10, 60), 0.0, 1),
    "dynamic tree of 60, T = 1": (Dynamic(6, 10, 60), 1.0, 1),
    "chain of 4, 4 at once": (None, 0.0, 4),
}
MODELS = {"target": ("forward", "logits", "embed"), "head": ("advance", "logits", "feature", "feed")}


class Stopwatch:
    """CPU seconds inside the wrapped calls; a call inside another counts once."""

    def __init__(self) -> None:
        self.inside, self.seconds = 0, 0.0

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, self.inside = time.process_time(), self.inside + 1
            try:
                return call(*args, **kwargs)
            finally:
                self.inside -= 1
                if not self.inside:
                    self.seconds += time.process_time() - began

        return timed


def measure(target: Target, drafter: Any, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """One row per case: CPU milliseconds of a round, of both models in it, and the share of the rest."""
    models, whole = Stopwatch(), Stopwatch()
    for owner, names in ((target, MODELS["target"]), (drafter.head, MODELS["head"])):
        for name in names:
            setattr(owner, name, models.wrapped(getattr(owner, name)))
    found = []
    rounds = Batch.round
    try:
        for name, (tree, temperature, concurrency) in CASES.items():
            k = 0 if name == "plain" else 4
            decoding = Decoding(k, tokens, Warpers(temperature), tree=tree)
            batch = prompts[:concurrency]

            def run(decoding: Decoding = decoding, batch: list[list[int]] = batch, k: int = k) -> int:
                drafts = drafter if k else None
                return len(generate_batch(target, drafts, batch, [decoding] * len(batch), len(batch))[0].steps)

            run()  # warm-up
            counted = Stopwatch()

            def round_(self: Batch, counted: Stopwatch = counted) -> None:
                before = models.seconds
                counted.wrapped(rounds)(self)
                whole.seconds += models.seconds - before

            Batch.round = round_  # type: ignore[method-assign]
            whole.seconds = 0.0
            steps = run()
            Batch.round = rounds  # type: ignore[method-assign]
            found.append(
                {
                    "case": name,
                    "rounds": steps,
                    "round_ms": 1000 * counted.seconds / steps,
                    "models_ms": 1000 * whole.seconds / steps,
                    "rest_ms": 1000 * (counted.seconds - whole.seconds) / steps,
                    "rest_share": 1 - whole.seconds / counted.seconds,
                }
            )
    finally:
        Batch.round = rounds  # type: ignore[method-assign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", default=TargetSettings().id)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(TargetSettings(id=options.target))
    target.eos_ids = frozenset()
    V = target.spec.vocab_size
    size = min(8192, V)
    vocab = build(torch.ones(V, dtype=torch.int64), size, []) if size < V else None
    head = untrained(Eagle3(Eagle3Config(draft_vocab_size=size), target.spec, vocab), target)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(V, (options.prompt,), generator=generator).tolist() for _ in range(4)]
    rows = measure(target, drafter_for(pack(head, target), target), prompts, options.tokens)
    print(f"{'case':<28}{'rounds':>7}{'round ms':>10}{'models ms':>11}{'rest ms':>9}{'rest':>8}")
    for row in rows:
        print(
            f"{row['case']:<28}{row['rounds']:>7}{row['round_ms']:>10.1f}{row['models_ms']:>11.1f}"
            f"{row['rest_ms']:>9.2f}{100 * row['rest_share']:>7.1f}%"
        )
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
