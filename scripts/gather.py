"""What an export must know beside the head: its target, loaded where it is needed, and what may be published of it."""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from heads.hub import LMHead
from heads.spec import TargetSpec
from heads.target import Target, TargetSettings
from heads.tuned import load_adapted, merge
from scripts.card import base_model, base_of, draft_tokens
from scripts.layouts import ExportError, Made


class ExportFor(Protocol):
    """The settings of the export that decide about its target."""

    format: str
    dtype: str
    with_target: bool
    target_id: str | None
    base_model: str | None


def gather(settings: ExportFor, facts: dict[str, Any], target: Target | None) -> Made:
    """What the writers need beside the head."""
    made = Made(
        facts=published(facts),
        spec=TargetSpec.from_dict(facts["target"]),
        format=settings.format,
        dtype=settings.dtype,
        base=settings.base_model or base_model(base_of(facts)["name"]),
        draft_tokens=draft_tokens(facts),
    )
    if target is not None:
        if borrows(facts):
            weight, bias = target.lm_head()
            made.lm_head = LMHead(weight.detach(), None if bias is None else bias.detach())
        made.embeddings = target.model.get_input_embeddings().weight.detach()
    return made


def borrows(facts: dict[str, Any]) -> bool:
    """Whether the head drafts with the target's LM head."""
    config = facts["config"]
    return (
        facts["kind"] in ("eagle1", "mtp") or bool(config.get("shared_lm_head")) or config.get("own_lm_head") is False
    )


def its_target(settings: ExportFor, facts: dict[str, Any]) -> Target | None:
    """The very target the head was trained on, its adapter merged; None where it is neither needed nor wanted.

    Raises ExportError when it is another one by now, or needed and not known.
    """
    needed = borrows(facts) or settings.format == "speculators" or brings_target(settings.format, facts)
    made = {"id": settings.target_id} if settings.target_id else facts["provenance"].get("target")
    if not needed and (not settings.with_target or not isinstance(made, dict)):
        return None
    if not isinstance(made, dict):
        raise ExportError(f"{facts['folder']}: head.json does not say how its target is loaded: give it, target_id=...")
    wanted = plain(TargetSettings(**made))
    target = merge(*load_adapted(wanted, facts), packed=False) if "adapter" in facts else Target.load(wanted)
    if differing := TargetSpec.from_dict(facts["target"]).same_target(target.spec):
        raise ExportError(
            f"target {made.get('id')!r} is no longer what the head was trained on: {', '.join(differing)} differ"
        )
    return target


def brings_target(format: str, facts: dict[str, Any]) -> bool:
    """Whether the folder holds the target as well: engines know no adapter, our own reader takes it from its file."""
    return "adapter" in facts and format != "native"


def plain(settings: TargetSettings) -> TargetSettings:
    """The target for comparisons: float32, and each weight where the model has it."""
    return dataclasses.replace(settings, packed=False, dtype="float32")


def published(facts: dict[str, Any]) -> dict[str, Any]:
    """head.json as it leaves this machine: a folder's place becomes its name."""
    provenance = dict(facts["provenance"])
    if is_local(made := provenance.get("target")):
        assert made is not None
        provenance["target"] = {**made, "id": Path(made["id"]).name}
    return {**{key: value for key, value in facts.items() if key != "folder"}, "provenance": provenance}


def is_local(made: Any) -> bool:
    """Whether provenance names its target by a place on this machine."""
    return isinstance(made, dict) and str(made.get("id", "")).startswith((".", "/", "~"))
