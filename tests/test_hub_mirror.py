"""Loading through a second, independent server: olah, a Hub mirror, between the real client and the stand-in.

Skipped where `olah-cli` is not installed (`pip install olah` into an environment of its own, its bin folder on PATH).
"""

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_place import pointed_at_a_hub
from huggingface_hub import constants
from test_export import DRAFT, exported
from tiny import tiny_target
from toys import eagle3, largest_gap, weights

from heads.download import locate
from heads.hub import load
from scripts.upload import push

OLAH = shutil.which("olah-cli")
pytestmark = [
    pytest.mark.skipif(OLAH is None, reason="olah-cli is not installed"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


@contextmanager
def mirror(upstream: str, folder: Path) -> Iterator[str]:
    """An olah server that mirrors `upstream`; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here, there = f"127.0.0.1:{port}", upstream.removeprefix("http://")
    line = [str(OLAH), "--host", "127.0.0.1", "--port", str(port), "--hf-scheme", "http", "--hf-netloc", there]
    line += ["--hf-lfs-netloc", there, "--mirror-scheme", "http", "--mirror-netloc", here, "--mirror-lfs-netloc", here]
    line += ["--repos-path", str(folder / "repos"), "--log-path", str(folder / "log")]
    folder.mkdir()
    with (folder / "out").open("w") as out, subprocess.Popen(line, cwd=folder, stdout=out, stderr=out) as server:
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"http://{here}/", timeout=1).close()
                    break
                except urllib.error.HTTPError as answered:
                    answered.close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield f"http://{here}"
        finally:
            server.terminate()


def test_a_pushed_head_loads_through_the_mirror_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(layers=6)
    head = eagle3(target, std=0.3, draft=DRAFT)
    folder = exported(tmp_path, target, head)
    with pointed_at_a_hub(tmp_path, monkeypatch) as hub:
        push(folder, "someone/draft", private=False)
        with mirror(hub.url, tmp_path / "olah") as url:
            monkeypatch.setattr(constants, "ENDPOINT", url)
            template = url + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            hub.asked.clear()
            found = locate("someone/draft@main")
            assert hub.has_seen("/resolve/.*model.safetensors"), "the mirror fetched it"
            for name in ("config.json", "manifest.json", "model.safetensors"):
                assert (found / name).read_bytes() == (folder / name).read_bytes()
            assert largest_gap(weights(load("someone/draft", target=target)), weights(head)) == 0.0
