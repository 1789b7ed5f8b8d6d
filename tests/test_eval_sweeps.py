"""`python -m eval` with trees, adaptive lengths and batches: what records, rows and report say of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target

from data.rows import DataRow
from eval import plan, report, shapes, table
from eval.__main__ import compare
from eval.chosen import prompts
from eval.drafters.head import untrained
from eval.measured import Measured, curve, described, texts
from eval.plan import EvalSettings
from eval.plots import Plot
from eval.predict import rank_accuracies, slot_runs
from eval.results import break_even
from eval.shapes import TreeSettings
from eval.tree import EAGLE_25, Dynamic, best_static_tree, depth_of, from_paths
from heads.eagle3 import Eagle3, Eagle3Config
from heads.medusa import Medusa, MedusaConfig
from heads.target import Target

VOCAB = 16


def rows_of_data(count: int = 5) -> list[DataRow]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, VOCAB, (16 + i,), generator=generator).tolist() for i in range(count)]
    return [
        DataRow(i, str(i), f"{i:064x}", ["chat", "code"][i % 2], own, [(8 + i, 16 + i)]) for i, own in enumerate(ids)
    ]


def settings(tmp_path: Path, **changes: Any) -> EvalSettings:
    base: dict[str, Any] = {
        "outputs": str(tmp_path), "heads": {"medusa": "none", "eagle3": "none"},
        "methods": ["lookup", "medusa", "eagle3"], "prompts": 3, "sampled_prompts": 2, "sweep_prompts": 2,
        "alpha_prompts": 1, "k": 3, "sweep_k": [1], "max_new_tokens": 8, "cost_context": 8, "temperatures": [0.0],
    }  # fmt: skip
    return EvalSettings(**{**base, **changes})


def heads(target: Target) -> dict[str, Any]:
    return {
        "medusa": untrained(Medusa(MedusaConfig(num_heads=4), target.spec), target, seed=1),
        "eagle3": untrained(Eagle3(Eagle3Config(taps=[1, 2, 3], max_draft=6), target.spec), target, seed=1),
    }


def silent() -> Target:
    target = tiny_target(vocab_size=VOCAB, layers=4)
    target.eos_ids = frozenset()
    return target


def test_a_run_with_everything_says_what_it_was_and_changes_no_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.plots.position", lambda *args: nothing())
    for name in ("speedup_by_k", "routes", "cost_curve"):
        monkeypatch.setattr(f"eval.plots.{name}", lambda *args: nothing())
    target = silent()
    wanted = settings(
        tmp_path, tree="dynamic", sweep_trees=["eagle25", "sparse", [[0], [1], [0, 0]]], min_confidence=0.2,
        trees=TreeSettings(nodes=6, depth=3, top_k=4, total=8), adaptive="heuristic", concurrency=[1, 2, 3],
        sweep_adaptive=["gain", "confidence", "heuristic", "load"], temperatures=[0.0, 1.0],
    )  # fmt: skip
    compare(wanted, target, heads(target), rows_of_data(), {})
    out = capsys.readouterr().out
    assert out.startswith("Self-checks passed"), out[:400]
    folder = tmp_path / "eval" / "default"
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    drafted = [r for r in lines if r["method"] in ("medusa", "eagle3")]
    named = {re.sub(r"paths .*", "paths", r["tree"]) for r in drafted}
    assert named == {"chain", "dynamic 3/4/8", "eagle25", "sparse 6", "3 paths"}
    assert {r["adaptive"] for r in drafted} == {"none", "gain", "confidence", "heuristic", "load"}
    assert {r["concurrency"] for r in lines} == {1, 2, 3} and not any(r["lossy"] for r in lines)
    assert {r["temperature"] for r in lines if r["concurrency"] == 3} == {0.0, 1.0}
    for r in drafted:
        assert "nodes" not in r or r["tree"] != "chain"
        # without drafts (above the load) a tree is a chain of none
        assert "nodes" in r or r["tree"] == "chain" or not any(K for K, _ in r["steps"])
        if r["tree"] == "sparse 6":
            assert max(r["nodes"]) == 6
    texts_of: dict[Any, set[tuple[int, ...]]] = {}
    for r in lines:
        if r["proposal"] == "greedy":  # greedy at 0 and match at 1: the same text from every method
            texts_of.setdefault((r["id"], r["temperature"]), set()).add(tuple(r["output_ids"]))
    assert all(len(found) == 1 for found in texts_of.values())
    rows = [row for row in json.loads((folder / "rows.json").read_text()) if row["concurrency"] == 1]
    main = {(row["tree"], row["adaptive"]) for row in rows if row["method"] == "eagle3" and not row["sweep"]}
    assert main == {("dynamic 3/4/8", "heuristic")}, "other trees and lengths are no rows of the main table"
    assert not any(row["sweep"] for row in rows if row["method"] in ("plain", "lookup"))
    page = (folder / "report.html").read_text()
    for title in (
        "Trees, T = 0",
        "Best static tree",
        "Adaptive draft length, T = 0",
        "Sequences decoded at once, T = 0",
    ):
        assert title in page, title
    found = json.loads((folder / "trees.json").read_text())
    assert len(found["medusa"]["rank_accuracies"]) == 4 and len(found["eagle3"]["rank_accuracies"]) == 6

    before = (folder / "records.jsonl").read_bytes()
    compare(wanted, target, heads(target), rows_of_data(), {})
    assert (folder / "records.jsonl").read_bytes() == before, "all of it is there: nothing is decoded again"


def nothing() -> Any:
    return Plot("none", "", "", None)


def test_a_lossy_rule_is_named_wherever_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[str] = []

    def notes(folder: Path, rows: list[Any], *args: Any) -> Path:
        pages.append(str(report.notes(table.labelled(rows), 3)))
        return folder

    monkeypatch.setattr("eval.report.write", notes)
    target = silent()
    wanted = settings(
        tmp_path, methods=["medusa"], temperatures=[1.0], rule="typical", proposals=["greedy"], alpha_prompts=0
    )
    compare(wanted, target, heads(target), rows_of_data(), {})
    out = capsys.readouterr().out
    rows = [row for row in json.loads(out.strip().splitlines()[-1])["rows"] if row["route"] == "all"]
    assert [(row["method"], row["rule"], row["lossy"]) for row in rows][:2] == [
        ("plain", "match", False), ("medusa", "typical", True),
    ]  # fmt: skip
    assert "LOSSY" in out
    assert "does not keep the target's law" in pages[0]


def test_records_of_earlier_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.report.write", lambda *args: Path("none"))
    target = silent()
    wanted = settings(tmp_path, methods=["lookup"], sweep_k=[])
    compare(wanted, target, {}, rows_of_data(), {})
    path = tmp_path / "eval" / "default" / "records.jsonl"
    later = ("tree", "adaptive", "concurrency", "lossy", "wall_s")
    old = [{k: v for k, v in json.loads(x).items() if k not in later} for x in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in old))
    compare(wanted, target, {}, rows_of_data(), {})
    assert path.read_text() == "".join(json.dumps(record) + "\n" for record in old)


def test_trees_by_name() -> None:
    sizes = TreeSettings(nodes=7, depth=6, top_k=3, total=20)
    assert shapes.shape("chain", sizes, 4, 99) is None
    assert shapes.shape("dynamic", sizes, 4, 99) == Dynamic(4, 3, 20), "no deeper than the head drafts"
    eagle = shapes.shape("eagle25", sizes, 5, 99)
    assert eagle == from_paths(EAGLE_25, 5, 4)
    shallow = shapes.shape("eagle25", sizes, 2, 99)
    assert shallow is not None and depth_of(shallow) == 2
    assert shapes.shape([[0], [0, 1]], sizes, 2, 9) == ([0, 1], [0, 1])
    sparse = shapes.shape("sparse", sizes, 2, 99, [[0.5, 0.2], [0.4, 0.1], [0.9]])
    assert sparse is not None and depth_of(sparse) == 2
    with pytest.raises(ValueError, match="3 deep, the head drafts at most 2"):
        shapes.shape([[0], [0, 0], [0, 0, 0]], sizes, 2, 9)
    assert shapes.label("dynamic", sizes) == "dynamic 6/3/20" and shapes.label("sparse", sizes) == "sparse 7"
    assert shapes.label([[0]], sizes) != shapes.label([[1]], sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree": "eagle"}, "tree='eagle': choose from chain, eagle25, sparse, dynamic"),
        ({"tree": 3}, "tree=3: give a name"),
        ({"sweep_trees": [[[0], [1, 0]]]}, r"path \[1, 0\] has no parent"),
        ({"trees": TreeSettings(nodes=0)}, "trees.nodes=0"),
        ({"adaptive": "often"}, "adaptive='often'"),
        ({"sweep_adaptive": ["confidence"]}, "adaptive=confidence stops at min_confidence"),
        ({"adaptive": "load"}, "adaptive=load needs a concurrency sweep"),
        ({"concurrency": [0]}, r"concurrency=\[0\]"),
        ({"rule": "best"}, "rule='best'"),
        ({"rule": "one-hot", "temperatures": [1.0]}, "rule=one-hot judges greedy drafts"),
        ({"tree": "dynamic", "temperatures": [1.0], "proposals": ["sampled"]}, "tree=dynamic has greedy drafts"),
    ],
)
def test_settings_of_sweeps_that_mean_nothing_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.check(settings(tmp_path, **changes), {})


def test_rank_accuracies_start_with_what_a_chain_is_right_about() -> None:
    target = silent()
    text = torch.randint(2, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for head in heads(target).values():
        table = rank_accuracies(target, head, [(text, 6)], ranks=VOCAB)
        runs = slot_runs(target, head, text[:6], text[6:], 1)
        assert table[0][0] == pytest.approx(sum(runs) / len(runs))
        assert len(table) == head.max_draft and all(sum(row) == pytest.approx(1) for row in table), "some rank is right"


def test_the_best_tree_is_found_on_the_curve_read_between_what_was_measured(tmp_path: Path) -> None:
    cost: dict[str, Any] = {
        "target_pass_s": {"1": 1.0, "2": 1.0, "4": 1.2},
        "draft_step_s": {"h": 0.1},
        "draft_fixed_s": {},
    }
    assert curve(cost) == pytest.approx((1.0, 1.0, 1.1, 1.2))
    best = described(best_static_tree([[0.6, 0.2], [0.5]], curve(cost), 0.1))
    assert from_paths(best["paths"], 2, 2) == best_static_tree([[0.6, 0.2], [0.5]], curve(cost), 0.1).tree
    target = silent()
    known = Measured(settings(tmp_path, tree="sparse"), target, heads(target), texts(rows_of_data(), [], 2))
    assert (
        known.sizes()[-1] == 64
        and known.trees({**cost, "draft_step_s": {"medusa": 0.1}})["medusa"]["best"]["speedup"] >= 1
    )


def test_texts_that_are_decoded_are_measured_last() -> None:
    rows = rows_of_data()
    assert [start for _, start in texts(rows, [{"key": rows[0].key}], most=4)] == [9, 10, 11, 12]


def test_the_measured_load_up_to_which_a_draft_gains() -> None:
    def at(method: str, c: int, seconds: float) -> dict[str, Any]:
        return {
            "kind": "timed", "method": method, "id": "0", "turn": 0, "seed": 0, "temperature": 0.0, "concurrency": c,
            "new_tokens": 11, "prefill_s": 0.0, "draft_s": 0.0, "verify_s": seconds, "other_s": 0.0,
        }  # fmt: skip

    records = [at("plain", c, 1.0) for c in (1, 2, 4)] + [at("eagle3", c, s) for c, s in ((1, 0.7), (2, 0.9), (4, 1.3))]
    assert break_even(records, "eagle3", "chain") == 2
    assert break_even(records[:-1], "eagle3", "chain") == 2, "it gains everywhere: the highest that was measured"
    assert break_even([*records[:3], at("eagle3", 1, 1.1)], "eagle3", "chain") == 0


def test_batches_may_take_more_prompts_than_are_decoded_one_by_one(tmp_path: Path) -> None:
    wanted = settings(tmp_path, prompts=2, concurrency=[1, 3], concurrency_prompts=5, temperatures=[0.0, 1.0])
    chosen = prompts(rows_of_data(7), wanted, 64)
    alone = prompts(rows_of_data(7), settings(tmp_path, prompts=2), 64)
    assert len(chosen) == 5 and chosen[:2] == alone, "the first of more prompts are those of fewer"
    found = [unit for group in plan.plan(wanted, len(chosen)) for unit in group]
    assert {unit.prompt for unit in found if unit.concurrency == 1} == {0, 1}
    batched = [unit for unit in found if unit.concurrency == 3]
    assert {(unit.prompt, unit.count) for unit in batched} == {(0, 5)}
    assert {unit.proposal for unit in batched if unit.temperature} == {"greedy", "sampled"}
    every = settings(tmp_path, prompts=2, concurrency=[2], concurrency_prompts=0)
    assert len(prompts(rows_of_data(7), every, 64)) == 7
