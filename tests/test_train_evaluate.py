"""What `python -m train` predicts from features is what decoding then measures: the same rounds, the same tau."""

from typing import Any

import pytest
import torch
from tiny import tiny_target
from toys import batch_of, conversations, eagle3, head_input, medusa

from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from heads.eagle3 import Eagle3
from heads.layers import LayerCache
from heads.replay import accepted_runs, walk_rounds
from heads.target import Target
from scripts.permutation import eagle3_head, medusa_head, permutation, permutation_target
from train.evaluate import Tally, evaluate
from train.mixture import LossSettings
from train.objective import Objective

K = 3


def rough(head: Any, noise: float = 1.2) -> Any:
    """An analytic head of the permutation target that errs now and then."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(("lm_head.weight", "1.weight")):
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator) * parameter.std())
            elif name == "midlayer.self_attn.v_proj.weight":
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return head


def answered(target: Target, new_tokens: int) -> list[dict[str, Any]]:
    """Prompts with the target's own greedy answers."""
    rows = []
    for prompt in ([5, 9, 3, 22, 41], [7, 60, 2], [33, 33, 1, 0, 12, 63, 8], [11, 50]):
        output = generate(target, None, prompt, Decoding(max_new_tokens=new_tokens)).output_ids
        rows.append({"id": "row", "ids": [*prompt, *output], "spans": [[len(prompt), len(prompt) + len(output)]]})
    return rows


def tally_of(target: Target, head: Any, rows: list[dict[str, Any]], k: int, max_tokens: int) -> Tally:
    return evaluate(Objective(head, target, LossSettings()), batch_of(rows), k, max_tokens)


@pytest.mark.parametrize("make", [eagle3_head, medusa_head])
@pytest.mark.parametrize(("k", "new_tokens"), [(1, 12), (3, 20), (3, 21), (3, 2)])
def test_the_predicted_acceptance_length_is_the_measured_one(make: Any, k: int, new_tokens: int) -> None:
    target, E = permutation_target()
    head = rough(make(target, E))
    rows, steps = answered(target, new_tokens), []
    for row in rows:
        start, _ = row["spans"][0]
        found = generate(
            target, drafter_for(head, target), row["ids"][:start], Decoding(k=k, max_new_tokens=new_tokens)
        )
        assert found.output_ids == row["ids"][start:]
        steps += found.steps
    tally = tally_of(target, head, rows, k, new_tokens)
    assert tally.round_count == len(steps)
    assert tally.rounds.tolist() == [sum(accepted > i for _, accepted in steps) for i in range(k)]
    assert tally.emitted == sum(len(row["ids"]) - row["spans"][0][0] - 1 for row in rows)
    measured = 1 + sum(accepted for _, accepted in steps) / len(steps)
    assert tally.figures()["predicted_acceptance_length"] == pytest.approx(measured)
    if new_tokens == 20:
        assert 1.3 < measured < 3.9, "a head that is always or never right would prove little"


def test_cutting_longer_answers_predicts_what_the_cut_decoding_does() -> None:
    """Rows hold 30 tokens, evaluation makes 11."""
    target, E = permutation_target()
    head = rough(eagle3_head(target, E))
    rows, steps = answered(target, 30), []
    for row in rows:
        prompt = row["ids"][: row["spans"][0][0]]
        steps += generate(target, drafter_for(head, target), prompt, Decoding(k=K, max_new_tokens=11)).steps
    tally = tally_of(target, head, rows, K, 11)
    assert (tally.round_count, tally.rounds.tolist()) == (len(steps), [sum(a > i for _, a in steps) for i in range(K)])


def replayed(target: Target, head: Eagle3, row: dict[str, Any], max_tokens: int) -> list[tuple[int, int]]:
    """Greedy chain decoding of each answer of a row, slowly: an own cache per round, the head fed its own drafts."""
    ids, rounds = row["ids"], []
    taps = target.forward(torch.tensor([ids]), taps=head.taps).taps
    assert taps is not None
    for start, end in row["spans"]:
        end = min(end, start + max_tokens)
        at = start  # newest token of the text so far: the target itself gave the first one
        while at < end - 1:
            cache, drafts = LayerCache(1), []
            embeddings = target.embed(torch.tensor([ids[1 : at + 1]]))
            hidden = head.advance(cache, head.fuse(taps[:, :at]), embeddings)[:, -1:]
            for i in range(K):
                drafts.append(int(head.to_target(head.logits(hidden, i).argmax())))
                hidden = head.advance(cache, hidden, target.embed(torch.tensor([[drafts[-1]]])))
            accepted = 0
            while accepted < K and at + 1 + accepted < end and drafts[accepted] == ids[at + 1 + accepted]:
                accepted += 1
            emitted = min(accepted + 1, end - 1 - at)
            rounds.append((accepted, emitted))
            at += emitted
    return rounds


