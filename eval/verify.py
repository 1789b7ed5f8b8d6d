"""The verification rules of a drafted chain, as pure functions: no model, cache, tokenizer or config.

Letters (conventions.md): B sequences, K drafted tokens, V target vocabulary. Row i of `target_probs` [B, K+1, V] is
the target's distribution p after draft tokens 0..i-1; row K is the bonus row. `draft_probs` [B, K, V] is q, the law
the draft really sampled token i from. Every rule returns `accepted` [B] (0..K) and `own` [B], the one token the
target adds after the accepted run; a round emits draft[:accepted] + [own].

Randomness comes in as uniforms in [0, 1) or as already drawn target tokens, so that a test can walk through every
branch; `torch.Generator` draws the uniforms, (seed, position) keys those of `keyed_sample`.

Worked example, K = 3, draft [7, 8, 9], first two accepted: accepted = 2, own is drawn from row 2 (after 7, 8), with
the residual of p and q there because 9 was refused; the round emits [7, 8, own].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eval.warpers import one_hot


class Verdict(NamedTuple):
    """Outcome of one round: accepted [B] draft tokens, own [B] the target's token after them."""

    accepted: Tensor
    own: Tensor


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: probs [..., V] (any positive sum) and uniforms [...] -> token ids [...].

    In fp64, since 50,000 fp32 terms lose the tail. A token of probability 0 has an empty interval and is never drawn.
    """
    cdf = probs.double().cumsum(-1)
    draw = torch.searchsorted(cdf, (u.double() * cdf[..., -1]).unsqueeze(-1), right=True).squeeze(-1)
    return draw.clamp(max=probs.shape[-1] - 1)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(0, p - q)) [..., V]; p itself where p <= q everywhere (p = q: never needed, never divided by zero)."""
    left = (target_probs - draft_probs).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.where(total > 0, 1.0), target_probs)


def rejection(draft: Tensor, target_probs: Tensor, draft_probs: Tensor, u: Tensor) -> Verdict:
    """Chain rejection sampling (2211.17192, algorithm 1): draft [B, K] sampled from q, u [B, K+1] uniforms.

    1. accept token i with probability min(1, p(x)/q(x)): `u < ratio`, strict, so p(x) = 0 is never accepted;
    2. at the first refusal emit from norm(max(0, p - q));
    3. if all K survive emit a bonus token from the last p.
    """
    B, K, V = draft_probs.shape
    px = target_probs[:, :K].gather(-1, draft.unsqueeze(-1)).squeeze(-1)
    qx = draft_probs.gather(-1, draft.unsqueeze(-1)).squeeze(-1)
    accepted = leading(u[:, :K] < px / qx)  # 0/0 is NaN, which accepts nothing
    row = accepted.view(B, 1, 1).expand(B, 1, V)
    p = target_probs.gather(1, row).squeeze(1)
    q = torch.cat([draft_probs, draft_probs.new_zeros(B, 1, V)], 1).gather(1, row).squeeze(1)
    return Verdict(accepted, sample(residual(p, q), u[:, K]))  # bonus row: q = 0, the residual is p


def chain_one_hot(draft: Tensor, target_probs: Tensor, u: Tensor) -> Verdict:
    """Chain whose draft [B, K] is deterministic: each token is a point mass, accepted with probability p(x).

    The same law as rejection with q = one-hot; using the draft's softmax as q instead is biased.
    """
    return rejection(draft, target_probs, one_hot(draft, target_probs.shape[-1]), u)


def node_one_hot(children: list[int], target_probs: Tensor, u: Tensor) -> int:
    """One node with distinct deterministic children, p [V], u [len(children)+1] -> the emitted token.

    Accept child c with probability p'(c); on refusal p'(c) = 0 and renormalise; all refused: emit from p'.
    """
    p = target_probs
    for i, child in enumerate(children):
        if u[i] < p[child] / p.sum():
            return child
        p = p.clone()
        p[child] = 0
    return int(sample(p, u[-1]))


def match(draft: Tensor, target_tokens: Tensor) -> Verdict:
    """Keep drafts [B, K] while they equal the target's own tokens [B, K+1]; then the target's token stands.

    Three rules are this one comparison: greedy (tokens = argmax of p), sample-and-match (tokens drawn from p, draft
    deterministic: the one-hot rule's law) and strict match (the same with a sampled draft; lossless, accepts least).
    """
    B, K = draft.shape
    accepted = leading(draft == target_tokens[:, :K])
    return Verdict(accepted, target_tokens.gather(1, accepted.view(B, 1)).squeeze(1))


def leading(flags: Tensor) -> Tensor:
    """Length of the run of true at the start of each row: [B, K] bool -> [B]."""
    return flags.long().cumprod(-1).sum(-1)


def keyed_sample(probs: Tensor, seed: int, position: int) -> int:
    """One Gumbel-max sample of a row [V] whose noise depends on (seed, position) only.

    The token at a position is then a function of its prefix alone: plain sampling and any one-hot/match drafting
    emit identical tokens (coupling), and no noise is spent by a refused draft.
    """
    generator = torch.Generator().manual_seed(mix(seed, position))
    # fp64: an fp32 uniform is 0 once in 16 million, which over a large vocabulary would bias every 300th token
    waiting = torch.rand(probs.shape[-1], dtype=torch.float64, generator=generator).log_().neg_()
    # argmax(log p + Gumbel) = argmin(Exp(1) / p); p = 0 waits for ever
    return int((waiting / probs.cpu()).argmin())


def sample_and_match(draft: Tensor, target_probs: Tensor, seed: int, position: int) -> Verdict:
    """One chain, draft [1, K], target_probs [1, K+1, V]: draw the target's own keyed tokens, keep drafts while equal.

    `position` is that of draft token 0 in the sequence. Rows after the first difference are never drawn.
    """
    B, K = draft.shape
    assert B == 1, f"sample_and_match takes one chain, got {B}"
    for i in range(K + 1):
        own = keyed_sample(target_probs[0, i], seed, position + i)
        if i == K or own != int(draft[0, i]):
            break
    return Verdict(torch.tensor([i]), torch.tensor([own]))


def mix(seed: int, position: int) -> int:
    """Two counters -> one well spread 63-bit key (splitmix64), as neighbouring seeds give correlated first draws."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & (2**64 - 1)
    return (x ^ (x >> 31)) & (2**63 - 1)


def alphas(draft: Tensor, target_probs: Tensor, draft_probs: Tensor) -> tuple[list[float], list[float]]:
    """Per drafted position of one chain: sum_x min(p, q) and p(argmax q); p [K+1, V], q [K, V]."""
    K = draft.shape[0]
    p = target_probs[:K]
    overlap = torch.minimum(p, draft_probs).sum(-1)
    greedy = p.gather(-1, draft_probs.argmax(-1, keepdim=True)).squeeze(-1)
    return overlap.tolist(), greedy.tolist()
