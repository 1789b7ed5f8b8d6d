"""Mistakes that engines load without a word are each found before anything is kept or uploaded."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import Loaded, loadable_target
from forked import killed
from hub_place import pointed_at_a_hub
from hub_server import HubServer
from test_export import DRAFT, exported, run_folder
from tiny import tiny_target
from toys import eagle3

from heads.target import Target
from scripts import export
from scripts.export import ExportRun
from scripts.layouts import Layout

TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with pointed_at_a_hub(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loadable_target(tmp_path_factory.mktemp("target"))


def one_off(layout: Layout) -> None:
    layout.config[TAPS] = [i + 1 for i in layout.config[TAPS]]
    if "eagle_config" in layout.config:
        layout.config["eagle_config"][TAPS] = [i + 1 for i in layout.config["eagle_config"][TAPS]]


def another_base(layout: Layout) -> None:
    layer = layout.config.get("transformer_layer_config", layout.config)
    layer["rope_theta"] = layer["rope_parameters"]["rope_theta"] = 500000.0


def another_map(layout: Layout) -> None:
    """Of the same size and sound in itself: from another run."""
    ids = torch.tensor([1, 2, 5, 9, 15, 40, 63])
    V = len(layout.tensors["t2d"])
    layout.tensors["d2t"] = ids - torch.arange(7)
    layout.tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)


def half_of_the_lm_head(layout: Layout) -> None:
    layout.tensors["lm_head.weight"] = layout.tensors["lm_head.weight"][:3]


def half_of_the_lm_head_and_config(layout: Layout) -> None:
    half_of_the_lm_head(layout)
    layout.config["draft_vocab_size"] = 3


def one_tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Layout], None]:
    return lambda layout: layout.tensors.update({name: change(layout.tensors[name])})


def drop(*names: str) -> Callable[[Layout], Any]:
    return lambda layout: [layout.tensors.pop(name) for name in names]


WRONG: dict[str, tuple[Callable[[Layout], Any], str]] = {
    "taps in another order": (one_tensor("fc.weight", lambda x: x.roll(32, 1)), "fc.weight in the folder is not"),
    "taps one off": (one_off, r"says taps=\[2, 3, 5\], the head was trained with \[1, 2, 4\]"),
    "taps one off for SGLang alone": (lambda x: x.config["eagle_config"].update({TAPS: [1, 2, 4]}), "different taps"),
    "no d2t": (drop("d2t"), "tensor d2t is missing: the map of 7 draft ids to 64"),
    "no t2d": (drop("t2d"), "tensor t2d is missing"),
    "no map": (drop("d2t", "t2d"), "tensor d2t is missing"),
    "half a stale map": (one_tensor("d2t", lambda x: x.clone().index_fill_(0, torch.tensor([1]), 0)), "stale"),
    "another run's map": (another_map, "tensor d2t in the folder is not the trained one"),
    "the residual normed": (lambda x: x.config.update(norm_before_residual=True), "norm_before_residual=[tT]rue"),
    "another RoPE base": (another_base, "RoPE is not the one the head was trained with"),
    "random embeddings": (lambda x: x.tensors.update({"embed_tokens.weight": torch.randn(64, 32)}), "embed_tokens"),
    "half of the LM head": (half_of_the_lm_head, "lm_head.weight has 3 rows"),
    "half of the LM head, config as well": (
        half_of_the_lm_head_and_config, "d2t maps 7 draft ids"),
    "norms at one": (one_tensor("midlayer.hidden_norm.weight", torch.ones_like), "hidden_norm.weight in the folder"),
    "a tensor too many": (lambda x: x.tensors.update({"fc.bias": torch.zeros(32)}), "fc.bias"),
    "a tensor missing": (drop("norm.weight"), "norm.weight"),
    "embedding and feature halves": (
        one_tensor("midlayer.self_attn.q_proj.weight", lambda x: x.roll(32, 1)), "q_proj.weight in the folder is not"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(WRONG))
def test_each_mistake_is_found_before_the_upload(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    change, message = WRONG[what]
    target = tiny_target(layers=6)
    caught(change, message, monkeypatch, lambda: exported(tmp_path, target, head_of(target), push="someone/draft"))
    assert hub.asked == [] and not (tmp_path / "out").exists()
    monkeypatch.undo()


def head_of(target: Target) -> Any:
    return eagle3(target, std=0.3, draft=DRAFT)


def caught(
    change: Callable[[Layout], Any], message: str, patch: pytest.MonkeyPatch, command: Callable[[], Any]
) -> None:
    write = export.write_layout

    def wrong(folder: Path, layout: Layout, format: str) -> None:
        change(layout)
        write(folder, layout, format)

    patch.setattr(export, "write_layout", wrong)
    with pytest.raises(ValueError, match=message) as raised:
        command()
    assert "\n" not in str(raised.value)


SPECULATORS: dict[str, tuple[Callable[[Layout], Any], str]] = {
    "the residual left to its default": (lambda x: x.config.pop("norm_before_residual"), "before_residual=[tT]rue"),
    "random embeddings": (one_tensor("embed_tokens.weight", torch.randn_like), "embed_tokens.weight is not"),
    "taps one off": (one_off, r"says taps=\[2, 3, 5\]"),
    "another RoPE base": (another_base, "RoPE is not the one"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(SPECULATORS))
def test_the_speculators_format_is_checked_alike(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    change, message = SPECULATORS[what]
    trained = run_folder(tmp_path / "run", loaded[0], head_of(loaded[0]), target=loaded[1])
    settings = ExportRun(trained=str(trained), out=str(tmp_path / "out"), outputs=str(tmp_path), format="speculators")
    caught(change, message, monkeypatch, lambda: export.main(settings))


def test_norms_that_bfloat16_rounds_to_one_are_refused(tmp_path: Path) -> None:
    target = tiny_target(layers=6)
    head = head_of(target)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.001 * torch.randn_like(parameter).clamp(-1, 1))
    with pytest.raises(ValueError, match="all 4 norm weights are exactly 1.0"):
        exported(tmp_path, target, head, dtype="bfloat16")
    exported(tmp_path, target, head)


def test_an_untrained_head_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    target = tiny_target(layers=6)
    with pytest.raises(ValueError, match="set untrained=true"):
        exported(tmp_path, target, eagle3(target))
    exported(tmp_path, target, eagle3(target), untrained=True)


def test_head_json_changed_by_hand_is_found_by_trainings_record(tmp_path: Path) -> None:
    target = tiny_target(layers=6)
    trained = run_folder(tmp_path / "run", target, head_of(target), head={"kind": "eagle3", "taps": [1, 2, 4]})
    path = trained / "best" / "head.json"
    facts = json.loads(path.read_text())
    facts["config"]["taps"] = [2, 3, 5]
    path.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"head.json says taps=\[2, 3, 5\], its training's record \[1, 2, 4\]"):
        export.main(ExportRun(trained=str(trained), out=str(tmp_path / "out"), outputs=str(tmp_path)))


def test_the_targets_own_features_are_what_is_compared_on(tmp_path: Path, loaded: Loaded, capsys: Any) -> None:
    trained = run_folder(tmp_path / "run", loaded[0], head_of(loaded[0]), target=loaded[1])
    for with_target, said in ((True, "on the target features"), (False, "on random features")):
        out = tmp_path / f"out-{with_target}"
        export.main(ExportRun(trained=str(trained), out=str(out), outputs=str(tmp_path), with_target=with_target))
        assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kill_9_during_the_export_leaves_no_folder_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed once the tensors and config.json are written, before the manifest: the next export clears it away."""
    target = tiny_target(layers=6)
    trained = run_folder(tmp_path / "run", target, head_of(target))
    settings = ExportRun(trained=str(trained), out=str(tmp_path / "out"), outputs=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(export, "card", lambda *given: time.sleep(600))
        child = killed(lambda: export.main(settings), lambda: list(tmp_path.glob("out.*.tmp/config.json")))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"out.{child}.tmp", "run"] and not (tmp_path / left[0] / "manifest.json").exists()
    export.main(settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
