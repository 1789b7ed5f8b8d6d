"""Drafters without a trained head: DRAFTERS, method name -> factory, and their settings. Heads: eval/drafters/head.py.

A factory gets the target, the settings, and `other`, which makes the drafter of another method (for the hybrid).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from data.rows import load
from eval.drafter import Drafter, PerSequence
from eval.drafters.draft_model import DraftModel, DraftModelSettings
from eval.drafters.hybrid import Hybrid, HybridSettings
from eval.drafters.lookahead import Lookahead, LookaheadSettings
from eval.drafters.lookup import Lookup
from eval.drafters.random import Random
from eval.drafters.self_draft import SelfDraft, SelfDraftSettings
from eval.drafters.suffix import Memory, Suffix, SuffixSettings
from heads.target import Target


@dataclass
class DrafterSettings:
    """One group per kind of drafter."""

    draft_model: DraftModelSettings = field(default_factory=DraftModelSettings)
    self_draft: SelfDraftSettings = field(default_factory=SelfDraftSettings)
    suffix: SuffixSettings = field(default_factory=SuffixSettings)
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
    hybrid: HybridSettings = field(default_factory=HybridSettings)

    def check(self) -> None:
        """Raises ValueError naming the setting that means nothing."""
        for group in (self.self_draft, self.suffix, self.lookahead, self.hybrid):
            group.check()


Other = Callable[[str], Drafter]


def lookup(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    return PerSequence(lambda: Lookup(target.spec.vocab_size))


def random_tokens(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    return PerSequence(lambda: Random(target.spec.vocab_size))


def suffix(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    return PerSequence(lambda: Suffix(target.spec.vocab_size, settings.suffix))


def suffix_tree(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    return PerSequence(lambda: Suffix(target.spec.vocab_size, settings.suffix, tree=True))


def suffix_memory(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    memory = Memory(settings.suffix.memory, settings.suffix.depth)
    if settings.suffix.corpus:
        rows = load(settings.suffix.corpus, "train", target.spec)
        memory.fill(row.ids[start:end] for row in rows for start, end in row.spans)
    return PerSequence(lambda: Suffix(target.spec.vocab_size, settings.suffix, memory))


def lookahead(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    spec = target.spec
    return PerSequence(lambda: Lookahead(spec.vocab_size, spec.max_position_embeddings, settings.lookahead))


def draft_model(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    return DraftModel(settings.draft_model.load(target), target)


def self_draft(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    return SelfDraft(target, settings.self_draft)


def hybrid(target: Target, settings: DrafterSettings, other: Other) -> Drafter:
    if settings.hybrid.method in ("", "hybrid"):
        raise ValueError("hybrid.method: name the method that drafts where no match is long, a head or draft-model")
    model = other(settings.hybrid.method)
    return Hybrid(model, lambda: Suffix(target.spec.vocab_size, settings.suffix), settings.hybrid)


SAMPLING = ("draft-model", "self-draft", "hybrid")  # have a law of their own that drafts can be drawn from
REMEMBERING = ("suffix-memory",)  # learn from the requests they served

DRAFTERS: dict[str, Callable[[Target, DrafterSettings, Other], Drafter]] = {
    "lookup": lookup,
    "suffix": suffix,
    "suffix-tree": suffix_tree,
    "suffix-memory": suffix_memory,
    "lookahead": lookahead,
    "draft-model": draft_model,
    "self-draft": self_draft,
    "hybrid": hybrid,
    "random-tokens": random_tokens,
}
