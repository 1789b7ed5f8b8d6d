"""One loop: speculative output equals plain output, whatever drafts; ends and budgets hold inside an accepted run."""

import dataclasses
from typing import Any

import pytest
import torch
from tiny import tiny_target

from eval import verify
from eval.drafter import Ask, Drafter
from eval.drafters.head import StepDrafter, drafter_for, untrained
from eval.drafters.lookup import Lookup
from eval.drafters.random import Random
from eval.drafters.replay import Replay
from eval.generate import Decoding, Generation, generate
from eval.warpers import Warpers
from heads.eagle3 import Eagle3, Eagle3Config
from heads.medusa import Medusa, MedusaConfig
from heads.target import Target

PROMPT = [5, 9, 3, 22, 41, 17, 30]


def silent(target: Target) -> Target:
    """A target that never ends by itself, so that lengths are what the budget says."""
    target.eos_ids = frozenset()
    return target


def reduced(size: int, vocab_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(0, vocab_size, vocab_size // size)[:size]
    return ids - torch.arange(size), torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)


def eagle3(target: Target, size: int | None = None) -> Eagle3:
    head = Eagle3(
        Eagle3Config(taps=[1, 2, 3], draft_vocab_size=size), target.spec, None if size is None else reduced(size)
    )
    return untrained(head, target)


def drafters(target: Target, output: list[int]) -> dict[str, Drafter]:
    medusa = untrained(Medusa(MedusaConfig(num_heads=5), target.spec), target)
    return {
        "lookup": Lookup(64),
        "random": Random(64),
        "replay": Replay(output, 64),
        "half-right": Replay([t if i % 3 else 2 for i, t in enumerate(output)], 64),
        "medusa": drafter_for(medusa, target),
        "eagle3": drafter_for(eagle3(target), target),
        "eagle3-reduced": drafter_for(eagle3(target, 16), target),
    }


@pytest.mark.parametrize(
    ("kind", "overrides", "ks"),
    [
        ("llama", {}, (1, 2, 3, 4, 5)),
        ("qwen3", {}, (4,)),
        ("gemma2", {"sliding_window": 6}, (4,)),
        ("llama", {"model_type": "mistral", "sliding_window": 8}, (3,)),
    ],
)
def test_greedy_speculative_output_equals_plain(kind: str, overrides: dict[str, Any], ks: tuple[int, ...]) -> None:
    target = silent(tiny_target(kind, layers=4, **overrides))
    plain = generate(target, None, PROMPT, Decoding(max_new_tokens=24))
    assert plain.steps == [[0, 0]] * 23
    for name, drafter in drafters(target, plain.output_ids).items():
        for k in ks:
            found = generate(target, drafter, PROMPT, Decoding(k=k, max_new_tokens=24))
            assert found.output_ids == plain.output_ids, (name, k)
            assert all(0 <= a <= K <= k for K, a in found.steps)
            if name == "replay":
                assert found.steps[:-1] == [[k, k]] * (len(found.steps) - 1) and len(found.steps) == -(-23 // (k + 1))


@pytest.mark.parametrize("rule", ["match", "strict"])
def test_sampled_output_is_coupled_to_plain_sampling(rule: str) -> None:
    target = silent(tiny_target(layers=4))
    for seed in range(2):
        decoding = Decoding(max_new_tokens=16, warpers=Warpers(1.0, top_p=0.95), seed=seed)
        plain = generate(target, None, PROMPT, decoding)
        for name, drafter in drafters(target, plain.output_ids).items():
            proposal = "sampled" if rule == "strict" else "greedy"
            found = generate(
                target,
                drafter,
                PROMPT,
                Decoding(4, 16, Warpers(1.0, top_p=0.95), proposal=proposal, rule=rule, seed=seed),
            )
            assert found.output_ids == plain.output_ids, (name, seed)


@pytest.mark.parametrize(("proposal", "rule"), [("sampled", "rejection"), ("greedy", "one-hot"), ("sampled", "auto")])
def test_sampled_decoding_repeats_per_seed_and_differs_between_seeds(proposal: str, rule: str) -> None:
    target = silent(tiny_target(layers=4))
    runs = {}
    for seed in range(2):
        for name, drafter in drafters(target, [2] * 30).items():
            decoding = Decoding(3, 10, Warpers(1.0), proposal=proposal, rule=rule, seed=seed)
            found = generate(target, drafter, PROMPT, decoding).output_ids
            if name != "random":  # keeps its own generator from prompt to prompt
                assert found == generate(target, drafter, PROMPT, decoding).output_ids, name
            runs[name, seed] = tuple(found)
    assert runs["eagle3", 0] != runs["eagle3", 1]


@torch.no_grad()
def test_sampled_draft_from_a_reduced_vocabulary_has_the_targets_law() -> None:
    """q is what the draft is drawn from, scattered into V; rejection against it gives p, also outside D."""
    target = silent(tiny_target(layers=4))
    drafter, n = drafter_for(eagle3(target, 16), target), 100_000
    output = target.forward(torch.tensor([PROMPT]), taps=drafter.taps)
    drafter.start(PROMPT, 8, output)
    ask = Ask(True, Warpers(1.5), torch.Generator().manual_seed(0))
    q = drafter.propose(2, ask).probs
    assert q is not None and q.shape == (2, 64) and torch.allclose(q.sum(-1), torch.ones(2))
    assert ((q > 0) == (torch.arange(64) % 4 == 0)).all()
    p = target.logits(target.forward(torch.tensor([[*PROMPT, 8]])).last[0, -1]).softmax(-1)
    draft = verify.sample(q[0].expand(n, 64), torch.rand(n, generator=ask.generator))
    u = torch.rand(n, 2, generator=ask.generator)
    accepted, own = verify.rejection(draft[:, None], p.expand(n, 2, 64), q[0].expand(n, 1, 64), u)
    law = torch.bincount(torch.where(accepted == 1, draft, own), minlength=64) / n
    assert float((law - p).abs().sum() / 2) < 0.012
    assert float((accepted == 1).float().mean()) == pytest.approx(float(torch.minimum(p, q[0]).sum()), abs=0.005)
    proposed = torch.stack([drafter.propose(1, ask).tokens for _ in range(300)])
    assert set(proposed.flatten().tolist()) <= set(range(0, 64, 4))


def test_cache_lengths_are_sequence_length_minus_one_after_every_round() -> None:
    """Prompt of 7, k = 4, accepted 4, 1, 0, 4: full acceptance feeds the last draft, a refusal drops the rest."""
    target = silent(tiny_target(layers=4))
    drafter = StepDrafter(eagle3(target), target)
    text = torch.randint(2, 64, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    ask = Ask(False, Warpers(), torch.Generator())
    drafter.start(text[:7], text[7], target.forward(torch.tensor([text[:7]]), taps=drafter.taps))
    assert drafter.cache.lengths.tolist() == [7]
    length = 8
    for accepted in (4, 1, 0, 4):
        drafter.propose(4, ask)
        output = target.forward(torch.tensor([text[: length + accepted]]), taps=drafter.taps)
        assert output.taps is not None
        output.last, output.taps = output.last[:, length - 1 :], output.taps[:, length - 1 :]
        length += accepted + 1
        drafter.commit(text[length - accepted - 1 : length], output)
        assert drafter.cache.lengths.tolist() == [length - 1]
        fresh = StepDrafter(drafter.head, target)
        fresh.start(
            text[: length - 1], text[length - 1], target.forward(torch.tensor([text[: length - 1]]), taps=drafter.taps)
        )
        assert torch.allclose(drafter.hidden, fresh.hidden, atol=1e-5), "own features left in the draft's cache"
    assert length - 1 == 20


def ends_at(target: Target, output: list[int], index: int) -> int:
    """Make the token at `index` of the plain output an end-of-turn token; its first occurrence is what counts."""
    target.eos_ids = frozenset({output[index], 63})
    return output.index(output[index])


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 9])
def test_nothing_follows_an_end_token_inside_an_accepted_run(index: int) -> None:
    target = silent(tiny_target(layers=4))
    output = generate(target, None, PROMPT, Decoding(max_new_tokens=20)).output_ids
    first = ends_at(target, output, index)
    found = generate(target, Replay(output, 64), PROMPT, Decoding(k=4, max_new_tokens=20))
    assert (found.output_ids, found.stop) == (output[: first + 1], "eos")
    assert sum(a for _, a in found.steps) + len(found.steps) - first in (0, 1), "accepted counts emitted drafts only"


@pytest.mark.parametrize("budget", [0, 1, 2, 4, 5, 6, 7])
def test_the_budget_holds_inside_an_accepted_run(budget: int) -> None:
    target = silent(tiny_target(layers=4))
    output = generate(target, None, PROMPT, Decoding(max_new_tokens=20)).output_ids
    found = generate(target, Replay(output, 64), PROMPT, Decoding(k=4, max_new_tokens=budget))
    assert found.output_ids == output[:budget] and found.stop == "length"


def test_drafts_shrink_at_the_end_of_the_context_and_a_full_one_is_refused() -> None:
    target = silent(tiny_target(layers=4, max_position_embeddings=20))
    output = generate(target, None, PROMPT, Decoding(max_new_tokens=50)).output_ids
    assert len(PROMPT) + len(output) == 20
    assert generate(target, Replay(output, 64), PROMPT, Decoding(k=4, max_new_tokens=50)).output_ids == output
    with pytest.raises(ValueError, match="prompt of 20 tokens: the context holds 20"):
        generate(target, None, [2] * 20, Decoding())


def test_stop_strings_cut_ids_and_steps() -> None:
    target = silent(tiny_target(layers=4))
    plain = generate(target, None, PROMPT, Decoding(max_new_tokens=20))

    def decode(ids: list[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    word = f"{plain.output_ids[4]}><{plain.output_ids[5]}"
    decoding = Decoding(k=4, max_new_tokens=20, stop_strings=(word,))
    found = generate(target, Replay(plain.output_ids, 64), PROMPT, decoding, decode=decode)
    assert found.stop == "stop" and found.output_ids == plain.output_ids[:5]


def test_lookup_prefers_the_longest_and_most_recent_match() -> None:
    drafter, ask = Lookup(64), Ask(False, Warpers(), torch.Generator())
    drafter.start([1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2], 3, None)  # type: ignore[arg-type]
    assert drafter.propose(3, ask).tokens.tolist() == [4, 9, 2]
    drafter.commit([8, 2, 3], None)  # type: ignore[arg-type]
    assert drafter.propose(2, ask).tokens.tolist() == [8, 2]
    drafter.commit([60], None)  # type: ignore[arg-type]
    assert drafter.propose(2, ask).tokens.tolist() == []


def permutation_target(vocab_size: int = 64, layers: int = 4) -> tuple[Target, torch.Tensor, torch.Tensor]:
    """Next token = perm[current]: no block adds anything, unit-norm embedding rows E, lm_head[perm[v]] = E[v]."""
    target = silent(tiny_target(vocab_size=vocab_size, layers=layers, seed=1, hidden_size=128))
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(4))
    perm = torch.empty_like(order).index_copy_(0, order, order.roll(-1))  # one cycle: no token returns within a test
    E = torch.nn.functional.normalize(torch.randn(vocab_size, 128, generator=torch.Generator().manual_seed(5)), dim=-1)
    with torch.no_grad():
        for layer in target.layers:
            layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr,operator]
            layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr,operator]
        target.norm.weight.fill_(1.0)  # type: ignore[operator]
        target.model.get_input_embeddings().weight.copy_(E)
        target.head.weight[perm] = E
    return target, perm, E


