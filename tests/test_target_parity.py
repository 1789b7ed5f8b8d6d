"""The frozen target gives what training and decoding build on: taps, last feature, and logits equal to its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_target
from toys import tokens
from transformers import AutoConfig, AutoModelForCausalLM

from heads.packed import PackedLinear
from heads.target import Target, TargetParityError, TargetSettings

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("gemma2", {}),  # 1 + w norms, soft-capped logits, scaled embeddings
]


def target_of(model_type: str, **overrides: Any) -> Target:
    """Families whose logits need more than norm and LM head."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, vocab_size=64, hidden_size=32, num_attention_heads=4, **overrides)
    model = AutoModelForCausalLM.from_config(config)
    if model.get_output_embeddings().bias is not None:
        with torch.no_grad():
            model.get_output_embeddings().bias.copy_(torch.arange(64) / 100)
    return Target(model, name=model_type)


def unusual() -> list[Target]:
    small: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 3}
    return [
        target_of("phi", initializer_range=0.3, **small),  # LM-head bias, LayerNorm
        target_of("cohere", num_key_value_heads=4, logit_scale=0.0625, pad_token_id=0, initializer_range=0.3, **small),
        target_of("granite", num_key_value_heads=4, logits_scaling=4.0, initializer_range=0.3, **small),
    ]


@pytest.mark.parametrize(("kind", "overrides"), FAMILIES)
def test_rebuilt_logits_equal_the_targets_own(kind: str, overrides: dict[str, Any]) -> None:
    target, ids = tiny_target(kind, layers=4, **overrides), tokens(2, 9)
    assert target.check_parity(ids) < 1e-5
    own = target.model(input_ids=ids).logits
    assert float((target.logits(target.forward(ids).last) - own).abs().max()) < 1e-4
    assert float(own.std()) > 0.5, "logits too flat for this test to fail"
    assert target.logits(target.forward(ids).last).dtype == torch.float32


def test_bias_and_logit_scales_are_reproduced() -> None:
    for target in unusual():
        ids = tokens(2, 9)
        assert target.check_parity(ids) < 1e-5, target.spec.name
        rows = torch.tensor([0, 7, 63])
        last = target.forward(ids).last
        assert torch.allclose(target.logits(last, rows), target.logits(last)[..., rows], atol=1e-5), target.spec.name


def skip_final_norm(target: Target) -> None:
    captured = target.forward
    layers = target.spec.num_layers

    def forward(ids: Any, **options: Any) -> Any:
        output = captured(ids, **{**options, "taps": (layers,)})
        assert output.taps is not None
        output.last = output.taps[:, :, 0]
        return output

    target.forward = forward  # type: ignore[method-assign]


def without_cap(target: Target) -> None:
    target.finish_logits = lambda logits: logits.float()  # type: ignore[method-assign]


def without_bias(target: Target) -> None:
    target.lm_head = lambda rows=None: (target.head.weight, None)  # type: ignore[method-assign]


def wrong_head(target: Target) -> None:
    weight = target.head.weight.roll(1, 0)
    target.logits = lambda last, rows=None: F.linear(last, weight)  # type: ignore[method-assign]


def not_a_number(target: Target) -> None:
    target.logits = lambda last, rows=None: F.linear(last, target.head.weight) * float("nan")  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("make", "spoil"),
    [
        (lambda: tiny_target("llama", layers=4), skip_final_norm),
        (lambda: tiny_target("gemma2", layers=4), skip_final_norm),
        (lambda: tiny_target("gemma2", layers=4), without_cap),
        (lambda: unusual()[0], without_bias),
        (lambda: unusual()[1], without_cap),
        (lambda: unusual()[2], without_cap),
        (lambda: tiny_target("qwen3", layers=4), wrong_head),
        (lambda: tiny_target("qwen3", layers=4), not_a_number),
    ],
    ids=lambda value: value.__name__ if value.__name__ != "<lambda>" else "",
)
def test_a_wrong_teacher_is_refused(make: Callable[[], Target], spoil: Callable[[Target], None]) -> None:
    target = make()
    target.check_parity(tokens(2, 9))
    spoil(target)
    with pytest.raises(TargetParityError, match="teacher parity failed"):
        target.check_parity(tokens(2, 9))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_tap_i_is_the_state_entering_layer_i(kind: str) -> None:
    target, ids = tiny_target(kind, layers=4), tokens(2, 9)
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    output = target.forward(ids, taps=(0, 1, 3, 4))
    assert output.taps is not None and output.taps.shape == (2, 9, 4, 32)
    for n, i in enumerate((0, 1, 3)):
        assert torch.equal(output.taps[:, :, n], states[i]), i
    # hidden_states[L] of transformers is after the final norm; ours is before it, and `last` is after it
    assert torch.allclose(target.norm(output.taps[:, :, 3]), states[4], atol=1e-5)
    assert torch.allclose(output.last, states[4], atol=1e-5)
    assert float((output.taps[:, :, 3] - states[4]).abs().max()) > 0.1


