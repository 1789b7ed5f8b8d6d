"""How the conversations of one optimizer step are laid out in forward passes: by rank, padded or packed.

The loss of a step is a sum over all its trained slots, so the layout changes memory and speed, never the result.

    rows of 9, 7, 5, 4, 3, 2 tokens, one rank
    micro_batch_size=3                  [9] [7] [5]          [4] [3] [2]        padded to 9 and to 4: 9 of 39 wasted
    max_tokens=16                       [9]   [7] [5]   [4] [3] [2]             passes of at most 16 padded tokens
    packing, pack_length=12, 2 a pass   [9 2] [7 4]          [5 3]              micro_batch_size counts lines
"""

import dataclasses

from data.packing import even_fit

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
        found = [[n] for n in numbers]
        if self.pack_length is not None:
            found = [[numbers[i] for i in one] for one in even_fit([lengths[n] for n in numbers], self.pack_length)]
        elif self.max_tokens is None:
            return _cut(found, self.micro_batch_size)
        sized = [(sum(lengths[n] for n in line), line) for line in found]
        sized.sort(key=lambda pair: (-pair[0], pair[1]))  # lines of like length together
        if self.max_tokens is None:
            return _cut([line for _, line in sized], self.micro_batch_size)
        passes: list[Pass] = []
        longest = 0
        for size, line in sized:
            if not passes or (len(passes[-1]) + 1) * longest > self.max_tokens:
                passes.append([])
                longest = size
            passes[-1].append(line)
        return passes


def _cut(found: Pass, size: int) -> list[Pass]:
    return [found[i : i + size] for i in range(0, len(found), size)]
