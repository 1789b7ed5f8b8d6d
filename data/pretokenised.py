"""Rows that were tokenised and masked elsewhere, checked before they are believed.

{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}     1: token 7 is supervised
{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}  the same; labels stand on their own token, not one before
{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], ...}  padding goes
{"prompt_ids": [5, 6], "output_ids": [7]}            one answer as a server logged it: output_ids are supervised
{"ids": [5, 6, 7], "spans": [[2, 3]]}                a row of a data folder (data/rows.py): folders can be put together
"""

from typing import Any

from data.messages import Refused

ID_FIELDS = ("input_ids", "ids", "output_ids")
MASK_FIELDS = ("loss_mask", "labels", "assistant_masks", "completion_mask")
IGNORED = -100


def ids_and_mask(value: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """ids [T] and which of them are supervised. Raises Refused for a mask missing, shifted, or of another length."""
    name = next(n for n in ID_FIELDS if value.get(n) is not None)
    ids = _integers(value, name)
    if name == "output_ids":
        if value.get("prompt_ids") is None:
            raise Refused("malformed_ids", "field 'output_ids' comes without 'prompt_ids'")
        prompt = _integers(value, "prompt_ids")
        return prompt + ids, [False] * len(prompt) + [True] * len(ids)
    mask_name = next((n for n in MASK_FIELDS if value.get(n) is not None), None)
    if mask_name is None and value.get("spans") is not None:
        return ids, _spans(value["spans"], len(ids))
    if mask_name is None:
        raise Refused("no_loss_mask", f"field {name!r} comes without any of {', '.join(MASK_FIELDS)}, spans")
    numbers = _integers(value, mask_name, len(ids))
    if mask_name == "labels":
        wrong = next((t for t, label in enumerate(numbers) if label not in (IGNORED, ids[t])), None)
        if wrong is not None:
            raise Refused(
                "labels_not_aligned", f"label {numbers[wrong]} stands at token {ids[wrong]} (position {wrong}): unshift"
            )
        mask = [label != IGNORED for label in numbers]
    elif any(number not in (0, 1) for number in numbers):
        raise Refused("malformed_loss_mask", f"field {mask_name!r} holds other numbers than 0 and 1")
    else:
        mask = [number == 1 for number in numbers]
    if value.get("attention_mask") is not None:
        real = _integers(value, "attention_mask", len(ids))
        ids, mask = [i for i, r in zip(ids, real, strict=True) if r], [m for m, r in zip(mask, real, strict=True) if r]
    return ids, mask


def _spans(spans: Any, length: int) -> list[bool]:
    """Runs [start, end) of supervised positions -> the mask of them [T]."""
    mask = [False] * length
    for span in spans if isinstance(spans, list) else [spans]:
        whole = isinstance(span, list) and len(span) == 2 and all(isinstance(i, int) for i in span)
        if not whole or not 0 <= span[0] < span[1] <= length:
            raise Refused("malformed_spans", f"field 'spans' has {span} for {length} tokens: give [start, end)")
        mask[span[0] : span[1]] = [True] * (span[1] - span[0])
    return mask


def _integers(value: dict[str, Any], name: str, length: int | None = None) -> list[int]:
    found = value[name]
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
        raise Refused("malformed_ids", f"field {name!r} is not a list of whole numbers")
    if length is not None and len(found) != length:
        raise Refused("malformed_ids", f"field {name!r} has {len(found)} entries for {length} tokens")
    return [int(i) for i in found]
