"""The evaluation report: one self-contained HTML page, every figure of it derived from result rows.

The first line is the verdict of the self-checks; a report that fails one says so there, before any figure.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval import plots, report_sweeps
from eval.cells import Cell, Table, length, slower, speed
from eval.table import (
    DASH,
    LOSES,
    Row,
    alone,
    at_main_k,
    by_route,
    finite,
    formula_speedup,
    interval,
    labelled,
    main_k,
    number,
    overall,
    percent,
    prediction_error,
    signed,
    speedup,
    temperatures,
    times,
)
from heads.hub import write_text

# What was measured: meta key -> label. Shown even when missing, because a figure without them cannot be compared.
FACTS = {
    "target": "Target",
    "revision": "Revision",
    "dtype": "Number format",
    "device": "Device",
    "threads": "Threads",
    "batch": "Batch size",
    "prompts": "Prompts",
    "tokens": "Tokens generated",
    "rule": "Verification rule",
    "proposal": "Draft proposal",
    "temperature": "Temperature",
    "k": "Drafted tokens per pass (k)",
    "tree": "Draft tree",
    "adaptive_length": "Adaptive draft length",
    "date": "Date",
}
# Summary table: label, shared name, explanation, format, key of the interval.
Format = Callable[[Any], str]
SUMMARY: list[tuple[str, str, str, Format, str]] = [
    ("Tokens per target pass", "acceptance_length", "own token counted, plain = 1", number, "acceptance_length_ci"),
    ("Mean over prompts", "acceptance_length_macro", "the same, each prompt weighing the same", number, ""),
    ("Predicted tokens per pass", "predicted_acceptance_length", "without generating", number, ""),
    ("Prediction against measurement", "prediction_error", "relative difference", signed, ""),
    ("Accepted share of drafts", "acceptance_rate", "falls with k for the same head", percent, ""),
    ("Decode speed", "speedup_decode", "tokens per second over plain", speedup, "speedup_decode_ci"),
    ("Speed with prefill", "speedup_e2e", "", speedup, ""),
    ("Tokens per second", "tokens_per_second", "", lambda value: number(value, 1), ""),
    ("Efficiency", "speedup_efficiency", "decode speed / tokens per pass", number, ""),
    ("Time spent drafting", "draft_overhead", "share of the total", percent, ""),
    ("Repeated text", "loop_share", "loops flatter every drafter", percent, ""),
]
POSITIONS = {
    "position_acceptance_joint": "accepted up to here (joint)",
    "position_acceptance_conditional": "accepted once reached (conditional)",
    "alpha_sum_min": "overlap of p and q (alpha_sum_min)",
    "alpha_greedy": "p of the top draft (alpha_greedy)",
}


def summary(rows: list[Row], temperature: float, k: int) -> Table:
    """The main table: measures down, methods across, over all prompts at the main k."""
    found = at_main_k(overall(rows, temperature), k)
    body = [
        [Cell("k")] + [Cell(str(row["k"])) for row in found],
        [Cell("Rule", "")] + [Cell(str(row.get("rule") or DASH)) for row in found],
        [Cell("Proposal", "")] + [Cell(str(row.get("proposal") or DASH)) for row in found],
    ]
    for label, name, note, shown, bounds in SUMMARY:
        cells = [Cell(label, f"{name}{': ' if note else ''}{note}")]
        for row in found:
            value = prediction_error(row) if name == "prediction_error" else row.get(name)
            measured = finite(value)
            loses = name.startswith("speedup_") and shown is speedup and measured is not None and measured < 1
            cells.append(Cell(shown(value), interval(row.get(bounds)), loses and row["method"] != "plain"))
        body.append(cells)
    return Table(f"T = {temperature:g}, k = {k}, all prompts", ["Measure"] + [row["label"] for row in found], body)


def by_position(rows: list[Row], temperature: float, k: int) -> Table:
    """Joint and conditional acceptance and the two alphas by draft position, at the main k."""
    found = [row for row in at_main_k(overall(rows, temperature), k) if row["method"] != "plain"]
    deepest = max((len(row.get(name) or []) for row in found for name in POSITIONS), default=0)
    body = []
    for row in found:
        cells = [Cell(row["label"])]
        for name in POSITIONS:
            values = list(row.get(name) or [])
            cells += [Cell(number(value)) for value in values + [None] * (deepest - len(values))]
        body.append(cells)
    head = ["Method"] + [str(i) for i in range(1, deepest + 1)] * len(POSITIONS)
    groups = [("", 1)] + [(label, deepest) for label in POSITIONS.values()] if deepest else []
    return Table(f"By draft position, T = {temperature:g}, k = {k}", head, body, groups)


def per_route(rows: list[Row], temperature: float, k: int) -> Table:
    """Tokens per pass and decode speed of every method on every route, at the main k."""
    found = by_route(rows, temperature, k)
    labels = list(dict.fromkeys(label for methods in found.values() for label in methods if label != "plain"))
    body = []
    for route, methods in found.items():
        cells = [Cell(route, f"{number(next(iter(methods.values())).get('prompts'), 0)} prompts")]
        for label in labels:
            row = methods.get(label)
            cells += [length(row), speed(row)] if row else [Cell(DASH), Cell(DASH)]
        body.append(cells)
    head = ["Route"] + ["tokens per pass", "decode speed"] * len(labels)
    return Table(f"By route, T = {temperature:g}, k = {k}", head, body, [("", 1)] + [(label, 2) for label in labels])


def by_k(rows: list[Row], temperature: float, cost: dict[str, Any]) -> Table:
    """Every draft length that was run, measured against the formula."""
    body = []
    for row in overall(rows, temperature):
        told = Cell(speedup(formula_speedup(row, cost)))
        cells = [Cell(row["label"]), Cell(str(row["k"])), length(row), speed(row), told]
        cells += [Cell(number(row.get("tokens_per_second"), 1)), Cell(percent(row.get("draft_overhead")))]
        body.append(cells)
    head = ["Method", "k", "tokens per pass", "decode speed", "formula", "tokens/s", "drafting"]
    return Table(f"By draft length, T = {temperature:g}, all prompts", head, body)


def best(rows: list[Row], temperature: float) -> str:
    """One sentence: which method decodes fastest at this temperature.

    Only rows measured on the most prompts compete: a sweep over k on two of them must not win by its prompts.
    """
    found = [row for row in overall(rows, temperature) if row["method"] != "plain"]
    timed = [row for row in found if finite(row.get("speedup_decode")) is not None]
    most = max((row.get("prompts") or 0 for row in timed), default=0)
    timed = [row for row in timed if (row.get("prompts") or 0) == most]
    if not timed:
        return f"T = {temperature:g}: no method's speed was measured."
    top = max(timed, key=lambda row: row["speedup_decode"])
    bounds = interval(top.get("speedup_decode_ci"))
    figures = f"{times(top['speedup_decode'])} times plain decoding"
    figures += f" (interval {bounds})" if bounds else ""
    figures += f", {number(top.get('acceptance_length'))} tokens per target pass"
    where = f"{top['label']} at k = {top['k']}"
    if top["speedup_decode"] < 1:
        return f"T = {temperature:g}: no method beats plain decoding. Closest: {where}, {figures}."
    text = f"T = {temperature:g}: fastest is {where}, {figures}."
    if bounds and top["speedup_decode_ci"][0] <= 1:
        text += " The interval reaches down to 1, so this is not shown to be faster."
    longest = max(timed, key=lambda row: finite(row.get("acceptance_length")) or 0)
    if longest["label"] != top["label"]:
        text += f" {longest['label']} accepts most, {number(longest.get('acceptance_length'))} tokens per pass at k = "
        text += f"{longest['k']}, at {times(longest['speedup_decode'])} times plain."
    return text


def losses(rows: list[Row]) -> list[tuple[str, str]]:
    """Where speculation is slower than plain: (method and T, its losing k) and (method, T and k, its losing routes)."""
    by_method: dict[str, list[str]] = {}
    by_method_k: dict[str, list[str]] = {}
    for row in filter(slower, filter(alone, rows)):
        where, figure = f"{row['label']} at T = {row['temperature']:g}", times(row["speedup_decode"])
        if row["route"] == "all":
            bounds = interval(row.get("speedup_decode_ci"))
            shown = f"k = {row['k']} ({figure}{', ' + bounds if bounds else ''})"
            by_method.setdefault(f"{where}, all prompts", []).append(shown)
        else:
            by_method_k.setdefault(f"{where}, k = {row['k']}, routes", []).append(f"{row['route']} ({figure})")
    return [(where, ", ".join(figures)) for where, figures in (by_method | by_method_k).items()]


def notes(rows: list[Row], k: int) -> list[str]:
    """What a reader must know before believing the figures: loops in the text, predictions that are off."""
    found = [
        f"{row['label']}, T = {row['temperature']:g}: rule {row['rule']} does not keep the target's law."
        for row in rows
        if row.get("lossy") and row["route"] == "all"
    ]
    for temperature in temperatures(rows):
        for row in at_main_k(overall(rows, temperature), k):
            where = f"{row['label']}, T = {temperature:g}"
            error = prediction_error(row)
            if error is not None and abs(error) > 0.05:
                found.append(f"{where}: the predicted acceptance length is {signed(error)} off the measured one.")
            if row["method"] == "plain" and (finite(row.get("loop_share")) or 0) >= 0.1:
                share = percent(row["loop_share"])
                found.append(f"{where}: {share} of the text repeats itself, which flatters every drafter.")
    return found


def _plain_fact(value: object) -> str:
    """A meta value in words; nested ones become `key: value` lists."""
    if value is None or (isinstance(value, float) and finite(value) is None):
        return DASH
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain_fact(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_plain_fact, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _facts(meta: dict[str, Any]) -> list[tuple[str, str]]:
    known = [(label, _plain_fact(meta.get(key))) for key, label in FACTS.items()]
    known.append(("Bonus token", "counted: each target pass emits one token of its own"))
    shown_elsewhere = ("checks", "caveats", "bonus_token_counted", "main_k")
    rest = [key for key in meta if key not in FACTS and key not in shown_elsewhere]
    return known + [(key.replace("_", " ").capitalize(), _plain_fact(meta[key])) for key in rest]


def render(
    rows: list[Row],
    cost: dict[str, Any],
    training: dict[str, list[Row]],
    meta: dict[str, Any],
    trees: dict[str, Any] | None = None,
) -> str:
    """The page as text; see `write`."""
    rows = labelled(rows)
    k = main_k(rows, meta.get("main_k", meta.get("k")))
    found = temperatures(rows)
    look = plots.styles([row["label"] for row in rows] + list(training) + list(cost.get("draft_step_s") or {}))
    figures = [plots.position(rows, t, k, look) for t in found]
    figures += [plots.speedup_by_k(rows, t, cost, look) for t in found]
    figures += [plots.routes(rows, t, k, look) for t in found]
    figures += [plots.cost_curve(cost, look), *plots.training(training, look)]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        title=f"drafthead: {meta.get('target') or 'evaluation'}",
        checks=meta.get("checks") or [],
        failed=[check for check in meta.get("checks") or [] if not check["ok"]],
        best=[best(rows, t) for t in found],
        losses=losses(rows),
        timed=any(finite(row.get("speedup_decode")) is not None for row in rows if row["method"] != "plain"),
        notes=[*meta.get("caveats", []), *notes(rows, k)],
        facts=_facts(meta),
        summaries=[table for t in found for table in (summary(rows, t, k), by_position(rows, t, k))],
        routes=[per_route(rows, t, k) for t in found],
        sweeps=[by_k(rows, t, cost) for t in found],
        trees=[*report_sweeps.trees(rows, cost), *report_sweeps.best_trees(trees or {})],
        adaptive=report_sweeps.adaptive(rows),
        batches=report_sweeps.batches(rows),
        plots=figures,
        loses=LOSES,
    )


def write(
    folder: Path,
    rows: list[Row],
    cost: dict[str, Any],
    training: dict[str, list[Row]],
    meta: dict[str, Any],
    trees: dict[str, Any] | None = None,
) -> Path:
    """Write `folder/report.html` atomically and return its path.

    rows: result rows of every method, k, temperature and route. cost: `target_pass_s` {tokens: seconds}, `draft_step_s`
    {method: seconds per drafted token} and optional `draft_fixed_s` {method: seconds per round}. training: log rows per
    head. meta: what was measured (FACTS), `checks` [{name, ok, detail}], `caveats` (sentences to read first) and
    anything else worth showing, by name. trees: head -> {"rank_accuracies", "best"} (eval/measured.py).
    """
    page = render(rows, cost, training, meta, trees)
    path = folder / "report.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    except OSError as error:
        raise ValueError(
            f"cannot write the report {path} ({error.strerror}): choose a run folder that can be written"
        ) from error
    return path
