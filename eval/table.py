"""The main table in the terminal, and what every view of the result rows shares: names, main k, formula, formats.

A *result row* is one dict of shared names (`acceptance_length`, `speedup_decode`, ...) for one method, k, temperature
and route; `route == "all"` is the figure over every prompt. Lengths are tokens, shares are 0..1, times are seconds.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval import theory

Row = dict[str, Any]
DASH = "–"  # a value that was not measured; never 0, never NaN
LOSES = "↓"  # beside every speedup below 1, so that colour is not the only sign


def finite(value: object) -> float | None:
    """The value as a float, or None for what is not a finite number (None, NaN, infinity, text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def number(value: object, digits: int = 2) -> str:
    """`1.955 -> "1.96"`, `None -> "–"`."""
    known = finite(value)
    return DASH if known is None else f"{known:.{digits}f}"


def percent(value: object, digits: int = 0) -> str:
    """A share as a percentage: `0.123 -> "12%"`."""
    known = finite(value)
    return DASH if known is None else f"{100 * known:.{digits}f}%"


def interval(bounds: object) -> str:
    """`[1.8, 2.1] -> "1.80 to 2.10"`; empty when there is no interval to show."""
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2 or None in map(finite, bounds):
        return ""
    return f"{number(bounds[0])} to {number(bounds[1])}"


def times(value: object) -> str:
    """A speedup as a number; a loss is never rounded up to 1: `0.998 -> "0.99"`."""
    known = finite(value)
    return number(min(known, 0.99) if known is not None and 0.99 < known < 1 else known)


def speedup(value: object) -> str:
    """A speedup over plain decoding, marked when it is a loss: `0.9 -> "0.90× ↓"`."""
    known = finite(value)
    return DASH if known is None else f"{times(known)}×" + (f" {LOSES}" if known < 1 else "")


def signed(value: object) -> str:
    """A relative difference: `-0.031 -> "-3.1%"`."""
    known = finite(value)
    return DASH if known is None else f"{100 * known:+.1f}%"


def prediction_error(row: Row) -> float | None:
    """(predicted - measured) / measured acceptance length, or None when either is missing."""
    predicted, measured = finite(row.get("predicted_acceptance_length")), finite(row.get("acceptance_length"))
    return (predicted - measured) / measured if predicted is not None and measured else None


def labelled(rows: list[Row]) -> list[Row]:
    """Copies of the rows with a `label`: the method, plus proposal and rule where the method alone is ambiguous, the
    tree and the adaptive length where there is one, and LOSSY where the rule does not keep the target's law."""
    proposals, rules = defaultdict(set), defaultdict(set)
    for row in rows:
        proposals[row["method"], row["temperature"]].add(row.get("proposal"))
        rules[row["method"], row.get("proposal"), row["temperature"]].add(row.get("rule"))
    several_proposals = {key[0] for key, found in proposals.items() if len(found) > 1}
    several_rules = {key[:2] for key, found in rules.items() if len(found) > 1}
    copies = []
    for row in rows:
        label = str(row["method"])
        if row["method"] in several_proposals:
            label += f", {row.get('proposal') or 'no'} draft"
        if (row["method"], row.get("proposal")) in several_rules:
            label += f", {row.get('rule') or 'no'} rule"
        if row.get("tree", "chain") != "chain":
            label += f", {row['tree']} tree"
        if row.get("adaptive", "none") != "none":
            label += f", length by {row['adaptive']}"
        copies.append({**row, "label": label + (", LOSSY" if row.get("lossy") else "")})
    return copies


def temperatures(rows: list[Row]) -> list[float]:
    """Every temperature in the rows, lowest first."""
    return sorted({row["temperature"] for row in rows})


def overall(rows: list[Row], temperature: float) -> list[Row]:
    """The rows over all prompts at one temperature, decoded one by one."""
    return [row for row in rows if alone(row) and row["route"] == "all" and row["temperature"] == temperature]


def alone(row: Row) -> bool:
    """Decoded at batch 1; rows of a concurrency sweep have tables of their own."""
    return bool(row.get("concurrency", 1) == 1)


def main_k(rows: list[Row], wanted: object = None) -> int:
    """The draft length of the main table: `wanted` where it was run, else 4 (the usual headline), else the longest."""
    run = {row["k"] for row in rows if row["method"] != "plain" and alone(row)}
    for k in (wanted, 4):
        if k in run and isinstance(k, int):
            return k
    return max(run, default=0)


def at_main_k(rows: list[Row], k: int) -> list[Row]:
    """One row per label, in order: the one at k, or at the nearest k that was run (plain decoding has only k = 0).

    Sweeps over trees and adaptive lengths, on fewer prompts, have tables of their own.
    """
    best: dict[str, Row] = {}
    for row in (row for row in rows if not row.get("sweep")):
        held = best.get(row["label"])
        if held is None or abs(row["k"] - k) < abs(held["k"] - k):
            best[row["label"]] = row
    return list(best.values())


def by_route(rows: list[Row], temperature: float, k: int) -> dict[str, dict[str, Row]]:
    """`{route: {label: row}}` at the main k, routes in the order of the rows."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["route"] != "all" and row["temperature"] == temperature:
            found[row["route"]].append(row)
    return {route: {row["label"]: row for row in at_main_k(own, k)} for route, own in found.items()}


def draft_seconds(cost: dict[str, Any], method: str, k: int) -> float | None:
    """Seconds to draft k tokens: `draft_fixed_s[method]` (once a round, optional) + k * `draft_step_s[method]`."""
    step = finite((cost.get("draft_step_s") or {}).get(method))
    fixed = finite((cost.get("draft_fixed_s") or {}).get(method)) or 0.0
    return None if step is None else fixed + k * step


def target_pass(cost: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The measured cost curve: numbers of tokens, ascending, and the seconds of one target pass over as many."""
    known = {float(n): finite(s) for n, s in (cost.get("target_pass_s") or {}).items()}
    points = sorted((n, s) for n, s in known.items() if s)
    return [n for n, _ in points], [s for _, s in points]


def formula_speedup(row: Row, cost: dict[str, Any]) -> float | None:
    """tau * t(1) / (t(N + 1) + draft seconds): tau / (k c + 1) with the measured curve t in place of a flat one.

    N are the tokens a pass verifies: k on a chain, the nodes of a tree. tau is the row's measured acceptance length.
    None when tau, t(1), t(N + 1) or the draft cost was not measured.
    """
    tokens, seconds = target_pass(cost)
    drafting = draft_seconds(cost, row["method"], row["k"])
    tau = finite(row.get("acceptance_length"))
    verified = row["k"] if row.get("tree", "chain") == "chain" else finite(row.get("nodes_per_pass")) or 0.0
    if tau is None or drafting is None or not tokens or tokens[0] != 1 or verified + 1 > tokens[-1]:
        return None
    one_token = seconds[0]
    return theory.speedup(tau, 1, drafting / one_token, float(np.interp(verified + 1, tokens, seconds)) / one_token)


def _with_interval(text: str, bounds: object) -> str:
    found = interval(bounds).replace(" to ", "–")  # nine columns must fit 80 characters
    return f"{text}\n{found}" if found else text


def print_results(verdict: str, rows: list[Row], k: int, page: Path, caveats: Sequence[str] = ()) -> None:
    """What a run says on standard output: verdict of the self-checks first, its rows as JSON in the last line."""
    print(verdict)
    print_table(rows, Console(), k)
    for text in caveats:
        print(text)
    print(f"report: {page}")
    print(json.dumps({"rows": rows}))


def print_table(rows: list[Row], console: Console, k: int | None = None) -> None:
    """Print the main table, one block per temperature, at the main k; intervals stand under their figure.

    Cells are `Text`, because a route or method name such as `[red]` must not be read as markup.
    """
    rows = labelled(rows)
    k = main_k(rows, k)
    for temperature in temperatures(rows):
        title = f"T = {temperature:g}, k = {k} ({LOSES} slower than plain)"
        table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("method", overflow="fold")
        for name in (
            "k",
            "tokens per pass",
            "drafts kept",
            "predicted",
            "tok/s",
            "decode speed",
            "with prefill",
            "loops",
        ):
            table.add_column(name, justify="right")
        for row in at_main_k(overall(rows, temperature), k):
            decode = finite(row.get("speedup_decode"))
            cells = [
                row["label"],
                str(row["k"]),
                _with_interval(number(row.get("acceptance_length")), row.get("acceptance_length_ci")),
                percent(row.get("acceptance_rate")),
                number(row.get("predicted_acceptance_length")),
                number(row.get("tokens_per_second"), 1),
                _with_interval(speedup(decode), row.get("speedup_decode_ci")),
                speedup(row.get("speedup_e2e")),
                percent(row.get("loop_share")),
            ]
            loses = row["method"] != "plain" and decode is not None and decode < 1
            table.add_row(*map(Text, cells), style="red" if loses else None)
        console.print(table)