@torch.no_grad()
def test_the_replay_equals_a_slow_one_on_conversations_of_several_turns() -> None:
    target, E = permutation_target()
    head, perm = rough(eagle3_head(target, E)), permutation()
    rows = conversations(6)
    for row in rows:  # mostly what the head expects, with surprises
        for t in range(1, len(row["ids"])):
            if t % 5:
                row["ids"][t] = int(perm[row["ids"][t - 1]])
    for max_tokens in (4, 64):
        rounds = [r for row in rows for r in replayed(target, head, row, max_tokens)]
        tally = tally_of(target, head, rows, K, max_tokens)
        assert tally.round_count == len(rounds) > 10
        assert tally.rounds.tolist() == [sum(accepted > i for accepted, _ in rounds) for i in range(K)]
        assert tally.emitted == sum(emitted for _, emitted in rounds)
        assert len({accepted for accepted, _ in rounds}) == K + 1, "runs of every length occur"


DRAFT = list(range(0, 64, 2))


@pytest.mark.parametrize(
    ("make", "options"), [(eagle3, {}), (eagle3, {"draft": DRAFT}), (medusa, {"draft": DRAFT, "shared_lm_head": False})]
)
@torch.no_grad()
def test_position_figures_equal_plain_loops_over_slots(make: Any, options: dict[str, Any]) -> None:
    """Joint, conditional and overlap figures, tokens outside the draft vocabulary counted as rejections."""
    target = tiny_target(layers=4)
    head = make(target, std=0.3, **options)
    rows = conversations(5)
    slots, joint, reach = [0] * K, [0] * K, [0] * K
    alpha, greedy = [0.0] * K, [0.0] * K
    kept = head.to_target(torch.arange(head.draft_vocab_size))
    for row in rows:
        ids = torch.tensor([row["ids"]])
        asst = [any(a <= t < b for a, b in row["spans"]) for t in range(ids.shape[1])]
        for t in range(ids.shape[1]):
            right = True
            for i in range(K):
                if t + 2 + i >= ids.shape[1] or not all(asst[t + 1 : t + 3 + i]):
                    break
                inputs = head_input(target, head, ids, torch.tensor([[t]]))
                logits = head.logits(head(inputs, i + 1)[i][0, 0], i)
                q = torch.zeros(64).index_copy(0, kept, logits.softmax(-1))
                p = target.logits(inputs.last[0, t + 1 + i]).softmax(-1)
                slots[i] += 1
                reach[i] += right
                right = right and int(kept[logits.argmax()]) == row["ids"][t + 2 + i]
                joint[i] += right
                alpha[i] += float(torch.minimum(p, q).sum())
                greedy[i] += float(p[kept[logits.argmax()]])
    # Random heads are hardly ever right: the counts below are compared whole, not as ratios.
    tally = tally_of(target, head, rows, K, 64)
    assert (tally.slots.tolist(), tally.joint.tolist(), tally.reach.tolist()) == (slots, joint, reach)
    assert tally.alpha.tolist() == pytest.approx(alpha, rel=1e-4)
    assert tally.alpha_greedy.tolist() == pytest.approx(greedy, rel=1e-4)
    figures = tally.figures()
    assert figures["alpha_sum_min"] == pytest.approx([a / n for a, n in zip(alpha, slots, strict=True)], rel=1e-4)


def test_tallies_add_up() -> None:
    target, E = permutation_target()
    head = rough(eagle3_head(target, E))
    rows, total = answered(target, 12), Tally.empty(K)
    for row in rows:
        total.add(tally_of(target, head, [row], K, 64))
    whole = tally_of(target, head, rows, K, 64)
    for name, value in total.figures().items():
        assert value == pytest.approx(whole.figures()[name], rel=1e-5), name
    assert Tally.empty(K).figures()["predicted_acceptance_length"] == 1.0


def test_rounds_walk_as_in_the_worked_example() -> None:
    assert walk_rounds([2, 0, 0, 1], 64) == [(2, 3), (1, 1)]
    assert walk_rounds([3, 3, 3], 64) == [(3, 3)]
    assert walk_rounds([0, 0, 0], 64) == [(0, 1)] * 3
    assert walk_rounds([2, 2, 2, 2, 2], 3) == [(2, 2)], "an answer cut at three tokens has two after the first"
    assert walk_rounds([], 64) == []
    correct = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]]).bool()
    exists = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()
    assert accepted_runs(correct, exists).tolist() == [2, 2, 0]
