"""The proof that runs in vLLM (`make vllm`), as far as it can be shown without one: its heads, folders and verdicts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target

from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from heads.hub import load
from heads.target import Target
from scripts import prove_vllm
from scripts.layouts import ExportError
from scripts.permutation import NEW_TOKENS, PROMPTS, K, eagle1_head, permutation_target
from scripts.prove_vllm import Case, cases, report, said, write_case
from scripts.verify import verify

World = list[Case]


@pytest.fixture(scope="module")
def world() -> World:
    return cases()


def counted(target: Target, head: Any) -> tuple[int, list[int]]:
    drafter = drafter_for(head.attach(target), target)
    runs = [generate(target, drafter, p, Decoding(k=K, max_new_tokens=NEW_TOKENS)) for p in PROMPTS]
    assert [run.output_ids for run in runs] == [said(p) for p in PROMPTS]
    steps = [step for run in runs for step in run.steps]
    return len(steps), [sum(a > i for _, a in steps) for i in range(K)]


def test_our_own_loop_counts_in_the_written_folders_what_vllm_must(world: World, tmp_path: Path) -> None:
    for number, case in enumerate(case for case in world if case.damage is None):
        folder = tmp_path / str(number)
        write_case(case, folder, tmp_path / "target")
        assert counted(case.target, load(folder, target=case.target)) == case.expected, case.name


def test_folders_that_vllm_misreads_are_caught_by_the_export(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = [case for case in world if case.damage is not None]
    assert len(damaged) == 3
    checked: list[tuple[Path, Any, Any, Target]] = []
    monkeypatch.setattr(prove_vllm, "verify", lambda *args, **more: checked.append(args))
    for number, case in enumerate(damaged):
        write_case(case, tmp_path / str(number), tmp_path / "target")
        with pytest.raises(ExportError, match="d2t|embed_tokens"):
            verify(*checked[-1], untrained=True)
    sound = next(case for case in world if case.damage is None)
    write_case(sound, tmp_path / "sound", tmp_path / "target")
    assert verify(*checked[-1], untrained=True) == 0


def counts(wanted: list[Case], **changed: Any) -> dict[str, Any]:
    tokens = [said(prompt) for prompt in PROMPTS]
    heads = {c.name: {"drafts": c.expected[0], "accepted": c.expected[1], "tokens": tokens} for c in wanted}
    return {"version": "0.0.test", "heads": heads | changed}


def test_every_count_must_be_as_it_must_be(world: World) -> None:
    wanted = world
    text, whole = report(wanted, counts(wanted))
    assert whole and text.count("as it must be") == len(wanted) == 16
    tokens = [said(prompt) for prompt in PROMPTS]
    for wrong, words in [
        ({"drafts": 141, "accepted": [0, 0, 0], "tokens": tokens}, "WRONG, must be (36, [36, 36, 36])"),
        ({"drafts": 36, "accepted": [36, 36, 35], "tokens": tokens}, "WRONG, must be"),
        ({"drafts": 36, "accepted": [36, 36, 36], "tokens": tokens[::-1]}, "WRONG tokens"),
        ({"error": "KeyError: fc.weight"}, "KeyError: fc.weight"),
    ]:
        text, whole = report(wanted, counts(wanted, **{"EAGLE-1": wrong}))
        assert not whole and words in text
    # a wrong head that passes for right is as bad
    right = {"drafts": 36, "accepted": [36, 36, 36], "tokens": tokens}
    assert not report(wanted, counts(wanted, **{"EAGLE-1, halves of fc swapped": right}))[1]
    lacking = counts(wanted)
    del lacking["heads"]["Medusa"]
    text, whole = report(wanted, lacking)
    assert not whole and "was not run" in text


def test_the_command_ends_with_the_verdict(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program stands in for vLLM's Python: it copies counts to where they are wanted."""
    program, table = tmp_path / "python", tmp_path / "table.txt"
    program.write_text(f'#!/bin/sh\ncp {tmp_path / "counts.json"} "$3"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["prove", "--python", str(program), "--out", str(table)])
    monkeypatch.setattr(prove_vllm, "write_jobs", lambda root, wanted: root / "jobs.json")
    (tmp_path / "counts.json").write_text(json.dumps(counts(world)))
    prove_vllm.main()
    assert table.read_text() == capsys.readouterr().out and str(tmp_path) not in table.read_text()
    (tmp_path / "counts.json").write_text(json.dumps(counts(world, Medusa={"error": "no"})))
    with pytest.raises(SystemExit, match="a count is not what it must be"):
        prove_vllm.main()
    (tmp_path / "counts.json").unlink()
    with pytest.raises(SystemExit, match="status 1 before the counts were written"):
        prove_vllm.main()
    monkeypatch.setattr(sys, "argv", ["prove", "--python", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="no such program; `make vllm` makes .venv-vllm"):
        prove_vllm.main()


def test_the_table_in_the_repository_has_every_head(world: World, root: Path) -> None:
    table = root / "docs/proofs/vllm_permutation.txt"
    text = table.read_text()
    assert [case.name for case in world if case.name not in text] == []
    assert "WRONG" not in text


def test_a_head_of_another_target_has_no_such_counts() -> None:
    """Negative control of the counting itself: the permutation's head on a target of random weights."""
    target, E = permutation_target()
    head = eagle1_head(target, E)
    other = tiny_target(vocab_size=96, layers=4, num_attention_heads=1, num_key_value_heads=1)
    found = generate(other, drafter_for(head.attach(other), other), PROMPTS[0], Decoding(k=K, max_new_tokens=16))
    assert sum(a for _, a in found.steps) < K * len(found.steps)
