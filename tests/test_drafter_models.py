"""Draft models and the self-draft: the target's output whatever is drafted, caches as if read anew, q as drawn."""

import dataclasses
from typing import Any

import pytest
import torch
from tiny import tiny_target

from eval.cache import KVCache
from eval.drafter import Ask, Drafter
from eval.drafters import DRAFTERS, DrafterSettings
from eval.drafters.draft_model import DraftModel, DraftModelSettings
from eval.drafters.self_draft import SelfDraft, SelfDraftSettings, SparseView
from eval.drafters.truncated import truncated
from eval.generate import Decoding, generate, generate_batch
from eval.verify import residual
from eval.warpers import Warpers
from heads.target import Target

PROMPT = [5, 9, 3, 22, 41, 17, 30]
PROMPTS = [PROMPT, [3, 4], [9, 8] * 8]
# at least as many drafted tokens per round as `k`, and a short self-draft window, so that it does leave something out
SETTINGS = DrafterSettings(draft_model=DraftModelSettings(layers=3), self_draft=SelfDraftSettings(2, 4))
METHODS = [name for name in DRAFTERS if name != "random-tokens"]


def silent(layers: int = 4, **sizes: Any) -> Target:
    target = tiny_target(layers=layers, **sizes)
    target.eos_ids = frozenset()
    return target


def made(name: str, target: Target) -> Drafter:
    chosen = dataclasses.replace(SETTINGS, hybrid=dataclasses.replace(SETTINGS.hybrid, method="draft-model"))
    return DRAFTERS[name](target, chosen, lambda other: made(other, target))


@pytest.mark.parametrize(("kind", "name"), [*(("llama", name) for name in METHODS), ("gemma2", "self-draft")])
def test_output_equals_plain_alone_and_in_a_batch(kind: str, name: str) -> None:
    target = silent(kind=kind, **({"sliding_window": 6} if kind == "gemma2" else {}))
    drafter = made(name, target)
    for warpers, rule in ((Warpers(), "auto"), (Warpers(1.0, top_p=0.95), "match")):
        plain = Decoding(max_new_tokens=14, warpers=warpers)
        drafting = dataclasses.replace(plain, k=4, rule=rule)
        wanted = [generate(target, None, prompt, plain).output_ids for prompt in PROMPTS]
        alone = generate(target, drafter, PROMPT, drafting)
        assert alone.output_ids == wanted[0]
        together = generate_batch(target, drafter, PROMPTS, [drafting] * len(PROMPTS), 2)
        assert [found.output_ids for found in together] == wanted


@pytest.mark.parametrize("name", ["draft-model", "self-draft", "hybrid"])
def test_sampled_drafts_repeat_per_seed_in_any_batch(name: str) -> None:
    target = silent()
    drafter = made(name, target)
    decodings = [Decoding(3, 12, Warpers(1.0), proposal="sampled", seed=i) for i in range(3)]
    alone = [generate(target, drafter, p, d).output_ids for p, d in zip(PROMPTS, decodings, strict=True)]
    assert [found.output_ids for found in generate_batch(target, drafter, PROMPTS, decodings, 2)] == alone


@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_that_is_the_target_is_always_accepted(sampled: bool) -> None:
    """One wrong entry left in a cache would show as a refusal."""
    target = silent()
    for drafter in (DraftModel(target, target), SelfDraft(target, SelfDraftSettings(0, 256))):
        for k in (1, 4):
            proposal = "sampled" if sampled else "greedy"
            decoding = Decoding(k, 19, Warpers(float(sampled)), proposal=proposal)
            found = generate_batch(target, drafter, PROMPTS, [decoding] * 3, 2)
            assert all(step == [step[0], step[0]] for g in found for step in g.steps)


def test_proposals_are_those_of_a_drafter_that_reads_the_text_anew() -> None:
    """Whatever was accepted, the draft's cache holds the true text: its greedy chain is that of whole-text passes."""
    target, draft = silent(), silent(layers=2, seed=3)
    drafter = DraftModel(draft, target)
    propose = drafter.propose
    checked = 0

    def watched(slots: list[int], asks: list[Ask]) -> Any:
        nonlocal checked
        found = propose(slots, asks)
        for slot, proposal in zip(slots, found, strict=True):
            ids = list(drafter.text[slot])
            for token in proposal.tokens.tolist():
                assert token == int(draft.logits(draft.forward(torch.tensor([ids])).last[0, -1]).argmax())
                ids.append(token)
                checked += 1
        return found

    drafter.propose = watched  # type: ignore[method-assign]
    generate_batch(target, drafter, PROMPTS, [Decoding(k=3, max_new_tokens=12)] * 3, 2)
    assert checked > 40


