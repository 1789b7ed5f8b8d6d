"""Start from a trained head of the same target: a run or head folder, one in an engine's format, a Hub repository.

The head's own vocabulary map comes with it: a map rebuilt from other counts would give each LM-head row another token.
"""

import dataclasses
import json
import re
from typing import Any

from torch import Tensor

from heads import HEADS
from heads.base import Head
from heads.hub import build_head, load
from heads.target import Target

# What a head computes with and no tensor shows.
SILENT = ("layer", "norm_before_residual", "norm_output", "from_anchor", "scale_input")


def load_warm(folder: str, settings: dict[str, Any], target: Target) -> Head:
    """The head of `folder`, under this run's `settings` ({"kind": ..., **fields}).

    Settings that change no tensor (training steps, the start) may differ. Raises ValueError, naming both sides, for
    another kind, target, tap, vocabulary or shape.
    """
    source = load(folder, target=target)
    before = f"train.warm_start={folder} holds"
    if source.config.kind != settings["kind"]:
        raise ValueError(f"{before} a head of kind {source.config.kind!r}, this run trains {settings['kind']!r}")
    size = settings.get("draft_vocab_size") or target.spec.vocab_size
    if source.draft_vocab_size != size:
        raise ValueError(
            f"{before} a head with a draft vocabulary of {source.draft_vocab_size} ids, this run asks for {size}: its "
            f"map is kept, so set head.draft_vocab_size={source.draft_vocab_size}"
        )
    wanted = HEADS[settings["kind"]][1](**{key: value for key, value in settings.items() if key != "kind"})
    for key in SILENT:
        theirs = getattr(source.config, key, None)
        if theirs != getattr(wanted, key, None):
            said = re.sub(r'"(\w+)":', r"\1:", json.dumps(theirs))  # as Hydra reads it
            raise ValueError(f"{before} a head that was trained with {key}={said}: set 'head.{key}={said}'")
    head = build_head(settings, target.spec, vocabulary_of(source))
    if head.taps != source.taps:
        raise ValueError(
            f"{before} a head that reads taps {list(source.taps)}, this run's reads {list(head.taps)}: set "
            f"head.taps={list(source.taps)}".replace(", ", ",")
        )
    _fill(head, source.state_dict(), f"{before} a {source.config.kind} head", source.config)
    return head


def vocabulary_of(head: Head) -> tuple[Tensor, Tensor] | None:
    """(d2t, t2d) of a reduced draft vocabulary, None for the whole one."""
    return (head.d2t, head.t2d) if head.draft_vocab_size < head.vocab_size else None


def _fill(head: Head, tensors: dict[str, Tensor], before: str, config: Any) -> None:
    wanted = head.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        have, want = (tuple(state[name].shape) if name in state else "no" for state in (tensors, wanted))
        if have != want:
            own, theirs = dataclasses.asdict(head.config), dataclasses.asdict(config)
            differ = [
                f"head.{key}={json.dumps(theirs[key])}" for key in own if own[key] != theirs[key] and key != "init"
            ]
            asked = " ".join(differ) or "what it was trained with"
            raise ValueError(f"{before} whose tensor {name} is {have}, this run's is {want}: set {asked}")
    head.load_state_dict(tensors, strict=True)
