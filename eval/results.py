"""Records -> result rows, predictions, comparison with plain. Derived anew each time, never stored as means."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eval import metrics, theory
from eval.checks import first_difference
from eval.metrics import Record
from eval.predict import joint_acceptance, slot_runs
from heads.target import Target

Row = dict[str, Any]
Prompts = Sequence[dict[str, Any]]


def result_rows(
    records: Sequence[Record],
    main_k: int,
    methods: Sequence[str] = (),
    main: tuple[str, str] = ("chain", "none"),
) -> list[tuple[Row, list[Record]]]:
    """Every result row with its records: route "all" for each (method, k, T, proposal, tree, adaptive, concurrency),
    single routes for the main k or tree, decoded one by one.

    main: tree and adaptive length of the main table; other rows of a method that has those are marked `sweep`.
    Order: concurrency, temperature, plain, then `methods` as given, proposal, tree, adaptive, k.
    """
    timed = [r for r in records if r["kind"] == "timed"]
    plain = [r for r in timed if r["method"] == "plain"]
    alpha = [r for r in records if r["kind"] == "alpha"]
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in timed:
        groups.setdefault(_group(r), []).append(r)
    place = {method: i for i, method in enumerate(["plain", *methods])}
    found = []
    drafting = {g[0] for g in groups if g[4:6] == main}
    order = sorted(groups, key=lambda g: (g[6], g[2], place.get(g[0], 99), *g[3:6], g[1]))
    for method, k, temperature, _, tree, adaptive, concurrency in order:
        held = groups[method, k, temperature, _, tree, adaptive, concurrency]
        sweep = (tree, adaptive) != main and method in drafting
        shown = concurrency == 1 and not sweep and (k in (0, main_k) or tree != "chain")
        routes = list(dict.fromkeys(r["route"] for r in held)) if shown else []
        for route in ["all", *routes]:
            own = [r for r in held if route in ("all", r["route"])]
            row = {**metrics.summarise(own, plain, route), "sweep": sweep}
            if route == "all" and tree == "chain" and concurrency == 1:
                same = [r for r in alpha if (r["method"], r["k"], r["temperature"]) == (method, k, temperature)]
                for name in ("alpha_sum_min", "alpha_greedy"):
                    row[name] = metrics.mean_by_position(same, name)
            found.append((row, own))
    return found


def _group(record: Record) -> tuple[Any, ...]:
    names = ("tree", "adaptive", "concurrency")
    later = (record.get(name, metrics.LATER[name]) for name in names)
    return record["method"], record["k"], record["temperature"], record["proposal"], *later


def break_even(records: Sequence[Record], method: str, tree: str) -> int:
    """The most sequences at once up to which a method's fixed draft was measured to gain; 0 where it loses alone."""
    own = [
        r
        for r in records
        if r["method"] == method and r.get("tree", "chain") == tree and r.get("adaptive", "none") != "load"
    ]
    plain = [r for r in records if r["method"] == "plain" and r["kind"] == "timed"]
    speeds = {}
    for c in sorted({r.get("concurrency", 1) for r in own}):
        at = [r for r in own if r.get("concurrency", 1) == c and r["kind"] == "timed"]
        speeds[c] = metrics.speedups(metrics.pair(at, plain))[0]
    found = metrics.break_even(list(speeds.items()))
    return max(speeds, default=0) if found is None else int(found)


def predict(
    target: Target,
    prompts: Prompts,
    groups: Sequence[tuple[Row, list[Record]]],
    records: Sequence[Record],
    heads: dict[str, Any],
) -> None:
    """Fill in predicted_acceptance_length of the heads' rows (route "all"), on the prompts each row was measured on.

    Temperature 0: 1 + sum of the joint acceptance of rounds replayed on plain's outputs. Above: 1 + sum of products of
    the recorded alpha (the overlap of p and q for sampled drafts, p of the greedy draft for deterministic ones).
    """
    plain = {_place(r): r["output_ids"] for r in records if r["method"] == "plain" and r["temperature"] == 0}
    ids = {_place(p): p["ids"] for p in prompts}
    for name, head in heads.items():
        own = [(row, held) for row, held in groups if row["method"] == name and _fixed(row)]
        greedy = [(row, held) for row, held in own if row["temperature"] == 0]
        longest = max((row["k"] for row, _ in greedy), default=0)
        places = {_place(r) for _, held in greedy for r in held if _place(r) in plain and _place(r) in ids}
        runs = {place: slot_runs(target, head, ids[place], plain[place], longest) for place in sorted(places)}
        for row, held in greedy:
            measured = [runs[_place(r)] for r in held if _place(r) in runs]
            row["predicted_acceptance_length"] = 1 + sum(joint_acceptance(measured, row["k"]))
        for row, _ in own:
            alphas = row["alpha_sum_min" if row["proposal"] == "sampled" else "alpha_greedy"]
            if row["temperature"] > 0 and alphas and None not in alphas:
                row["predicted_acceptance_length"] = theory.tau_from_conditionals(alphas)


def _fixed(row: Row) -> bool:
    """Chains of a fixed k, decoded one by one, over all routes: what replayed rounds predict."""
    return (row["route"], row["tree"], row["adaptive"], row["concurrency"]) == ("all", "chain", "none", 1)


def _place(record: Record) -> tuple[str, int]:
    """What names a prompt: the conversation and its turn."""
    return record["id"], record["turn"]


def equality(target: Target | None, prompts: Prompts, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Coupled rules (greedy, match, strict) against plain, token by token.

    A difference names the logit gap, where there is a target to compute it.
    """
    timed = [r for r in records if r["kind"] == "timed" and r["method"] == "plain"]
    plain = {metrics.text_key(r): r for r in timed if r.get("concurrency", 1) == 1}
    ids_of = {_place(p): p["ids"] for p in prompts}
    found = []
    for r in records:
        own = plain.get(metrics.text_key(r))
        if own is None or own is r or r["rule"] not in ("greedy", "match", "strict"):
            continue
        at = first_difference(r["output_ids"], own["output_ids"])
        detail = ""
        if at is not None and target is None:
            detail = f"token {at} differs"
        elif at is not None and target is not None and _place(r) in ids_of:
            ids = torch.tensor([[*ids_of[_place(r)], *own["output_ids"][:at]]], device=target.device)
            top = target.logits(target.forward(ids).last[0, -1]).topk(2).values
            detail = f"token {at} differs, the target's two best logits are {float(top[0] - top[1]):.2e} apart"
        what = f"{r['method']} k={r['k']} T={r['temperature']:g} on {r['id']}"
        if _group(r)[4:] != ("chain", "none", 1):
            what += " ({}, {}, {} at once)".format(*_group(r)[4:])
        found.append(
            {
                "what": what,
                "same": at is None,
                "detail": detail,
                "rule": r["rule"],
                "tokens": r["new_tokens"],
                "id": r["id"],
            }
        )
    return found


def training_logs(heads: dict[str, str]) -> dict[str, list[Row]]:
    """The training log beside each head folder (run folder or its `best/`), where there is one."""
    found = {}
    for name, folder in heads.items():
        for log in (Path(folder) / "log.jsonl", Path(folder).parent / "log.jsonl"):
            if log.is_file():
                lines = log.read_text(encoding="utf-8").splitlines()
                found[name] = [json.loads(line) for line in lines if line.endswith("}")]
                break
    return found
