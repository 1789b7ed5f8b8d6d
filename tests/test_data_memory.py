"""Claim: choosing, splitting and checking a source for leaks holds hashes of its rows, never the rows.

`python -m scripts.bench_data` measures the whole stage, speed and memory, for 10,000 and 100,000 conversations.
"""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target
from tiny_chat import byte_tokenizer

from data import build
from data.asking import RegenerateSettings
from data.prompts import read
from data.tally import Tally
from data.writer import RowWriter
from heads.target import Target
from scripts.bench_data import write_conversations

ROW_BYTES = 29  # of a conversation in data/split.py
LEAK_SHARE, LEAK_BYTES = 0.05, 12 * 60  # of conversations held out, and what data/leakage.py keeps of each
BLOCK = 1 << 14


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(vocab_size=264, layers=2).model, byte_tokenizer())


def peak(target: Target, source: Path, folder: Path, keep: list[Any] | None = None) -> tuple[int, int]:
    """(most bytes that Python held while the rows were chosen one by one, how many rows)."""
    folder.mkdir()
    settings = build.DataSettings(
        source=[str(source)], heldout_share=LEAK_SHARE, block_bytes=BLOCK, regenerate=RegenerateSettings(enabled=False)
    )
    writer = RowWriter(folder, target, Tally("x"))
    count = 0
    tracemalloc.start()
    try:
        with writer:
            for chosen in build._chosen(settings, writer):
                count += 1
                if keep is not None:
                    keep.append(chosen)
        return tracemalloc.get_traced_memory()[1], count
    finally:
        tracemalloc.stop()


def test_a_longer_source_takes_no_more_memory_than_its_hashes(target: Target, tmp_path: Path) -> None:
    grown, sizes = {}, (100, 600)
    for rows in sizes:
        write_conversations(tmp_path / f"{rows}.jsonl", rows, tokens=100)
    for name in ("first", "streamed", "held"):  # the first loads whatever is loaded once; the last shows a fault
        found = []
        for rows in sizes:
            keep: list[Any] | None = [] if name == "held" else None
            most, count = peak(target, tmp_path / f"{rows}.jsonl", tmp_path / f"{name}-{rows}", keep)
            assert count > 0.95 * rows
            found.append(most)
        grown[name] = found[1] - found[0]
    allowed = (sizes[1] - sizes[0]) * 3 * (ROW_BYTES + LEAK_SHARE * LEAK_BYTES)  # 3: sorting copies them
    assert grown["streamed"] < allowed < grown["held"] / 5, (grown, allowed)


def test_reading_alone_holds_a_block(tmp_path: Path) -> None:
    write_conversations(tmp_path / "in.jsonl", 1000, tokens=300)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read(tmp_path / "in.jsonl", block_bytes=BLOCK)) == 1000
        assert tracemalloc.get_traced_memory()[1] < 300_000 < (tmp_path / "in.jsonl").stat().st_size / 3
    finally:
        tracemalloc.stop()
