"""Heads against their papers' and engines' formulas, written out once more without any of our layers."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_target
from tiny_heads import TINY_HEADS, drafted_logits, tiny_head
from torch import Tensor
from toys import head_input, tokens

from eval.drafters.head import pack

EPS = 1e-6  # of the tiny targets' norms and of the recurrent heads'


def norm(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rest_of_layer(w: dict[str, Tensor], prefix: str, read: Tensor, residual: Tensor) -> Tensor:
    """A Llama layer at its first position: attention sees one key, so it returns that value."""
    value = F.linear(read, w[f"{prefix}.self_attn.v_proj.weight"]).view(2, 8)  # 2 key/value heads of 8
    attended = value.repeat_interleave(2, dim=0).flatten()  # for 4 query heads
    x = residual + F.linear(attended, w[f"{prefix}.self_attn.o_proj.weight"])
    z = norm(x, w[f"{prefix}.post_attention_layernorm.weight"])
    gate, up, down = (w[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + F.linear(F.silu(F.linear(z, gate)) * F.linear(z, up), down)


def first_step(kind: str, **settings: Any) -> tuple[Any, dict[str, Tensor], Tensor, Tensor, Tensor, Tensor]:
    """(head, its weights, last feature, taps, next embedding, logits of step 0) of slot 0."""
    target, ids = tiny_target(layers=5), tokens(1, 4)
    head = tiny_head(kind, target, wide=True, **settings)
    inputs = head_input(target, head, ids, torch.zeros(1, 1, dtype=torch.int64))
    with torch.no_grad():
        logits = head.logits(head(inputs, 1)[0])[0, 0]
    taps = torch.empty(0) if inputs.taps is None else inputs.taps[0, 0]
    return head, head.state_dict(), inputs.last[0, 0], taps, inputs.embeddings[0, 1], logits


def test_eagle1() -> None:
    head, w, last, _, token, logits = first_step("eagle1")
    x = F.linear(torch.cat([token, last]), w["fc.weight"])
    expected = F.linear(rest_of_layer(w, "layers.0", x, x), tiny_target(layers=5).head.weight)
    assert torch.allclose(logits, expected, atol=1e-3)


def test_mtp() -> None:
    head, w, last, _, token, logits = first_step("mtp")
    x = F.linear(torch.cat([norm(token, w["enorm.weight"]), norm(last, w["hnorm.weight"])]), w["eh_proj.weight"])
    u = rest_of_layer(w, "mtp_block", norm(x, w["mtp_block.input_layernorm.weight"]), x)
    expected = F.linear(norm(u, w["shared_head.norm.weight"]), tiny_target(layers=5).head.weight)
    assert torch.allclose(logits, expected, atol=1e-3)


@pytest.mark.parametrize("norm_before_fc", [False, True])
@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_eagle3_flags(norm_before_fc: bool, fc_norm: bool, norm_before_residual: bool, norm_output: bool) -> None:
    """As vLLM's llama_eagle3.py computes them: combine_hidden_states, _norm_before_residual, aux_output."""
    flags = {"norm_before_fc": norm_before_fc, "fc_norm": fc_norm, "norm_output": norm_output}
    head, w, _, taps, token, logits = first_step("eagle3", norm_before_residual=norm_before_residual, **flags)
    joined = norm(taps.flatten(), w["input_norm.weight"]) if norm_before_fc else taps.flatten()
    if fc_norm:
        joined = torch.cat([norm(tap, w[f"fc_norm.{i}.weight"]) for i, tap in enumerate(joined.chunk(3))])
    g = F.linear(joined, w["fc.weight"])
    normed = norm(g, w["midlayer.hidden_norm.weight"])
    read = torch.cat([norm(token, w["midlayer.input_layernorm.weight"]), normed])
    u = rest_of_layer(w, "midlayer", read, normed if norm_before_residual else g)
    out = norm(u, w["norm.weight"])
    assert torch.allclose(logits, F.linear(out, w["lm_head.weight"]), atol=1e-3)
    assert torch.allclose(head.feed(u), out if norm_output else u, atol=1e-4)


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
def test_mlp_speculator(tie_weights: bool, scale_input: bool) -> None:
    """fms-extras: state = GELU(LN(state_weight * proj(state) + emb_weight * sqrt(inner / 2) * unit emb))."""
    target, ids, n, inner = tiny_target(layers=5), tokens(1, 8), 4, 24
    head = tiny_head("mlp", target, wide=True, tie_weights=tie_weights, scale_input=scale_input)
    w, state_weight = head.state_dict(), 0.5 ** (0.5 / n)
    emb_weight = math.sqrt(1 - state_weight**2)
    state, embeddings = target.forward(ids).last[0, 0], target.embed(ids)[0]
    inputs = head_input(target, head, ids, torch.zeros(1, 1, dtype=torch.int64))
    state = norm(state) / 2**0.5 if scale_input else state
    for i, found in enumerate(head(inputs, n)):
        proj, tied = (min(i, 1), 0) if tie_weights else (i, i)
        z = F.linear(norm(embeddings[1 + i]), w[f"emb.{tied}.weight"]) / math.sqrt(inner)
        state = F.linear(state, w[f"proj.{proj}.weight"]) * state_weight + z * emb_weight * math.sqrt(inner / 2)
        state = F.gelu(norm(state, w[f"ln.{tied}.weight"]) + w[f"ln.{tied}.bias"])
        assert torch.allclose(found[0, 0], state, atol=1e-4)
        assert torch.allclose(head.logits(found, i)[0, 0], F.linear(state, w[f"head.{tied}.weight"]), atol=1e-4)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_lstm_speculator(tie_embeddings: bool) -> None:
    """ArcticTraining, sum_lstm: one gate after another."""
    target, ids, n, inner = tiny_target(layers=5), tokens(1, 8), 4, 24
    head = tiny_head("lstm", target, wide=True, tie_embeddings=tie_embeddings)
    w, state_weight = head.state_dict(), 0.5 ** (0.5 / n)
    alpha = math.sqrt((1 - state_weight**2) / 2) / state_weight
    state, cell, embeddings = norm(target.forward(ids).last[0, 0]) / 2**0.5, torch.zeros(inner), target.embed(ids)[0]
    inputs = head_input(target, head, ids, torch.zeros(1, 1, dtype=torch.int64))
    for i, found in enumerate(head(inputs, n)):

        def gate(part: int, i: int = i, state: Tensor = state) -> Tensor:
            rows = slice(part * inner, (part + 1) * inner)
            z = F.linear(norm(embeddings[1 + i]), w["emb.weight"][slice(inner) if tie_embeddings else rows])
            return F.linear(state, w[f"proj.{min(i, 1)}.weight"][rows]) + alpha * z

        cell = cell * gate(3).sigmoid() if i else cell  # nothing to forget yet
        candidate = F.gelu(norm(gate(1), w["cell_ln.weight"]) + w["cell_ln.bias"])
        cell = cell + candidate * gate(0).sigmoid()
        state = F.gelu(norm(cell, w["state_ln.weight"]) + w["state_ln.bias"]) * gate(2).sigmoid()
        assert torch.allclose(found[0, 0], torch.cat([state, cell]), atol=1e-4)
        assert torch.allclose(head.logits(found, i)[0, 0], F.linear(state, w["head.0.weight"]), atol=1e-4)