def test_taps_outside_the_model_are_refused() -> None:
    target = tiny_target(layers=4)
    with pytest.raises(ValueError, match=r"taps \[5\] lie outside 0\.\.4"):
        target.forward(tokens(1, 4), taps=(1, 5))
    with pytest.raises(ValueError, match=r"taps \[-1\] lie outside 0\.\.4"):
        target.forward(tokens(1, 4), taps=(-1,))


def test_embeddings_are_the_bare_rows() -> None:
    """Gemma scales its embeddings by sqrt(H) inside the model; engines hand a draft head the unscaled rows."""
    target, ids = tiny_target("gemma2", layers=4), tokens(1, 4)
    rows = target.model.get_input_embeddings().weight[ids]
    assert torch.equal(target.embed(ids), rows)
    output = target.forward(ids, taps=(0,))
    assert output.taps is not None
    assert torch.allclose(output.taps[:, :, 0], rows * 32**0.5, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_right_padding_changes_no_real_position(kind: str) -> None:
    target, ids = tiny_target(kind, layers=4), tokens(1, 9)
    alone = target.forward(ids, taps=(2,))
    padded = target.forward(F.pad(ids, (0, 6), value=1), taps=(2,))
    assert alone.taps is not None and padded.taps is not None
    assert torch.allclose(alone.last, padded.last[:, :9], atol=1e-5)
    assert torch.allclose(alone.taps, padded.taps[:, :9], atol=1e-5)


def test_the_target_is_frozen_in_eval_mode_and_leaves_no_graph() -> None:
    target = tiny_target(layers=4)
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    output = target.forward(tokens(1, 4), taps=(2,))
    assert not output.last.requires_grad and output.taps is not None and not output.taps.requires_grad


def test_packed_weights_give_the_same_logits() -> None:
    plain = tiny_target(layers=4)
    packed = Target(tiny_target(layers=4).model, name="tiny-llama", packed=True)
    ids = tokens(1, 9)
    assert torch.allclose(plain.forward(ids).last, packed.forward(ids).last, atol=1e-5)
    assert packed.check_parity(ids) < 1e-4
    assert packed.spec == plain.spec


def test_end_ids_are_the_union_of_every_source() -> None:
    model = tiny_target(layers=2, eos_token_id=[1, 5]).model
    model.generation_config.eos_token_id = 9

    class Tokenizer:
        eos_token_id, chat_template = 3, "{}"

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def __len__(self) -> int:
            return 60

    target = Target(model, Tokenizer())
    assert target.eos_ids == {1, 3, 5, 9}
    assert target.spec.tokenizer_size == 60 and target.spec.vocab_size == 64


def test_a_target_that_is_missing_or_no_decoder_is_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"target.id='.*nothing'.*config.json is missing"):
        Target.load(TargetSettings(id=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="target.id='nobody/nothing' could not be loaded"):
        Target.load(TargetSettings(id="nobody/nothing"))
    headless = AutoModelForCausalLM.from_config(tiny_target(layers=2).model.config).model
    headless.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="target 'bare' has no LM head"):
        Target(headless, name="bare")


def test_a_packed_linear_moves_to_another_device_and_serves_there() -> None:
    """Its packed copy stays behind; the LM head of a packed target moves along."""
    target = Target(tiny_target("llama", layers=2).model, packed=True)
    layer = next(module for module in target.decoder.modules() if isinstance(module, PackedLinear))
    target.to(torch.device("meta"))
    assert layer(torch.zeros(8, 32, device="meta")).device.type == "meta"
    assert target.logits(torch.zeros(8, 32, device="meta")).shape == (8, 64)
