"""Chat templates in the style of the well-known ones, each with its control tokens and the texts it must supervise.

Written anew for these tests: what each does with system turns, history, reasoning, white space and the end of a turn is
what the real one does, and that is what a mask can get wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.messages import Message

# A system prompt of its own where none is given (Qwen2.5, SmolLM2).
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Trims every text; BOS from the template; the header is two control tokens and an empty line.
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | "
    "trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Reasoning is kept after the last question alone; the last answer opens a thinking block even when there is none.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m['reasoning_content'] or '').strip('\n') + '\n</think>\n\n' + m['content'].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not "
    "enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# No system role: its text opens the first question. The assistant is called model; roles must alternate.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{{ first if loop.first else '' }}{{ m['content'] | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# The system text moves to the last question, so that history is rewritten by every new one; no generation prompt.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{{ bos_token }}"
    "{% set users = turns | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m['role'] == 'user' %}"
    "{% if loop.index0 // 2 + 1 == users | length and system is defined %}"
    "{{ '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}{% else %}"
    "{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}{% else %}"
    "{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# Today's date in a system turn of its own; channels; only the last answer keeps its analysis and ends in <|return|>.
GPT_OSS = (
    "{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: medium<|end|>' }}"
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ '<|start|>developer<|message|># Instructions\n\n' + "
    "m['content'] + '<|end|>' }}{% elif m['role'] == 'assistant' %}{% if loop.last and not add_generation_prompt %}"
    "{% if m['thinking'] %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m['thinking'] + '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% else %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def answers(messages: list[Message]) -> list[tuple[Message, bool, bool]]:
    """(message, is it the last message, does it follow the last question) of each answer that holds text."""
    last_question = max(n for n, m in enumerate(messages) if m["role"] == "user")
    return [
        (m, n == len(messages) - 1, n > last_question)
        for n, m in enumerate(messages)
        if m["role"] == "assistant" and m["content"].strip()
    ]


def _chatml(messages: list[Message]) -> list[str]:
    return [m["content"] + "<|im_end|>" for m, _, _ in answers(messages)]


def _llama3(messages: list[Message]) -> list[str]:
    return [m["content"].strip() + "<|eot_id|>" for m, _, _ in answers(messages)]


def _qwen3(messages: list[Message]) -> list[str]:
    found = []
    for m, _, newest in answers(messages):
        thought = f"<think>\n{m.get('reasoning_content', '').strip(chr(10))}\n</think>\n\n"
        found.append((thought + m["content"].lstrip("\n") if newest else m["content"]) + "<|im_end|>")
    return found


def _gemma(messages: list[Message]) -> list[str]:
    return [m["content"].strip() + "<end_of_turn>" for m, _, _ in answers(messages)]


def _mistral(messages: list[Message]) -> list[str]:
    """With a system text, an answer before the last question stands after another prompt than it was asked by."""
    moved = messages[0]["role"] == "system"
    return [f" {m['content'].strip()}</s>" for m, _, newest in answers(messages) if newest or not moved]


def _gpt_oss(messages: list[Message]) -> list[str]:
    found = []
    for m, last, _ in answers(messages):
        thought = f"<|channel|>analysis<|message|>{m['thinking']}<|end|><|start|>assistant" if m.get("thinking") else ""
        text = f"<|channel|>final<|message|>{m['content']}"
        found.append(f"{thought}{text}<|return|>" if last else f"{text}<|end|>")
    return found


@dataclass(frozen=True)
class Style:
    """A template, its control tokens (BOS and end first), and what must be supervised of a conversation."""

    template: str
    special: list[str]
    expected: Callable[[list[Message]], list[str]]
    reasoning: str | None = None  # the field it reads reasoning from

    def tokenizer(self) -> Any:
        from tiny_chat import byte_tokenizer

        return byte_tokenizer(self.template, self.special)


STYLES = {
    "chatml": Style(CHATML, ["<|endoftext|>", "<|im_end|>", "<|im_start|>"], _chatml),
    "llama3": Style(LLAMA3, ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], _llama3),
    "qwen3": Style(QWEN3, ["<|endoftext|>", "<|im_end|>", "<|im_start|>"], _qwen3, "reasoning_content"),
    "gemma": Style(GEMMA, ["<bos>", "<end_of_turn>", "<start_of_turn>"], _gemma),
    "mistral": Style(MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], _mistral),
    "gpt-oss": Style(
        GPT_OSS,
        ["<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
        _gpt_oss,
        "thinking",
    ),
}
