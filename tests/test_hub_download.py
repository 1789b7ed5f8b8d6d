"""Loading from a Hub (a stand-in on the loopback, the client is the real one): faults, revisions, no network."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import Loaded, eagle3_config, eagle3_tensors, folder_of, loadable_target
from hub_place import pointed_at_a_hub
from hub_server import TOKEN, HubServer, Repo
from test_export_formats import exported
from tiny_heads import tiny_head
from toys import eagle3, largest_gap, weights

from eval import __main__ as evaluation
from eval.plan import EvalSettings
from heads.download import locate
from heads.hub import load, origin
from heads.target import TargetSettings
from scripts import convert
from scripts.convert import ConvertRun
from train.warm import load_warm

REPO = "someone/published"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with pointed_at_a_hub(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loadable_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def published(hub: HubServer, tmp_path: Path, loaded: Loaded) -> Any:
    """A head others put there in the engines' layout, a pickle on a branch; files that are no head's stay there."""
    head = eagle3(loaded[0], std=0.3)
    config = eagle3_config(loaded[0], head, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    repo = hub.repos[REPO] = Repo(private=True)
    for branch, file in (("main", "model.safetensors"), ("pickle", "pytorch_model.bin")):
        folder = folder_of(tmp_path / branch, config, eagle3_tensors(head), file)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        repo.commit(branch, {**files, "README.md": b"# Mine", "video.mp4": bytes(1000)})
    return head


def test_published_heads_load_by_id_branch_and_commit(hub: HubServer, loaded: Loaded, published: Any) -> None:
    commit = hub.repos[REPO].branches["main"]
    for source in (REPO, f"{REPO}@pickle", f"{REPO}@{commit}"):
        assert largest_gap(weights(load(source, target=loaded[0])), weights(published)) == 0.0
    assert not [line for line in hub.asked if "video" in line or "README" in line], "only what a head needs"
    assert origin(REPO) == {"imported": REPO, "commit": commit}


def test_the_file_beside_a_block_heads_tensors_comes_along(hub: HubServer, tmp_path: Path, loaded: Loaded) -> None:
    head = tiny_head("block", loaded[0], wide=True)
    out = exported(tmp_path, loaded, head)
    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit("main", {path.name: path.read_bytes() for path in out.iterdir()})
    assert largest_gap(weights(load(REPO, target=loaded[0])), weights(head)) == 0.0


def test_what_was_loaded_once_is_there_without_the_network(
    hub: HubServer, loaded: Loaded, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(REPO, target=loaded[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert largest_gap(weights(load(REPO, target=loaded[0])), weights(published)) == 0.0
    with pytest.raises(ValueError, match=r"no folder 'someone/else' here.*offline mode is on"):
        load("someone/else")


FAULTS = [
    ("GET /someone/published/resolve/.*safetensors", "cut"), ("GET /api/models/someone/published", "429"),
    ("GET /api/models/.*/tree", "500"), ("HEAD .*config.json", "500"), ("GET .*config.json", "429"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "kind"), FAULTS)
def test_a_fault_that_passes_is_recovered_from(
    hub: HubServer, loaded: Loaded, published: Any, pattern: str, kind: str, capsys: Any
) -> None:
    fault = hub.arm(pattern, kind)
    assert largest_gap(weights(load(REPO, target=loaded[0])), weights(published)) == 0.0
    assert fault.seen == 1 and TOKEN not in "".join(capsys.readouterr())


REFUSED = [
    ("GET /api/models", "401", "the Hub does not accept the token|cannot see it"),
    ("GET /api/models", "429", "asks to slow down"),
    ("GET /api/models", "500", "answered with 500"),
    ("GET .*safetensors", "500", "answered with 500"),
]


@pytest.mark.parametrize(("pattern", "kind", "message"), REFUSED)
def test_a_fault_that_stays_is_one_clear_error(
    hub: HubServer, published: Any, pattern: str, kind: str, message: str, capsys: Any
) -> None:
    hub.arm(pattern, kind, times=1000)
    with pytest.raises(ValueError, match=message) as raised:
        load(REPO)
    said = str(raised.value)
    assert "\n" not in said and TOKEN not in said + "".join(capsys.readouterr()) and f"no folder {REPO!r} here" in said


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_bytes_with_another_checksum_are_thrown_away(hub: HubServer, loaded: Loaded, published: Any, file: str) -> None:
    hub.arm(f"GET .*{file}", "wrong")
    with pytest.raises(ValueError, match=f"{file} was damaged on its way"):
        load(REPO, target=loaded[0])
    assert largest_gap(weights(load(REPO, target=loaded[0])), weights(published)) == 0.0


def test_a_private_or_missing_repository_or_revision_is_named(
    hub: HubServer, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in ("someone/nothing", f"{REPO}@nothing"):
        with pytest.raises(ValueError, match=f"no folder '{source}' here.*no such repository or revision"):
            load(source)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="cannot see it"):
        load(REPO)


def test_a_folder_comes_before_a_repository_and_other_paths_are_never_asked_for(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "mine").mkdir(parents=True)
    for place in ("outputs/mine", "outputs/train/none", "./outputs/none", str(tmp_path / "none")):
        assert locate(place) == Path(place)
        with pytest.raises(ValueError, match="no trained head here"):
            load(place)
    assert hub.asked == []


def test_a_run_starts_warm_from_a_published_head(hub: HubServer, loaded: Loaded, published: Any) -> None:
    settings = {
        "kind": "eagle3",
        "taps": [1, 2, 4],
        "ttt_steps": 2,
        "norm_before_residual": False,
        "norm_output": False,
    }
    head = load_warm(REPO, settings, loaded[0])
    assert largest_gap(weights(head), weights(published)) == 0.0 and head.train_steps == 2
    with pytest.raises(ValueError, match="trained with norm_output=false: set 'head.norm_output=false'"):
        load_warm(REPO, {**settings, "norm_output": True}, loaded[0])
    config = json.loads(hub.files(REPO)["config.json"])
    hub.repos[REPO].commit(
        "main", {**hub.files(REPO), "config.json": json.dumps({**config, "rope_theta": 5.0}).encode()}
    )
    with pytest.raises(ValueError, match="set 'head.layer={rope: {rope_theta: 5.0, rope_type: "):
        load_warm(REPO, settings, loaded[0])


def test_a_published_head_is_converted_and_evaluated_by_its_id(
    hub: HubServer, loaded: Loaded, published: Any, tmp_path: Path
) -> None:
    convert.main(ConvertRun(source=f"{REPO}@pickle", to=str(tmp_path / "ours"), target_id=loaded[1]["id"]))
    commit = hub.repos[REPO].branches["pickle"]
    facts = json.loads((tmp_path / "ours" / "head.json").read_text())
    assert facts["provenance"]["imported"] == REPO and facts["provenance"]["commit"] == commit
    assert largest_gap(weights(load(tmp_path / "ours", loaded[0].spec)), weights(published)) == 0.0
    settings = EvalSettings(
        target=TargetSettings(id=loaded[1]["id"]), heads={"theirs": REPO}, methods=["theirs"], outputs=str(tmp_path)
    )
    with pytest.raises(ValueError, match="outputs/data/default"):  # the head was found; there is no data here
        evaluation.evaluate(settings)
    assert torch.equal(load(REPO).fc.weight, published.fc.weight)
