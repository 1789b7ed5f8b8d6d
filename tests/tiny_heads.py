"""One small head of every kind, for the claims that hold of all of them: a new kind is one more entry here."""

from typing import Any

from toys import spread, vocabulary

from heads import HEADS
from heads.hub import build_head
from heads.target import Target

# kind -> settings on a tiny target of 5 layers or more; every head drafts and trains four steps
TINY_HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 4, "num_layers": 2},
    "eagle3": {"taps": [1, 2, 4], "ttt_steps": 4},
}
assert TINY_HEADS.keys() == HEADS.keys(), f"give every kind an entry: {sorted(HEADS.keys() ^ TINY_HEADS.keys())}"


def tiny_head(
    kind: str, target: Target, std: float | None = None, draft: list[int] | None = None, **settings: Any
) -> Any:
    """An attached head in eval mode; `std` draws every matrix anew, wide enough that a wrong input or mask shows.

    `draft` are the target ids of a reduced vocabulary.
    """
    chosen = {"kind": kind, **TINY_HEADS[kind], **settings}
    vocab = None
    if draft is not None:
        chosen["draft_vocab_size"], vocab = len(draft), vocabulary(draft, target.spec.vocab_size)
    head = build_head(chosen, target.spec, vocab)
    return spread(head, std).attach(target).eval()
