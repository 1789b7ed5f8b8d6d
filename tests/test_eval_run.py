"""`python -m eval` on a tiny target: rows, records, resuming, self-checks, and bad input before any work."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target

from data.rows import DataRow
from eval import chosen, plan, records
from eval.__main__ import compare
from eval.drafters.head import drafter_for, untrained
from eval.generate import Decoding, generate
from eval.plan import EvalSettings
from eval.predict import joint_acceptance, slot_runs
from heads.eagle3 import Eagle3, Eagle3Config
from heads.medusa import Medusa, MedusaConfig
from heads.replay import walk_rounds
from heads.target import Target


def rows_of_data(count: int = 4) -> list[DataRow]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        ids = torch.randint(2, 64, (12 + i,), generator=generator).tolist()
        found.append(DataRow(i, str(i), f"{i:064x}", ["chat", "code"][i % 2], ids, [(8 + i, 12 + i)]))
    return found


def settings(tmp_path: Path, **changes: Any) -> EvalSettings:
    base: dict[str, Any] = {
        "outputs": str(tmp_path), "heads": {"medusa": "none", "eagle3": "none"},
        "methods": ["lookup", "medusa", "eagle3", "random", "replay"], "prompts": 3, "sampled_prompts": 2,
        "sweep_prompts": 1, "alpha_prompts": 1, "k": 3, "sweep_k": [1, 2], "max_new_tokens": 9, "cost_context": 8,
    }  # fmt: skip
    return EvalSettings(**{**base, **changes})


def heads(target: Target) -> dict[str, Any]:
    eagle3 = Eagle3(Eagle3Config(taps=[1, 2, 3]), target.spec)
    return {
        "medusa": untrained(Medusa(MedusaConfig(num_heads=4), target.spec), target, seed=1),
        "eagle3": untrained(eagle3, target, seed=1),
    }


def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the plots takes longer than all the decoding."""
    monkeypatch.setattr("eval.report.write", lambda *args: Path("none"))


def last_json(text: str) -> dict[str, Any]:
    return json.loads(text.strip().splitlines()[-1])


def test_a_run_leaves_rows_records_report_and_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(layers=4)
    target.eos_ids = frozenset()
    compare(settings(tmp_path), target, heads(target), rows_of_data(), {})
    out = capsys.readouterr().out
    assert out.startswith("Self-checks passed"), out[:300]
    rows = last_json(out)["rows"]
    found = {(r["method"], r["k"], r["temperature"], r["proposal"]) for r in rows if r["route"] == "all"}
    for method in ("medusa", "eagle3"):
        assert {(method, k, 0.0, "greedy") for k in (1, 2, 3)} <= found
        assert {(method, 3, 1.0, "greedy"), (method, 3, 1.0, "sampled")} <= found
    by = {(r["method"], r["k"], r["temperature"], r["proposal"], r["route"]): r for r in rows}
    assert by["plain", 0, 0.0, "greedy", "all"]["acceptance_length"] == 1
    assert by["replay", 3, 1.0, "greedy", "all"]["acceptance_length"] == 4, (
        "match rule: the same tokens as plain at T = 1"
    )
    assert by["medusa", 3, 0.0, "greedy", "code"]["prompts"] == 1
    assert by["eagle3", 3, 1.0, "sampled", "all"]["rule"] == "rejection"
    assert len(by["eagle3", 3, 1.0, "greedy", "all"]["alpha_sum_min"]) >= 1
    assert by["medusa", 3, 0.0, "greedy", "all"]["predicted_acceptance_length"] >= 1

    folder = tmp_path / "eval" / "default"
    assert all((folder / n).is_file() for n in ("rows.json", "cost.json", "report.html", "manifest.json"))
    cost = json.loads((folder / "cost.json").read_text())
    assert list(cost["target_pass_s"]) == [str(n) for n in range(1, 17)] and cost["draft_step_s"]["eagle3"] > 0

    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "records.jsonl").write_bytes(b"".join(lines[:-3]) + lines[-3][:20])
    no_report(monkeypatch)
    compare(settings(tmp_path), target, heads(target), rows_of_data(), {})
    again = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert len(again) == len(lines)
    assert [r["output_ids"] for r in again] == [json.loads(line)["output_ids"] for line in lines]

    with pytest.raises(ValueError, match="another max_new_tokens"):
        compare(settings(tmp_path, max_new_tokens=12), target, heads(target), rows_of_data(), {})


