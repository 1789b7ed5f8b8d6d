"""How the conversations of one optimizer step are laid out in forward passes: by rank, padded or packed.

The loss of a step is a sum over all its trained slots, so the layout changes memory and speed, never the result.

    rows of 9, 7, 5, 4, 3, 2 tokens, one rank
    micro_batch_size=3                  [9] [7] [5]          [4] [3] [2]        padded to 9 and to 4: 9 of 39 wasted
    max_tokens=16                       [9]   [7] [5]   [4] [3] [2]             passes of at most 16 padded tokens
    packing, pack_length=12, 2 a pass   [7 5] [9 3]          [4 2]              micro_batch_size counts lines
"""

import dataclasses

from data.packing import best_fit

Pass = list[list[int]]  # lines of row numbers


@dataclasses.dataclass(frozen=True)
class Layout:
    """`max_tokens` bounds a pass by padded tokens, in place of `micro_batch_size`; `pack_length` None: no packing."""

    micro_batch_size: int
    max_tokens: int | None = None
    pack_length: int | None = None

    def check(self, lengths: list[int]) -> None:
        """Raises ValueError, naming the row, when one conversation alone is longer than a line or a pass may be."""
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        for name, most in (("pack_length", self.pack_length), ("max_tokens", self.max_tokens)):
            if most is not None and lengths[longest] > most:
                raise ValueError(
                    f"train.{name}={most} is below the {lengths[longest]} tokens of training row {longest}: raise it, "
                    "or build the data with a smaller data.max_length"
                )

    def passes(self, numbers: list[int], lengths: list[int], rank: int = 0, world: int = 1) -> list[Pass]:
        """This rank's passes of a global batch of row `numbers`; every rank gets equally many, some may be empty."""
        shares = [self._passes(numbers[r::world], lengths) for r in range(world)]
        count = max(1, *(len(share) for share in shares))
        return shares[rank] + [[] for _ in range(count - len(shares[rank]))]

    def _passes(self, numbers: list[int], lengths: list[int]) -> list[Pass]:
        if self.pack_length is None:
            found = [[n] for n in numbers]
        else:
            bins = best_fit([lengths[n] for n in numbers], self.pack_length)
            found = [[numbers[i] for i in one] for one in bins]
        if self.max_tokens is None:
            size = self.micro_batch_size
            return [found[i : i + size] for i in range(0, len(found), size)]
        return _filled(found, [sum(lengths[n] for n in line) for line in found], self.max_tokens)


def _filled(found: Pass, sizes: list[int], max_tokens: int) -> list[Pass]:
    """Lines, longest first, in passes of at most `max_tokens` once each line is padded to the longest of its pass."""
    passes: list[Pass] = []
    longest = 0
    for i in sorted(range(len(found)), key=lambda i: (-sizes[i], i)):
        if not passes or (len(passes[-1]) + 1) * longest > max_tokens:
            passes.append([])
            longest = sizes[i]
        passes[-1].append(found[i])
    return passes
