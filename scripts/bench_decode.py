"""Our decoding loop beside transformers' own, on the same model object: seconds, ratios and their spread in one run.

    python -m scripts.bench_decode [--prompts 6] [--tokens 48] [--repeats 3] [--k 4] [--layers 4] [--pair plain ...]
    python -m scripts.bench_decode --pair --method self-draft --context 1024     (drafters against plain decoding)

Batch 1, temperature 0. Every prompt is decoded by all methods in turn, the two sides of a ratio one after the other,
and the whole is repeated; a ratio above 1 says ours is faster. Outputs must be the same ids. The last line of standard
output is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from data.chat import prompt_ids
from data.template import ChatFormat
from eval import reference
from eval.drafter import Drafter
from eval.drafters import DRAFTERS, DrafterSettings
from eval.drafters.draft_model import DraftModelSettings
from eval.generate import Decoding, Generation, generate
from heads.target import Target, TargetSettings

PAIRS = {"plain": "hf-generate", "draft-model": "hf-assisted", "lookup": "hf-lookup"}
Row = dict[str, Any]
PROMPTS = Path(__file__).parent / "assets/prompts"


class Bench:
    """The target, its draft model and the drafters; `run` decodes one prompt with a method of either side."""

    def __init__(self, target: Target, options: argparse.Namespace) -> None:
        self.target, self.options = target, options
        settings = DrafterSettings(draft_model=DraftModelSettings(options.draft, layers=options.layers))
        self.assistant = settings.draft_model.load(target)
        self.drafters: dict[str, Drafter | None] = {"plain": None}
        for name in {*options.pair, *options.method} - {"plain"}:
            self.drafters[name] = DRAFTERS[name](target, settings, self._other)

    def run(self, method: str, prompt: list[int]) -> tuple[Generation, float]:
        """The decoded prompt and the seconds it took by the chosen clock."""
        decoding = Decoding(k=self.options.k, max_new_tokens=self.options.tokens)
        clock = time.process_time if self.options.clock == "cpu" else time.perf_counter
        if method in reference.METHODS:
            assistant = self.assistant if method == "hf-assisted" else None
            found = reference.generate(self.target, method, prompt, decoding, assistant, clock)
            return found, found.wall_s
        if method == "plain":
            decoding.k = 0
        began = clock()
        found = generate(self.target, self.drafters[method], prompt, decoding)
        return found, clock() - began

    def _other(self, name: str) -> Drafter:
        drafter = self.drafters[name]
        assert drafter is not None, name
        return drafter


def measure(bench: Bench, prompts: Sequence[list[int]], pairs: Sequence[tuple[str, str]], repeats: int) -> list[Row]:
    """Per repeat, prompt and method: seconds, the prompt's reading included, tokens, steps.

    Raises ValueError where two methods emit different ids.
    """
    for method in order(pairs, 0):
        bench.run(method, prompts[0])  # lazy set-up is paid here
    found: list[Row] = []
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            outputs: dict[str, list[int]] = {}
            for method in order(pairs, i + repeat):
                g, seconds = bench.run(method, prompt)
                outputs[method] = g.output_ids
                row = {"repeat": repeat, "prompt": i, "method": method, "seconds": seconds}
                found.append({**row, "tokens": len(g.output_ids), "steps": len(g.steps)})
            first, *others = outputs
            if odd := [method for method in others if outputs[method] != outputs[first]]:
                raise ValueError(f"prompt {i}: {odd[0]} and {first} emit different ids")
            print(f"repeat {repeat + 1}/{repeats}, prompt {i + 1}/{len(prompts)}", file=sys.stderr)
    return found


def order(pairs: Sequence[tuple[str, str]], turn: int) -> list[str]:
    """Methods one after the other, pairs side by side: the first pair rotates, and so does who of a pair comes first.

    (a, x), (b, y) -> a x b y, then y b x a, ...: the machine drifts less between the two sides of a ratio.
    """
    at = turn % len(pairs)
    rotated = [*pairs[at:], *pairs[:at]]
    return list(dict.fromkeys(method for pair in rotated for method in (pair if turn % 2 == 0 else pair[::-1])))


def ratios(rows: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """Seconds of theirs over seconds of ours per decoded prompt: median, quartiles and range."""
    found = []
    for ours, theirs in pairs:
        row: Row = {"ours": ours, "theirs": theirs}
        sides = [[r for r in rows if r["method"] == method] for method in (ours, theirs)]  # in the order of prompts
        each = [other["seconds"] / own["seconds"] for own, other in zip(*sides, strict=True)]
        low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
        row |= {"ratio": middle, "quartiles": [low, high], "range": [min(each), max(each)]}
        for side, own in zip(("ours", "theirs"), sides, strict=True):
            row[f"{side}_tokens_per_s"] = sum(r["tokens"] for r in own) / sum(r["seconds"] for r in own)
            row[f"{side}_tokens_per_step"] = sum(r["tokens"] for r in own) / max(sum(r["steps"] for r in own), 1)
        found.append(row)
    return found


def prompts_of(target: Target, count: int, context: int) -> list[list[int]]:
    """`count` bundled prompts as chat, one route after the other; with `context`, texts joined to that many tokens."""
    routes = [path.read_text(encoding="utf-8").splitlines() for path in sorted(PROMPTS.glob("*.jsonl"))]
    turns = [json.loads(line)["turns"][0] for group in zip(*routes, strict=False) for line in group]
    chat = ChatFormat(target.tokenizer)

    def ids(texts: Sequence[str]) -> list[int]:
        return prompt_ids(chat, [{"role": "user", "content": "\n\n".join(texts)}])

    found: list[list[int]] = []
    at = 0
    while len(found) < count:
        taken = 1
        while len(ids(turns[at : at + taken + 1])) <= context and at + taken < len(turns):
            taken += 1
        found.append(ids(turns[at : at + taken]))
        at += taken
        if at >= len(turns):
            raise ValueError(f"--prompts {count} --context {context}: the bundled prompts are used up; ask for fewer")
    return found


def show(found: Sequence[Row], title: str) -> None:
    table = Table("ours", "theirs", "tokens/s", "tokens/step", "theirs / ours", "quartiles", "range", title=title)
    for row in found:
        speed = f"{row['ours_tokens_per_s']:.1f} / {row['theirs_tokens_per_s']:.1f}"
        steps = f"{row['ours_tokens_per_step']:.2f} / {row['theirs_tokens_per_step']:.2f}"
        spreads = [f"{low:.2f}-{high:.2f}" for low, high in (row["quartiles"], row["range"])]
        table.add_row(row["ours"], row["theirs"], speed, steps, f"{row['ratio']:.2f}", *spreads)
    Console(width=120).print(table)


def main() -> None:
    options = _parse()
    target = Target.load(TargetSettings(options.target))
    bench = Bench(target, options)
    pairs = [(name, PAIRS[name]) for name in options.pair] + [(name, "plain") for name in options.method]
    prompts = prompts_of(target, options.prompts, options.context)
    rows = measure(bench, prompts, pairs, options.repeats)
    found = ratios(rows, pairs)
    threads = torch.get_num_threads()
    title = f"k = {options.k}, draft: {bench.assistant.spec.name}, {threads} threads, {options.clock} seconds"
    show(found, title)
    lengths = [len(prompt) for prompt in prompts]
    print(json.dumps({"settings": vars(options), "prompt_tokens": lengths, "ratios": found, "rows": rows}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TargetSettings().id, help="target, as target.id")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--context", type=int, default=0, help="join texts to prompts of about this many tokens")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--k", type=int, default=4, help="draft tokens per round")
    parser.add_argument("--draft", default="", help="draft model, as draft_model.id")
    parser.add_argument("--layers", type=int, default=4, help="without --draft: the target's own first layers draft")
    parser.add_argument(
        "--pair", nargs="*", default=list(PAIRS), choices=[*PAIRS, ""], help="ours beside transformers'"
    )
    parser.add_argument("--method", nargs="*", default=[], choices=[*DRAFTERS], help="drafters beside plain decoding")
    clock = "cpu: CPU seconds, where other programs run beside (with OMP_NUM_THREADS=1: waiting threads burn them too)"
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help=clock)
    return parser.parse_args()


if __name__ == "__main__":
    main()
