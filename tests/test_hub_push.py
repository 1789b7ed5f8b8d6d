"""Pushing to a Hub (a stand-in on the loopback, the client is the real one): whole or not at all, and read back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import killed
from hub_place import pointed_at_a_hub
from hub_server import PART, TOKEN, HubServer
from test_export import DRAFT, exported
from tiny import tiny_target
from toys import eagle3, largest_gap, weights

from heads.hub import load
from heads.target import Target
from scripts.upload import push

# The client's own call of its HTTP library; nothing here passes raw content.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "someone/draft"
FILES = ["README.md", "config.json", "manifest.json", "model.safetensors"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with pointed_at_a_hub(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    return exported(tmp_path_factory.mktemp("made"), target, eagle3(target, std=0.3, draft=DRAFT))


def ours(server: HubServer, revision: str = "main") -> list[str]:
    """Files of a revision that an export writes; the repository's own .gitattributes is no part of it."""
    return sorted(name for name in server.files(REPO, revision) if name != ".gitattributes")


def test_what_is_pushed_is_what_is_loaded_byte_for_byte(hub: HubServer, folder: Path, target: Target) -> None:
    url = push(folder, REPO)
    assert hub.repos[REPO].private, "private unless told otherwise"
    assert {name: hub.files(REPO)[name] for name in FILES} == {name: (folder / name).read_bytes() for name in FILES}
    assert url.startswith(f"{hub.url}/{REPO}/tree/") and len(hub.repos[REPO].commits) == 2, "one commit"
    assert (folder / "model.safetensors").stat().st_size > PART, "uploaded in parts"
    commit = hub.repos[REPO].branches["main"]
    for source in (REPO, f"{REPO}@main", f"{REPO}@{commit}"):
        assert largest_gap(weights(load(source, target=target)), weights(load(folder))) == 0.0


def test_a_second_push_of_the_same_folder_makes_no_commit(hub: HubServer, folder: Path) -> None:
    push(folder, REPO)
    push(folder, REPO)
    assert len(hub.repos[REPO].commits) == 2


def test_a_branch_holds_its_own_head_and_another_format_leaves_nothing_stale(
    hub: HubServer, folder: Path, target: Target, tmp_path: Path
) -> None:
    push(folder, REPO)
    native = exported(tmp_path, target, eagle3(target, std=0.2), format="native")
    push(native, REPO, revision="native")
    assert ours(hub) == FILES
    assert ours(hub, "native") == ["README.md", "head.json", "head.safetensors", "manifest.json"]
    assert largest_gap(weights(load(f"{REPO}@native", target.spec)), weights(eagle3(target, std=0.2))) == 0.0


def test_the_command_exports_and_pushes(hub: HubServer, target: Target, tmp_path: Path, capsys: Any) -> None:
    exported(tmp_path, target, eagle3(target, std=0.3), push=REPO, revision="v1", private=False)
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["pushed"].startswith(f"{hub.url}/{REPO}/tree/")
    card = hub.files(REPO, "v1")["README.md"].decode()
    assert "- speculative-decoding" in card and "base_model_relation: finetune" in card
    assert not hub.repos[REPO].private and TOKEN not in captured.out + captured.err


def test_a_dry_run_shows_every_file_and_size_and_touches_nothing(
    hub: HubServer, target: Target, tmp_path: Path, capsys: Any
) -> None:
    out = exported(tmp_path, target, eagle3(target, std=0.3), push=REPO, dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert sorted(report["files"]) == FILES and not out.exists() and hub.asked == []
    again = exported(tmp_path, target, eagle3(target, std=0.3))
    sizes = {path.name: path.stat().st_size for path in again.iterdir()}
    assert {name: size for name, size in report["files"].items() if name != "manifest.json"} == {
        name: size for name, size in sizes.items() if name != "manifest.json"
    }
    assert [line.split()[-1] for line in lines[:4]] == FILES and f"would go to {REPO}@main" in lines[4]


def test_a_public_repository_is_not_filled_by_a_private_push(hub: HubServer, folder: Path) -> None:
    push(folder, REPO, private=False)
    with pytest.raises(ValueError, match="this repository is public; set private=false"):
        push(folder, REPO)


PASSING = [
    ("POST /api/models/.*/preupload", "500"), ("POST /api/models/.*/commit", "409"),
    ("POST /api/models/.*/commit", "429"), ("POST /api/models/.*/commit", "500"), ("PUT /lfs", "500"),
    ("PUT /lfs", "429"), ("PUT /lfs", "cut"), ("POST /.*batch", "cut"), ("GET /api/models/.*/tree", "429"),
    ("POST /api/models/.*/commit", "cut"), ("POST /api/repos/create", "429"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "kind"), PASSING)
def test_a_fault_that_passes_is_recovered_from(
    hub: HubServer, folder: Path, pattern: str, kind: str, capsys: Any
) -> None:
    fault = hub.arm(pattern, kind, times=1 if "commit" in pattern else 2)
    push(folder, REPO)
    assert fault.seen == fault.times and ours(hub) == FILES and len(hub.repos[REPO].commits) == 2
    assert TOKEN not in "".join(capsys.readouterr())


REFUSED = [
    ("POST /api/repos/create", "401", "the Hub does not accept the token"),
    ("POST /api/models/.*/commit", "403", "the token may not do this"),
    ("PUT /lfs", "500", "the Hub answered with 500"),
    ("PUT /lfs", "cut", "the connection to the Hub failed"),
    ("POST /api/models/.*/commit", "409", "another change is under way"),
    ("POST /api/models/.*/commit", "429", "asks to slow down"),
]


@pytest.mark.parametrize(("pattern", "kind", "message"), REFUSED)
def test_a_fault_that_stays_is_one_clear_error_and_leaves_no_half_revision(
    hub: HubServer, folder: Path, pattern: str, kind: str, message: str, capsys: Any
) -> None:
    hub.arm(pattern, kind, times=1000)
    with pytest.raises(ValueError, match=message) as raised:
        push(folder, REPO)
    assert "\n" not in str(raised.value) and TOKEN not in str(raised.value) + "".join(capsys.readouterr())
    assert REPO not in hub.repos or ours(hub) == []


def test_bytes_that_arrive_otherwise_are_noticed(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stores a wrong object refuses it by its sha256; one that commits it is found out afterwards."""
    keep = HubServer.fault

    def corrupt(self: HubServer, line: str) -> str | None:
        if line.startswith("POST /api/models") and "commit" in line:
            self.blobs = {oid: bytes(len(blob)) for oid, blob in self.blobs.items()}
        return keep(self, line)

    monkeypatch.setattr(HubServer, "fault", corrupt)
    with pytest.raises(ValueError, match=r"model.safetensors in commit \w{8} is not the file that was sent"):
        push(folder, REPO)


def test_without_a_token_the_login_is_named(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="log in with `hf auth login` or set HF_TOKEN"):
        push(folder, REPO)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kill_9_during_the_upload_leaves_no_revision_that_looks_whole(hub: HubServer, folder: Path) -> None:
    """Killed at each step that the server can see, up to the last: all is uploaded and the commit is asked for."""
    for place in ("PUT /lfs", "POST /lfs/.*/complete", "POST /api/models/.*/commit"):
        hub.arm(place, "hang")
        hub.asked.clear()
        killed(lambda: push(folder, REPO), lambda: hub.has_seen(place))  # noqa: B023
        assert ours(hub) == []
    hub.asked.clear()
    push(folder, REPO)
    assert ours(hub) == FILES and not hub.has_seen("PUT /lfs"), "what has arrived is not sent again"
