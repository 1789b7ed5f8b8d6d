"""Two tokenizers, one text: proposals spell what was drafted, bit by bit as at once; inexact tokenizers are refused."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_target
from tiny_chat import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eval.align import Aligned, Bridge, decode, encode, same_ids
from eval.drafter import Ask, Kept
from eval.drafters.draft_model import DraftModel
from eval.generate import Decoding, generate, generate_batch
from eval.warpers import Warpers
from heads.target import Target

CORPUS = ["the cat sat on the mat and the dog sat on the cat", "naïve café, 日本 and 🙂", "one two three, 123 456"] * 3


def bpe(merges: int, lower: bool = False) -> Any:
    """A byte-level BPE learnt from CORPUS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


BYTES, SMALL, LARGE = byte_tokenizer(), bpe(30), bpe(90)
PAIRS = [(SMALL, LARGE), (LARGE, SMALL), (LARGE, BYTES), (BYTES, LARGE)]
TEXTS = st.one_of(
    st.text(alphabet="the catsondg,.\n 12é日🙂", max_size=30),
    st.lists(st.sampled_from(["the", " cat", " sat", " on", "日本", "🙂", " 123", ","]), max_size=8).map("".join),
)


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.sampled_from(PAIRS), st.integers(0, 12), st.booleans())
def test_proposals_spell_the_drafted_text_in_whole_tokens(
    before: str, after: str, pair: tuple[Any, Any], steps: int, ended: bool
) -> None:
    target, draft = pair
    held = encode(target, before)
    aligned = Aligned(Bridge(target, draft, "draft"), held)
    if not aligned.ready:
        return
    assert decode(draft, aligned.draft_ids) == before
    drafted = encode(draft, after)[:steps]
    found = aligned.whole(drafted, ended)
    spelled = decode(target, [*held, *found])
    text = decode(draft, [*aligned.draft_ids, *drafted])
    assert text.startswith(spelled) and "\ufffd" not in spelled[len(before) :]
    if not ended and found:
        assert len(text) > len(spelled), "something was drafted behind the last token"


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.sampled_from(PAIRS), st.lists(st.integers(1, 5), max_size=8))
def test_taking_in_tokens_bit_by_bit_equals_reading_them_at_once(
    text: str, pair: tuple[Any, Any], sizes: list[int]
) -> None:
    """Texts here are shorter than the tail that is cut anew, so both are the draft's own tokenisation."""
    target, draft = pair
    ids = encode(target, text)
    bridge = Bridge(target, draft, "draft")
    aligned, at = Aligned(bridge, ids[:2]), 2
    for size in [*sizes, len(ids)]:
        aligned.extend(ids[at : at + size])
        at += size
        fresh = Aligned(bridge, ids[:at])
        assert aligned.ready == fresh.ready
        if aligned.ready:
            assert decode(draft, aligned.draft_ids) == decode(draft, fresh.draft_ids) == decode(target, ids[:at])


def test_a_perfect_draft_gives_the_targets_own_tokens() -> None:
    text = "the cat sat on the mat and the dog sat"
    for target, draft in PAIRS:
        wanted, aligned = encode(target, text), Aligned(Bridge(target, draft, "draft"), encode(target, "the cat"))
        n = len(encode(target, "the cat"))
        found = aligned.whole(encode(draft, text)[len(aligned.draft_ids) :])
        assert len(found) >= 3 and found == wanted[n : n + len(found)]


def test_a_text_that_ends_inside_a_character_waits_for_the_rest() -> None:
    face = encode(BYTES, "ok 🙂")
    aligned = Aligned(Bridge(BYTES, LARGE, "draft"), face[:-1])
    assert not aligned.ready
    aligned.extend(face[-1:])
    assert decode(LARGE, aligned.draft_ids) == "ok 🙂" and bool(aligned.ready)


def speaking(tokenizer: Any, layers: int, seed: int) -> Target:
    target = tiny_target(layers=layers, vocab_size=len(tokenizer), seed=seed)
    spoken = Target(target.model, tokenizer, name="tiny")
    spoken.eos_ids = frozenset()
    return spoken


@pytest.mark.parametrize(("target_tokenizer", "draft_tokenizer"), PAIRS[:3])
def test_output_equals_plain_whatever_the_draft_speaks(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    target, draft = speaking(target_tokenizer, 3, 0), speaking(draft_tokenizer, 2, 1)
    drafter = DraftModel(draft, target)
    assert drafter.bridge is not None
    prompts = [encode(target_tokenizer, text) for text in ("the cat sat", "naïve 日本", "one two three on the mat")]
    for warpers, rule in ((Warpers(), "auto"), (Warpers(1.0), "match")):
        decoding = Decoding(max_new_tokens=10, warpers=warpers)
        wanted = [generate(target, None, prompt, decoding).output_ids for prompt in prompts]
        drafting = dataclasses.replace(decoding, k=3, rule=rule)
        found = generate_batch(target, drafter, prompts, [drafting] * 3, 2)
        assert [g.output_ids for g in found] == wanted


def test_drafts_of_a_twin_with_another_tokenizer_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's logits are forced to spell the target's own answer: whole tokens of it are proposed and accepted."""
    target, draft = speaking(LARGE, 3, 0), speaking(SMALL, 2, 1)
    prompt, answer = encode(LARGE, "the cat"), " sat on the mat and the dog sat on the cat"
    script = encode(SMALL, "the cat" + answer)
    drafter, text = DraftModel(draft, target), encode(LARGE, "the cat" + answer)
    read = drafter.read

    def scripted(feed: dict[int, list[int]]) -> Any:
        logits = read(feed)
        for slot in logits:
            logits[slot] = logits[slot] * 0
            logits[slot][script[min(len(drafter.fed[slot]), len(script) - 1)]] = 1
        return logits

    drafter.read = scripted  # type: ignore[method-assign]
    drafter.start(0, prompt, text[len(prompt)], None)  # type: ignore[arg-type]
    found: list[Any] = []
    for _ in range(2):
        done = len(prompt) + 1 + len(found)
        proposal = drafter.propose([0], [Ask(3, False, Warpers(), None)])[0].tokens.tolist()  # type: ignore[arg-type]
        assert proposal == text[done : done + 3]
        found += [*proposal, text[done + 3]]
        drafter.commit([0], [Kept(text[done : done + 4], None)])  # type: ignore[arg-type]


def test_tokenizers_that_change_the_text_are_refused() -> None:
    with pytest.raises(ValueError, match="that of the draft model 'lower' does not give back"):
        Bridge(LARGE, bpe(30, lower=True), "lower")
    with pytest.raises(ValueError, match="that of the target does not give back"):
        Bridge(bpe(30, lower=True), LARGE, "draft")
    with pytest.raises(ValueError, match="the draft model 'none' has no tokenizer"):
        Bridge(LARGE, None, "none")


def test_the_same_ids_need_no_alignment() -> None:
    assert same_ids(LARGE, bpe(90)) and same_ids(None, None)
    assert not same_ids(LARGE, SMALL) and not same_ids(LARGE, None)