def chain_law(drafter: DraftModel, target: Target, prompt: list[int], draws: int) -> torch.Tensor:
    """Exact law of the first two emitted tokens of a round, over every drafted pair, from the q the drafter reports.

    On the way: pairs come as often as the product of the reported q says.
    """
    V = target.spec.vocab_size
    slots = list(range(40))
    for slot in slots:
        drafter.start(slot, prompt[:-1], prompt[-1], target.forward(torch.tensor([prompt[:-1]])))
    asks = [Ask(2, True, Warpers(1.0), torch.Generator().manual_seed(slot)) for slot in slots]
    laws: dict[tuple[int, int], torch.Tensor] = {}
    counts = torch.zeros(V, V)
    for proposal in (proposal for _ in range(draws // 40) for proposal in drafter.propose(slots, asks)):
        assert proposal.probs is not None
        a, b = proposal.tokens.tolist()
        assert (a, b) not in laws or torch.allclose(laws[a, b], proposal.probs, atol=1e-6)
        laws[a, b] = proposal.probs
        counts[a, b] += 1
    drawn = torch.zeros(V, V)
    law = torch.zeros(V, V, dtype=torch.float64)
    for (a, b), q in laws.items():
        weight = float(q[0, a] * q[1, b])
        drawn[a, b] = weight
        p = [after(target, [*prompt, *path]) for path in ([], [a])]
        first, second = min(1.0, float(p[0][a] / q[0, a])), min(1.0, float(p[1][b] / q[1, b]))
        law[a, b] += weight * first * second
        law[a] += weight * first * (1 - second) * residual(p[1], q[1]).double()
        for x in range(V):  # refused at once: the round emits x alone, the next one goes on from p
            law[x] += weight * (1 - first) * float(residual(p[0], q[0])[x]) * after(target, [*prompt, x]).double()
    assert float((counts / counts.sum() - drawn).abs().sum() / 2) < 0.04
    return law


def after(target: Target, ids: list[int]) -> torch.Tensor:
    return target.logits(target.forward(torch.tensor([ids])).last[0, -1]).softmax(-1)


def test_the_law_of_sampled_drafts_is_the_targets_by_enumeration() -> None:
    target, draft = silent(vocab_size=4), silent(vocab_size=4, layers=2, seed=5)
    prompt = [1, 1, 3, 2, 0, 2]
    law = chain_law(DraftModel(draft, target), target, prompt, 2400)
    p = after(target, prompt)
    wanted = torch.stack([p[x] * after(target, [*prompt, x]) for x in range(4)]).double()
    assert float((law - wanted).abs().sum() / 2) < 1e-5
    assert float((after(draft, prompt) - p).abs().sum() / 2) > 0.05, "the draft's own law is another"


def test_only_ids_that_both_models_have_are_drafted() -> None:
    """Target of 64 rows, draft of 72, tokenizer of 61: padding rows are never drafted however loud they are."""
    target, draft = silent(), silent(vocab_size=72, layers=2, seed=3)
    target.spec = dataclasses.replace(target.spec, tokenizer_size=61)
    with torch.no_grad():
        draft.head.weight[61:] *= 100
    drafter = DraftModel(draft, target)
    for sampled in (False, True):
        drafter.start(0, PROMPT, 2, target.forward(torch.tensor([PROMPT])))
        ask = Ask(6, sampled, Warpers(1.0), torch.Generator().manual_seed(0), with_probs=True)
        proposal = drafter.propose([0], [ask])[0]
        assert proposal.probs is not None and proposal.probs.shape == (6, 64)
        assert int(proposal.tokens.max()) < 61 and float(proposal.probs[:, 61:].sum()) == 0


def test_a_draft_with_a_shorter_context_stops_drafting_at_its_end() -> None:
    target, draft = silent(), silent(layers=2, seed=3, max_position_embeddings=16)
    plain = generate(target, None, PROMPT, Decoding(max_new_tokens=24)).output_ids
    found = generate(target, DraftModel(draft, target), PROMPT, Decoding(k=3, max_new_tokens=24))
    assert found.output_ids == plain
    assert found.steps[0][0] == 3 and found.steps[-1][0] == 0


def test_the_first_layers_of_a_target_are_a_model_of_their_own() -> None:
    target = silent()
    ids = torch.tensor([PROMPT])
    draft = truncated(target, 2)
    residual_stream = target.forward(ids, taps=[2]).taps
    assert residual_stream is not None
    assert torch.allclose(draft.forward(ids).last, target.norm(residual_stream[:, :, 0]), atol=1e-6)
    assert draft.model.num_parameters() < target.model.num_parameters() and len(target.layers) == 4
    assert torch.allclose(draft.model(ids).logits, draft.logits(draft.forward(ids).last), atol=1e-5)
    for layers in (0, 4):
        with pytest.raises(ValueError, match=f"draft_model.layers={layers}"):
            truncated(target, layers)


def test_the_sparse_view_gives_sinks_and_window() -> None:
    """Two rows of 10 and 3 true entries; entry j of row b holds 100 b + j."""
    cache = KVCache(2, 16)
    stripes = torch.arange(10.0).view(1, 1, 10, 1) + torch.tensor([0.0, 100.0]).view(2, 1, 1, 1)
    cache.update(stripes, stripes, 0)
    cache.lengths = [10, 3]
    new = torch.tensor([10.0, 103.0]).view(2, 1, 1, 1)
    view = SparseView(cache, 2, 4)
    keys, _ = view.update(new, new, 0)
    seen = view.seen(torch.device("cpu"))[:, 0, 0]
    shown = [keys[b, 0, seen[b], 0].tolist() for b in range(2)]
    assert shown == [[0, 1, 7, 8, 9, 10], [100, 101, 102, 103]]
    with cache.rows(0, 1):
        alone = SparseView(cache, 2, 4)
        keys, _ = alone.update(new[:1], new[:1], 0)
        assert keys[0, 0, :, 0].tolist() == [0, 1, 7, 8, 9, 10] and alone.seen(torch.device("cpu")).all()
        whole = SparseView(cache, 2, 9)
        assert whole.update(new[:1], new[:1], 0)[0].shape[2] == 11


def test_a_small_window_drafts_differently_from_the_target() -> None:
    """The negative control of the exactness tests above: the sparse view does change what is drafted."""
    target = silent()
    found = generate(target, SelfDraft(target, SelfDraftSettings(1, 2)), PROMPT, Decoding(k=4, max_new_tokens=30))
    assert any(a < K for K, a in found.steps)


def test_settings_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="self_draft.window=0"):
        SelfDraft(silent(), SelfDraftSettings(window=0))
    with pytest.raises(ValueError, match="hybrid.method"):
        DRAFTERS["hybrid"](silent(), DrafterSettings(), lambda name: made(name, silent()))
