"""What each start of a head claims: which tensors are the target's, and that `induction` is an in-context bigram."""

from typing import Any

import pytest
import torch
from tiny import tiny_target
from tiny_heads import TINY_HEADS
from torch import Tensor
from toys import TAPS, head_input, largest_gap, medusa, tokens, vocabulary, weights

from heads.base import shift
from heads.eagle3 import Eagle3, Eagle3Config
from heads.hub import build_head
from heads.layers import rotate
from heads.target import Target

DRAFT = [0, 3, 4, 9, 15, 40]


def started(
    target: Target, init: str, draft: list[int] | None = None, kv_heads: int | None = None, **flags: Any
) -> Eagle3:
    torch.manual_seed(0)
    size, vocab = (None, None) if draft is None else (len(draft), vocabulary(draft, target.spec.vocab_size))
    config = Eagle3Config(taps=TAPS, init=init, draft_vocab_size=size, num_kv_heads=kv_heads, **flags)
    head = Eagle3(config, target.spec, vocab)
    head.init_from(target, tokens(1, 20, vocab_size=target.spec.vocab_size))
    return head.attach(target).eval()


def echo_target(tied: bool, kv_heads: int) -> Target:
    """A residual stream that is the embedding all the way up, with attention heads as wide as real ones."""
    wide = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": kv_heads, "head_dim": 64}
    target = tiny_target("llama", vocab_size=200, layers=5, tie_word_embeddings=tied, **wide)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return target


