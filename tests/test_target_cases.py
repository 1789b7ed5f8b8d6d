"""The tiny targets of the shared cases: sizes, scaling and vocabularies that faulty tools got wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import batch_of, conversations, medusa, tokens, vocabulary, weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from heads.eagle3 import Eagle3, Eagle3Config
from heads.hub import load_head, save_head
from heads.target import Target
from train.mixture import LossSettings
from train.objective import Objective, slot_counts
from train.optim import OptimSettings, build_optimizer


def build(shared: Path, name: str) -> Target:
    config = dict(json.loads((shared / "cases" / "targets" / f"{name}.json").read_text())["config"])
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    return Target(model, name=name)


def head_of(target: Target, **settings: Any) -> Eagle3:
    draft = settings.pop("draft", None)
    vocab = None if draft is None else vocabulary(draft, target.spec.vocab_size)
    size = None if draft is None else len(draft)
    return Eagle3(Eagle3Config(taps=[1, 3, 5], draft_vocab_size=size, **settings), target.spec, vocab)


def roundtrip(folder: Path, target: Target, head: Eagle3) -> Eagle3:
    save_head(folder, head, target.spec, {})
    return load_head(folder, target.spec)


def one_step(target: Target, head: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights before and after one optimizer step."""
    head.attach(target).train()
    before, batch = weights(head), batch_of(conversations(4))
    optimizer = build_optimizer(head.parameters(), OptimSettings(lr=1e-2))
    objective = Objective(head, target, LossSettings())
    loss, _ = objective(batch, slot_counts(batch.asst, batch.documents, head.train_steps))
    loss.backward()
    assert bool(torch.isfinite(loss))
    optimizer.step()
    return before, weights(head)


def logits(head: Eagle3, target: Target, ids: torch.Tensor) -> torch.Tensor:
    from toys import head_input

    with torch.no_grad():
        return head.logits(head(head_input(target, head, ids), 1)[0])


def test_teacher_logits_need_the_final_norm(shared: Path) -> None:
    target, ids = build(shared, "gqa"), tokens(2, 20, vocab_size=264)
    own = target.model(input_ids=ids).logits.softmax(-1)
    assert float((target.logits(target.forward(ids).last).softmax(-1) - own).abs().max()) < 1e-5


def test_gqa_target_gives_the_draft_its_kv_heads_and_trains(shared: Path) -> None:
    target = build(shared, "gqa")
    head = head_of(target)
    assert head.midlayer.self_attn.k_proj.weight.shape == (2 * 12, 2 * 48)
    before, after = one_step(target, head)
    assert all(not torch.equal(before[n], after[n]) for n in before if n not in ("d2t", "t2d"))


def test_explicit_head_dim_is_kept(shared: Path, tmp_path: Path) -> None:
    target = build(shared, "explicit-head-dim")
    head = head_of(target)
    assert target.spec.head_dim == 16
    assert head.midlayer.self_attn.q_proj.weight.shape == (64, 96)
    assert head.midlayer.self_attn.o_proj.weight.shape == (48, 64)
    ids = tokens(1, 12, vocab_size=264)
    again = roundtrip(tmp_path, target, head)
    assert torch.equal(logits(head, target, ids), logits(again, target, ids))


def test_lm_head_bias_is_part_of_the_teacher_and_of_a_shared_head(shared: Path) -> None:
    target, ids = build(shared, "lm-head-bias"), tokens(2, 12, vocab_size=264)
    with torch.no_grad():
        target.head.bias.copy_(torch.arange(264) / 100)
    own = target.model(input_ids=ids).logits
    last = target.forward(ids).last
    assert float((target.logits(last) - own).abs().max()) < 1e-5
    # a Medusa head starts as the LM head itself, bias included
    assert torch.allclose(medusa(target).draft_logits(last[0], 2)[:, 1], own[0], atol=1e-5)