def test_prompts_share_no_noise_but_methods_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_report(monkeypatch)
    target = tiny_target(layers=4)
    one = rows_of_data(1)[0]
    same = [dataclasses.replace(one, id=str(i), route="chat") for i in range(2)]
    compare(settings(tmp_path, methods=["lookup"], temperatures=[1.0], sweep_k=[1]), target, {}, same, {})
    lines = [json.loads(x) for x in (tmp_path / "eval" / "default" / "records.jsonl").read_text().splitlines()]
    outputs = {i: {tuple(r["output_ids"]) for r in lines if r["id"] == i} for i in ("0", "1")}
    assert all(len(found) == 1 for found in outputs.values()) and outputs["0"] != outputs["1"]


def test_the_plan_rotates_and_covers_every_setting(tmp_path: Path) -> None:
    groups = plan.plan(settings(tmp_path), 3)
    units = [unit for group in groups for unit in group]
    assert len(units) == len(set(units))
    first = [group[0].method for group in groups[:3]]
    assert len(set(first)) == 3 and all(group[-1].method == "replay" for group in groups[:3])
    assert {u.k for u in units if u.method == "lookup" and u.temperature == 1.0} == {1, 2, 3}
    assert chosen.spread([{"route": r, "n": i} for i, r in enumerate("aabc")], 3) == [
        {"route": "a", "n": 0}, {"route": "b", "n": 2}, {"route": "c", "n": 3},
    ]  # fmt: skip


def test_a_time_budget_ends_the_run_at_a_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_report(monkeypatch)
    target = tiny_target(layers=4)
    target.eos_ids = frozenset()
    compare(settings(tmp_path, minutes=1e-9, methods=["lookup"]), target, {}, rows_of_data(), {})
    captured = capsys.readouterr()
    assert "cut short" in captured.err and last_json(captured.out) == {"rows": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 0}, "k=0: a draft has at least 1 token"),
        ({"sweep_k": [1, 5]}, "k=5 is above what 'medusa' can draft"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_confidence": 1.5}, "min_confidence=1.5"),
        ({"temperatures": [-1.0]}, "temperatures"),
        ({"proposals": ["best"]}, "proposals has 'best'"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.check(settings(tmp_path, **changes), {"medusa": 4})


def test_unknown_methods_and_unusable_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="methods has 'medusa2': choose from medusa, eagle3"):
        plan.method_names(settings(tmp_path, methods=["medusa2"]))
    with pytest.raises(ValueError, match="no prompt of at most 5 tokens"):
        chosen.prompts(rows_of_data(), settings(tmp_path, max_prompt_tokens=5), 256)


def test_an_output_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "eval").write_text("a file")
    with pytest.raises(ValueError, match="cannot write into"):
        records.claim(tmp_path / "eval" / "default", {})


def test_a_run_does_not_go_on_with_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding timed on one and a method on the other would be compared with each other."""
    no_report(monkeypatch)
    target = tiny_target(layers=4)
    wanted = settings(tmp_path, methods=["lookup"])
    compare(wanted, target, {}, rows_of_data(), {})
    compare(wanted, target, {}, rows_of_data(), {})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(ValueError, match="holds records made with another threads: choose another name="):
        compare(wanted, target, {}, rows_of_data(), {})


def test_a_damaged_record_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("{}x\n")
    with pytest.raises(ValueError, match="records.jsonl:1"):
        records.RecordFile(tmp_path / "records.jsonl")


def test_replayed_rounds_equal_the_rounds_decoding_makes() -> None:
    """The training form over plain's own output against cached drafting, round by round."""
    target = tiny_target(layers=4, vocab_size=6)
    prompt, k = [2, 5, 3], 3
    plain = generate(target, None, prompt, Decoding(max_new_tokens=24)).output_ids
    accepted = 0
    for head in heads(target).values():
        steps = generate(target, drafter_for(head, target), prompt, Decoding(k=k, max_new_tokens=24)).steps
        runs = slot_runs(target, head, prompt, plain, k)
        assert [a for a, _ in walk_rounds(runs, len(plain))] == [a for _, a in steps]
        joint = joint_acceptance([runs], k)
        assert joint == pytest.approx([sum(a > i for _, a in steps) / len(steps) for i in range(k)])
        accepted += sum(a for _, a in steps)
    assert accepted > 0, "a comparison of nothing but rejections proves little"