def counted(runs: list[Generation], k: int) -> tuple[int, list[int]]:
    steps = [step for run in runs for step in run.steps]
    return len(steps), [sum(a > i for _, a in steps) for i in range(k)]


PROMPTS = [[3, 4], [10, 20, 30], [7, 8, 9, 11]]


def test_analytic_medusa_heads_count_as_a_serving_engine_counts_them() -> None:
    """Head i predicts perm^(2+i): 36 drafts, [36, 36, 36] accepted; with a wrong third head 48 and [48, 48, 0]."""
    target, perm, E = permutation_target()
    medusa = Medusa(MedusaConfig(num_heads=3, shared_lm_head=False), target.spec)
    power = perm
    with torch.no_grad():
        for i in range(3):
            power = perm[power]
            medusa.medusa_heads[i][-1].weight[power] = E  # type: ignore[index]
    drafter = drafter_for(medusa, target)
    runs = [generate(target, drafter, p, Decoding(k=3, max_new_tokens=48)) for p in PROMPTS]
    assert counted(runs, 3) == (36, [36, 36, 36])
    with torch.no_grad():
        medusa.medusa_heads[2][-1].weight.copy_(E)  # type: ignore[index]
    runs = [generate(target, drafter, p, Decoding(k=3, max_new_tokens=48)) for p in PROMPTS]
    assert counted(runs, 3) == (48, [48, 48, 0])


