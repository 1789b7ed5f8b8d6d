"""transformers' own loops beside ours: the same ids, steps that add up, records of the same shape in one table."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_eval_run import heads, no_report, rows_of_data, settings
from tiny import tiny_target

from eval import plan, reference
from eval.__main__ import compare
from eval.chosen import prompts
from eval.drafters import DRAFTERS, SAMPLING
from eval.drafters.draft_model import DraftModelSettings
from eval.drafters.hybrid import HybridSettings
from eval.drafters.truncated import truncated
from eval.generate import Decoding, generate
from eval.measured import Measured
from eval.plan import Unit
from eval.run import Bench
from eval.warpers import Warpers
from heads.target import Target

PROMPT = [5, 9, 3, 22, 41, 17, 30, 9, 3, 22]


def silent(**sizes: Any) -> Target:
    target = tiny_target(layers=4, **sizes)
    target.eos_ids = frozenset()
    return target


@pytest.mark.parametrize("method", reference.METHODS)
def test_transformers_emits_our_ids_and_its_steps_add_up(method: str) -> None:
    target = silent()
    for penalty in (1.0, 1.3):
        decoding = Decoding(k=4, max_new_tokens=24, warpers=Warpers(repetition_penalty=penalty))
        plain = generate(target, None, PROMPT, Decoding(max_new_tokens=24, warpers=decoding.warpers))
        found = reference.generate(target, method, PROMPT, decoding, truncated(target, 3))
        assert found.output_ids == plain.output_ids
        missing = len(found.output_ids) - sum(a + 1 for _, a in found.steps)
        assert missing in (0, 1), "the first token comes with the prompt where nothing was drafted for it"
        assert all(0 <= a <= K <= 4 for K, a in found.steps)
        assert found.wall_s > 0 and min(found.prefill_s, found.draft_s, found.verify_s, found.other_s) >= 0
    assert (max(K for K, _ in found.steps) == 0) == (method == "hf-generate")


def test_end_ids_and_context_hold() -> None:
    target = silent(max_position_embeddings=24)
    plain = generate(target, None, PROMPT, Decoding(max_new_tokens=50))
    assert len(plain.output_ids) == 14
    target.eos_ids = frozenset({plain.output_ids[5]})
    ends = plain.output_ids.index(plain.output_ids[5]) + 1
    for method in reference.METHODS:
        found = reference.generate(target, method, PROMPT, Decoding(k=4, max_new_tokens=50), truncated(target, 3))
        assert (found.output_ids, found.stop) == (plain.output_ids[:ends], "eos")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    target = silent()
    with pytest.raises(ValueError, match="'hf-lookup', which is measured at temperature 0 only"):
        plan.check(settings(tmp_path, methods=["lookup", "hf-lookup"], temperatures=[1.0]), {})
    with pytest.raises(ValueError, match="temperature 0 only"):
        reference.generate(target, "hf-generate", PROMPT, Decoding(warpers=Warpers(1.0)))
    with pytest.raises(ValueError, match="needs a draft model"):
        reference.generate(target, "hf-assisted", PROMPT, Decoding(k=2))
    with pytest.raises(ValueError, match="reference method 'hf'"):
        reference.generate(target, "hf", PROMPT, Decoding(k=2))


def test_every_drafter_and_reference_stands_in_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the tiny target: greedy rows equal plain for all, sampled ones where a drafter has a law of its own."""
    no_report(monkeypatch)
    target = silent()
    methods = ["medusa", *DRAFTERS, *reference.METHODS]
    chosen = settings(
        tmp_path, methods=methods, heads={"medusa": "none"}, prompts=1, sampled_prompts=1, sweep_k=[], alpha_prompts=0,
        draft_model=DraftModelSettings(layers=2), hybrid=HybridSettings(method="medusa"),
    )  # fmt: skip
    rows = compare(chosen, target, {"medusa": heads(target)["medusa"]}, rows_of_data(), {})
    greedy = {row["method"] for row in rows if row["temperature"] == 0}
    assert greedy == {"plain", *methods}
    sampled = {row["method"] for row in rows if row["temperature"] > 0 and row["proposal"] == "sampled"}
    assert sampled == {"medusa", *SAMPLING}
    folder = tmp_path / "eval" / chosen.name
    checks = json.loads((folder / "manifest.json").read_text())["checks"]
    assert [check["name"] for check in checks if not check["ok"]] == []
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    tall = [r for r in records if r["method"] == "lookahead" and r["temperature"] == 0]
    assert all(sum(r["nodes"]) > sum(K for K, _ in r["steps"]) for r in tall), "a tree of guesses counts all its rows"


def test_memory_never_holds_an_answer_to_the_prompt_at_hand(tmp_path: Path) -> None:
    """One memory per row of a table: each prompt is decoded once with it, warming up apart."""
    target = silent()
    chosen = settings(tmp_path, methods=["suffix-memory"], heads={})
    bench = Bench(chosen, target, {}, prompts(rows_of_data(), chosen, 256), Measured(chosen, target, {}, []))
    unit = Unit("timed", 0, "suffix-memory", 3, 0.0, "greedy")
    same = Unit("timed", 1, "suffix-memory", 3, 0.0, "greedy")
    assert bench.drafter(unit, []) is bench.drafter(same, [])
    for other in (dataclasses.replace(unit, k=2), dataclasses.replace(unit, kind="warm-up")):
        assert bench.drafter(other, []) is not bench.drafter(unit, [])


def test_a_hybrid_needs_a_method_that_drafts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hybrid.method=''"):
        plan.method_names(settings(tmp_path, methods=["hybrid", "medusa"]))
    with pytest.raises(ValueError, match="hybrid.method='eagle3'"):
        plan.method_names(settings(tmp_path, methods=["hybrid", "medusa"], hybrid=HybridSettings("eagle3")))
    plan.method_names(settings(tmp_path, methods=["hybrid", "medusa"], hybrid=HybridSettings("medusa")))
