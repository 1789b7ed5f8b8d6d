"""Coupling on a real target: chain, static tree and dynamic tree emit plain decoding's own tokens, at batch 1 and 8.

    python -m scripts.prove_coupling --head outputs/train/quickstart-eagle3 --prompts 50 --tokens 8

At temperature 1 under the match rule a token is a function of its prefix, seed and position, so speculative and plain
sampling must agree token by token; at temperature 0 they must as well. Without --head an EAGLE-3 head of random weights
drafts, which accepts little. Ends with status 1 where a single token differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from eval.drafters.head import drafter_for, pack, untrained
from eval.generate import Decoding, generate_batch
from eval.tree import Dynamic, Shape, from_paths
from eval.warpers import Warpers
from heads.eagle3 import Eagle3, Eagle3Config
from heads.hub import load_head
from heads.target import Target, TargetSettings

PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]
PROMPTS = Path(__file__).parent / "assets" / "prompts"


def prompts(target: Target, count: int, longest: int = 96) -> list[list[int]]:
    """First turns of every route in turn, through the target's chat template, those of at most `longest` tokens."""
    routes = [path.read_text(encoding="utf-8").splitlines() for path in sorted(PROMPTS.glob("*.jsonl"))]
    texts = [json.loads(line)["turns"][0] for turn in zip(*routes, strict=False) for line in turn]
    found: list[list[int]] = []
    for text in texts:
        message = [{"role": "user", "content": text}]
        held = target.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        if len(held["input_ids"]) <= longest and len(found) < count:
            found.append(list(held["input_ids"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", default=TargetSettings().id)
    parser.add_argument("--head")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()
    target = Target.load(TargetSettings(id=options.target))
    head: Any = (
        load_head(options.head, target.spec) if options.head else untrained(Eagle3(Eagle3Config(), target.spec), target)
    )
    drafter = drafter_for(pack(head.attach(target), target), target)
    texts = prompts(target, options.prompts)
    shapes: dict[str, Shape | None] = {
        "chain of 3": None,
        "static tree of 9": from_paths(PATHS, head.max_draft, head.draft_vocab_size),
        "dynamic tree of 9": Dynamic(3, 3, 9),
    }
    different = 0
    for temperature in (1.0, 0.0):
        plain = [Decoding(0, options.tokens, Warpers(temperature), seed=i) for i in range(len(texts))]
        alone = [found.output_ids for found in generate_batch(target, None, texts, plain, 1)]
        for name, shape in shapes.items():
            for batch in (1, 8):
                settings = [
                    Decoding(3, options.tokens, Warpers(temperature), seed=i, tree=shape) for i in range(len(texts))
                ]
                found = generate_batch(target, drafter, texts, settings, batch)
                equal = sum(ours.output_ids == theirs for ours, theirs in zip(found, alone, strict=True))
                accepted = sum(a for own in found for _, a in own.steps)
                different += len(texts) - equal
                print(
                    f"T = {temperature:g}, {name}, batch {batch}: {equal} of {len(texts)} prompts equal to plain, "
                    f"{sum(map(len, alone))} tokens, {accepted} drafts accepted",
                    flush=True,
                )
    if different:
        sys.exit(f"{different} answers differ from plain decoding")


if __name__ == "__main__":
    main()
