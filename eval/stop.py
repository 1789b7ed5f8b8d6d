"""Where an answer ends: the first of a set of end-of-turn ids, the token budget, a stop string. Pure functions."""

from collections.abc import Collection, Sequence


def cut(tokens: Sequence[int], eos_ids: Collection[int], budget: int) -> tuple[list[int], str | None]:
    """The tokens of one round that are really emitted, and why the answer ends there ("eos", "length" or None).

    The end-of-turn token is kept, nothing after it is; an end inside the budget wins over the budget.
    Example: [7, 8, 2, 9], {2}, 16 -> [7, 8, 2], "eos".  [7, 8, 9, 5, 2], {2}, 4 -> [7, 8, 9, 5], "length".
    """
    kept = list(tokens[: max(budget, 0)])
    for i, token in enumerate(kept):
        if token in eos_ids:
            return kept[: i + 1], "eos"
    return kept, "length" if len(kept) >= budget else None


def cut_at_string(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, int] | None:
    """Text before the earliest stop string, and how many pieces (tokens) are kept; None when none occurs.

    A piece partly before the stop is kept, so ids, log-probabilities and pieces are cut at one place.
    Example: ["ab", "c!", "de", "f"], ["!d"] -> "abc", 2.
    """
    text = "".join(pieces)
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    if not ends:
        return None
    end, start, kept = min(ends), 0, 0
    for piece in pieces:
        if start >= end:
            break
        kept += 1
        start += len(piece)
    return text[:end], kept
