"""Where a head starts: nothing learned yet, but the target's geometry is known.

random      the papers: every matrix N(0, 0.02) (recurrent heads: fan-in), every norm 1.
target      the layer (query, key, value, output, MLP and its norms) is the target's last one, and what it reads of a
            slot is the feature alone, the embedding's columns being 0:
              eagle3  the feature half of q, k, v; fc passes the last tap; final norm and LM-head rows are the target's
              eagle1  fc passes the feature; the layer lacks the input norm and stands behind the target's final norm,
                      so the norm's weight and the scales measured on a text are folded into its matrices
              mtp     eh_proj passes the feature at the scale of the residual stream; final norm the target's
              block   as many of the target's last layers as it has; fc passes the last tap, whose keys and values in
                      the first layer are then the target's own; MASK is the mean embedding
              mlp, lstm   their own LM head is the target's rows (inner_size = hidden size); the rest stays random
induction   EAGLE-3 only: final norm and LM-head rows are the target's, and attention starts as an in-context bigram:
            the query is the newest token x_{t+1}, the key of slot s is the token x_s (still readable in the lowest
            tap), the value is its successor x_{s+1}. So the head begins by proposing what followed the same token
            before, which copying needs and small budgets do not learn from a random start. Measured in
            docs/experiments.md. The other heads read the last feature, in which x_s is no longer to be found.

Frozen LM heads are the target's rows whatever the start.
"""

import math
from typing import Any

import torch
from torch import Tensor

TARGET_STARTS = ("random", "target")
STARTS = (*TARGET_STARTS, "induction")

_NORM_SCALE = 0.3  # the final norm starts below the target's: unscaled rows start far above the uniform loss
_MATCH_SCORE = 14.0  # attention score of an exact token match; chance matches stay several times below
_SLOW = 2e-3  # radians per token: rotary pairs this slow keep a match a match over a few hundred positions


def check_init(init: str, known: tuple[str, ...]) -> None:
    """Raises ValueError for a start that the head does not have."""
    if init not in known:
        raise ValueError(f"head.init={init!r} must be one of {', '.join(known)}")


@torch.no_grad()
def eagle3(head: Any, target: Any, ids: Tensor) -> None:
    """Start an Eagle3 as its config says; ids [1, T] are any text, to measure the scale of the taps on.

    Raises ValueError when 'target' is asked for and the target's last layer has other parts or shapes.
    """
    if head.config.init != "random" or not head.config.train_lm_head:
        head.lm_head.weight.copy_(target.lm_head(head.target_rows())[0])
    if head.config.init == "random":
        return
    head.norm.weight.copy_(_NORM_SCALE * _plain(target.norm, target))
    if head.config.init == "induction":
        _induction(head, target, ids)
        return
    H = head.norm.weight.shape[0]
    head.fc.weight.zero_()
    head.fc.weight[:, -H:].copy_(torch.eye(H))
    _copy_layer(head.midlayer, target.layers[-1], target, offset=H)
    head.midlayer.hidden_norm.weight.copy_(_norm_of(target, "input_layernorm"))


@torch.no_grad()
def eagle1(head: Any, target: Any, ids: Tensor) -> None:
    """Start an Eagle1 as its config says; raises ValueError as `eagle3` does.

    The target's layer reads norm(r) of a residual stream r and adds to r; here it reads the feature h, whose scale is
    another: queries, keys and values take the norm's weight and 1 / rms(h), and what is added to h is scaled by
    rms(h) / rms(r).
    """
    if head.config.init == "random":
        return
    layer = head.layers[0]
    _copy_layer(layer, target.layers[-1], target, offset=0)
    last_scale, stream_scale = _scales(target, ids)
    read = _norm_of(target, "input_layernorm").to(head.fc.weight) / last_scale
    for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        projection.weight.mul_(read)
    for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
        projection.weight.mul_(last_scale / stream_scale)
    _pass_feature(head.fc, 1.0)


@torch.no_grad()
def mtp(head: Any, target: Any, ids: Tensor) -> None:
    """Start an Mtp as its config says; raises ValueError as `eagle3` does."""
    if head.config.init == "random":
        return
    _copy_layer(head.mtp_block, target.layers[-1], target, offset=0)
    head.mtp_block.input_layernorm.weight.copy_(_norm_of(target, "input_layernorm"))
    head.shared_head["norm"].weight.copy_(_NORM_SCALE * _plain(target.norm, target))
    _pass_feature(head.eh_proj, _scales(target, ids)[1])


