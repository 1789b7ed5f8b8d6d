"""The same prompts through a serving engine: step records and rows as the evaluation of our own loop writes them.

    python -m eval backend=vllm name=served dataset=outputs/data/mine 'heads={eagle3: outputs/export/eagle3}' \\
        'methods=[eagle3]' 'temperatures=[0.0]' prompts=60

Heads are exported folders, which `python -m eval` without `backend` reads as well, so that both can measure the same
files; `python -m scripts.compare_serving` sets the two side by side. A vLLM is started for plain decoding and for each
head in turn (eval/vllm_server.py), or the one at `serving.url` is asked. Prompts go as token ids, one after the other.

A record holds what the engine tells: rounds, token ids, seconds of prefill and of decoding (vLLM). How decoding divides
into drafting and verifying no engine says: those fields are left out.
"""

import contextlib
import dataclasses
import datetime
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from data.rows import load, manifest
from eval import checks, metrics, report
from eval.chosen import prompts
from eval.engines import ACCEPTED, DRAFTED, DRAFTS, Answer, Engine, rounds
from eval.metrics import PREFIX, Record
from eval.plan import EvalSettings, measured
from eval.records import RecordFile, claim, unit
from eval.results import equality, result_rows, training_logs
from eval.table import print_results
from eval.vllm_server import command, environment, speculation, started
from heads import hub
from heads.download import locate
from heads.hub import origin, write_json
from heads.spec import TargetSpec
from heads.target import Target, model_place