def look_back(head: Eagle3, target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(attention [heads, T, T] of step 0, tokens [T] that its output alone would draft)."""
    inputs, attn = head_input(target, head, ids), head.midlayer.self_attn
    assert inputs.taps is not None
    g = head.fuse(inputs.taps)
    mixed, _ = head.mix(shift(inputs.embeddings, 1), g)
    cos, sin = head.rotary(g, inputs.positions)
    query, key = (rotate(attn.split(mixed, p), cos, sin) for p in (attn.q_proj, attn.k_proj))
    scores = query @ attn.expand(key).transpose(-1, -2) / attn.head_dim**0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    attention = scores.masked_fill(future, float("-inf")).softmax(-1)
    written = attn.join(attention @ attn.expand(attn.split(mixed, attn.v_proj)))
    return attention[0], head.to_target(head.logits(written).argmax(-1))[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2])
@torch.no_grad()
def test_induction_looks_at_what_followed_the_same_token_before(tied: bool, kv_heads: int) -> None:
    """26 different tokens, said twice: slot t finds x_{t+1} where it stood before and drafts its successor."""
    target = echo_target(tied, kv_heads)
    once = torch.randperm(190, generator=torch.Generator().manual_seed(3))[:26] + 2
    ids = torch.cat([once, once])[None]
    head = started(target, "induction")
    attention, drafts = look_back(head, target, ids)
    slots = torch.arange(26, 50)
    share = attention[:, slots, slots + 1 - 26]
    assert float(share.mean()) > 0.8, "nearly all attention lies on the match"
    assert bool((attention[:, slots].argmax(-1) == slots + 1 - 26).all())
    assert float((drafts[slots] == ids[0, slots + 2]).float().mean()) > 0.75
    random_attention, _ = look_back(started(target, "random"), target, ids)
    assert float(random_attention[:, slots, slots + 1 - 26].mean()) < 0.2


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("init", ["target", "induction"])
@pytest.mark.parametrize("draft", [None, DRAFT])
@torch.no_grad()
def test_norm_and_lm_head_rows_start_as_the_targets(kind: str, init: str, draft: list[int] | None) -> None:
    """The draft logits then have the shape of the target's own: Gemma's norm counts from 1."""
    target = tiny_target(kind, layers=5)
    head = started(target, init, draft)
    state = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    raw = torch.nn.functional.linear(target.norm(state), target.head.weight)
    raw = raw if draft is None else raw[:, draft]
    ours = head.logits(state)
    scale = float((ours / raw).median())
    assert 0.1 < scale <= 1.0
    assert torch.allclose(ours, scale * raw, atol=1e-3)


def test_target_start_holds_the_last_layers_projections_and_ignores_the_embedding() -> None:
    target = tiny_target("llama", layers=5)
    head, last = started(target, "target"), target.model.model.layers[-1]
    attn, H = head.midlayer.self_attn, 32
    for own, theirs in ((attn.q_proj, "q_proj"), (attn.k_proj, "k_proj"), (attn.v_proj, "v_proj")):
        assert torch.equal(own.weight[:, H:], getattr(last.self_attn, theirs).weight)
        assert not bool(own.weight[:, :H].any())
    assert torch.equal(attn.o_proj.weight, last.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(head.midlayer.mlp, name).weight, getattr(last.mlp, name).weight)
    wider = started(target, "target", kv_heads=4).midlayer.self_attn.k_proj.weight[:, H:]
    assert torch.equal(wider.view(2, 2, 8, H)[:, 0], wider.view(2, 2, 8, H)[:, 1]), "each served two query heads"


def test_random_start_is_the_papers_and_reads_nothing_of_the_target() -> None:
    one, two = (started(tiny_target("llama", layers=5, seed=seed), "random") for seed in (0, 1))
    assert largest_gap(weights(one), weights(two)) == 0.0
    assert one.midlayer.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("init", ["target", "induction"])
def test_a_packed_target_gives_the_same_start(init: str) -> None:
    """Packing for speed takes the weights out of reach of whoever copies them."""
    plain, packed = tiny_target("llama", layers=5), Target(tiny_target("llama", layers=5).model, packed=True)
    assert largest_gap(weights(started(plain, init)), weights(started(packed, init))) < 1e-5


@torch.no_grad()
def test_medusa_starts_as_the_lm_head_itself() -> None:
    target = tiny_target("llama", layers=3)
    last = target.forward(tokens(1, 6)).last[0]
    for shared in (True, False):
        head = medusa(target, num_heads=3, shared_lm_head=shared)
        head.init_from(target, tokens(1, 6))
        logits = head.draft_logits(last, 3)
        assert all(torch.allclose(logits[:, i], target.logits(last), atol=1e-5) for i in range(3))


@torch.no_grad()
def test_target_start_of_eagle3_holds_the_norms_of_the_last_layer_too() -> None:
    for family in ("llama", "qwen3", "gemma2"):
        target = tiny_target(family, layers=5)
        layer, last = started(target, "target").midlayer, any_module(target.layers[-1])
        one = 1 if family == "gemma2" else 0  # Gemma stores weight - 1
        before_mlp = last.pre_feedforward_layernorm if one else last.post_attention_layernorm
        assert torch.equal(layer.hidden_norm.weight, last.input_layernorm.weight + one)
        assert torch.equal(layer.post_attention_layernorm.weight, before_mlp.weight + one)
        assert torch.equal(layer.input_layernorm.weight, torch.ones(32)), "of the embedding nothing is known"


def any_module(module: Any) -> Any:
    return module


def start(kind: str, target: Target, **settings: Any) -> Any:
    torch.manual_seed(0)
    head = build_head({"kind": kind, **TINY_HEADS[kind], **settings}, target.spec, None)
    head.init_from(target, tokens(1, 40))
    return head.attach(target).eval()


@torch.no_grad()
def test_target_start_of_mtp_is_the_last_layer_on_the_feature() -> None:
    """The cached block gives what the target's own layer gives for the same residual stream, whatever the embedding."""
    target = tiny_target("llama", layers=5)
    head = start("mtp", target, init="target")
    stream = torch.nn.functional.normalize(torch.randn(1, 9, 32), dim=-1) * 32**0.5  # rms 1: hnorm leaves it
    scale = float(head.eh_proj.weight[0, 32])
    taps = target.forward(tokens(1, 40), taps=(5,)).taps
    assert taps is not None and scale == pytest.approx(float(taps.pow(2).mean().sqrt()), rel=1e-5)
    positions = torch.arange(9)[None]
    theirs = target.layers[-1](scale * stream, position_embeddings=head.rotary(stream, positions), attention_mask=None)
    for embedding in (torch.zeros(1, 9, 32), torch.randn(1, 9, 32)):
        assert torch.allclose(head.advance(head.new_cache(), stream, embedding), theirs, atol=1e-4)


@torch.no_grad()
def test_target_start_of_eagle1_reads_as_the_last_layer_reads_at_the_scale_of_the_feature() -> None:
    target, ids = tiny_target("llama", layers=5), tokens(1, 40)
    head, last = start("eagle1", target, init="target"), any_module(target.layers[-1])
    output = target.forward(ids, taps=(5,))
    assert output.taps is not None
    rms, stream = (float(x.pow(2).mean().sqrt()) for x in (output.last, output.taps))
    feature = torch.nn.functional.normalize(torch.randn(1, 9, 32), dim=-1) * 32**0.5 * rms
    read, residual = head.mix(torch.randn(1, 9, 32), feature)
    assert torch.allclose(residual, feature, atol=1e-5), "fc passes the feature"
    normed = last.input_layernorm(feature)
    for name in ("q_proj", "k_proj", "v_proj"):
        theirs = getattr(last.self_attn, name)(normed)
        assert torch.allclose(getattr(head.layer.self_attn, name)(read), theirs, atol=1e-4)
    for own, theirs in (
        (head.layer.self_attn.o_proj, last.self_attn.o_proj),
        (head.layer.mlp.down_proj, last.mlp.down_proj),
    ):
        assert torch.allclose(own.weight, theirs.weight * rms / stream, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_target_start_of_a_block_reads_the_last_tap_as_the_targets_last_layer_does(family: str) -> None:
    """With one layer and the tap before it: its values are the target's own, and its keys where those are normed."""
    target = tiny_target(family, layers=5)
    head, last = start("block", target, init="target", num_layers=1), any_module(target.layers[-1])
    attention, taps = head.layers[0].self_attn, target.forward(tokens(1, 40), taps=head.taps).taps
    assert taps is not None and head.taps[-1] == 4
    g, normed = head.feature(taps, taps), last.input_layernorm(taps[:, :, -1])
    positions = torch.arange(40)[None]
    keys, values = attention.keys_values(g, *head.rotary(g, positions))
    assert torch.allclose(values, attention.split(normed, last.self_attn.v_proj), atol=1e-5)
    theirs = attention.split(normed, last.self_attn.k_proj)
    if family == "qwen3":
        theirs = rotate(last.self_attn.k_norm(theirs), *head.rotary(g, positions))
        assert torch.allclose(keys, theirs, atol=1e-5)
    else:
        assert float(keys.pow(2).mean()) == pytest.approx(float(theirs.pow(2).mean()), rel=1e-4)
    embeddings = target.embed(torch.arange(target.spec.vocab_size))
    assert torch.allclose(head.mask_embedding, embeddings.mean(0), atol=1e-6)
    assert torch.equal(head.layers[0].mlp.down_proj.weight, last.mlp.down_proj.weight)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_target_start_of_recurrent_heads_copies_the_lm_head(kind: str) -> None:
    target = tiny_target("llama", layers=5)
    copied = start(kind, target, init="target", inner_size=None)
    assert all(torch.equal(lm_head.weight, target.head.weight) for lm_head in copied.head)
    random = start(kind, target, init="random", inner_size=None)
    assert largest_gap(weights(copied.proj), weights(random.proj)) == 0.0


@pytest.mark.parametrize("kind", ["block", "eagle1", "eagle3", "mtp", "mlp", "lstm"])
def test_random_starts_read_nothing_of_the_target(kind: str) -> None:
    one, two = (start(kind, tiny_target("llama", layers=5, seed=seed), init="random") for seed in (0, 1))
    assert largest_gap(weights(one), weights(two)) == 0.0


@pytest.mark.parametrize("kind", ["block", "eagle1", "eagle3", "mtp"])
def test_a_target_whose_layers_have_other_parts_is_refused(kind: str) -> None:
    target = tiny_target("llama", layers=5)
    del any_module(target.layers[-1]).mlp.gate_proj
    with pytest.raises(ValueError, match="the target's layers have no mlp.gate_proj; use head.init=random"):
        start(kind, target, init="target")


@pytest.mark.parametrize("init", ["random", "target", "induction"])
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_a_frozen_lm_head_is_the_targets_whatever_the_start(init: str, draft: list[int] | None) -> None:
    target = tiny_target("llama", layers=5)
    head = started(target, init, draft, train_lm_head=False)
    rows = target.head.weight if draft is None else target.head.weight[draft]
    assert torch.equal(head.lm_head.weight, rows) and not head.lm_head.weight.requires_grad


@pytest.mark.parametrize("flags", [{"fc_norm": True}, {"norm_before_fc": True}, {"norm_output": True}])
@torch.no_grad()
def test_induction_measures_the_taps_as_fc_reads_them(flags: dict[str, Any]) -> None:
    target = echo_target(True, 2)
    once = torch.randperm(190, generator=torch.Generator().manual_seed(3))[:26] + 2
    head = started(target, "induction", **flags)
    attention, _ = look_back(head, target, torch.cat([once, once])[None])
    slots = torch.arange(26, 50)
    assert float(attention[:, slots, slots + 1 - 26].mean()) > 0.8