@torch.no_grad()
def block(head: Any, target: Any, ids: Tensor) -> None:
    """Start a Block as its config says; raises ValueError as `eagle3` does."""
    if head.config.init == "random":
        return
    if head.lm_head is not None:
        head.lm_head.weight.copy_(target.lm_head(head.target_rows())[0])
    H = head.norm.weight.shape[0]
    sources = target.layers[-len(head.layers) :]
    for layer, source in zip(head.layers, sources, strict=True):
        _copy_layer(layer, source, target, offset=0)
        layer.input_layernorm.weight.copy_(_plain(_part(source, "input_layernorm"), target))
    first = target.spec.num_layers - len(head.layers)  # all fit: only now the target is run
    entered = target.forward(ids, taps=range(first, target.spec.num_layers)).taps
    for layer, source, inputs in zip(head.layers, sources, entered.unbind(2), strict=True):
        _norm_queries_and_keys(layer.self_attn, source, target, inputs)
    head.hidden_norm.weight.copy_(head.layers[0].input_layernorm.weight)
    head.fc.weight.zero_()
    head.fc.weight[:, -H:].copy_(torch.eye(H))
    head.mask_embedding.copy_(target.embed(torch.arange(head.vocab_size, device=target.device)).mean(0))
    head.norm.weight.copy_(_NORM_SCALE * _plain(target.norm, target))


@torch.no_grad()
def recurrent(head: Any, target: Any) -> None:
    """Start the LM heads that a recurrent head owns as its config says."""
    if head.config.init == "target" and head.config.own_lm_head:
        for lm_head in head.head:
            lm_head.weight.copy_(target.lm_head(head.target_rows())[0])


def _pass_feature(projection: Any, scale: float) -> None:
    """[H, 2H] over (embedding, feature) that passes the feature at `scale`."""
    H = projection.out_features
    projection.weight.zero_()
    projection.weight[:, H:].copy_(scale * torch.eye(H))


def _scales(target: Any, ids: Tensor) -> tuple[float, float]:
    """rms over a text of the last feature and of the residual stream behind the last layer."""
    output = target.forward(ids, taps=(target.spec.num_layers,))
    return tuple(float(x.float().pow(2).mean().sqrt()) for x in (output.last, output.taps))  # type: ignore[return-value]


def _plain(norm: Any, target: Any) -> Tensor:
    """A norm's weight as in x / rms(x) * weight; Gemma stores weight - 1, GPT-style LayerNorms leave their bias."""
    return norm.weight + 1 if "gemma" in target.spec.model_type else norm.weight


def _norm_of(target: Any, name: str) -> Tensor:
    return _plain(_part(target.layers[-1], name), target)


def _norm_queries_and_keys(attention: Any, source: Any, target: Any, inputs: Tensor) -> None:
    """The norms behind q and k: the target layer's own, or, where it has none, one scale that keeps their rms.

    inputs [1, T, H]: what enters the target's layer on some text.
    """
    for name in ("q", "k"):
        own = getattr(attention, f"{name}_norm").weight
        if hasattr(source.self_attn, f"{name}_norm"):
            own.copy_(_plain(getattr(source.self_attn, f"{name}_norm"), target))
        else:
            own.fill_(getattr(source.self_attn, f"{name}_proj")(source.input_layernorm(inputs)).pow(2).mean().sqrt())


def _copy_layer(layer: Any, source: Any, target: Any, offset: int) -> None:
    """A layer of the target into `layer`, whose q, k, v read the H columns from `offset` on."""
    attention = layer.self_attn
    pairs = [(f"self_attn.{n}_proj", getattr(attention, f"{n}_proj").weight, n in "qkv") for n in ("q", "k", "v", "o")]
    pairs += [(f"mlp.{n}_proj", getattr(layer.mlp, f"{n}_proj").weight, False) for n in ("gate", "up", "down")]
    for name, own, is_input in pairs:
        theirs = _part(source, name).weight
        if name.endswith(("k_proj", "v_proj")) and theirs.shape[0] != own.shape[0]:
            theirs = _more_kv_heads(theirs, own.shape[0], attention.head_dim)
        view = own[:, offset : offset + theirs.shape[1]] if is_input else own
        if view.shape != theirs.shape:
            raise ValueError(
                f"head.init=target: {name} of the target's layer is {tuple(theirs.shape)}, not "
                f"{tuple(view.shape)}; use head.init=random"
            )
        own.zero_()
        view.copy_(theirs)
    # Gemma-2 and -3 call the norm before their MLP otherwise: their post_attention_layernorm closes the attention
    before_mlp = "pre_feedforward_layernorm" if hasattr(source, "pre_feedforward_layernorm") else None
    layer.post_attention_layernorm.weight.copy_(_plain(_part(source, before_mlp or "post_attention_layernorm"), target))


def _part(layer: Any, name: str) -> Any:
    try:
        return layer.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"head.init=target: the target's layers have no {name}; use head.init=random") from error


def _more_kv_heads(weight: Tensor, rows: int, head_dim: int) -> Tensor:
    """[KV d, H] -> [rows, H]: each key/value head repeated for the query heads it served."""
    KV = weight.shape[0] // head_dim
    if rows % weight.shape[0]:
        return weight
    return weight.view(KV, head_dim, -1).repeat_interleave(rows // weight.shape[0], dim=0).reshape(rows, -1)


def _induction(head: Any, target: Any, ids: Tensor) -> None:
    H, n = head.norm.weight.shape[0], len(head.taps)
    generator = torch.Generator().manual_seed(1)
    rms = head.before_fc(target.forward(ids, taps=head.taps).taps).float().pow(2).mean((0, 1, 3)).sqrt()  # [taps]
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
