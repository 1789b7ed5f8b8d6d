"""Which head goes into which format: a new head is one entry, each format a writer or the reason why there is none."""

import dataclasses
from collections.abc import Callable
from typing import Any

from scripts.layouts import ExportError, Layout, Made, cast
from scripts.write_eagle3 import engine_layout, speculators_layout
from scripts.write_medusa import medusa_layout

Writer = Callable[[Any, Made], Layout]

_MEDUSA = "Medusa is served by vLLM up to 0.32 alone"

LAYOUTS: dict[str, dict[str, Writer | str]] = {
    "eagle3": {"vllm": engine_layout, "sglang": engine_layout, "speculators": speculators_layout},
    "medusa": {
        "vllm": medusa_layout,
        "sglang": f"{_MEDUSA}; SGLang never had it: use format=vllm, or train an EAGLE-3 head",
        "speculators": f"{_MEDUSA}, in its own format: use format=vllm",
    },
}


def layout(head: Any, made: Made) -> Layout:
    """The files of `head` in `made.format`. Raises ExportError with the reason where the format cannot hold it."""
    if made.format == "native":
        return Layout({**made.facts, "config": dataclasses.asdict(head.config)}, cast(head.state_dict(), made.dtype))
    writer = check_format(made.facts["kind"], made.format)
    return writer(head, made)


def check_format(kind: str, format: str) -> Writer:
    """The writer of a format other than native. Raises ExportError with the reason where there is none."""
    found = LAYOUTS[kind][format]
    if isinstance(found, str):
        raise ExportError(f"format={format}: {found}")
    return found
