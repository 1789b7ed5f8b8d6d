"""Every target family: its logits rebuilt, its taps right, a head that inherits its RoPE and drafts as it trained."""

from typing import Any

import pytest
import torch
from test_heads_ttt import TOLERANCE, T
from tiny import KINDS, tiny_target
from tiny_heads import largest_difference
from toys import eagle3, tokens

from heads.target import Target

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 1}),  # multi-query
    ("llama", {"num_key_value_heads": 4}),  # a key/value head for each query head
    ("llama", {"head_dim": 16}),
]
SCALED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


def with_taps(target: Target) -> Any:
    return eagle3(target, std=0.3)


@pytest.mark.parametrize(("kind", "overrides"), VARIANTS)
def test_logits_rebuilt_from_the_last_feature_are_the_targets_own(kind: str, overrides: dict[str, Any]) -> None:
    target, ids = tiny_target(kind, layers=6, **overrides), tokens(2, 9)
    assert target.check_parity(ids) < 1e-5
    own = target.model(input_ids=ids).logits
    assert float(own.std()) > 0.5, "logits too flat for this test to fail"


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_the_states_entering_the_layers(kind: str) -> None:
    target, ids = tiny_target(kind, layers=6), tokens(2, 9)
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    taps = target.forward(ids, taps=(0, 2, 5)).taps
    assert taps is not None
    for column, layer in enumerate((0, 2, 5)):
        assert torch.equal(taps[:, :, column], states[layer]), layer
    assert not torch.allclose(states[2], states[3], atol=1e-3), "layers too alike for this test to fail"


@pytest.mark.parametrize(("kind", "overrides"), VARIANTS)
def test_a_head_drafts_as_it_was_trained_on(kind: str, overrides: dict[str, Any]) -> None:
    target = tiny_target(kind, layers=8, **overrides)
    assert largest_difference(target, with_taps(target), tokens(2, T)) < TOLERANCE


@pytest.mark.parametrize("rope", SCALED, ids=[str(rope["rope_type"]) for rope in SCALED])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_scaled_rope_and_context_length_are_inherited(kind: str, rope: dict[str, Any]) -> None:
    target = tiny_target(kind, layers=8, rope_parameters={**rope, "rope_theta": 5000.0})
    head = with_taps(target)
    theirs = target.model.get_decoder().rotary_emb
    assert torch.equal(head.rotary.inv_freq, theirs.inv_freq)
    assert head.rotary.attention_scaling == theirs.attention_scaling
    assert head.layer_config.max_position_embeddings == target.spec.max_position_embeddings == 256
    plain = with_taps(tiny_target(kind, layers=8, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}))
    assert not torch.equal(plain.rotary.inv_freq, theirs.inv_freq), "scaling too weak for this test to fail"
    assert largest_difference(target, head, tokens(2, T)) < TOLERANCE


def test_the_base_of_full_attention_is_taken_where_a_target_has_two() -> None:
    target = tiny_target("gemma3", layers=8)
    bases = {name: rope["rope_theta"] for name, rope in target.spec.rope.items()}
    assert bases["full_attention"] != bases["sliding_attention"]
    assert with_taps(target).layer_config.rope_parameters["rope_theta"] == bases["full_attention"]
