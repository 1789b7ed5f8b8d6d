"""Claim: a full or read-only disk is one clear error, and the next run takes nothing half-written for whole."""

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_run import contents
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data.asking import RegenerateSettings
from data.build import DataSettings, build
from heads.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(vocab_size=264, layers=2, max_position_embeddings=512).model, byte_tokenizer())


def settings_for(folder: Path) -> DataSettings:
    source = folder / "in.jsonl"
    lines = [{"prompt": f"question {n}"} for n in range(8)] + [{"prompt": "question 1"}, {"neither": 1}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = RegenerateSettings(max_new_tokens=4, batch_size=3)
    return DataSettings(source=[str(source)], heldout_share=0.3, max_length=200, regenerate=asked)


class SmallDisk:
    """Room for so many bytes under a folder: the write that passes it puts down what fits and fails, as a disk does."""

    def __init__(self, folder: Path, room: int) -> None:
        self.folder, self.room, self.open = str(folder), room, Path.open

    def opened(self, path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not str(path).startswith(self.folder) or not set(mode) & set("wax+"):
            return self.open(path, mode, *args, **kwargs)
        if "b" in mode:
            return Limited(self.open(path, mode, *args, **kwargs), self)
        return Limited(self.open(path, mode.replace("t", "") + "b"), self, kwargs.get("encoding") or "utf-8")


class Limited:
    """A file on a SmallDisk. Unbuffered, so that the n-th byte of the run is always the same one."""

    def __init__(self, stream: Any, disk: SmallDisk, encoding: str | None = None) -> None:
        self.stream, self.disk, self.encoding = stream, disk, encoding

    def write(self, text: Any) -> int:
        data = text.encode(self.encoding) if self.encoding else text
        fits = min(len(data), self.disk.room)
        self.disk.room -= fits
        self.stream.write(data[:fits])
        if fits < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(text)

    def __enter__(self) -> "Limited":
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def room_for(folder: Path, size: int) -> Iterator[SmallDisk]:
    disk = SmallDisk(folder, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *args, **kwargs: disk.opened(path, *args, **kwargs))
        yield disk


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[DataSettings, dict[str, bytes], int]:
    """Settings, the files of an undisturbed run, and how many bytes it writes in all."""
    folder = tmp_path_factory.mktemp("whole")
    settings = settings_for(folder)
    with room_for(folder / "out", 1 << 30) as disk:
        build(target, settings, folder / "out")
    return settings, contents(folder / "out"), (1 << 30) - disk.room


@pytest.mark.parametrize("part", [0.0, 0.02, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 0.9999])
def test_a_disk_that_fills_at_any_write_is_one_error_and_the_next_run_is_whole(
    target: Target, whole: tuple[DataSettings, dict[str, bytes], int], tmp_path: Path, part: float
) -> None:
    settings, files_of_whole, size = whole
    folder = tmp_path / "out"
    with room_for(folder, int(part * size)), pytest.raises(OSError, match="could not be written.*make room") as full:
        build(target, settings, folder)
    assert str(folder) in str(full.value) and "No space left on device" in str(full.value)
    assert not (folder / "manifest.json").exists()
    build(target, settings, folder)
    assert contents(folder) == files_of_whole


def test_answers_are_not_made_again_when_only_the_manifest_is_missing(
    target: Target, whole: tuple[DataSettings, dict[str, bytes], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, files_of_whole, size = whole
    with room_for(tmp_path / "out", size - 10), pytest.raises(OSError, match="make room"):
        build(target, settings, tmp_path / "out")
    monkeypatch.setattr("data.local.answer", None)  # asking the target once more would fail
    build(target, settings, tmp_path / "out")
    assert contents(tmp_path / "out") == files_of_whole


def test_a_file_in_place_of_the_folder_is_one_error_that_names_it(target: Target, tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    (tmp_path / "outputs").write_text("in the way")
    for folder in (tmp_path / "outputs", tmp_path / "outputs" / "data"):
        with pytest.raises(OSError, match=f"'{tmp_path / 'outputs'}"):
            build(target, settings, folder)


def test_a_real_full_and_read_only_disk(root: Path, python: str, tmp_path: Path) -> None:
    unshare = ["unshare", "--map-root-user", "--mount"]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0:
            environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}"}
            command = [*unshare, python, str(root / "tests" / "full_disk.py"), str(tmp_path)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
            assert done.returncode == 0, done.stderr
            check_disk(**json.loads(done.stdout.splitlines()[-1]))
            return
    pytest.skip("this machine lets no one mount a tmpfs of their own (unshare --map-root-user --mount)")


def check_disk(errors: dict[str, str | None], same: bool) -> None:
    for step in ("rows on 16 kB", "rows on 64 kB"):
        error = errors.pop(step) or ""
        assert "rows could not be written (No space left on device): make room" in error
    error = errors.pop("features on 512 kB") or ""
    assert "No space left on device" in error and "shard-" in error
    error = errors.pop("new rows, read-only") or ""
    assert "Read-only file system" in error and "other" in error
    assert not any(errors.values()), errors
    assert same