@torch.no_grad()
def test_noise_is_uniform_in_absolute_units_and_only_in_training() -> None:
    """fc passes the feature and the layer adds nothing, so the hidden state is the noisy feature itself."""
    target, ids = tiny_target(layers=5), tokens(4, 64)
    head = tiny_head("eagle1", target, noise=0.1)
    head.fc.weight.copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1))
    head.layer.self_attn.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    inputs = head_input(target, head, ids)
    assert torch.equal(head(inputs, 1)[0], inputs.last[:, :-1])
    noise = head.train()(inputs, 1)[0] - inputs.last[:, :-1]
    assert float(noise.abs().max()) <= 0.1 + 1e-5
    assert float(noise.std()) == pytest.approx(0.1 / 3**0.5, rel=0.03) and abs(float(noise.mean())) < 2e-3
    assert torch.equal(
        tiny_head("eagle1", target, noise=0.0).train()(inputs, 1)[0].isfinite().all(), torch.tensor(True)
    )


def test_a_borrowed_lm_head_gives_the_targets_own_logits() -> None:
    """Soft-cap included, and of a reduced vocabulary its rows: a feature predicted right drafts as the target would."""
    target, draft = tiny_target("gemma2", layers=5), [1, 5, 9, 33]
    last = target.forward(tokens(1, 6)).last
    for kept in (None, draft):
        logits = tiny_head("eagle1", target, draft=kept).logits(last)
        assert torch.allclose(logits, target.logits(last, None if kept is None else torch.tensor(kept)), atol=1e-5)


def test_a_copied_head_borrows_from_the_same_target() -> None:
    head = tiny_head("eagle1", tiny_target(layers=5))
    copied = copy.deepcopy(head)
    assert copied._lm_head is head._lm_head and copied.fc.weight is not head.fc.weight


@pytest.mark.parametrize("kind", TINY_HEADS)
def test_packing_for_speed_changes_nothing(kind: str) -> None:
    """Several slots at once take the packed path of the linears, one token each of the sequences does not."""
    target, ids = tiny_target("gemma2", layers=5), tokens(3, 9)
    head = tiny_head(kind, target, wide=True)
    before = drafted_logits(target, head, ids, 4)
    after = drafted_logits(target, pack(head, target), ids, 4)
    assert all(torch.allclose(one, two, atol=1e-3) for one, two in zip(before, after, strict=True))
