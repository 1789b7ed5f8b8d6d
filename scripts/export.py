"""Write a trained head as a folder that serving engines load, checked by a round trip, with a model card.

    python -m scripts.export trained=outputs/train/eagle3 [measured=outputs/eval/default] [out=outputs/export/eagle3]

EAGLE-3 goes to vLLM and SGLang, Medusa to vLLM up to 0.32. Everything is written to a temporary folder, read back, and
renamed; manifest.json is written last, and a folder whose manifest fits is left as it is. The last line of standard
output is one JSON object.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from conf.entry import run
from heads.eagle3 import Eagle3
from heads.hub import load_head, read_facts, write_json
from heads.spec import TargetSpec
from heads.target import Target, TargetSettings
from scripts.card import card, read_measured
from scripts.layouts import DTYPES, WEIGHTS, ExportError, Layout, LMHead, eagle3_layout, medusa_layout, round_trip

VERSION = 1  # of the written files: raised when the same head would be written differently


@dataclass
class ExportRun:
    """Settings of this stage; conf/export.yaml merges into it."""

    name: str = "export"
    outputs: str = "outputs"
    trained: str = "outputs/train/eagle3"  # run folder of `python -m train`, or a head folder
    measured: str | None = None  # run folder of `python -m eval` on this head, for the card
    out: str | None = None  # null: outputs/export/<name>
    dtype: str = "float32"
    sglang: bool = True  # false: for vLLM only, which can also tap the embeddings (tap 0)
    base_model: str | None = None  # Hub id to serve with; null: the target the head was trained on
    license: str = "apache-2.0"  # of the head, an SPDX id; the target's own comes on top


def main(settings: ExportRun) -> None:
    if settings.dtype not in DTYPES:
        raise ValueError(f"dtype={settings.dtype!r} must be one of {', '.join(DTYPES)}")
    facts = read_facts(Path(settings.trained))
    measured = read_measured(settings.measured, facts["provenance"])
    out = Path(settings.out) if settings.out else Path(settings.outputs) / "export" / settings.name
    wanted = fingerprint(settings, facts, measured)
    if finished(out, wanted):
        print(f"export: {out} is up to date, skipped", file=sys.stderr)
    else:
        check_place(out)
        write(settings, facts, measured, out, wanted)
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    print(json.dumps({"out": str(out), "kind": manifest["head"], "files": sorted(manifest["files"])}))


def write(settings: ExportRun, facts: dict[str, Any], measured: dict[str, Any] | None, out: Path, wanted: str) -> None:
    """Build the folder beside `out` and move it there; whatever goes wrong, `out` is left as it was."""
    spec = TargetSpec.from_dict(facts["target"])
    check_tensors(Path(facts["folder"]), facts)
    head = load_head(settings.trained)
    lm_head = None
    if isinstance(head, Eagle3):
        layout = eagle3_layout(head, spec, settings.dtype, settings.sglang)
    else:
        if head.config.shared_lm_head:
            lm_head = target_lm_head(facts, spec)
            head.attach(lm_head)
        layout = medusa_layout(head, spec, lm_head, settings.dtype)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        write_layout(temporary, layout)
        gap = round_trip(temporary, head, spec, settings.dtype, lm_head)
        text = card(facts, layout, measured, settings.base_model, settings.license, Path(settings.outputs))
        (temporary / "README.md").write_text(text, encoding="utf-8")
        files = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
        manifest = {"kind": "export", "head": facts["kind"], "fingerprint": wanted, "round_trip_difference": gap}
        manifest |= {"dtype": settings.dtype, "target": {"name": spec.name, "revision": spec.revision}, "files": files}
        write_json(temporary / "manifest.json", manifest)
        swap(temporary, out)
    except OSError as error:
        raise ValueError(f"cannot write to {out}: {error.strerror or error}; choose another `out`") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(
        f"export: {out}: {facts['kind']} for {spec.name}, {settings.dtype}, read back with logits within {gap:.2g}",
        file=sys.stderr,
    )


def write_layout(folder: Path, layout: Layout) -> None:
    write_json(folder / "config.json", layout.config)
    # The metadata is what transformers and the engines look for in a file of PyTorch tensors.
    save_file({name: x.contiguous() for name, x in layout.tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def check_tensors(folder: Path, facts: dict[str, Any]) -> None:
    """A map that is missing shows only in what is drafted: vLLM then takes the first D ids, silently."""
    path = folder / "head.safetensors"
    if not path.is_file():
        raise ExportError(f"{path}: the tensors of this head are missing; train it again")
    with safe_open(path, framework="pt") as opened:
        names = set(opened.keys())
    if missing := sorted({"d2t", "t2d"} - names):
        size, V = facts["config"].get("draft_vocab_size"), facts["target"]["vocab_size"]
        raise ExportError(f"{path}: {missing[0]} is missing, the map of {size or V} draft ids to the target's {V}")


def target_lm_head(facts: dict[str, Any], spec: TargetSpec) -> LMHead:
    """The LM head of the very target the head was trained on. Raises ExportError when it is another one by now."""
    made = facts["provenance"].get("target")
    if not isinstance(made, dict):
        raise ExportError(f"{facts['folder']}: head.json does not say how its target is loaded; train the head again")
    target = Target.load(TargetSettings(**{**made, "packed": False, "dtype": "float32"}))
    if differing := spec.same_target(target.spec):
        raise ExportError(
            f"target {made.get('id')!r} is no longer what the head was trained on: {', '.join(differing)} differ"
        )
    weight, bias = target.lm_head()
    return LMHead(weight.detach(), None if bias is None else bias.detach())


def fingerprint(settings: ExportRun, facts: dict[str, Any], measured: dict[str, Any] | None) -> str:
    """Of everything the written files depend on."""
    own = {
        name: value for name, value in dataclasses.asdict(settings).items() if name not in ("name", "outputs", "out")
    }
    tensors = Path(facts["folder"]) / "head.safetensors"
    parts = [VERSION, own, facts, measured, sha256(tensors) if tensors.is_file() else None]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def finished(out: Path, wanted: str) -> bool:
    """Whether `out` holds this very export, whole."""
    manifest = read_manifest(out)
    if manifest is None or manifest.get("fingerprint") != wanted:
        return False
    return all((out / name).is_file() and sha256(out / name) == digest for name, digest in manifest["files"].items())


def read_manifest(out: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) and found.get("kind") == "export" else None


def check_place(out: Path) -> None:
    """`out` must be free, empty, or an earlier export."""
    if out.exists() and not out.is_dir():
        raise ExportError(f"out={out} is a file; choose another folder")
    if out.is_dir() and any(out.iterdir()) and read_manifest(out) is None:
        raise ExportError(f"out={out} holds files that are no export; choose another folder or empty this one")


def swap(temporary: Path, out: Path) -> None:
    """Put `temporary` in the place of `out`, which is whole before and after."""
    out.parent.mkdir(parents=True, exist_ok=True)
    old = out.with_name(f"{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    temporary.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    run("export", ExportRun, main)
