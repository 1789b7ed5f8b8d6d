"""The progress line of regeneration."""

import sys
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]


class Progress:
    """Conversations done, tokens per second and time left, on standard error."""

    def __init__(self, total: int, done: int) -> None:
        self.bar: Any = tqdm(
            total=total, initial=done, desc="regenerate", unit="conversation", file=sys.stderr, mininterval=1.0
        )
        self.count = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def tokens(self, count: int) -> None:
        self.count += count
        elapsed = self.bar.format_dict["elapsed"]
        self.bar.set_postfix_str(f"{self.count} tokens, {self.count / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)
        self.bar.update(0)

    def rows(self, count: int) -> None:
        self.bar.update(count)
