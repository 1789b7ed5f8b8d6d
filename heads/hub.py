"""A trained head on disk or on the Hub: our own folder, and every folder that heads/formats.py reads.

Ours is `head.safetensors` + `head.json` (written last), never pickle. `head.json` holds the kind, the settings, the
target's facts and the provenance; a reader refuses another target. Where the target was tuned with the head, its
adapter lies beside it (heads/tuned.py).

    load("outputs/train/eagle3")                       our own run or head folder
    load("user/repo@main", target=target)              a Hub repository in any of the formats
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads import HEADS, formats
from heads.download import locate, repository_of
from heads.lora import Lora
from heads.parts import Parts
from heads.read_block import MASK_FILE
from heads.spec import TargetSpec
from heads.tuned import ADAPTER, tuned_spec


def build_head(settings: dict[str, Any], spec: TargetSpec, vocab: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
    """A fresh head from `{"kind": ..., **fields}`. Raises ValueError naming a wrong kind or field."""
    kind = settings.get("kind")
    if kind not in HEADS:
        raise ValueError(f"head.kind={kind!r} is not a head: choose one of {sorted(HEADS)}")
    head_class, config_class = HEADS[kind]
    known = [f.name for f in dataclasses.fields(config_class)]
    if extra := sorted(set(settings) - set(known)):
        raise ValueError(f"head.{extra[0]} is not a setting of {kind}: it has {', '.join(known)}")
    return head_class(config_class(**settings), spec, vocab)


def write_text(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """JSON as `write_text` writes it."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """safetensors under a temporary name, then rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary)
    temporary.replace(path)


