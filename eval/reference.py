"""transformers' own decoding as an outside reference: `generate`, assisted generation, prompt lookup. Greedy, batch 1.

The same model object with the same weights and kernels runs under transformers' loops, so a difference in speed is the
loop's. Draft length k is fixed (constant schedule, no confidence threshold); lookup matches up to 3 tokens, as ours.

Assisted loops verify their first drafts in the pass that reads the prompt; that pass counts as a step. The seconds of
reading the prompt are those of a pass over it alone, timed just before, and of the draft model's first pass; the rest
is decoding. Only greedy decoding is compared: transformers' noise is not keyed by position, so samples do not coincide.
"""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache
from transformers.utils import logging

from eval.decoding import Decoding, Generation
from heads.target import Target

METHODS = ("hf-generate", "hf-assisted", "hf-lookup")


class Watch:
    """Times the passes of a model: (entries in the cache before, ids fed, seconds) of each."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.passes: list[tuple[int, int, float]] = []
        self.began: tuple[int, int, float] = (0, 0, 0.0)
        self.hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache")
        held = cache.get_seq_length() if cache is not None else 0
        self.began = held, kwargs["input_ids"].shape[1], self.clock()

    def _after(self, model: Any, args: Any, output: Any) -> None:
        held, fed, began = self.began
        self.passes.append((held, fed, self.clock() - began))


@torch.inference_mode()
def generate(
    target: Target,
    method: str,
    prompt: list[int],
    decoding: Decoding,
    assistant: Target | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Generation:
    """Decode one prompt with one of METHODS; `assistant` is the draft model of hf-assisted.

    Raises ValueError for an unknown method, sampling, an empty prompt or one that fills the context.
    """
    if method not in METHODS:
        raise ValueError(f"reference method {method!r}: choose from {', '.join(METHODS)}")
    if decoding.warpers.temperature > 0:
        raise ValueError(f"{method} is measured at temperature 0 only: its noise is not ours, so outputs would differ")
    room = target.spec.max_position_embeddings - len(prompt)
    if not prompt or room < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens: the context holds {target.spec.max_position_embeddings}")
    ids = torch.tensor([prompt], device=target.device)
    began = clock()
    target.model(input_ids=ids, cache=DynamicCache(config=target.model.config), use_cache=True, logits_to_keep=1)
    reading = clock() - began

    watch = Watch(target.model, clock)
    drafts = Watch(assistant.model, clock) if assistant is not None else None
    try:
        with _quiet():
            began = clock()
            output = target.model.generate(ids, **_options(target, method, decoding, assistant, room))
            total = clock() - began
    finally:
        watch.remove()
        if drafts is not None:
            drafts.remove()
    return _generation(output[0, len(prompt) :].tolist(), len(prompt), target, total, reading, watch, drafts)


def _options(target: Target, method: str, decoding: Decoding, assistant: Target | None, room: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "attention_mask": torch.ones(1, target.spec.max_position_embeddings - room, device=target.device).long(),
        "do_sample": False,
        "max_new_tokens": min(decoding.max_new_tokens, room),
        "repetition_penalty": decoding.warpers.repetition_penalty,
        "eos_token_id": sorted(target.eos_ids) or None,
        "pad_token_id": 0,  # one sequence is never padded
    }
    if method == "hf-lookup":
        options |= {"prompt_lookup_num_tokens": decoding.k, "max_matching_ngram_size": 3}
    if method == "hf-assisted":
        if assistant is None:
            raise ValueError("hf-assisted needs a draft model: give draft_model.id or draft_model.layers")
        config = copy.deepcopy(assistant.model.generation_config)
        config.num_assistant_tokens = decoding.k
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        assistant.model.generation_config = config
        options["assistant_model"] = assistant.model
    return options


def _generation(
    output: list[int], prompt: int, target: Target, total: float, reading: float, watch: Watch, drafts: Watch | None
) -> Generation:
    """What the passes say: pass s starts after `held` entries, so it kept held[s + 1] - held[s] - 1 of its drafts."""
    starts = [max(held, prompt - 1) for held, _, _ in watch.passes]
    fed = [held + n - start for (held, n, _), start in zip(watch.passes, starts, strict=True)]
    ends = [*starts[1:], prompt - 1 + len(output)]
    steps = [[n - 1, end - start - 1] for n, start, end in zip(fed, starts, ends, strict=True)]
    if steps and steps[0][0] == 0:
        steps = steps[1:]  # nothing was drafted with it: the first pass only reads the prompt
    first_draft = drafts.passes[0][2] if drafts is not None and drafts.passes else 0.0
    draft = sum(seconds for _, _, seconds in drafts.passes) - first_draft if drafts is not None else 0.0
    verify = max(sum(seconds for _, _, seconds in watch.passes) - reading, 0.0)
    prefill = reading + first_draft
    return Generation(
        output_ids=output,
        steps=steps,
        nodes=[drafted for drafted, _ in steps],
        prefill_s=prefill,
        draft_s=draft,
        verify_s=verify,
        other_s=max(total - prefill - draft - verify, 0.0),
        wall_s=total,
        stop="eos" if output and output[-1] in target.eos_ids else "length",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers warns about its own call of the assistant's `generate`, once per process."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
