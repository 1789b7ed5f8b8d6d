"""Every format of the table holds the trained head, or says why not; a converted head comes back as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import Loaded, eagle3_tensors, folder_of, loadable_target, speculators_config
from safetensors.torch import load_file
from test_export import DRAFT, config_of, run_folder
from toys import eagle3, head_input, largest_gap, medusa, tokens, weights

from heads import HEADS
from heads.hub import load, read_facts
from heads.target import Target
from scripts import convert, export
from scripts.convert import ConvertRun
from scripts.export import ExportRun
from scripts.writers import LAYOUTS


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loadable_target(tmp_path_factory.mktemp("target"))


def exported(tmp_path: Path, place: Loaded, head: Any, out: str = "out", **settings: Any) -> Path:
    trained = run_folder(tmp_path / "run", place[0], head, target=place[1])
    export.main(ExportRun(trained=str(trained), out=str(tmp_path / out), outputs=str(tmp_path), **settings))
    return tmp_path / out


def test_every_head_has_its_entry_for_every_format() -> None:
    assert set(LAYOUTS) == set(HEADS)
    assert all(set(formats) == {"vllm", "sglang", "speculators"} for formats in LAYOUTS.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_a_speculators_folder_is_that_of_the_contract(
    tmp_path: Path,
    loaded: Loaded,
    dtype: str,
    draft: list[int] | None,
) -> None:
    target = loaded[0]
    head = eagle3(target, std=0.3, draft=draft)
    out = exported(tmp_path, loaded, head, format="speculators", dtype=dtype)
    config, tensors = config_of(out), load_file(out / "model.safetensors")
    V = target.spec.vocab_size
    assert config["architectures"] == ["Eagle3DraftModel"] and config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False, "always written: its default there is true"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4] and config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == (len(DRAFT) if draft else V) and config["target_hidden_size"] == 32
    layer = config["transformer_layer_config"]
    assert layer["vocab_size"] == V and layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    speculators = config["speculators_config"]
    assert speculators["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    ]
    assert speculators["verifier"] == {"name_or_path": target.spec.name, "architectures": ["LlamaForCausalLM"]}
    assert torch.equal(
        tensors["embed_tokens.weight"], target.model.get_input_embeddings().weight.to(getattr(torch, dtype))
    )
    assert not [name for name in tensors if name.startswith("midlayer.")]
    assert {"d2t", "t2d"} <= set(tensors) if draft else not {"d2t", "t2d"} & set(tensors)
    found = load(out, target=target)
    if dtype == "float32":
        assert largest_gap(weights(found), weights(head)) == 0.0
    card = (out / "README.md").read_text()
    assert "vllm serve PATH_OR_ID_OF_THIS_FOLDER" in card and "- speculators" in card


@pytest.mark.parametrize("format", ["vllm", "sglang", "speculators", "native"])
def test_each_format_is_read_back_as_the_same_head_and_leads_to_every_other(
    tmp_path: Path,
    loaded: Loaded,
    format: str,
) -> None:
    target = loaded[0]
    head = eagle3(target, std=0.3, draft=DRAFT, ttt_steps=5)
    first = exported(tmp_path, loaded, head, format=format)
    found = load(first, target=target)
    assert largest_gap(weights(found), weights(head)) == 0.0 and found.config.ttt_steps == 5
    back = tmp_path / "back"
    convert.main(ConvertRun(source=str(first), to=str(back), target_id=loaded[1]["id"]))
    assert sorted(path.name for path in back.iterdir()) == [
        "README.md",
        "head.json",
        "head.safetensors",
        "manifest.json",
    ]
    assert largest_gap(weights(load(back, target.spec)), weights(head)) == 0.0
    assert read_facts(back)["provenance"]["step"] == 2, "training's record goes along"


def test_no_path_of_this_machine_is_published(tmp_path: Path, loaded: Loaded) -> None:
    for format in ("vllm", "native"):
        out = exported(tmp_path, loaded, eagle3(loaded[0], std=0.3), format, format=format)
        texts = [path.read_text() for path in out.iterdir() if path.suffix != ".safetensors"]
        assert not [text for text in texts if str(Path(loaded[1]["id"]).parent) in text]


def test_a_head_made_elsewhere_becomes_ours_and_goes_back(tmp_path: Path, loaded: Loaded) -> None:
    target = loaded[0]
    head = eagle3(target, std=0.3, draft=DRAFT)
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in eagle3_tensors(head).items()}
    theirs = folder_of(tmp_path / "theirs", speculators_config(target, head), tensors, "pytorch_model.bin")
    with pytest.raises(ValueError, match="was made elsewhere: say which target it drafts for, target_id="):
        convert.main(ConvertRun(source=str(theirs), to=str(tmp_path / "ours")))
    convert.main(ConvertRun(source=str(theirs), to=str(tmp_path / "ours"), target_id=loaded[1]["id"]))
    facts = json.loads((tmp_path / "ours" / "head.json").read_text())
    assert facts["provenance"]["imported"] == "theirs" and facts["target"]["tokenizer_hash"] != "unknown"
    assert "converted from `theirs`" in (tmp_path / "ours" / "README.md").read_text()
    for format in ("vllm", "speculators"):
        to = tmp_path / format
        source = str(tmp_path / "ours")
        convert.main(ConvertRun(source=source, to=str(to), format=format, target_id=loaded[1]["id"]))
        assert largest_gap(weights(load(to, target=target)), weights(head)) == 0.0


def test_an_original_medusa_checkpoint_becomes_ours_and_goes_back(
    tmp_path: Path,
    loaded: Loaded,
) -> None:
    target = loaded[0]
    head = medusa(target, std=0.3, num_heads=2, shared_lm_head=False)
    tensors = {
        name.removeprefix("medusa_heads."): value
        for name, value in weights(head).items()
        if name.startswith("medusa_heads.")
    }
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "someone/tiny"}
    theirs = folder_of(tmp_path / "theirs", config, tensors, "medusa_lm_head.pt")
    convert.main(ConvertRun(source=str(theirs), to=str(tmp_path / "ours"), target_id=loaded[1]["id"]))
    source = str(tmp_path / "ours")
    convert.main(ConvertRun(source=source, to=str(tmp_path / "back"), format="vllm", target_id=loaded[1]["id"]))
    found = load(tmp_path / "back", target=target)
    inputs = head_input(target, head, tokens(1, 9))
    with torch.no_grad():
        pairs = zip(head(inputs, 2), found(inputs, 2), strict=True)
        gaps = [float((head.logits(a, i) - found.logits(b, i)).abs().max()) for i, (a, b) in enumerate(pairs)]
    assert max(gaps) == 0.0


@pytest.mark.parametrize("format", ["sglang", "speculators"])
def test_what_no_engine_serves_is_refused_before_work(
    tmp_path: Path,
    loaded: Loaded,
    format: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Target, "load", lambda settings: pytest.fail("nothing is loaded"))
    with pytest.raises(ValueError, match=rf"format={format}: Medusa is served by vLLM up to 0.32 alone"):
        exported(tmp_path, loaded, medusa(loaded[0]), format=format)


def test_unknown_formats_and_places_are_refused(tmp_path: Path, loaded: Loaded) -> None:
    head = eagle3(loaded[0], std=0.3)
    for settings, message in (
        ({"format": "gguf"}, "format='gguf' must be one of vllm, sglang, speculators, native"),
        ({"push": "draft"}, "push='draft' must be user/repo"),
        ({"push": "someone/draft"}, "the target was a folder here, .*; say its Hub id, base_model=user/model"),
        ({"revision": "v1"}, "revision='v1' names a branch of a Hub repository: set push"),
    ):
        with pytest.raises(ValueError, match=message):
            exported(tmp_path, loaded, head, **settings)
    with pytest.raises(ValueError, match="source is missing"):
        convert.main(ConvertRun(to=str(tmp_path / "x")))
