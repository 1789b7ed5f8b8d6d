"""Where an EAGLE-3 head starts: nothing learned yet, but the target's geometry is known.

random      the paper: every matrix N(0, 0.02).
target      final norm and LM-head rows are the target's; the layer (query, key, value, output, MLP) is the
            target's last one, reading the feature half; fc passes the last tap.
induction   final norm and LM-head rows are the target's, and attention starts as an in-context bigram: the query is
            the newest token x_{t+1}, the key of slot s is the token x_s (still readable in the lowest tap), the value
            is its successor x_{s+1}. So the head begins by proposing what followed the same token before, which copying
            needs and small budgets do not learn from a random start. Measured in docs/experiments.md.
"""

import math
from typing import Any

import torch
from torch import Tensor

STARTS = ("random", "target", "induction")

_NORM_SCALE = 0.3  # the final norm starts below the target's: unscaled rows start far above the uniform loss
_MATCH_SCORE = 14.0  # attention score of an exact token match; chance matches stay several times below
_SLOW = 2e-3  # radians per token: rotary pairs this slow keep a match a match over a few hundred positions


@torch.no_grad()
def apply(head: Any, target: Any, ids: Tensor) -> None:
    """Start `head` (Eagle3) as its config says; ids [1, T] are any text, to measure the scale of the taps on.

    Raises ValueError when 'target' is asked for and the target's last layer has other shapes.
    """
    if head.config.init == "random":
        return
    rows, _ = target.lm_head(head.target_rows())
    head.lm_head.weight.copy_(rows)
    head.norm.weight.copy_(_NORM_SCALE * _plain_norm_weight(target))
    if head.config.init == "target":
        _copy_last_layer(head, target)
    else:
        _induction(head, target, ids)


def _plain_norm_weight(target: Any) -> Tensor:
    """The final norm as x / rms(x) * weight; Gemma stores weight - 1, GPT-style LayerNorms come without their bias."""
    weight = target.norm.weight
    return weight + 1 if "gemma" in target.spec.model_type else weight


def _copy_last_layer(head: Any, target: Any) -> None:
    source, layer = target.layers[-1], head.midlayer
    H = head.norm.weight.shape[0]
    head.fc.weight.zero_()
    head.fc.weight[:, -H:].copy_(torch.eye(H))
    attention = layer.self_attn
    pairs = [(f"self_attn.{n}_proj", getattr(attention, f"{n}_proj").weight, n in "qkv") for n in ("q", "k", "v", "o")]
    pairs += [(f"mlp.{n}_proj", getattr(layer.mlp, f"{n}_proj").weight, False) for n in ("gate", "up", "down")]
    for name, own, reads_both in pairs:
        theirs = _weight(source, name)
        if name.endswith(("k_proj", "v_proj")) and theirs.shape[0] != own.shape[0]:
            theirs = _more_kv_heads(theirs, own.shape[0], attention.head_dim)
        view = own[:, H:] if reads_both else own
        if view.shape != theirs.shape:
            raise ValueError(
                f"head.init=target: {name} of the target's last layer is {tuple(theirs.shape)}, not "
                f"{tuple(view.shape)}; use head.init=induction"
            )
        view.copy_(theirs)
        if reads_both:
            own[:, :H].zero_()


def _weight(layer: Any, name: str) -> Tensor:
    try:
        module = layer.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"head.init=target: the target's layers have no {name}; use head.init=induction") from error
    return module.weight


def _more_kv_heads(weight: Tensor, rows: int, head_dim: int) -> Tensor:
    """[KV d, H] -> [rows, H]: each key/value head repeated for the query heads it served."""
    KV = weight.shape[0] // head_dim
    if rows % weight.shape[0]:
        return weight
    return weight.view(KV, head_dim, -1).repeat_interleave(rows // weight.shape[0], dim=0).reshape(rows, -1)


def _induction(head: Any, target: Any, ids: Tensor) -> None:
    H, n = head.norm.weight.shape[0], len(head.taps)
    generator = torch.Generator().manual_seed(1)
    rms = target.forward(ids, taps=head.taps).taps.float().pow(2).mean((0, 1, 3)).sqrt()  # [taps]
    head.fc.weight.zero_()
    for column in sorted({0, n - 1}):  # lowest tap: which token; highest: what the target expects
        head.fc.weight[:, column * H : (column + 1) * H].copy_(torch.eye(H) / rms[column].cpu())
    attention, d = head.midlayer.self_attn, head.midlayer.self_attn.head_dim
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        projection.weight.mul_(0.2)
    slow = _slow_dimensions(head.rotary.inv_freq, d)
    sharp = math.sqrt(_MATCH_SCORE * math.sqrt(d) / len(slow))
    group = attention.heads // attention.kv_heads
    for kv in range(attention.kv_heads):
        look = sharp * torch.randn(len(slow), H, generator=generator) / math.sqrt(H)
        attention.k_proj.weight[[kv * d + j for j in slow], H:] += look
        for q in range(kv * group, (kv + 1) * group):
            attention.q_proj.weight[[q * d + j for j in slow], :H] += look
    basis = _basis(attention.kv_heads * d, H, generator)
    attention.v_proj.weight[:, :H] += basis
    spread = basis.view(attention.kv_heads, 1, d, H).expand(-1, group, -1, -1).reshape(-1, H) / group
    attention.o_proj.weight += _bridge(head, target) @ spread.T


def _slow_dimensions(inv_freq: Tensor, head_dim: int) -> list[int]:
    """Dimensions of a head whose rotary pair (j, j + d/2) turns slowly; at least a quarter of them, the slowest."""
    half = len(inv_freq)
    slow = [j for j in range(half) if inv_freq[j] < _SLOW] or list(range(half - max(1, half // 4), half))
    return slow + [j + head_dim // 2 for j in slow]


def _basis(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """[rows, size] with basis.T @ basis as near the identity as rank allows; the identity itself where rows = size."""
    if rows == size:
        return torch.eye(size)
    q, _ = torch.linalg.qr(torch.randn(max(rows, size), min(rows, size), generator=generator))
    return q if rows > size else q.T.contiguous()


def _bridge(head: Any, target: Any) -> Tensor:
    """[H, H] from normed embeddings to the LM head's space: identity where tied, else least squares over its rows."""
    rows = head.target_rows()
    ids = torch.arange(head.vocab_size) if rows is None else rows
    if target.spec.tie_word_embeddings:
        return torch.eye(head.norm.weight.shape[0])
    embedded = torch.nn.functional.normalize(target.embed(ids).float(), dim=-1)
    wanted = torch.nn.functional.normalize(target.lm_head(rows)[0].float(), dim=-1)
    return torch.linalg.lstsq(embedded, wanted).solution.T
