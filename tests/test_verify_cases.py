"""Known faults of verifiers, as small inputs: own ones, and those of ../shared/cases where that folder exists."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval import stop, verify
from eval.warpers import Warpers, warp

NUMERIC = Path(__file__).parents[2] / "shared" / "cases" / "numeric"


def case(name: str) -> Any:
    file = NUMERIC / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"{name}: no shared cases beside this checkout")
    return json.loads(file.read_text())


def one_step(p: list[float], q: list[float], draft: int, u: float, final: float = 0.5) -> verify.Verdict:
    probs = torch.tensor([[p, p]])
    return verify.rejection(torch.tensor([[draft]]), probs, torch.tensor([[q]]), torch.tensor([[u, final]]))


def ids(values: list[int]) -> Tensor:
    return torch.tensor([values])


@pytest.mark.parametrize("u", [0.0, 0.5, 0.99999994])
def test_equal_p_and_q_accept_and_stay_finite(u: float) -> None:
    p = [0.1, 0.6, 0.3, 0.0]
    assert int(one_step(p, p, 1, u).accepted) == 1
    assert torch.isfinite(verify.residual(torch.tensor(p), torch.tensor(p))).all()


def test_a_token_the_target_excludes_is_never_accepted() -> None:
    verdict = one_step([0.0, 1.0], [0.5, 0.5], 0, 0.0)
    assert (int(verdict.accepted), int(verdict.own)) == (0, 1)


def test_acceptance_frequency_is_p_over_q_and_the_rest_comes_from_the_residual() -> None:
    n = 20_000
    u = torch.rand(n, 2, generator=torch.Generator().manual_seed(0))
    p, q = torch.tensor([0.3, 0.7]).expand(n, 2, 2), torch.tensor([0.9, 0.1]).expand(n, 1, 2)
    verdict = verify.rejection(torch.zeros(n, 1, dtype=torch.long), p, q, u)
    assert float(verdict.accepted.float().mean()) == pytest.approx(1 / 3, abs=0.012)
    assert (verdict.own[verdict.accepted == 0] == 1).all()


@pytest.mark.parametrize("u", [0.0, 0.5, 0.99999994])
def test_temperature_zero_compares_with_the_targets_argmax(u: float) -> None:
    p, q = (warp(torch.tensor(x).log(), Warpers(temperature=0.0)) for x in ([0.3, 0.5, 0.2], [0.2, 0.15, 0.65]))
    refused = verify.chain_one_hot(ids([0]), torch.stack([p, p])[None], torch.tensor([[u, u]]))
    assert (int(refused.accepted), int(refused.own)) == (0, 1)
    kept = verify.chain_one_hot(ids([1]), torch.stack([p, p])[None], torch.tensor([[u, u]]))
    assert int(kept.accepted) == 1
    assert q.tolist() == [0.0, 0.0, 1.0]


def test_rows_after_the_first_refusal_are_ignored_and_the_bonus_comes_from_the_last_row() -> None:
    rows = torch.eye(5)[[1, 2, 3, 4]][None]
    assert verify.match(ids([1, 0, 3]), rows.argmax(-1)) == (torch.tensor([1]), torch.tensor([2]))
    assert verify.match(ids([1, 2, 3]), rows.argmax(-1)) == (torch.tensor([3]), torch.tensor([4]))


def test_a_batch_is_judged_row_by_row() -> None:
    target = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    accepted, own = verify.match(torch.tensor([[9, 2], [1, 9], [1, 2]]), target)
    assert (accepted.tolist(), own.tolist()) == ([0, 1, 2], [1, 2, 3])


def test_warpers_cut_every_row_and_renormalise() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(3, 4)
    assert torch.allclose(warp(logits, Warpers(1.0, top_p=0.8)), torch.tensor([0.625, 0.375, 0, 0]).expand(3, 4))
    assert torch.allclose(warp(logits, Warpers(1.0, top_k=1)), torch.tensor([1.0, 0, 0, 0]).expand(3, 4))
    assert torch.allclose(warp(logits, Warpers(1.0, min_p=0.25)), torch.tensor([10, 6, 3, 0]).expand(3, 4) / 19)
    assert torch.allclose(warp(logits, Warpers(0.5))[0], torch.tensor([100.0, 36, 9, 1]) / 146)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"min_p": 2.0}])
def test_meaningless_warpers_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Warpers(**bad).check()


def test_a_banned_token_is_never_emitted() -> None:
    warpers = Warpers(temperature=0.0, logit_bias={2: -50.0})
    p = warp(torch.tensor([[1.0, 2.0, 9.0]] * 3), warpers)
    verdict = verify.match(ids([2, 1]), p.argmax(-1)[None])
    assert (int(verdict.accepted), int(verdict.own)) == (0, 1)
    with pytest.raises(ValueError, match="logit_bias names token 7"):
        warp(torch.zeros(3), Warpers(logit_bias={7: 1.0}))


@pytest.mark.parametrize(
    ("tokens", "eos", "budget", "kept", "why"),
    [
        ([5, 3, 9, 8], {9}, 16, [5, 3, 9], "eos"),
        ([5, 3, 8], {8, 3}, 16, [5, 3], "eos"),
        ([5, 3, 9], {9}, 2, [5, 3], "length"),
        ([5, 3, 9], {9}, 3, [5, 3, 9], "eos"),
        ([5, 3], {9}, 2, [5, 3], "length"),
        ([5, 3], {9}, 3, [5, 3], None),
        ([5], {9}, 0, [], "length"),
    ],
)
def test_answers_end_at_the_first_end_token_or_the_budget(
    tokens: list[int], eos: set[int], budget: int, kept: list[int], why: str | None
) -> None:
    assert stop.cut(tokens, eos, budget) == (kept, why)


def test_a_stop_string_across_two_pieces_cuts_text_and_ids_alike() -> None:
    assert stop.cut_at_string(["one ", "EN", "D x"], ["END"]) == ("one ", 1)
    assert stop.cut_at_string(["one E", "ND"], ["END", "zzz"]) == ("one ", 1)
    assert stop.cut_at_string(["one"], ["END"]) is None


# the shared cases


def test_case_monte_carlo() -> None:
    c = case("verify-acceptance-rate-monte-carlo")
    n = c["n"]
    u = torch.rand(n, 2, generator=torch.Generator().manual_seed(1))
    p, q = torch.tensor(c["p"]).expand(n, 2, 2), torch.tensor(c["q"]).expand(n, 1, 2)
    verdict = verify.rejection(torch.full((n, 1), c["draft_token"]), p, q, u)
    want = c["expect"]
    assert float(verdict.accepted.float().mean()) == pytest.approx(want["accept_fraction"], abs=want["tolerance"])
    assert (verdict.own[verdict.accepted == 0] == 1).all()


def test_case_p_equals_q() -> None:
    c = case("verify-p-equals-q")
    verdict = one_step(c["p"], c["q"], c["draft_token"], c["u"])
    assert int(verdict.accepted) == 1 and 0 <= int(verdict.own) < 3


def test_case_temperature_zero() -> None:
    c = case("verify-temperature-zero")
    p = warp(torch.tensor(c["target_probs_at_T1"]).log(), Warpers(c["temperature"]))
    rows = torch.stack([p, p])[None]
    for u in c["u_any_of"]:
        verdict = verify.chain_one_hot(ids([c["draft_token"]]), rows, torch.tensor([[u, u]]))
        assert (bool(verdict.accepted), int(verdict.own)) == (c["expect"]["accepted"], c["expect"]["emitted"])
    assert int(verify.match(ids([c["also"]["draft_token"]]), rows.argmax(-1)).accepted) == 1


def test_case_greedy_draft_sampled_target() -> None:
    c = case("verify-greedy-draft-sampled-target")
    p = torch.tensor(c["p"])
    grid = (torch.arange(1000) + 0.5) / 1000
    u = torch.cartesian_prod(grid[::10] + 0.0045, grid[::10] + 0.0045)
    verdict = verify.chain_one_hot(ids([0]).expand(len(u), 1), p.expand(len(u), 2, 3), u)
    emitted = torch.where(verdict.accepted == 1, 0, verdict.own)
    law = torch.bincount(emitted, minlength=3) / len(u)
    assert law.tolist() == pytest.approx(c["expect"]["output_distribution"], abs=1e-6)
    assert float((verdict.accepted == 1).float().mean()) == pytest.approx(c["expect"]["accept_probability"])
    assert verify.residual(p, torch.tensor(c["q_to_use"])).tolist() == pytest.approx(c["expect"]["residual"])


def test_case_logit_bias() -> None:
    c = case("verify-logit-bias")
    warpers = Warpers(c["temperature"], logit_bias={int(t): b for t, b in c["logit_bias"].items()})
    own = warp(torch.tensor([c["target_logits"]] * 3), warpers).argmax(-1)
    verdict = verify.match(ids(c["draft"]), own[None])
    assert (int(verdict.accepted), [int(verdict.own)]) == (c["expect"]["accepted"], c["expect"]["emitted"])


def test_case_min_p_on_every_position() -> None:
    c = case("verify-min-p-on-every-position")
    p = warp(torch.tensor([c["target_probs"]] * (c["k"] + 1)).log(), Warpers(1.0, min_p=c["min_p"]))
    for row in p:
        assert row.tolist() == pytest.approx(c["expect"]["p_at_every_verified_and_bonus_position"], abs=1e-6)
    u = torch.zeros(1, c["k"] + 1)
    assert int(verify.chain_one_hot(ids([2] * c["k"]), p[None], u).accepted) == 0


def test_case_top_p_on_both() -> None:
    c = case("verify-top-p-on-both")
    warpers, want = Warpers(1.0, top_p=c["top_p"]), c["expect"]
    p, q = (warp(torch.tensor(c[name]).log(), warpers) for name in ("target_probs", "draft_probs"))
    assert p.tolist() == pytest.approx(want["p"], abs=1e-6) and q.tolist() == pytest.approx(want["q"], abs=1e-6)
    assert verify.residual(p, q).tolist() == pytest.approx(want["residual"], abs=1e-6)
    assert int(one_step(p.tolist(), q.tolist(), 3, 0.0).accepted) == 0
    assert int(one_step(p.tolist(), q.tolist(), 1, 0.99999994).accepted) == 1
    out = torch.minimum(p, q) + (1 - torch.minimum(p, q).sum()) * verify.residual(p, q)
    assert out.tolist() == pytest.approx(want["output_distribution"], abs=1e-6)


def test_case_seed() -> None:
    c = case("verify-seed")

    def first_tokens(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        out = []
        for position in range(32):
            drafted = int(verify.sample(torch.tensor(c["q"]), torch.rand((), generator=generator)))
            u = torch.rand(1, 2, generator=generator)
            verdict = one_step(c["p"], c["q"], drafted, float(u[0, 0]), float(u[0, 1]))
            out.append(drafted if int(verdict.accepted) else int(verdict.own))
            assert verify.keyed_sample(torch.tensor(c["p"]), seed, position) in (0, 1)
        return out

    runs = {seed: first_tokens(seed) for seed in c["seeds"]}
    assert all(first_tokens(seed) == run for seed, run in runs.items())
    assert len({tuple(run) for run in runs.values()}) == len(runs)


def test_cases_of_ends() -> None:
    two = case("verify-two-eos-ids")
    eos = {two["tokenizer_eos"], *two["generation_config_eos"]}
    for c, ends in (
        (case("verify-eos-inside-run"), set(case("verify-eos-inside-run")["eos_ids"])),
        (two, eos),
    ):
        verdict = verify.match(ids(c["draft"]), ids(c["target_argmax"]))
        tokens = [*c["draft"][: int(verdict.accepted)], int(verdict.own)]
        kept, why = stop.cut(tokens, ends, c["max_new_tokens"])
        assert (kept, why) == (c["expect"]["emitted"], "eos")
    union = case("eos-union")
    ends = {union["tokenizer_eos"], *union["generation_config_eos"]}
    assert stop.cut(union["output_ids"], ends, 99)[0] == union["expect"]["emitted"]
    for c in case("verify-stop-against-budget"):
        kept, why = stop.cut(c["round_commits"], set(c["eos_ids"]), c["max_new_tokens"])
        assert (kept, why) == (c["expect"]["emitted"], {"stop": "eos"}.get(c["expect"]["finish"], "length"))
    for c in case("verify-bonus-within-budget"):
        kept, _ = stop.cut(list(range(10, 10 + c.get("k", 0) + 1)), {2}, c["max_new_tokens"])
        assert len(kept) == c["expect"]["emitted_count"]
    c = case("verify-stop-string-inside-block")
    assert stop.cut_at_string(c["pieces"], c["stop"]) == (c["expect"]["text"], c["expect"]["token_ids_kept"])
