"""The Medusa folder (vLLM up to 0.32): a shared LM head is written along, a reduced vocabulary becomes whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import Loaded, loadable_target
from safetensors.torch import load_file
from test_export import config_of, run_folder
from torch import Tensor
from toys import medusa, tokens

from scripts import export
from scripts.export import ExportRun

DRAFT = list(range(0, 256, 5))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loadable_target(tmp_path_factory.mktemp("target"), layers=3)


def exported(tmp_path: Path, loaded: Loaded, head: Any, **settings: Any) -> Path:
    trained = run_folder(tmp_path / "run", loaded[0], head, target=loaded[1])
    export.main(ExportRun(trained=str(trained), out=str(tmp_path / "out"), outputs=str(tmp_path), **settings))
    return tmp_path / "out"


def by_the_contract(out: Path, last: Tensor) -> Tensor:
    """Logits [n, K, V] from the files alone: h + SiLU(linear h), then the LM head."""
    w, config = load_file(out / "model.safetensors"), config_of(out)
    found = []
    for i in range(config["medusa_num_heads"]):
        h = last
        for block in range(config["medusa_num_layers"]):
            name = f"medusa_heads.{i}.{block}.linear"
            h = h + torch.nn.functional.silu(h @ w[f"{name}.weight"].T + w[f"{name}.bias"])
        own = f"medusa_heads.{i}.{config['medusa_num_layers']}.weight"
        found.append(h @ w["lm_head.weight" if config["original_lm_head"] else own].T)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(
    "settings", [{"num_layers": 2}, {"shared_lm_head": False}, {"shared_lm_head": True, "draft": DRAFT}]
)
def test_an_engine_that_follows_the_contract_computes_the_trained_heads_logits(
    tmp_path: Path, loaded: Loaded, settings: dict[str, Any]
) -> None:
    target = loaded[0]
    head = medusa(target, std=0.3, num_heads=3, **settings)
    out = exported(tmp_path, loaded, head)
    last = target.forward(tokens(1, 7, vocab_size=200)).last[0]
    with torch.no_grad():
        ours = head.draft_logits(last, 3)
    theirs = by_the_contract(out, last)
    assert theirs.shape == (7, 3, target.spec.vocab_size), "the format has no draft vocabulary"
    rows = head.target_rows()
    assert torch.allclose(ours, theirs if rows is None else theirs[..., rows], atol=1e-4)


def test_files_and_config_are_those_of_the_contract(tmp_path: Path, loaded: Loaded) -> None:
    out = exported(tmp_path, loaded, medusa(loaded[0], std=0.3, num_heads=2, draft=DRAFT), dtype="bfloat16")
    config = config_of(out)
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 263,
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "bfloat16",
    }
    assert [key for key in config if "num" in key and "heads" in key] == ["medusa_num_heads"]
    tensors = {name: list(value.shape) for name, value in load_file(out / "model.safetensors").items()}
    linear = {
        f"medusa_heads.{i}.0.linear.{part}": size
        for i in range(2)
        for part, size in (("weight", [32, 32]), ("bias", [32]))
    }
    assert tensors == {**linear, "lm_head.weight": [263, 32]}


def test_the_card_says_what_the_format_cannot(tmp_path: Path, loaded: Loaded) -> None:
    text = (exported(tmp_path, loaded, medusa(loaded[0], draft=DRAFT)) / "README.md").read_text()
    assert "vLLM up to 0.32.0 only" in text and "sglang.launch_server" not in text
    assert f"trained over {len(DRAFT)} ids; the format has no draft vocabulary" in text
    assert '"method": "medusa"' in text and '"num_speculative_tokens": 5' in text


def test_own_lm_heads_over_a_reduced_vocabulary_are_refused(tmp_path: Path, loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="the format has no draft vocabulary"):
        exported(tmp_path, loaded, medusa(loaded[0], shared_lm_head=False, draft=DRAFT))
    assert not (tmp_path / "out").exists()


def test_another_target_by_now_or_an_unknown_one_is_refused(tmp_path: Path, loaded: Loaded) -> None:
    head = medusa(loaded[0])
    folder = run_folder(tmp_path / "run", loaded[0], head)
    with pytest.raises(ValueError, match="does not say how its target is loaded"):
        export.main(ExportRun(trained=str(folder), out=str(tmp_path / "out")))
    folder = run_folder(tmp_path / "run", loaded[0], head, target=loaded[1])
    facts = json.loads((folder / "best" / "head.json").read_text())
    facts["target"]["revision"] = "another"
    (folder / "best" / "head.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="no longer what the head was trained on: revision"):
        export.main(ExportRun(trained=str(folder), out=str(tmp_path / "out")))
