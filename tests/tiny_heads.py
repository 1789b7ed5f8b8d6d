"""One small head of every kind, for the claims that hold of all of them: a new kind is one more entry here."""

from typing import Any

import torch
from torch import Tensor
from toys import head_input, spread, vocabulary

from heads import HEADS
from heads.hub import build_head
from heads.target import Target

# kind -> settings on a tiny target of 5 layers or more; every head drafts and trains STEPS steps
STEPS = 4
TINY_HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": STEPS, "num_layers": 2},
    "eagle1": {"train_steps": STEPS},
    "eagle3": {"taps": [1, 2, 4], "ttt_steps": STEPS},
    "mtp": {"train_steps": STEPS},
    "mlp": {"num_heads": STEPS, "inner_size": 24},
    "lstm": {"num_heads": STEPS, "inner_size": 24},
    "block": {"taps": [1, 2, 4], "block_size": STEPS + 1},
}
assert TINY_HEADS.keys() == HEADS.keys(), f"give every kind an entry: {sorted(HEADS.keys() ^ TINY_HEADS.keys())}"

# settings that change what a head computes, each on its own
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {"shared_lm_head": False}),
    ("eagle1", {"num_kv_heads": 1}),
    ("eagle3", {"num_kv_heads": 1}),
    ("eagle3", {"num_kv_heads": 4, "taps": [0, 5]}),
    ("eagle3", {"fc_norm": True, "norm_output": True}),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True, "taps": [3]}),
    ("eagle3", {"train_lm_head": False}),
    ("mtp", {"num_kv_heads": 4}),
    ("mlp", {"tie_weights": True, "scale_input": False}),
    ("mlp", {"own_lm_head": False, "inner_size": None}),
    ("lstm", {"tie_embeddings": False, "scale_input": False}),
    ("lstm", {"own_lm_head": False}),
    ("block", {"from_anchor": True, "block_size": STEPS, "num_layers": 3, "num_kv_heads": 4}),
    ("block", {"own_lm_head": True, "num_kv_heads": 1}),
]


# EAGLE-1 has no norm on its way from step to step: wider than this its features grow beyond what fp32 tells apart
WIDE = {"eagle1": 0.15}


def tiny_head(kind: str, target: Target, wide: bool = False, draft: list[int] | None = None, **settings: Any) -> Any:
    """An attached head in eval mode; `wide` draws every matrix anew, wide enough that a wrong input or mask shows.

    `draft` are the target ids of a reduced vocabulary.
    """
    chosen = {"kind": kind, **TINY_HEADS[kind], **settings}
    vocab = None
    if draft is not None:
        chosen["draft_vocab_size"], vocab = len(draft), vocabulary(draft, target.spec.vocab_size)
    head = build_head(chosen, target.spec, vocab)
    return spread(head, WIDE.get(kind, 0.3) if wide else None).attach(target).eval()


@torch.no_grad()
def trained_logits(target: Target, head: Any, ids: Tensor, steps: int = STEPS) -> list[Tensor]:
    """Training: logits [B, T-1, D] of each step, all slots of ids [B, T] at once."""
    return [head.logits(hidden, i) for i, hidden in enumerate(head(head_input(target, head, ids), steps))]


@torch.no_grad()
def drafted_logits(target: Target, head: Any, ids: Tensor, slot: int, steps: int = STEPS) -> list[Tensor]:
    """Decoding: true slots 0..slot, then the head's own; logits [B, D] of each step whose input token exists.

    The head is given the tokens of `ids`, whatever it would have drafted: the same ones as in training.
    """
    output, cache = target.forward(ids, taps=head.taps), head.new_cache(len(ids))
    last, taps = output.last[:, : slot + 1], None if output.taps is None else output.taps[:, : slot + 1]
    embeddings = target.embed(ids[:, 1:])
    if head.parallel:
        head.absorb(cache, last, taps)
        return list(head.draft_logits(last[:, -1], steps, cache, embeddings[:, slot]).unbind(1))
    feature, token = head.feature(last, taps), embeddings[:, : slot + 1]
    if not head.uses_cache:
        feature, token = feature[:, -1:], token[:, -1:]
    hidden = head.advance(cache, feature, token)[:, -1:]
    logits = [head.logits(hidden[:, 0])]
    for step in range(1, min(steps, ids.shape[1] - 1 - slot)):
        hidden = head.advance(cache, head.feed(hidden), embeddings[:, slot + step, None], step=step)
        logits.append(head.logits(hidden[:, 0], step))
    return logits


def largest_difference(target: Target, head: Any, ids: Tensor) -> float:
    """Between training and drafting, over all steps of every third slot."""
    trained, gap = trained_logits(target, head, ids), 0.0
    for slot in range(0, ids.shape[1] - 1, 3):
        for step, logits in enumerate(drafted_logits(target, head, ids, slot)):
            gap = max(gap, float((trained[step][:, slot] - logits).abs().max()))
    return gap
