"""Which slots are trained at which step, and on what: pure index work shared by every head.

Step i drafted from slot t predicts x_{t+2+i} (Medusa head i + 1, EAGLE-3 test-time step i), is taught by the target's
distribution at position t+1+i, and is trained when x_{t+1} .. x_{t+2+i} are all tokens the assistant produced, in one
document. Worked example, `asst` over 8 positions, J = 2:

    position   0  1  2  3  4  5  6  7
    asst       .  .  .  A  A  A  .  .        prompt 0..2, answer 3..5 (5 ends the turn)
    step 0     .  .  x  x  .  .  .  .        slot 2 = last prompt token: where decoding starts to draft
    step 1     .  .  x  .  .  .  .  .        slot 2 predicts x_5 = the end of the turn
"""

import torch
from torch import Tensor


def step_mask(asst: Tensor, documents: Tensor, step: int, drawn: Tensor | None = None) -> Tensor:
    """[B, T] bool: slot t is trained at `step` (asst, documents [B, T]); given `drawn` [B, T], only where drawn."""
    B, T = asst.shape
    span = step + 2
    mask = torch.zeros_like(asst)
    if T <= span:
        return mask
    ok = documents[:, span:] == documents[:, :-span]
    for offset in range(1, span + 1):
        ok = ok & asst[:, offset : T - span + offset]
    mask[:, : T - span] = ok
    return mask if drawn is None else mask & drawn


def draw_slots(mask: Tensor, documents: Tensor, most: int, rows: list[int], seed: int, step: int) -> Tensor:
    """[B, T] bool: at most `most` slots of each conversation of a step-0 mask [B, T], uniformly at random.

    Conversation number documents[b, t] is data row rows[documents[b, t]]. Which slots depends on (seed, step, data row)
    alone, so ranks, accumulation, packing and resume change nothing.
    """
    drawn = torch.zeros_like(mask)
    for place, row in enumerate(rows):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_000_003 + row)
        line, where = (mask & (documents == place)).nonzero(as_tuple=True)
        chosen = torch.randperm(len(where), generator=generator)[:most].to(where.device)
        drawn[line[chosen], where[chosen]] = True
    return drawn


def pick_slots(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [B, S] of a step-0 mask [B, T], left-packed, and which are real [B, S] (padding repeats position 0)."""
    B, T = mask.shape
    count = mask.sum(1)
    S = max(1, int(count.max()))
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)[:, :S]
    real = torch.arange(S, device=mask.device) < count[:, None]
    return order * real, real


def at_slots(values: Tensor, slots: Tensor, offset: int) -> Tensor:
    """values [B, T, ...] at position slot + offset -> [B, S, ...]; past the end the last one (callers mask it)."""
    where = (slots + offset).clamp_max(values.shape[1] - 1)
    if values.dim() == 2:
        return values.gather(1, where)
    return values.gather(1, where[..., None].expand(-1, -1, values.shape[-1]))
