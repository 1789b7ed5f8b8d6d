"""The real Hub client pointed at the stand-in server: endpoint, token, an empty cache, and no waiting between tries."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import TOKEN, HubServer, serving
from huggingface_hub import close_session, constants


@contextmanager
def pointed_at_a_hub(tmp_path: Path, patch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving(HubServer()) as server:
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in does not speak it
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setattr("heads.hub_client.FIRST_WAIT_S", 0.0)
        patch.setattr("heads.hub_client.TRIES", 3)
        quick = SimpleNamespace(sleep=lambda seconds: None, time=time.time, perf_counter=time.perf_counter)
        patch.setattr("huggingface_hub.utils._http.time", quick)
        yield server
        close_session()
