"""Proof that vLLM reads our folders as we mean them: analytic heads, exported by our writers, with vLLM's own counters.

    make vllm
    python -m scripts.prove_vllm --python .venv-vllm/bin/python --out docs/proofs/vllm_permutation.txt

A right head (scripts/permutation.py) must have [36, 36, 36] drafts accepted in 36 rounds, and each head that is wrong
on purpose must show it: vLLM loads all of these without a word. Ends with status 1 where a count differs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from eval.vllm_server import speculation
from heads.hub import LMHead, write_text
from heads.read_block import MASK_FILE
from heads.target import Target
from scripts.export import write_layout
from scripts.layouts import WEIGHTS, Made
from scripts.permutation import (
    NEW_TOKENS,
    PROMPTS,
    K,
    eagle1_head,
    eagle3_head,
    embeddings,
    medusa_head,
    permutation,
    permutation_target,
)
from scripts.permutation_block import block_head, block_target, carry
from scripts.verify import verify
from scripts.writers import layout

RIGHT = (36, [36, 36, 36])
NOTHING = (len(PROMPTS) * (NEW_TOKENS - 1), [0, 0, 0])
Tensors = dict[str, Tensor]


@dataclass
class Case:
    """A head, the format it is written in, what is then damaged in the folder, and the counts it must have in vLLM."""

    name: str
    target: Target
    head: Any
    expected: tuple[int, list[int]] = RIGHT
    format: str = "vllm"
    damage: Callable[[Tensors], None] | None = None
    without: str | None = None  # a file that is taken away

    @property
    def wrong(self) -> bool:
        return self.expected != RIGHT


def cases() -> list[Case]:
    target, E = permutation_target()
    eagle3, reduced = eagle3_head(target, E), eagle3_head(target, E, reduced=True)
    orbit = block_target()
    block, off = block_head(orbit), block_head(orbit)
    carry(off, from_anchor=True)
    return [
        Case("EAGLE-1", target, eagle1_head(target, E)),
        Case("EAGLE-3, whole vocabulary", target, eagle3),
        Case("EAGLE-3, reduced vocabulary", target, reduced),
        Case("EAGLE-3, speculators format", target, eagle3, format="speculators"),
        Case("EAGLE-3, speculators format, reduced", target, reduced, format="speculators"),
        Case("Medusa", target, medusa_head(target, E)),
        Case("Block", orbit, block),
        Case("Block, LM head of its own, reduced", orbit, block_head(orbit, own_lm_head=True)),
        Case("EAGLE-1, halves of fc swapped", target, eagle1_head(target, E, swapped=True), NOTHING),
        Case("EAGLE-3, token and feature swapped", target, eagle3_head(target, E, swapped=True), NOTHING),
        Case("EAGLE-3, d2t missing", target, reduced, NOTHING, damage=without_map),
        Case("EAGLE-3, d2t one off", target, reduced, NOTHING, damage=stale_map),
        Case("EAGLE-3, embeddings of its own, one off", target, eagle3, NOTHING, damage=other_embeddings),
        Case("Medusa, third head wrong", target, medusa_head(target, E, wrong_third=True), (48, [48, 48, 0])),
        Case("Block, each row says the token after its own", orbit, off, NOTHING),
        Case("Block, MASK missing", orbit, block, (139, [2, 0, 0]), without=MASK_FILE),
    ]


def without_map(tensors: Tensors) -> None:
    """vLLM then takes draft id i for target id i, which no draft id of this target is."""
    del tensors["d2t"], tensors["t2d"]


def stale_map(tensors: Tensors) -> None:
    tensors["d2t"] -= 1


def other_embeddings(tensors: Tensors) -> None:
    """vLLM takes those of the folder in place of the target's; here every token has its neighbour's."""
    tensors["embed_tokens.weight"] = embeddings().roll(-1, 0)


def write_case(case: Case, folder: Path, base: Path) -> None:
    """The folder of a case. Our own check reads it back before it is damaged; a head's norms are 1 by construction."""
    folder.mkdir(parents=True)
    target, kind = case.target, case.head.config.kind
    made = Made(
        facts={"kind": kind, "config": {}, "provenance": {}},
        spec=target.spec,
        format=case.format,
        dtype="float32",
        base=str(base),
        draft_tokens=K,
        lm_head=LMHead(*target.lm_head()),
        embeddings=target.model.get_input_embeddings().weight.detach(),
    )
    write_layout(folder, layout(case.head, made), case.format)
    verify(folder, case.head, made, target, untrained=True)
    if case.damage is not None:
        tensors = load_file(folder / WEIGHTS)
        case.damage(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    if case.without is not None:
        (folder / case.without).unlink()


def write_jobs(root: Path, wanted: list[Case]) -> Path:
    """Targets, heads and jobs.json for scripts/vllm_counts.py."""
    heads: dict[str, Any] = {}
    targets: list[Target] = []
    for number, case in enumerate(wanted):
        folder = root / f"head{number}"
        if case.target not in targets:
            targets.append(case.target)
            case.target.model.save_pretrained(root / f"target{len(targets) - 1}")
        base = root / f"target{targets.index(case.target)}"
        write_case(case, folder, base)
        method = "serve" if case.format == "speculators" else speculation(folder, K)["method"]
        heads[case.name] = {"method": method, "model": str(folder), "target": str(base)}
    jobs = {"prompts": PROMPTS, "k": K, "new_tokens": NEW_TOKENS, "heads": heads}
    path = root / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    return path


def judge(case: Case, found: dict[str, Any]) -> tuple[str, bool]:
    """(line of the table, whether it is as it must be): counts, and tokens that are those of the permutation."""
    if "error" in found:
        return f"{case.name:<46} {found['error']}", False
    counted = found["drafts"], found["accepted"]
    same = found["tokens"] == [said(prompt) for prompt in PROMPTS]
    ok = counted == case.expected and same
    verdict = "as it must be" if ok else f"WRONG, must be {case.expected}" if same else "WRONG tokens"
    return f"{case.name:<46} {counted[0]:>6}   {counted[1]!s:<14} {verdict}", ok


def said(prompt: list[int]) -> list[int]:
    """The answer of the target: perm, perm^2, ... of the last token."""
    perm, chain = permutation(), [prompt[-1]]
    for _ in range(NEW_TOKENS):
        chain.append(int(perm[chain[-1]]))
    return chain[1:]


def report(wanted: list[Case], counts: dict[str, Any]) -> tuple[str, bool]:
    lines = [
        f"vLLM {counts['version']} on CPU, target in float32, T = 0, k = {K}, {len(PROMPTS)} prompts, each with "
        f"{NEW_TOKENS} new tokens",
        "made by: python -m scripts.prove_vllm",
        "",
        f"{'head':<46} {'rounds':>6}   accepted",
    ]
    whole = True
    for wrong in (False, True):
        lines += ["", "wrong on purpose, which vLLM loads without a word:"] if wrong else []
        for case in (case for case in wanted if case.wrong == wrong):
            line, ok = judge(case, counts["heads"].get(case.name, {"error": "was not run"}))
            lines.append(line)
            whole = whole and ok
    return "\n".join(lines) + "\n", whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="Python of an environment that has vLLM")
    parser.add_argument("--out", help="file for the table, beside standard output")
    options = parser.parse_args()
    if shutil.which(options.python) is None:
        sys.exit(f"error: --python {options.python}: no such program; `make vllm` makes .venv-vllm")
    wanted = cases()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        jobs, result = write_jobs(root, wanted), root / "counts.json"
        command = [options.python, str(Path(__file__).with_name("vllm_counts.py")), str(jobs), str(result)]
        # its standard output is progress and goes to standard error: ours is the table
        ran = subprocess.run(command, stdout=2, env={**os.environ, "PYTHONPATH": ""})
        if ran.returncode or not result.is_file():
            sys.exit(f"error: vLLM ended with status {ran.returncode} before the counts were written, see above")
        counts = json.loads(result.read_text(encoding="utf-8"))
    text, whole = report(wanted, counts)
    print(text, end="")
    if options.out:
        write_text(Path(options.out), text)
    if not whole:
        sys.exit("error: a count is not what it must be")


if __name__ == "__main__":
    main()
