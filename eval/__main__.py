"""Measure draft heads on held-out prompts: acceptance, speed, exactness, report.

    python -m eval dataset=outputs/data/default 'heads={eagle3: outputs/train/eagle3}' 'methods=[lookup,eagle3,random]'
    python -m eval mode=theory
    python -m eval backend=vllm ...                     the same prompts through an engine: eval/serving.py

Writes outputs/eval/<name>/: records.jsonl (an interrupted run goes on from it), rows.json, cost.json, report.html, and
manifest.json last. The last line of standard output is one JSON object {"rows": [...]}.
"""

import copy
import dataclasses
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch

from conf.entry import run
from data.rows import DataRow, load, manifest
from eval import checks, exactness, report, theory
from eval.chosen import prompts
from eval.drift import caveat, measure_drift
from eval.measured import Measured, texts
from eval.plan import EvalSettings, check, main_row, measured, method_names, plan
from eval.records import RecordFile, claim
from eval.results import equality, predict, result_rows, training_logs
from eval.run import Bench, measure
from eval.serving import serve
from eval.table import print_results
from eval.warpers import Warpers
from heads import hub
from heads.download import locate
from heads.hub import origin, write_json
from heads.spec import TargetSpec
from heads.target import Target
from heads.tuned import load_adapted, merge


def main(settings: EvalSettings) -> None:
    if settings.mode == "theory":
        found = theory.rows()
        print(theory.table(found))
        print(json.dumps({"rows": found}))
        return
    if settings.mode != "run":
        raise ValueError(f"mode={settings.mode!r}: choose run or theory")
    if settings.backend != "drafthead":
        serve(settings)
        return
    evaluate(settings)


def evaluate(settings: EvalSettings) -> None:
    """Everything that can be wrong with the input is found before the first token is decoded."""
    method_names(settings)
    check(settings, {})
    for temperature in settings.temperatures:
        penalty = settings.repetition_penalty
        Warpers(temperature, settings.top_k, settings.top_p, settings.min_p, repetition_penalty=penalty).check()
    wanted = {name: settings.heads[name] for name in settings.methods if name in settings.heads}
    folders = {name: locate(source) for name, source in wanted.items()}
    made = {name: origin(folder) for name, folder in folders.items()}
    if settings.threads:
        torch.set_num_threads(settings.threads)
    tuned = next(filter(None, map(hub.adapted, folders.values())), None)
    target, lora = (Target.load(settings.target), None) if tuned is None else load_adapted(settings.target, tuned)
    base = target.spec if tuned is None else TargetSpec.from_dict(tuned["adapter"]["base"])
    heads = {name: hub.load(folder, target=target) for name, folder in folders.items()}
    check(settings, {name: head.max_draft for name, head in heads.items()})
    rows = load(settings.dataset, settings.split, base)
    drift = None
    if lora is not None:
        found = measure_drift(target, lora, rows[: settings.prompts or None])
        drift = {"base": f"{base.name}@{base.revision}", **found}
        merge(target, lora, settings.target.packed)
    heads = {name: head.attach(target) for name, head in heads.items()}
    source = {"data": manifest(settings.dataset).get("fingerprint"), "heads": made}
    compare(settings, target, heads, rows, source, drift)


def compare(
    settings: EvalSettings,
    target: Target,
    heads: dict[str, Any],
    data: list[DataRow],
    provenance: dict[str, Any],
    drift: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Decode, derive, report. heads: method -> head attached to `target`; data: rows of the split.

    `drift` of a target that was tuned with its heads, from the one it was tuned from (eval/drift.py).
    """
    chosen = prompts(data, settings, target.spec.max_position_embeddings)
    folder = Path(settings.outputs) / "eval" / settings.name
    name = f"{target.spec.name}@{target.spec.revision} {target.spec.dtype}"
    source = {"target": name, **provenance}
    # records of other threads or another device would make speeds of no one machine
    place = {"threads": torch.get_num_threads(), "device": str(target.device)}
    claim(folder, measured(settings, {**source, **place}))
    # packing for speed takes a head's weights out of reach of its training form, which the prediction needs
    known = Measured(settings, target, heads, texts(data, chosen))
    bench = Bench(settings, target, copy.deepcopy(heads), chosen, known)
    file = RecordFile(folder / "records.jsonl")
    whole = measure(bench, plan(settings, len(chosen)), file)
    if not whole:
        print(f"time budget of {settings.minutes:g} minutes used up: the plan was cut short", file=sys.stderr)

    groups = result_rows(file.rows, settings.k, settings.methods, main_row(settings))
    rows = [row for row, _ in groups]
    predict(target, chosen, groups, file.rows, heads)
    cost = known.costs(bench)
    trees = known.trees(cost)
    same = equality(target, chosen, file.rows)
    found = checks.run(groups, same, exactness.check(exactness.rules_of(file.rows)))
    write_json(folder / "rows.json", rows)
    write_json(folder / "cost.json", cost)
    write_json(folder / "trees.json", trees)
    meta = describe(settings, target, file.rows, found, same)
    if drift is not None:
        meta |= {"drift": drift, "caveats": [caveat(drift)]}
    page = report.write(folder, rows, cost, training_logs(settings.heads), meta, trees)
    manifest = {"kind": "eval", "whole": whole, "settings": dataclasses.asdict(settings), "checks": found, **source}
    manifest |= {"drift": drift} if drift is not None else {}
    write_json(folder / "manifest.json", manifest)
    print_results(checks.first_line(found), rows, settings.k, page, meta.get("caveats", []))
    return rows


def describe(
    settings: EvalSettings,
    target: Target,
    records: list[dict[str, Any]],
    found: list[dict[str, Any]],
    same: list[dict[str, Any]],
) -> dict[str, Any]:
    """What must be stated beside every figure."""
    greedy = [e for e in same if e["rule"] == "greedy"]
    return {
        "target": target.spec.name,
        "revision": target.spec.revision,
        "dtype": target.spec.dtype,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "batch": ", ".join(str(c) for c in sorted({r.get("concurrency", 1) for r in records})) or 1,
        "prompts": len({r["id"] for r in records}),
        "tokens": sum(r["new_tokens"] for r in records),
        "rule": ", ".join(dict.fromkeys(_rule(r) for r in records)),
        "proposal": ", ".join(dict.fromkeys(r["proposal"] for r in records)),
        "temperature": ", ".join(f"{t:g}" for t in settings.temperatures),
        "k": settings.k,
        "tree": ", ".join(dict.fromkeys(r.get("tree", "chain") for r in records if r["method"] != "plain")),
        "adaptive_length": ", ".join(dict.fromkeys(r.get("adaptive", "none") for r in records)),
        "min_confidence": settings.min_confidence,
        "date": datetime.date.today().isoformat(),
        "main_k": settings.k,
        "warpers": {name: getattr(settings, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
        "max_new_tokens": settings.max_new_tokens,
        "split": settings.split,
        "greedy_equality": {
            "prompts": len({e["id"] for e in greedy}),
            "tokens": sum(e["tokens"] for e in greedy),
            "equal": all(e["same"] for e in greedy),
        },
        "checks": found,
    }


def _rule(record: dict[str, Any]) -> str:
    lossy = " (LOSSY: not the target's law)" if record.get("lossy") else ""
    return f"{record['rule']} at T = {record['temperature']:g}{lossy}"


if __name__ == "__main__":
    run("eval", EvalSettings, main)