def test_an_analytic_eagle3_head_is_fully_accepted_at_every_step() -> None:
    """fc = 0, q = k = 8 [I|0], v = [I|-I], o = I: the layer swaps the feature for the newest token's embedding."""
    target, perm, E = permutation_target()
    head = Eagle3(Eagle3Config(taps=[1, 2, 3], num_kv_heads=4), target.spec)
    attn, eye, zero = head.midlayer.self_attn, torch.eye(128), torch.zeros(128, 128)
    with torch.no_grad():
        head.fc.weight.zero_()
        attn.q_proj.weight.copy_(8 * torch.cat([eye, zero], 1))
        attn.k_proj.weight.copy_(8 * torch.cat([eye, zero], 1))
        attn.v_proj.weight.copy_(torch.cat([eye, -eye], 1))
        attn.o_proj.weight.copy_(eye)
        head.midlayer.mlp.down_proj.weight.zero_()
        head.lm_head.weight[perm] = E
    runs = [generate(target, drafter_for(head, target), p, Decoding(k=3, max_new_tokens=48)) for p in PROMPTS]
    assert counted(runs, 3) == (36, [36, 36, 36])


@torch.no_grad()
def test_no_proposal_is_an_id_the_tokenizer_lacks() -> None:
    """Vocabulary padded to 64 while the tokenizer has 61 ids."""
    target = tiny_target(layers=4)
    target.spec = dataclasses.replace(target.spec, tokenizer_size=61)
    head = eagle3(target)
    with torch.no_grad():
        head.lm_head.weight[61:] *= 100  # logits of the padding rows dwarf the others, with either sign
    drafter = drafter_for(head, target)
    for sampled in (False, True):
        ask = Ask(sampled, Warpers(1.0), torch.Generator().manual_seed(0), with_probs=True)
        for last in range(2, 60, 5):
            drafter.start(PROMPT, last, target.forward(torch.tensor([PROMPT]), taps=drafter.taps))
            proposal = drafter.propose(4, ask)
            assert proposal.probs is not None
            assert int(proposal.tokens.max()) < 61 and float(proposal.probs[:, 61:].sum()) == 0