def save_head(folder: Path, head: Any, spec: TargetSpec, provenance: dict[str, Any], lora: Lora | None = None) -> None:
    """Write a head folder; head.json, written last, makes it whole.

    With `lora`, the adapters of a base target `spec`, the head is one of the tuned target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "head.json").unlink(missing_ok=True)
    save_tensors(folder / "head.safetensors", head.state_dict())
    facts: dict[str, Any] = {"kind": head.config.kind, "config": dataclasses.asdict(head.config)}
    if lora is not None:
        save_tensors(folder / ADAPTER, lora.tensors())
        base, digest = dataclasses.asdict(spec), lora.digest()
        facts["adapter"] = {"r": lora.r, "alpha": lora.alpha, "digest": digest, "base": base}
        spec = tuned_spec(spec, digest)
    facts |= {"target": dataclasses.asdict(spec), "provenance": provenance}
    write_json(folder / "head.json", facts)


def read_facts(source: Path | str, spec: TargetSpec | None = None) -> dict[str, Any]:
    """Kind, settings, target and provenance of a head: head.json of a head folder (or of a run folder's `best/`).

    A folder of another format has none: they are read off its config.json for the target `spec`, and `provenance` says
    what was imported. Raises ValueError when there is no head, or when head.json is damaged.
    """
    folder = locate(source)
    for candidate in (folder, folder / "best"):
        path = candidate / "head.json"
        if path.is_file():
            facts = formats.read_json(path)
            if missing := [key for key in ("kind", "config", "target", "provenance") if key not in facts]:
                raise ValueError(f"{path}: {missing[0]!r} is missing, the file is damaged; copy it again")
            return {**facts, "folder": str(candidate)}
    if formats.is_head_folder(folder):
        if (made := formats.own_facts(folder)) is not None:
            return {**made, "folder": str(folder)}
        return _imported_facts(folder, formats.read(folder, spec))
    raise ValueError(
        f"{source}: no trained head here (head.json is missing, and config.json with tensors as well); train one with "
        "`python -m train`"
    )


def load(source: Path | str, spec: TargetSpec | None = None, target: Any = None) -> Any:
    """A head from a folder or Hub repository (`user/repo@revision`), ours or made elsewhere; float32, in eval mode.

    With `target` (a loaded Target) its embeddings and LM head are compared with those that lie in the folder: a head
    trained on others would draft nonsense. What is taken for granted is printed. Raises ValueError naming the file, key
    or tensor when anything is missing, unknown, or belongs to another target.
    """
    folder = locate(source)
    spec = target.spec if spec is None and target is not None else spec
    if not is_imported(folder):
        return load_head(folder, spec)
    if made := formats.own_facts(folder):
        check_target(source, TargetSpec.from_dict(made["target"]), spec)
    parts = formats.read(folder, spec)
    check_borrowed(folder, parts, target)
    take_mask(folder, parts, target)
    for notice in parts.notices:
        print(f"{source}: {notice}", file=sys.stderr)
    return build(folder, parts)


def build(folder: Path, parts: Parts) -> Any:
    """A fresh head with the tensors of `parts`, strictly."""
    head = build_head(parts.settings, parts.spec, (parts.tensors["d2t"], parts.tensors["t2d"]))
    fill(head, parts.tensors, folder, "config.json")
    if "lm_head.weight" in parts.borrowed:
        head.attach(LMHead(parts.borrowed["lm_head.weight"].float()))
    return head.eval()


def load_head(folder: Path | str, spec: TargetSpec | None = None) -> Any:
    """Strictly load a head folder of our own (its vocabulary map included).

    Raises ValueError when the folder holds no head, the head belongs to another target than `spec`, or tensors differ.
    """
    facts = read_facts(Path(folder))
    path = Path(facts["folder"]) / "head.json"
    try:
        own = TargetSpec.from_dict(facts["target"])
        settings = {"kind": facts["kind"], **facts["config"]}
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: the target's facts are damaged ({error}); copy it again") from error
    check_target(folder, own, spec)
    tensors = formats.load_tensors(path.with_name("head.safetensors"))
    vocab = (tensors["d2t"], tensors["t2d"]) if {"d2t", "t2d"} <= tensors.keys() else None
    head = build_head(settings, own, vocab)
    fill(head, tensors, path.with_name("head.safetensors"), "head.json")
    return head.eval()


def fill(head: Any, tensors: dict[str, Tensor], path: Path, facts: str) -> None:
    """Load a state dict strictly. Raises ValueError naming tensors that are missing, unknown or of another shape."""
    try:
        head.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: tensors do not fit {facts}: {' '.join(str(error).split())}") from error


def check_target(source: Path | str, own: TargetSpec, spec: TargetSpec | None) -> None:
    """Raises ValueError when a head made for `own` cannot draft for `spec`."""
    if spec is not None and (differing := own.same_target(spec)):
        raise ValueError(
            f"{source}: this head was trained for target {own.name!r}, not {spec.name!r} (they differ in "
            f"{', '.join(differing)}): evaluate it with its own target or train a head for this one"
        )


def check_borrowed(folder: Path, parts: Parts, target: Any) -> None:
    """Tensors of the target's own that lie in the folder must be the target's, else the head was trained on others."""
    for name, value in parts.borrowed.items():
        if target is None:
            parts.notices.append(f"{name} was not compared with the target's, which is not loaded here")
            continue
        theirs = target.lm_head()[0] if name == "lm_head.weight" else target.embed(torch.arange(len(value)))
        # Stored in half precision at worst; trained or random ones differ by far more than its rounding.
        if value.shape != theirs.shape or not torch.allclose(value.float(), theirs.float(), rtol=2e-2, atol=1e-3):
            raise ValueError(
                f"{folder}: {name} is not the target's: this head was trained with one of its own, which is not read "
                "here (or the folder is damaged, or belongs to another target)"
            )


def take_mask(folder: Path, parts: Parts, target: Any) -> None:
    """The MASK of a block head that is a row of the target's embeddings. Raises ValueError without a target."""
    if parts.mask_id is None:
        return
    if target is None:
        raise ValueError(
            f"{folder}: its MASK is the target's embedding of id {parts.mask_id} (there is no {MASK_FILE}): load it "
            "with its target"
        )
    parts.tensors["mask_embedding"] = target.embed(torch.tensor([parts.mask_id]))[0].float().clone()


@dataclasses.dataclass
class LMHead:
    """A target's LM head, weight [V, H] and bias: all that a Medusa head needs of its target."""

    weight: Tensor
    bias: Tensor | None = None

    def lm_head(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        bias = self.bias
        return (self.weight, bias) if rows is None else (self.weight[rows], None if bias is None else bias[rows])


def is_imported(folder: Path) -> bool:
    """Whether a folder holds a head in another format than head.json + head.safetensors."""
    return formats.is_head_folder(folder) and not (folder / "head.json").is_file()


def origin(source: Path | str) -> dict[str, Any]:
    """What a head was made from: of ours what training wrote, of others where they come from and what they hold."""
    folder = locate(source)
    if not is_imported(folder):
        return read_facts(folder)["provenance"]
    made = formats.own_facts(folder)
    return made["provenance"] if made is not None else _imported(folder)


def adapted(source: Path | str) -> dict[str, Any] | None:
    """`read_facts` of a head whose target was tuned with it, None for any other head."""
    folder = locate(source)
    if is_imported(folder) and formats.own_facts(folder) is None:
        return None
    facts = read_facts(folder)
    return facts if "adapter" in facts else None


def _imported(folder: Path) -> dict[str, Any]:
    if (cached := repository_of(folder)) is not None:
        repo, commit = cached
        return {"imported": repo, "commit": commit}
    return {"imported": folder.name, "tensors": formats.fingerprint(folder)}


def _imported_facts(folder: Path, parts: Parts) -> dict[str, Any]:
    """What head.json would say of a folder made elsewhere."""
    config = {key: value for key, value in parts.settings.items() if key != "kind"}
    facts = {"kind": parts.settings["kind"], "config": config, "target": dataclasses.asdict(parts.spec)}
    return {**facts, "provenance": _imported(folder), "folder": str(folder)}
