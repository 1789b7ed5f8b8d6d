"""Counting rows so that none is lost silently: read = kept + dropped, each drop with its reason, file and line."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from data.chat import Encoded
from data.records import Bad, DataError


@dataclass
class Tally:
    """What became of the rows of one data set. `kept` is called with an encoded row, `drop` with a rejected one."""

    source: str
    read: int = 0
    kept_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, Bad] = field(default_factory=dict)
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    skipped_turns: int = 0
    all_supervised: int = 0

    def kept(self, row: Encoded) -> None:
        self.read += 1
        self.kept_rows += 1
        self.tokens += len(row.ids)
        self.supervised += row.supervised
        self.truncated += row.truncated
        self.skipped_turns += row.skipped_turns
        self.all_supervised += row.supervised == len(row.ids)

    def drop(self, bad: Bad) -> None:
        self.read += 1
        self.dropped[bad.reason] += 1
        self.first.setdefault(bad.reason, bad)

    def reasons(self) -> str:
        """`3 no_assistant_content (first: file:1), ...`"""
        parts = [f"{n} {reason} (first: {_where(self.first[reason])})" for reason, n in self.dropped.most_common()]
        return ", ".join(parts) or "none"

    def check(self, min_kept_share: float = 0.0) -> None:
        """Refuse a set without supervision, with everything supervised, or with too many rows lost."""
        if self.supervised == 0:
            raise DataError(
                "no_supervised_tokens_in_data_set",
                f"{self.source}: no supervised tokens in the data set; dropped rows: {self.reasons()}",
            )
        if self.all_supervised == self.kept_rows:
            raise DataError(
                "all_tokens_supervised_in_data_set",
                f"{self.source}: every token of every row is supervised: the mask never tells a prompt",
            )
        self.check_share(min_kept_share)

    def check_share(self, min_kept_share: float, waiting: int = 0) -> None:
        """Refuse when less than `min_kept_share` of the rows read are kept; repeats and leaks are no loss.

        waiting: rows that were read, are sound so far and will be counted when they are written.
        """
        read = self.read + waiting
        lost = sum(
            n for reason, n in self.dropped.items() if reason != "exact_repeat" and not reason.startswith("leak_")
        )
        if read and (read - lost) / read < min_kept_share:
            raise DataError(
                "too_few_rows_kept",
                f"{self.source}: {lost} of {read} rows dropped, more than data.min_kept_share={min_kept_share} "
                f"allows: {self.reasons()}",
            )

    def as_dict(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "kept": self.kept_rows,
            "dropped": dict(sorted(self.dropped.items())),
            "tokens": self.tokens,
            "supervised": self.supervised,
            "truncated": self.truncated,
            "skipped_turns": self.skipped_turns,
        }


def _where(bad: Bad) -> str:
    return f"{bad.file}:{bad.line}" + (f" {bad.detail}" if bad.detail else "")
