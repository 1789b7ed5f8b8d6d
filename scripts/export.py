"""Write a trained head as a folder that serving engines load, checked by a round trip, with a model card; push it.

    python -m scripts.export trained=outputs/train/eagle3 format=vllm [measured=outputs/eval/default] [dtype=bfloat16]
    python -m scripts.export trained=outputs/train/eagle3 push=user/repo [revision=branch] [private=false]

Formats: vllm (EAGLE-3 for vLLM and SGLang in one folder; Medusa for vLLM up to 0.32), sglang (the same, refused where
SGLang would misread it), speculators, native. Everything is written to a temporary folder, read back, compared with the
trained head, and renamed; manifest.json is written last, and a folder whose manifest fits is left as it is. A Medusa-2
head brings its tuned target: merged, as `target/`, or as its adapter (native). The last line of standard output is one
JSON object.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from conf.entry import run
from heads.download import locate
from heads.formats import own_facts
from heads.hub import is_imported, load, read_facts, write_json
from heads.spec import TargetSpec
from heads.target import Target, TargetSettings
from heads.tuned import ADAPTER
from scripts import upload
from scripts.card import TUNED, card, read_measured
from scripts.gather import brings_target, gather, is_local, its_target, plain
from scripts.layouts import DTYPES, FORMATS, WEIGHTS, ExportError, Layout
from scripts.place import check_place, finished, sha256, swap, sweep
from scripts.verify import verify
from scripts.writers import check_format, layout

VERSION = 2  # of the written files: raised when the same head would be written differently


@dataclass
class ExportRun:
    """Settings of this stage; conf/export.yaml merges into it."""

    name: str = "export"
    outputs: str = "outputs"
    trained: str = "outputs/train/eagle3"  # run folder of `python -m train`, a head folder, or a Hub id (user/repo@rev)
    target_id: str | None = None  # embedded name, folder or Hub id: of a head made elsewhere, or where ours lies by now
    measured: str | None = None  # run folder of `python -m eval` on this head, for the card
    out: str | None = None  # null: outputs/export/<name>
    format: str = "vllm"  # vllm | sglang | speculators | native
    dtype: str = "float32"
    with_target: bool = True  # compare on the target's own features; false: random ones, where the target is not needed
    untrained: bool = False  # true: a head whose norms are all still exactly 1.0 is meant
    base_model: str | None = None  # Hub id to serve with; null: the target the head was trained on
    license: str = "apache-2.0"  # of the head, an SPDX id
    target_license: str | None = None  # null: known for the embedded target, else "not stated" in the card
    data_license: str | None = None
    push: str | None = None  # Hub repository user/repo to upload to
    revision: str | None = None  # branch of it, made when it is not there; null: main
    private: bool = True
    dry_run: bool = False  # show every file and its size; write and upload nothing


def main(settings: ExportRun) -> None:
    check_settings(settings)
    folder = locate(settings.trained)
    imported = is_imported(folder) and own_facts(folder) is None
    if imported and settings.target_id is None:
        raise ExportError(
            f"trained={settings.trained} was made elsewhere: say which target it drafts for, target_id=user/model"
        )
    given = TargetSettings(id=settings.target_id) if imported and settings.target_id else None
    target = Target.load(plain(given)) if given else None
    facts = read_facts(folder, target.spec if target else None)
    if given:
        facts["provenance"]["target"] = dataclasses.asdict(given)
    if settings.format != "native":
        check_format(facts["kind"], settings.format)
    check_base(settings, facts)
    measured = read_measured(settings.measured, facts["provenance"])
    out = Path(settings.out) if settings.out else Path(settings.outputs) / "export" / settings.name
    wanted = fingerprint(settings, facts, measured)
    report: dict[str, Any] = {"out": str(out), "kind": facts["kind"], "format": settings.format}
    if finished(out, wanted) and not settings.dry_run:
        print(f"export: {out} is up to date, skipped", file=sys.stderr)
    else:
        check_place(out)
        files = write(settings, facts, measured, out, wanted, target)
        if settings.dry_run:
            show(files, f"{settings.push}@{settings.revision or 'main'}" if settings.push else str(out))
            print(json.dumps({**report, "dry_run": True, "files": files}))
            return
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    report["files"] = sorted(manifest["files"])
    if settings.push:
        report["pushed"] = upload.push(out, settings.push, settings.revision, settings.private)
    print(json.dumps(report))


def check_base(settings: ExportRun, facts: dict[str, Any]) -> None:
    """A model card on the Hub names its base model by a Hub id; a target that was a folder here has none.

    A merged target is a model of its own, which a repository of a head must not become unasked.
    """
    if settings.push and brings_target(settings.format, facts):
        raise ExportError(
            f"push={settings.push}: a Medusa-2 head in format={settings.format} comes with its whole tuned target, "
            "which is not pushed from here: push it with format=native (its adapter), or upload the folder yourself"
        )
    if settings.push and not settings.base_model and is_local(facts["provenance"].get("target")):
        raise ExportError(
            f"push={settings.push}: the target was a folder here, {facts['target']['name']}; say its Hub id, "
            "base_model=user/model"
        )


def show(files: dict[str, int], place: str) -> None:
    for name, size in files.items():
        print(f"{size:>14,} {name}")
    print(f"{sum(files.values()):>14,} bytes in {len(files)} files would go to {place}; nothing was written")


def check_settings(settings: ExportRun) -> None:
    """Raises ValueError naming the setting, before anything is loaded."""
    if settings.dtype not in DTYPES:
        raise ValueError(f"dtype={settings.dtype!r} must be one of {', '.join(DTYPES)}")
    if settings.format not in FORMATS:
        raise ValueError(f"format={settings.format!r} must be one of {', '.join(FORMATS)}")
    if settings.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", settings.push):
        raise ValueError(f"push={settings.push!r} must be user/repo (a branch goes into revision=...)")
    if settings.revision and not settings.push:
        raise ValueError(
            f"revision={settings.revision!r} names a branch of a Hub repository: set push=user/repo as well"
        )


def write(
    settings: ExportRun,
    facts: dict[str, Any],
    measured: dict[str, Any] | None,
    out: Path,
    wanted: str,
    target: Target | None,
) -> dict[str, int]:
    """Build the folder beside `out` and move it there (not in a dry run); whatever goes wrong, `out` is left as it was.

    Returns name -> bytes of every file.
    """
    check_map_is_there(Path(facts["folder"]), facts)
    target = target or its_target(settings, facts)
    head = load(Path(facts["folder"]), TargetSpec.from_dict(facts["target"]), target)
    made = gather(settings, facts, target)
    if made.lm_head is not None:
        head.attach(made.lm_head)
    written = layout(head, made)
    sweep(out)
    place = Path(tempfile.mkdtemp()) if settings.dry_run else out.parent
    temporary = place / f"{out.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        write_layout(temporary, written, settings.format)
        gap = verify(temporary, head, made, target, settings.untrained)
        text = card(made, written, measured, settings, Path(facts["folder"]))
        (temporary / "README.md").write_text(text, encoding="utf-8")
        if "adapter" in facts:
            write_tuned(temporary, settings, facts, target)
        files = {path.relative_to(temporary).as_posix(): sha256(path) for path in files_of(temporary)}
        manifest = {"kind": "export", "head": facts["kind"], "fingerprint": wanted, "round_trip_difference": gap}
        manifest |= {"format": settings.format, "dtype": settings.dtype, "head_facts": made.facts, "files": files}
        write_json(temporary / "manifest.json", manifest)
        sizes = {path.relative_to(temporary).as_posix(): path.stat().st_size for path in files_of(temporary)}
        if not settings.dry_run:
            swap(temporary, out)
    except OSError as error:
        raise ValueError(f"cannot write to {out}: {error.strerror or error}; choose another `out`") from error
    finally:
        shutil.rmtree(place if settings.dry_run else temporary, ignore_errors=True)
    print(
        f"export: {facts['kind']} for {made.spec.name} as {settings.format}, {settings.dtype}, read back with logits "
        f"within {gap:.2g} on {'the target' if target else 'random'} features",
        file=sys.stderr,
    )
    return sizes


def write_tuned(folder: Path, settings: ExportRun, facts: dict[str, Any], target: Target | None) -> None:
    """The target that a Medusa-2 head drafts for. `target` leaves in the precision of the folder."""
    if not brings_target(settings.format, facts):
        shutil.copyfile(Path(facts["folder"]) / ADAPTER, folder / ADAPTER)
        return
    assert target is not None, "loaded for this"
    target.model.to(DTYPES[settings.dtype]).save_pretrained(folder / TUNED)
    target.tokenizer.save_pretrained(folder / TUNED)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def write_layout(folder: Path, written: Layout, format: str) -> None:
    """Tensors first: a folder without its config.json or head.json is no head to any reader."""
    native = format == "native"
    # The metadata is what transformers and the engines look for in a file of PyTorch tensors.
    tensors = {name: x.contiguous() for name, x in written.tensors.items()}
    facts, weights = ("head.json", "head.safetensors") if native else ("config.json", WEIGHTS)
    save_file(tensors, folder / weights, {"format": "pt"})
    for name, content in written.files.items():
        (folder / name).write_bytes(content)
    write_json(folder / facts, written.config)
    # safetensors writes for the owner alone; an engine often runs as another user
    (folder / weights).chmod((folder / facts).stat().st_mode)


def check_map_is_there(folder: Path, facts: dict[str, Any]) -> None:
    """A map that is missing shows only in what is drafted: vLLM then takes the first D ids, silently."""
    if not (folder / "head.json").is_file():
        return  # a folder of another format: its reader looks
    path = folder / "head.safetensors"
    if not path.is_file():
        raise ExportError(f"{path}: the tensors of this head are missing; train it again")
    with safe_open(path, framework="pt") as opened:
        names = set(opened.keys())
    if missing := sorted({"d2t", "t2d"} - names):
        size, V = facts["config"].get("draft_vocab_size"), facts["target"]["vocab_size"]
        raise ExportError(f"{path}: {missing[0]} is missing, the map of {size or V} draft ids to the target's {V}")


def fingerprint(settings: ExportRun, facts: dict[str, Any], measured: dict[str, Any] | None) -> str:
    """Of everything the written files depend on."""
    elsewhere = ("name", "outputs", "out", "push", "revision", "private", "dry_run", "with_target")
    own = {name: value for name, value in dataclasses.asdict(settings).items() if name not in elsewhere}
    folder = Path(facts["folder"])
    tensors = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))
    parts = [VERSION, own, {**facts, "folder": None}, measured, [sha256(path) for path in tensors]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    run("export", ExportRun, main)
