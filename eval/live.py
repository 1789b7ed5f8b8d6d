"""A short run of the decoding engine while a head is trained: what acceptance it has now, measured, not predicted."""

from collections.abc import Sequence
from typing import Any

from eval.cache import AttentionMasks
from eval.drafters.head import drafter_for
from eval.generate import Decoding, generate
from eval.metrics import Record, acceptance_length, position_acceptance
from eval.verify import mix
from eval.warpers import Warpers
from heads.target import Target


def measure_acceptance(
    target: Target,
    head: Any,
    prompts: Sequence[list[int]],
    k: int,
    temperature: float,
    seed: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Decode `prompts` (token ids) with chains of k drafts: greedy at temperature 0, else rejection sampling.

    {"acceptance_length": tokens a pass, own one counted, "position_acceptance_joint": [k], "rounds": passes}
    Acceptance length 1, as in plain decoding, where every answer ended with its first token. The head is left in the
    mode (train or eval) it came in. Raises ValueError for a prompt that fills the context.
    """
    records: list[Record] = []
    training = head.training
    drafter, masks = drafter_for(head, target), AttentionMasks(target)
    try:
        for n, prompt in enumerate(prompts):
            decoding = Decoding(
                k=min(k, head.max_draft),
                max_new_tokens=max_new_tokens,
                warpers=Warpers(temperature),
                proposal="sampled" if temperature > 0 else "greedy",
                seed=mix(seed, n),  # prompts do not share their noise; runs of one training do
            )
            found = generate(target, drafter, prompt, decoding, masks)
            records.append({"steps": found.steps, "new_tokens": len(found.output_ids)})
    finally:
        head.train(training)
    return {
        "acceptance_length": acceptance_length(records) or 1.0,
        "position_acceptance_joint": position_acceptance(records)[0],
        "rounds": sum(len(record["steps"]) for record in records),
    }
