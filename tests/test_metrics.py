"""Every figure follows from step records by the definitions of the metrics, with its own name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import checks, metrics

NUMERIC = Path(__file__).parents[2] / "shared" / "cases" / "numeric"


def case(name: str) -> Any:
    file = NUMERIC / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"{name}: no shared cases beside this checkout")
    return json.loads(file.read_text())


def record(steps: list[list[int]], id: str = "a", **changes: Any) -> metrics.Record:  # noqa: A002
    """A record whose steps emit a + 1 tokens each, after one from the prefill."""
    new = 1 + sum(a + 1 for _, a in steps)
    base = {
        "id": id, "route": "chat", "turn": 0, "seed": 0, "method": "m", "k": 4, "temperature": 0.0, "rule": "greedy",
        "proposal": "greedy", "steps": steps, "new_tokens": new, "output_ids": list(range(new)),
        "prefill_s": 1.0, "draft_s": 1.0, "verify_s": 2.0, "other_s": 1.0,
    }  # fmt: skip
    return {**base, **changes}


def test_acceptance_figures_of_a_small_trace() -> None:
    row = metrics.summarise([record([[3, 3], [3, 1], [2, 0]])], [])
    assert row["acceptance_length"] == pytest.approx(7 / 3)
    assert row["acceptance_rate"] == pytest.approx(4 / 8)
    assert row["position_acceptance_joint"] == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert row["position_acceptance_conditional"] == pytest.approx([2 / 3, 1 / 2, 1.0])
    assert (row["spec_decode_num_drafts"], row["spec_decode_num_draft_tokens"]) == (3, 8)
    assert row["spec_decode_num_accepted_tokens_per_pos"] == [2, 1, 1]


def test_steps_without_a_draft_are_counted_as_steps_and_null_as_rates() -> None:
    plain = metrics.summarise([record([[0, 0]] * 5, k=0)], [])
    assert plain["acceptance_length"] == 1 and plain["acceptance_rate"] is None
    assert plain["position_acceptance_joint"] == [] and plain["spec_decode_num_drafts"] == 0
    assert metrics.acceptance_length([record([[0, 0], [4, 4]])]) == 3
    assert metrics.acceptance_length([record([])]) is None


def test_micro_and_macro_means_differ() -> None:
    records = [record([[4, 4]] * 2), record([[4, 0]] * 8, id="b")]
    assert metrics.acceptance_length(records) == pytest.approx(18 / 10)
    assert metrics.acceptance_length_macro(records) == pytest.approx((5 + 1) / 2)


def test_speedups_count_token_ids_and_pair_prompts() -> None:
    plain = [record([[0, 0]] * 11, method="plain", k=0, draft_s=0.0, verify_s=10.0, other_s=1.0)]
    ours = [record([[4, 4]] * 2, draft_s=1.0, verify_s=3.0, other_s=0.0), record([[4, 0]], id="unpaired")]
    row = metrics.summarise(ours, plain)
    assert row["speedup_decode"] == pytest.approx((10 / 4) / (11 / 11))
    assert row["speedup_e2e"] == pytest.approx((11 / 5) / (12 / 12))
    assert metrics.summarise(plain, plain)["speedup_decode"] == 1
    assert metrics.summarise(ours[1:], plain)["speedup_decode"] is None


def test_intervals_resample_prompts() -> None:
    rng = np.random.default_rng(0)
    records = [record([[4, int(a)] for a in rng.integers(0, 5, 10)], id=str(i)) for i in range(40)]
    low, high = metrics.summarise(records, [])["acceptance_length_ci"]
    tau = metrics.acceptance_length(records)
    assert tau is not None and low < tau < high and 0.1 < high - low < 0.6
    assert metrics.summarise([record([[4, 1]])], [])["acceptance_length_ci"] is None


def test_loops_are_the_share_of_repeated_four_grams() -> None:
    assert metrics.loop_share([1, 2, 3, 4, 5, 6]) == 0
    assert metrics.loop_share([7] * 8) == pytest.approx(4 / 5)
    assert metrics.loop_share([1, 2]) == 0


def test_alpha_is_averaged_over_the_steps_that_reached_a_position() -> None:
    records = [{"alpha_sum_min": [[0.5, 1.0], [0.7]]}, {"alpha_sum_min": [[0.6]]}, {}]
    assert metrics.mean_by_position(records, "alpha_sum_min") == pytest.approx([0.6, 1.0])


def outcome(records: list[metrics.Record], **changes: Any) -> dict[str, bool]:
    row = {**metrics.summarise(records, []), **changes}
    same = [{"what": "x", "same": True, "detail": ""}]
    return {c["name"]: c["ok"] for c in checks.run([(row, records)], same, {"match": 0.0})}


def test_self_checks_pass_on_sound_rows_and_each_catches_its_fault() -> None:
    sound = [record([[4, 4], [4, 2], [1, 0]])]
    cut = [record([[4, 4], [4, 2]], new_tokens=8)]  # the last own token fell to the end of the answer
    assert all(outcome(sound).values()) and all(outcome(cut).values())
    assert not outcome(sound, acceptance_length=5.5)["tau between 1 and K+1"]
    assert not outcome([record([[4, 4]], new_tokens=9)])["tau = 1 + sum of joint"]
    assert not outcome([record([[4, 5]])])["joint acceptance non-increasing"]
    assert not outcome(sound, spec_decode_num_drafts=9)["counters equal the records"]


def test_a_failed_check_stands_on_the_first_line() -> None:
    failed = checks.run([], [{"what": "medusa on 7", "same": False, "detail": "token 3 differs"}], {"rejection": 0.2})
    line = checks.first_line(failed)
    assert line.startswith("SELF-CHECK FAILED") and "medusa on 7: token 3 differs" in line and "0.2000" in line
    assert checks.first_line(checks.run([], [], {})) == "Self-checks passed: 6 of 6."


def test_first_difference_counts_a_missing_token() -> None:
    assert checks.first_difference([1, 2], [1, 2]) is None
    assert checks.first_difference([1, 3], [1, 2]) == 1
    assert checks.first_difference([1], [1, 2]) == 1


def test_case_definitions() -> None:
    c = case("metrics-definitions")
    row = metrics.summarise([record([[c["k"], a] for a in c["accepted_per_round"]])], [])
    want = c["expect"]
    assert row["spec_decode_num_draft_tokens"] == want["proposed"]
    assert row["spec_decode_num_accepted_tokens"] == want["accepted"]
    assert row["acceptance_rate"] == want["acceptance_rate"]
    assert row["acceptance_length"] == want["mean_tokens_per_verify_call"] == want["mean_accepted_per_round"] + 1
    assert row["position_acceptance_joint"] == pytest.approx(want["acceptance_per_position"], abs=1e-6)


def test_case_pooled() -> None:
    c = case("metrics-pooled-not-mean-of-means")
    records = [{"new_tokens": r["tokens"] + 1, "steps": [[4, 0]] * r["verify_calls"]} for r in c["requests"]]
    assert metrics.acceptance_length(records) == c["expect"]["tokens_per_verify_pooled"]
    assert metrics.acceptance_length_macro(records) == c["wrong_mean_of_request_means"]


def test_case_speedup_from_ids() -> None:
    c = case("speedup-same-token-count")

    def run(side: dict[str, Any]) -> metrics.Record:
        timing = {"draft_s": 0.0, "verify_s": side["seconds"], "other_s": 0.0, "prefill_s": 0.0}
        return record([[0, 0]], new_tokens=side["output_ids"], **timing)

    _, e2e = metrics.speedups([(run(c["speculative"]), run(c["baseline"]))])
    assert e2e == pytest.approx(c["expect"]["speedup"])
