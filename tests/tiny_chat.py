"""A byte-level tokenizer and chat templates built in-process: one token per UTF-8 byte, plus control tokens."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<bos>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<turn>", "<end_turn>", "</s>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_LIKE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
)
GEMMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
MISTRAL_LIKE = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
    "[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] | trim }}</s>{% endif %}{% endfor %}"
)
# Reasoning is dropped from every answer before the last user turn, as Qwen3 does.
THINK_LIKE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m['reasoning_content'] or '' }}\n</think>"
    "\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = CHATML, special: list[str] | None = None) -> Any:
    """Ids 0..255 are bytes, then `special` (BOS first, end of turn second) or SPECIAL; no pad token.

    Like most tokenizers it adds a BOS when asked to add special tokens.
    """
    special, end = (special, special[1]) if special else (SPECIAL, "<|im_end|>")
    alphabet = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    bos = tokenizer.token_to_id(special[0])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], bos)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=end)
    fast.add_special_tokens({"additional_special_tokens": special[1:]})
    fast.chat_template = template
    return fast


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = (b for b in range(256) if b not in plain)
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(shifted)}
