"""Claim: answers are the target's own, exact to the id, whatever the batch, and identical after any interruption."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data.answers import load_given, training_rows
from data.asking import Limits, Prompt, RegenerateSettings, answerable, to_prompt, with_samples
from data.generate import generate, sample, uniforms
from data.prompts import to_row
from data.regenerate import Answers, forget
from data.template import ChatFormat
from heads.target import Target

SETTINGS = RegenerateSettings(temperature=0.8, top_p=0.9, seed=3, max_new_tokens=10, batch_size=3)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def any_target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny_target(request.param, vocab_size=264, layers=2).model, byte_tokenizer())


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(vocab_size=264, layers=2).model, byte_tokenizer())


def prompts(target: Target, count: int = 7) -> list[Prompt]:
    chat, limits = ChatFormat(target.tokenizer), Limits(256, 256)
    turns = [[f"prompt {'x' * n}"] + ["more"] * (n % 2) for n in range(count)]
    rows = [to_row("f", "f", n, {"id": f"id{n}", "turns": ts}) for n, ts in enumerate(turns)]
    return [to_prompt(chat, row, f"{n:064x}", "train", limits) for n, row in enumerate(rows)]


def answers(target: Target, folder: Path, settings: RegenerateSettings = SETTINGS) -> Answers:
    return Answers(target, ChatFormat(target.tokenizer), settings, folder)


def plain(target: Target, prompt: list[int], draws: torch.Tensor, temperature: float, count: int) -> list[int]:
    """One token at a time with a full forward: no cache, no batch, no padding."""
    ids = list(prompt)
    for step in range(count):
        logits = target.logits(target.forward(torch.tensor([ids])).last[:, -1])[:, : target.spec.tokenizer_size]
        ids.append(int(sample(logits, draws[step : step + 1], temperature, 0.9)))
        if ids[-1] in target.eos_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batched_decoding_equals_plain_decoding_row_by_row(any_target: Target, temperature: float) -> None:
    asked = [[5], [7, 8, 9, 10], list(range(40, 60)), [11, 12]]
    draws = [uniforms(1, str(n), 0, 12) for n in range(len(asked))]
    eos = plain(any_target, asked[1], draws[1], temperature, 12)[3]
    ending = Target(any_target.model, any_target.tokenizer)
    ending.eos_ids = frozenset([eos])  # one row of the batch ends early and leaves it
    batched = generate(ending, asked, draws, temperature, 0.9, 12)
    expected = [plain(ending, p, d, temperature, 12) for p, d in zip(asked, draws, strict=True)]
    assert batched == expected
    assert len(batched[1]) <= 4 and batched[1][-1] == eos


def test_sampling_follows_the_nucleus_distribution() -> None:
    probs = torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1])
    draws = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    drawn = sample(probs.log().expand(2000, 5), draws, 1.0, 0.8)
    share = torch.bincount(drawn, minlength=5) / 2000
    assert torch.allclose(share, torch.tensor([0, 0.4, 0.3, 0.15, 0]) / 0.85, atol=1e-3)
    share = torch.bincount(sample(probs.log().expand(2000, 5), draws, 1.0, 1.0), minlength=5) / 2000
    assert torch.allclose(share, probs, atol=1e-3)


def test_draws_belong_to_seed_row_and_turn() -> None:
    assert torch.equal(uniforms(0, "k", 0, 5), uniforms(0, "k", 0, 8)[:5])
    others = [uniforms(1, "k", 0, 5), uniforms(0, "l", 0, 5), uniforms(0, "k", 1, 5)]
    assert not any(torch.equal(uniforms(0, "k", 0, 5), other) for other in others)


def test_any_interruption_resumes_to_the_same_bytes_in_row_order(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = prompts(target)
    whole = answers(target, tmp_path / "whole").make(asked).read_bytes()
    made = [json.loads(line) for line in whole.splitlines()]
    assert [row["id"] for row in made] == [p.row.id for p in asked]
    assert [len(row["turns"]) for row in made] == [1 + n % 2 for n in range(len(asked))]
    interrupted = answers(target, tmp_path / "cut")
    partial = _partial_file(interrupted, asked)
    for cut in [0, len(partial) - 1, *random.Random(0).sample(range(len(partial)), 10)]:
        interrupted.final.unlink(missing_ok=True)
        interrupted.partial.write_bytes(partial[:cut])  # what kill -9 leaves: any prefix of the appended bytes
        assert interrupted.make(asked).read_bytes() == whole
    capsys.readouterr()


def _partial_file(made_by: Answers, asked: list[Prompt]) -> bytes:
    kept: list[bytes] = []
    append = made_by._append

    def spy(rows: list[dict[str, Any]], done: dict[str, dict[str, Any]]) -> None:
        append(rows, done)
        kept.append(made_by.partial.read_bytes())

    made_by._append = spy  # type: ignore[method-assign]
    forget(made_by.folder)
    made_by.make(asked)
    made_by._append = append  # type: ignore[method-assign]
    return kept[-1]


def test_a_partial_file_of_other_settings_is_not_continued(target: Target, tmp_path: Path) -> None:
    asked = prompts(target, 3)
    first = answers(target, tmp_path)
    first.partial.write_bytes(_partial_file(answers(target, tmp_path / "x"), asked))
    other = RegenerateSettings(temperature=0.8, top_p=0.9, seed=4, max_new_tokens=10, batch_size=3)
    resumed = answers(target, tmp_path, other).make(asked).read_bytes()
    assert resumed == answers(target, tmp_path / "fresh", other).make(asked).read_bytes()


def test_given_answers_are_used_and_other_prompts_ignored(target: Target, tmp_path: Path) -> None:
    asked = prompts(target)
    made_by = answers(target, tmp_path)
    file = made_by.make(asked[2:])
    again = answers(target, tmp_path / "again")
    given = load_given(file, again, asked[:5])
    assert sorted(given) == [p.key for p in asked[2:5]]
    rows = [json.loads(line) for line in again.make(asked[:5], given).read_text().splitlines()]
    assert [row["key"] for row in rows] == [p.key for p in asked[:5]]
    assert rows[2]["turns"] == given[asked[2].key]["turns"]


def test_given_answers_of_another_revision_are_refused_with_both_named(target: Target, tmp_path: Path) -> None:
    asked = prompts(target, 2)
    file = answers(target, tmp_path).make(asked)
    file.write_text(file.read_text().replace('"revision": "none"', '"revision": "r2"'))
    with pytest.raises(ValueError, match="line 1: made under other settings .revision: 'r2' there, 'none' here"):
        load_given(file, answers(target, tmp_path), asked)


def test_training_rows_use_the_exact_ids_and_never_retokenise() -> None:
    turns = [{"prompt_ids": [1, 2], "output_ids": [3, 9]}, {"prompt_ids": [1, 2, 3, 9, 4], "output_ids": [5]}]
    assert list(training_rows({"id": "x", "turns": turns})) == [("x", [1, 2, 3, 9, 4, 5], [(2, 4), (5, 6)])]
    turns[1]["prompt_ids"] = [1, 2, 7, 9, 4]
    apart = [("x", [1, 2, 3, 9], [(2, 4)]), ("x#2", [1, 2, 7, 9, 4, 5], [(5, 6)])]
    assert list(training_rows({"id": "x", "turns": turns})) == apart


def test_turns_that_the_target_can_answer() -> None:
    u, a, t = ({"role": r, "content": r} for r in ("user", "assistant", "tool"))
    s, call = {"role": "system", "content": "s"}, {"role": "assistant", "content": "", "tool_calls": [{}]}
    assert answerable([s, u, a, u]) == [[s, u], [u]]
    assert answerable([u, u, a]) == [[u, u]]
    assert answerable([u, a, u, call, t, a, u]) == [[u], [u]]
    assert answerable([s]) == [] and answerable([]) == []
    assert answerable([a, u]) == [[a, u]]
    assert answerable([s, u, u], turn_by_turn=True) == [[s, u], [u]]


def test_each_of_several_turns_is_answered_after_the_targets_own_answer(target: Target, tmp_path: Path) -> None:
    (row,) = [
        json.loads(line) for line in answers(target, tmp_path).make(prompts(target)[1:2]).read_text().splitlines()
    ]
    first, second = (target.tokenizer.decode(turn["prompt_ids"]) for turn in row["turns"])
    ended = row["turns"][0]["finish"] == "stop"
    own = target.tokenizer.decode(row["turns"][0]["output_ids"][: -1 if ended else None])
    assert first == "<|im_start|>user\nprompt x<|im_end|>\n<|im_start|>assistant\n"
    assert second == f"{first}{own}<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_given_answers_that_merge_or_miss_turns_are_left_out_and_made_anew(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = prompts(target, 4)
    made_by = answers(target, tmp_path)
    rows = [json.loads(line) for line in made_by.make(asked).read_text().splitlines()]
    rows[1]["turns"], rows[2]["turns"][0]["prompt_ids"] = rows[1]["turns"][:1], [1, 2, 3]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = load_given(tmp_path / "given.jsonl", made_by, asked)
    assert sorted(given) == [asked[0].key, asked[3].key]
    assert "2 answers of" in capsys.readouterr().err


def test_samples_of_a_prompt_differ_keep_their_temperature_and_stand_side_by_side(
    target: Target, tmp_path: Path
) -> None:
    many = dataclasses.replace(SETTINGS, samples=3, temperatures=[0.8, 1.5])
    asked = prompts(target, 4)
    asked[2] = dataclasses.replace(asked[2], split="heldout")
    made = answers(target, tmp_path / "many", many).make(with_samples(asked, 3))
    rows = [json.loads(line) for line in made.read_text().splitlines()]
    names = [(row["id"], row.get("sample", 0), row["temperature"]) for row in rows]
    each = [(0, 0.8), (1, 1.5), (2, 0.8)]
    assert names == [(f"id{n}", s, t) for n in range(4) for s, t in (each[:1] if n == 2 else each)]
    assert len({str(row["turns"][0]["output_ids"]) for row in rows if row["id"] == "id0"}) == 3
    one = answers(target, tmp_path / "one").make(asked).read_text().splitlines()
    assert [json.loads(line) for line in one] == [row for row in rows if "sample" not in row]
    assert [name for name, _, _ in training_rows(rows[1])] == ["id0/1"]


def test_samples_are_resumed_and_given_one_by_one(target: Target, tmp_path: Path) -> None:
    many = dataclasses.replace(SETTINGS, samples=3, temperatures=[0.8, 1.5])
    asked = with_samples(prompts(target, 4), 3)
    made_by = answers(target, tmp_path, many)
    whole = made_by.make(asked).read_bytes()
    partial = _partial_file(made_by, asked)
    for cut in random.Random(2).sample(range(len(partial)), 4):
        made_by.partial.write_bytes(partial[:cut])
        assert made_by.make(asked).read_bytes() == whole
    given = load_given(made_by.final, made_by, asked[1:8])
    assert sorted(given) == sorted(prompt.name for prompt in asked[1:8])
    assert load_given(made_by.final, answers(target, tmp_path), asked[::3]).keys() == {p.key for p in asked[::3]}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"samples": 2, "temperature": 0.0}, "several of them are greedy"),
        ({"samples": 2, "temperatures": [0.5, 0.6, 0.7]}, "from one temperature to one per sample"),
        ({"temperatures": []}, "from one temperature to one per sample"),
        ({"temperatures": [-0.5]}, "data.regenerate.temperatures=.* out of range"),
        ({"samples": 0}, "data.regenerate.samples=0 is out of range"),
    ],
)
def test_samples_that_would_be_equal_or_unused_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegenerateSettings(**settings).check()


@pytest.mark.parametrize(
    "name, value", [("temperature", -1.0), ("top_p", 0.0), ("max_new_tokens", 0), ("batch_size", 0)]
)
def test_impossible_settings_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"data.regenerate.{name}={value}"):
        RegenerateSettings(**{name: value}).check()  # type: ignore[arg-type]
