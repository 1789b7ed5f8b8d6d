"""The target answers in this process, batch by batch."""

from collections.abc import Callable
from typing import Any

from data.asking import Prompt, RegenerateSettings, next_prompt
from data.generate import generate, uniforms
from data.messages import Message
from data.template import ChatFormat
from heads.target import Target


def batches(prompts: list[Prompt], settings: RegenerateSettings) -> list[list[Prompt]]:
    """Conversations of one temperature, as many turns and about as long prompts together.

    Ties go by name, never by file order: the plan depends on what is asked alone.
    """
    found: dict[float, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda p: (-len(p.steps), -len(p.first_ids), p.name)):
        found.setdefault(settings.temperature_of(prompt.sample), []).append(prompt)
    size = settings.batch_size
    return [group[i : i + size] for group in found.values() for i in range(0, len(group), size)]


def answer(
    target: Target,
    chat: ChatFormat,
    settings: RegenerateSettings,
    batch: list[Prompt],
    on_step: Callable[[int], None] = lambda tokens: None,
) -> list[list[dict[str, Any]]]:
    """Turns of each conversation of a batch, each prompt holding the target's own earlier answers."""
    limit, temperature = target.spec.max_position_embeddings, settings.temperature_of(batch[0].sample)
    history: list[list[Message]] = [[] for _ in batch]
    turns: list[list[dict[str, Any]]] = [[] for _ in batch]
    for turn in range(max(len(p.steps) for p in batch)):
        asked, ids = [], []
        for i, prompt in enumerate(batch):
            if turn < len(prompt.steps) and len(turns[i]) == turn:
                history[i] += prompt.steps[turn]
                known = prompt.first_ids if turn == 0 else next_prompt(chat, history[i], prompt)
                if known is not None and len(known) < limit:
                    asked.append(i)
                    ids.append(known)
        if not asked:
            break
        draws = [uniforms(settings.seed, batch[i].name, turn, settings.max_new_tokens) for i in asked]
        room = min(settings.max_new_tokens, limit - max(map(len, ids)))
        outputs = generate(target, ids, draws, temperature, settings.top_p, room, on_step)
        for i, prompt_ids, output in zip(asked, ids, outputs, strict=True):
            stopped = output[-1] in target.eos_ids
            turns[i].append({"prompt_ids": prompt_ids, "output_ids": output, "finish": "stop" if stopped else "length"})
            text = chat.tokenizer.decode(output[:-1] if stopped else output)
            history[i].append({"role": "assistant", "content": text})
    return turns