def test_a_nested_text_config_is_read(shared: Path) -> None:
    spec = build(shared, "nested-text-config").spec
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.head_dim) == (264, 48, 6, 12)


def test_a_nested_text_config_target_is_whole(shared: Path) -> None:
    target, ids = build(shared, "nested-text-config"), tokens(1, 12, vocab_size=264)
    assert target.check_parity(ids) < 1e-5
    one_step(target, head_of(target))


def test_scaled_rope_is_the_targets(shared: Path, tmp_path: Path) -> None:
    target = build(shared, "rope-llama3-scaling")
    head = head_of(target)
    for draft in (head, roundtrip(tmp_path, target, head)):
        assert torch.equal(draft.rotary.inv_freq, target.decoder.rotary_emb.inv_freq)
        rope = draft.layer_config.rope_parameters
        assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("llama3", 500000.0, 8.0)
        assert draft.layer_config.max_position_embeddings == 512
    plain = Eagle3(Eagle3Config(taps=[1, 3, 5]), dataclasses.replace(target.spec, rope={}))
    assert not torch.equal(plain.rotary.inv_freq, head.rotary.inv_freq), "unscaled frequencies differ"


def test_sliding_window_target_trains_a_head(shared: Path) -> None:
    target, ids = build(shared, "sliding-window"), tokens(1, 20, vocab_size=264)
    assert target.check_parity(ids) < 1e-5
    one_step(target, head_of(target))


def test_tied_target_keeps_the_draft_lm_head_its_own(shared: Path, tmp_path: Path) -> None:
    target = build(shared, "tied-embeddings")
    draft = list(range(0, 256, 4))
    head = head_of(target, draft=draft)
    head.init_from(target, tokens(1, 20, vocab_size=264))
    assert target.spec.tie_word_embeddings and torch.equal(
        target.lm_head()[0], target.model.get_input_embeddings().weight
    )
    embedding = target.model.get_input_embeddings().weight.clone()
    one_step(target, head)
    again = roundtrip(tmp_path, target, head)
    assert head.lm_head.weight.shape == again.lm_head.weight.shape == (64, 48)
    assert torch.equal(head.lm_head.weight, again.lm_head.weight)
    assert torch.equal(target.model.get_input_embeddings().weight, embedding)


def test_two_layers_are_refused_unless_taps_are_given(shared: Path) -> None:
    target = build(shared, "two-layers")
    with pytest.raises(ValueError, match=r"target of 2 layers.*head.taps"):
        Eagle3(Eagle3Config(), target.spec)
    head = Eagle3(Eagle3Config(taps=[0, 1, 2]), target.spec)
    assert head.taps == (0, 1, 2)
    one_step(target, head)


def test_case_feature_taps(shared: Path) -> None:
    case = json.loads((shared / "cases" / "numeric" / "feature-taps.json").read_text())
    target, ids = build(shared, "gqa"), tokens(1, 9, vocab_size=264)
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    taps = case[3]["taps"]
    output = target.forward(ids, taps=taps)
    assert output.taps is not None
    assert all(torch.equal(output.taps[:, :, n], states[i]) for n, i in enumerate(taps))
    inside = target.forward(ids, taps=case[4]["taps"]).taps
    assert inside is not None
    assert torch.allclose(target.norm(inside[:, :, 2]), states[6], atol=1e-5), "index L is before the final norm"


def test_case_vocab_size_invalid(shared: Path) -> None:
    from heads.layers import map_buffers

    case = json.loads((shared / "cases" / "numeric" / "vocab-size-invalid.json").read_text())
    for size in case["bad_draft_vocab_sizes"]:
        with pytest.raises(ValueError, match="head.draft_vocab_size="):
            map_buffers(None, size, case["target_vocab"])
    maps = {1: vocabulary([0], 20), 20: None, None: None}
    for size in case["ok"]:
        assert map_buffers(maps[size], size, 20)[0].shape == (size or 20,)
