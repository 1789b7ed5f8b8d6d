"""How far a tuned target (Medusa-2) is from the one it was tuned from: what "lossless" leaves out there.

Verification keeps the law of the target that verifies. Where that target was tuned with its heads, its answers are its
own, not the base's; two figures over held-out answers, teacher-forced, say by how much:

    kl_base_tuned       mean over the answers' tokens of KL(base || tuned) = sum_x p (log p - log q), nats
    greedy_agreement    share of the tokens at which both have the same likeliest token
"""

from collections.abc import Sequence
from typing import Any

import torch

from data.rows import DataRow
from heads.lora import Lora
from heads.target import Target

_CHUNK = 256  # positions whose logits exist at one moment


@torch.inference_mode()
def measure_drift(target: Target, lora: Lora, rows: Sequence[DataRow]) -> dict[str, Any]:
    """{"kl_base_tuned", "greedy_agreement", "tokens", "conversations"}; `lora` is in `target`, not merged yet."""
    divergence, same, tokens = 0.0, 0, 0
    for row in rows:
        ids = torch.tensor([row.ids], device=target.device)
        where = row.supervised()[1:].nonzero().squeeze(1).to(ids.device)  # x_{t+1} is the assistant's
        tuned = target.forward(ids).last[0, where]
        with lora.off():
            base = target.forward(ids).last[0, where]
        for start in range(0, len(where), _CHUNK):
            here = slice(start, start + _CHUNK)
            log_p, log_q = (target.logits(last[here]).log_softmax(-1) for last in (base, tuned))
            divergence += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
            same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        tokens += len(where)
    return {
        "kl_base_tuned": divergence / max(1, tokens),
        "greedy_agreement": same / max(1, tokens),
        "tokens": tokens,
        "conversations": len(rows),
    }


def caveat(drift: dict[str, Any]) -> str:
    """What a report must say of figures of a tuned target; `drift` names its "base" as well."""
    return (
        f"Lossless here means relative to the tuned target, not to {drift['base']}, from which it was tuned with its "
        f"heads. Drift on {drift['tokens']:,} tokens of {drift['conversations']} held-out conversations: mean "
        f"KL(base || tuned) {drift['kl_base_tuned']:.4f} nats a token, the same greedy token at "
        f"{drift['greedy_agreement']:.1%} of them."
    )
