"""The target of a Medusa-2 head: the base target with the adapter that lies beside the head.

    best/head.json            target: the tuned one (revision = the base's + the adapter's digest), adapter: what it is
    best/head.safetensors
    best/adapter.safetensors  layers.<i>.<projection>.a, .b

So by the revision alone the head refuses the base target, and a head of the base target refuses this one.
"""

import dataclasses
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from heads.lora import Lora
from heads.spec import TargetSpec
from heads.target import Target, TargetSettings

ADAPTER = "adapter.safetensors"


def tuned_spec(base: TargetSpec, digest: str) -> TargetSpec:
    """The facts of the base target with an adapter of this digest merged."""
    return dataclasses.replace(base, name=f"{base.name}+adapter", revision=f"{base.revision}+lora-{digest}")


def load_adapted(settings: TargetSettings, facts: dict[str, Any]) -> tuple[Target, Lora]:
    """The tuned target: the base with the adapter of a head folder put in; `facts` as heads.hub.read_facts gives them.

    Raises ValueError when `settings` name another base, or the adapter is not the one the head was trained with.
    """
    made, path = facts["adapter"], Path(facts["folder"]) / ADAPTER
    target = Target.load(dataclasses.replace(settings, packed=False))
    base = TargetSpec.from_dict(made["base"])
    if differing := base.same_target(target.spec):
        raise ValueError(
            f"{path}: this adapter was trained on target {base.name!r}, not {target.spec.name!r} (they differ in "
            f"{', '.join(differing)}): set target.id to the base it was trained on"
        )
    if not path.is_file():
        raise ValueError(f"{path}: the adapter of this head is missing: use its run folder, or an export format=native")
    lora = Lora(target, made["r"], made["alpha"])
    lora.load(load_file(path))
    if lora.digest() != made["digest"]:
        raise ValueError(f"{path}: not the adapter this head was trained with ({made['digest']}); train it again")
    target.spec = tuned_spec(target.spec, made["digest"])
    return target, lora


def merge(target: Target, lora: Lora, packed: bool) -> Target:
    """The tuned target with its adapters inside its weights, for good."""
    lora.merge()
    if packed:
        target.pack()
    return target