BACKENDS = ("vllm", "sglang")
# Settings that only our own loop obeys, and what they must be here.
OURS: dict[str, Any] = {
    "temperatures": [0.0], "rule": "auto", "tree": "chain", "adaptive": "none", "concurrency": [1],
    "min_confidence": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


def serve(settings: EvalSettings) -> list[dict[str, Any]]:
    """Measure every method through the engine; the rows. Whatever is wrong with the input is found before it starts."""
    check(settings)
    folders = {name: locate(settings.heads[name]) for name in settings.methods}
    drafting = {name: speculation(folder, settings.k) for name, folder in folders.items() if not settings.serving.url}
    target = Target.load(settings.target, weights=False)
    for name, folder in folders.items():
        facts = hub.read_facts(folder, target.spec)
        hub.check_target(settings.heads[name], TargetSpec.from_dict(facts["target"]), target.spec)
    chosen = prompts(load(settings.dataset, settings.split, target.spec), settings, target.spec.max_position_embeddings)
    folder = Path(settings.outputs) / "eval" / settings.name
    source = {
        "target": f"{target.spec.name}@{target.spec.revision} {target.spec.dtype}",
        "data": manifest(settings.dataset).get("fingerprint"),
        "heads": {name: origin(place) for name, place in folders.items()},
        "backend": settings.backend,
    }
    claim(folder, measured(settings, {**source, "threads": settings.threads}))
    file = RecordFile(folder / "records.jsonl")
    counted = True
    for method in ([] if settings.serving.url or not settings.serving.plain else ["plain"]) + settings.methods:
        missing = [p for p in chosen if unit(identity(settings, p, method)) not in file.done]
        if missing:
            with engine(settings, target, chosen, method, drafting.get(method), folder) as running:
                counted &= decode(settings, target, running, missing, method, file)
    return finish(settings, target, chosen, file, source, counted)


def check(settings: EvalSettings) -> None:
    """Raises ValueError naming the setting that an engine cannot do."""
    if settings.backend not in BACKENDS:
        raise ValueError(f"backend={settings.backend!r}: choose from drafthead, {', '.join(BACKENDS)}")
    if settings.backend == "sglang" and not settings.serving.url:
        raise ValueError("backend=sglang asks a running server: give its address, serving.url=http://127.0.0.1:30000")
    for name, wanted in OURS.items():
        if getattr(settings, name) != wanted:
            raise ValueError(
                f"{name}={getattr(settings, name)} is not measured through an engine: give {name}={wanted} with "
                f"backend={settings.backend}"
            )
    if other := [method for method in settings.methods if method not in settings.heads]:
        raise ValueError(
            f"methods has {other[0]!r}: backend={settings.backend} serves heads, give methods=[...] of those in heads"
        )
    if settings.k < 1 or settings.max_new_tokens < 2:
        raise ValueError(f"k={settings.k}, max_new_tokens={settings.max_new_tokens}: give at least 1 and 2")
    if settings.serving.url and len(settings.methods) != 1:
        raise ValueError(f"methods={settings.methods}: name the one head that the server at serving.url drafts with")


def identity(settings: EvalSettings, prompt: dict[str, Any], method: str) -> Record:
    """The part of a record that says what was decoded, as eval/run.py writes it."""
    return {
        "kind": "timed",
        **{name: prompt[name] for name in ("id", "route", "turn")},
        "method": method,
        "proposal": "greedy",
        "k": settings.k if method != "plain" else 0,
        **metrics.LATER,
        "temperature": 0.0,
        "seed": settings.seed,
    }


@contextlib.contextmanager
def engine(
    settings: EvalSettings,
    target: Target,
    chosen: Sequence[dict[str, Any]],
    method: str,
    drafting: dict[str, Any] | None,
    folder: Path,
) -> Iterator[Engine]:
    """The server of one method: the running one, or a vLLM that ends with the block."""
    serving = settings.serving
    if serving.url:
        with Engine(settings.backend, serving.url, serving.timeout_s) as running:
            yield running
        return
    # vLLM drafts nothing where the drafts just verified and those to come would not both fit: leave it room
    longest = max(len(prompt["ids"]) for prompt in chosen) + settings.max_new_tokens + 2 * settings.k + 1
    context = min(longest, target.spec.max_position_embeddings)
    place = model_place(settings.target)
    parts = command(serving, place, settings.target.dtype, context, settings.seed, drafting)
    environ = environment(serving, settings.threads, offline=Path(place).is_dir())
    print(f"eval: starting vLLM for {method}, its log is {folder / f'server-{method}.log'}", file=sys.stderr)
    with started(serving, parts, environ, folder / f"server-{method}.log") as url:
        with Engine(settings.backend, url, serving.timeout_s) as running:
            yield running


def decode(
    settings: EvalSettings,
    target: Target,
    running: Engine,
    missing: Sequence[dict[str, Any]],
    method: str,
    file: RecordFile,
) -> bool:
    """A record for each prompt; whether vLLM's counters over all of them say the same as its answers."""
    drafts, made = method != "plain", []
    eos_ids = sorted(target.eos_ids)
    running.decode(missing[0]["ids"][-16:], 8, eos_ids, drafts)  # warm-up
    before = running.settled() if drafts and running.kind == "vllm" else None
    for prompt in tqdm(missing, desc=f"{settings.backend}, {method}", unit="prompt", dynamic_ncols=True):
        answer = running.decode(prompt["ids"], settings.max_new_tokens, eos_ids, drafts)
        made.append(answer)
        file.append(record(settings, running, prompt, method, answer))
    return before is None or agrees(before, running.settled(), made)


def agrees(before: dict[str, list[int]], after: dict[str, list[int]], made: Sequence[Answer]) -> bool:
    """The counters' growth over all requests against the sum of the answers' own rounds."""
    steps = [step for answer in made for step in answer.steps]
    known = before[ACCEPTED] + [0] * (len(after[ACCEPTED]) - len(before[ACCEPTED]))
    accepted = [n - m for n, m in zip(after[ACCEPTED], known, strict=True)]
    return (
        after[DRAFTS][0] - before[DRAFTS][0] == len(steps)
        and after[DRAFTED][0] - before[DRAFTED][0] == sum(K for K, _ in steps)
        and accepted == [sum(a > i for _, a in steps) for i in range(len(accepted))]
    )


def record(settings: EvalSettings, running: Engine, prompt: dict[str, Any], method: str, answer: Answer) -> Record:
    """As eval/run.py writes it, less what the engine does not tell; its own counts stand beside ours as `engine_*`."""
    emitted = len(answer.output_ids) - 1
    steps = rounds(answer, settings.max_new_tokens) if method != "plain" else [[0, 0]] * max(emitted, 0)
    found: Record = {
        **identity(settings, prompt, method),
        "engine": running.version,
        "rule": "greedy",
        "prompt_tokens": len(prompt["ids"]),
        "new_tokens": len(answer.output_ids),
        "loop_share": metrics.loop_share(answer.output_ids),
        "output_ids": answer.output_ids,
        "steps": steps,
        "stop": answer.stop,
        "wall_s": answer.wall_s,
    }
    if not answer.ordered:
        found["steps_unordered"] = True
    if method != "plain":
        own = metrics.counters([{"steps": answer.steps}])
        found |= {f"engine_{name.removeprefix(PREFIX)}": value for name, value in own.items()}
    seconds = {"prefill_s": answer.prefill_s, "decode_s": answer.decode_s}
    return found | {name: value for name, value in seconds.items() if value is not None}


def finish(
    settings: EvalSettings,
    target: Target,
    chosen: Sequence[dict[str, Any]],
    file: RecordFile,
    source: dict[str, Any],
    counted: bool,
) -> list[dict[str, Any]]:
    """Rows, self-checks, report and manifest."""
    folder = file.path.parent
    groups = result_rows(file.rows, settings.k, settings.methods)
    versions = ", ".join(dict.fromkeys(r["engine"] for r in file.rows))
    rows = [row | {"engine": versions} for row, _ in groups]
    same = equality(None, chosen, file.rows)
    # no rule of ours ran here, and without plain nothing was compared
    unchecked = ["verification rules exact by enumeration", *([] if same else ["output equal to plain"])]
    found = [check for check in checks.run(groups, same, {}) if check["name"] not in unchecked]
    found.append({"name": "engine's counters equal its answers", "ok": counted, "detail": ""})
    write_json(folder / "rows.json", rows)
    meta = {
        "target": target.spec.name,
        "revision": target.spec.revision,
        "dtype": target.spec.dtype,
        "engine": versions,
        "batch": 1,
        "prompts": len({r["id"] for r in file.rows}),
        "tokens": sum(r["new_tokens"] for r in file.rows),
        "rule": "greedy at T = 0",
        "proposal": "greedy",
        "temperature": "0",
        "k": settings.k,
        "main_k": settings.k,
        "date": datetime.date.today().isoformat(),
        "max_new_tokens": settings.max_new_tokens,
        "split": settings.split,
        "checks": found,
    }
    page = report.write(folder, rows, {}, training_logs(settings.heads), meta)
    held = {"kind": "eval", "whole": True, "settings": dataclasses.asdict(settings), "checks": found}
    write_json(folder / "manifest.json", {**held, "engine": versions, **source})
    print_results(checks.first_line(found), rows, settings.k, page)
    return rows
