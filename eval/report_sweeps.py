"""The report's tables of trees, adaptive draft lengths and batches, each empty where nothing of it was measured."""

from typing import Any

from eval.cells import Cell, Table, length, speed
from eval.metrics import break_even
from eval.table import DASH, Row, finite, formula_speedup, number, overall, percent, temperatures


def trees(rows: list[Row], cost: dict[str, Any]) -> list[Table]:
    """Every tree beside the chains of the same head and proposal, at each temperature, on the prompts of each row."""
    found = []
    for temperature in temperatures(rows):
        here = [row for row in overall(rows, temperature) if row.get("adaptive", "none") == "none"]
        heads = {row["method"] for row in here if row.get("tree", "chain") != "chain"}
        body = []
        for row in sorted((r for r in here if r["method"] in heads), key=lambda r: (r["method"], r["proposal"])):
            cells = [Cell(row["method"], f"{row['proposal']} drafts"), Cell(row.get("tree", "chain"))]
            cells += [Cell(str(row["k"])), Cell(number(row.get("nodes_per_pass"), 1)), length(row), speed(row)]
            cells += [Cell(number(formula_speedup(row, cost))), Cell(str(row.get("prompts") or DASH))]
            body.append(cells)
        if body:
            head = ["Head", "tree", "depth", "nodes per pass", "tokens per pass", "decode speed", "formula", "prompts"]
            found.append(Table(f"Trees, T = {temperature:g}", head, body))
    return found


def best_trees(best: dict[str, Any]) -> list[Table]:
    """Per head the static tree that its rank accuracies and the measured costs promise most speed of."""
    body = []
    for name, measured in best.items():
        tree = measured["best"]
        accuracies = measured["rank_accuracies"]
        first = ", ".join(number(a) for a in accuracies[0][:5]) if accuracies else DASH
        paths = str(tree["paths"]).replace(" ", "") if tree["paths"] else "none: plain decoding is faster"
        body.append(
            [
                Cell(name),
                Cell(str(tree["nodes"])),
                Cell(str(tree["depth"])),
                Cell(number(tree["acceptance_length"])),
                Cell(number(tree["speedup"]) + "×"),
                Cell(first),
                Cell("", paths),
            ]
        )
    head = [
        "Head",
        "nodes",
        "depth",
        "predicted tokens per pass",
        "predicted speed",
        "first token, ranks 1 to 5",
        "paths",
    ]
    return [Table("Best static tree for the measured acceptance and costs", head, body)] if body else []


def adaptive(rows: list[Row]) -> list[Table]:
    """Adaptive draft lengths beside the fastest fixed k of the same head on the same number of prompts."""
    found = []
    for temperature in temperatures(rows):
        here = [row for row in overall(rows, temperature) if row.get("tree", "chain") == "chain"]
        body = []
        for method in dict.fromkeys(row["method"] for row in here if row.get("adaptive", "none") != "none"):
            own = [row for row in here if row["method"] == method and row["proposal"] == "greedy"]
            moving = [row for row in own if row.get("adaptive", "none") != "none"]
            fixed = [row for row in own if row not in moving and finite(row.get("speedup_decode")) is not None]
            few = min(row["prompts"] for row in moving)
            fixed = [row for row in fixed if row["prompts"] == few] or fixed  # a sweep is on the same prompts
            best = max(fixed, key=lambda row: row["speedup_decode"], default=None)
            for row in [*([best] if best else []), *moving]:
                what = f"best fixed k = {row['k']}" if row is best else f"by {row['adaptive']}, from k = {row['k']}"
                cells = [Cell(method, what), Cell(number(row.get("nodes_per_pass"), 1)), length(row), speed(row)]
                body.append([*cells, Cell(percent(row.get("acceptance_rate"))), Cell(str(row["prompts"]))])
        if body:
            head = ["Draft length", "drafted per pass", "tokens per pass", "decode speed", "drafts kept", "prompts"]
            found.append(Table(f"Adaptive draft length, T = {temperature:g}", head, body))
    return found


def batches(rows: list[Row]) -> list[Table]:
    """Throughput and what one request sees at each concurrency; where speculation stops to pay."""
    found = []
    for temperature in temperatures(rows):
        here = [row for row in rows if row["route"] == "all" and row["temperature"] == temperature]
        levels = sorted({row.get("concurrency", 1) for row in here})
        if levels[-1:] in ([], [1]):
            continue
        shown = {_what(row) for row in here if row.get("concurrency", 1) > 1}
        body = []
        for what in dict.fromkeys(_what(row) for row in here):
            if what not in shown:
                continue
            own = {row.get("concurrency", 1): row for row in here if _what(row) == what}
            cells = [Cell(own[max(own)]["label"], f"k = {own[max(own)]['k']}")]
            for c in levels:
                row = own.get(c)
                total = number(row.get("tokens_per_second"), 1) if row else DASH
                each = number(row.get("request_tokens_per_second"), 1) if row else DASH
                cells += [Cell(total, f"{each} a request"), speed(row) if row and what[0] != "plain" else Cell(DASH)]
            known = [(c, finite(row.get("speedup_decode"))) for c, row in own.items()]
            at = break_even(known)
            end = DASH if what[0] == "plain" else f"above {max(own)}" if at is None else number(at, 1)
            body.append([*cells, Cell(end)])
        head = ["Method", *["tokens/s", "over plain"] * len(levels), "break-even concurrency"]
        groups = [("", 1), *((f"{c} at once", 2) for c in levels), ("", 1)]
        found.append(Table(f"Sequences decoded at once, T = {temperature:g}", head, body, groups))
    return found


def _what(row: Row) -> tuple[Any, ...]:
    return row["method"], row["k"], row["proposal"], row.get("tree", "chain"), row.get("adaptive", "none")
