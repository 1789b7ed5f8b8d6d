"""Decodes prompts with each of several heads in vLLM and writes vLLM's own counters; runs in vLLM's Python.

    .venv-vllm/bin/python scripts/vllm_counts.py jobs.json counts.json

jobs.json: {"prompts": [[ids]], "k": 3, "new_tokens": 48, "heads": {name: {"method", "model", "target"}}}, where method
"serve" is a folder that names its target itself, as `vllm serve FOLDER` takes it. counts.json: {"version": of vLLM,
"heads": {name: {"drafts", "accepted" [k], "tokens" [[ids]]} or {"error": text}}}.

It imports nothing of ours: the two environments never meet.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# before vllm is imported: it reads them then
os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"})
os.environ.update({"VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1"})
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def counts(jobs: dict[str, Any], head: dict[str, Any]) -> dict[str, Any]:
    """An engine of its own for each head: its counters start at 0."""
    alone = head["method"] == "serve"
    speculative = {"method": head["method"], "model": head["model"], "num_speculative_tokens": jobs["k"]}
    engine = vllm.LLM(
        model=head["model"] if alone else head["target"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        max_model_len=128,
        speculative_config=None if alone else speculative,
    )
    try:
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=jobs["new_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in jobs["prompts"]]
        found = engine.generate(prompts, sampling, use_tqdm=False)
        metrics = {metric.name: metric for metric in engine.get_metrics()}
        accepted = [int(n) for n in metrics[ACCEPTED].values]
        tokens = [list(one.outputs[0].token_ids) for one in found]
        return {"drafts": int(metrics[DRAFTS].value), "accepted": accepted, "tokens": tokens}
    finally:
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for name, head in jobs["heads"].items():
        try:
            found[name] = counts(jobs, head)
        except Exception as error:  # a head that vLLM refuses is a result too
            found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(name, found[name].get("error") or (found[name]["drafts"], found[name]["accepted"]), flush=True)
    Path(sys.argv[2]).write_text(json.dumps({"version": vllm.__version__, "heads": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
