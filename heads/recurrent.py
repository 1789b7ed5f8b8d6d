"""Recurrent speculators: a state is carried from token to token, without attention and without a cache.

MLP speculator (Wertheimer et al., arXiv 2404.19124; fms-extras `speculator.py`), n heads, W, emb, norm and LM head of
each head its own or tied over heads:

    s_t^i = GELU(norm(W_i s_t^{i-1} + c emb(x_{t+1+i})))         s_t^{-1} = h_t, the target's last feature
    logits = LM head_i (s_t^i)                                    predicts x_{t+2+i}

LSTM speculator (Arctic; ArcticTraining `sum_lstm`), tied over heads: every gate reads W_i s + c emb(x),

    cell = sigmoid(forget) cell + sigmoid(input) GELU(norm(candidate));   s = sigmoid(output) GELU(norm(cell))

c keeps the feature's share of the state at one half by the last head: a_s^2 = 2^(-1/n) of the variance comes from the
state and 1 - a_s^2 from the token. The published code learns an embedding table per head; here `emb` projects the
target's own rows, normed, which costs H x inner_size parameters in place of V x inner_size.
"""

import abc
import dataclasses
import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads import starts
from heads.base import Head, gather_slots, shift
from heads.borrowed import BorrowedLMHead
from heads.layers import HeadInput, LayerCache
from heads.spec import TargetSpec

_EPS = 1e-6


@dataclasses.dataclass
class RecurrentConfig:
    num_heads: int = 3  # tokens drafted, as published for 7B
    inner_size: int | None = None  # width of the state; None: the target's hidden size
    scale_input: bool = True  # norm the feature first: its scale is the target's own
    own_lm_head: bool = True  # False: the target's LM head, frozen, behind a projection of the state
    draft_vocab_size: int | None = None
    init: str = "random"  # random | target: own LM heads start as the target's rows, see heads/starts.py


@dataclasses.dataclass
class MlpConfig(RecurrentConfig):
    kind: str = "mlp"
    tie_weights: bool = False  # one embedding, norm and LM head for all heads, one W for all but the first


@dataclasses.dataclass
class LstmConfig(RecurrentConfig):
    kind: str = "lstm"
    tie_embeddings: bool = True  # one embedding for the four gates


class StateNorm(nn.Module):
    """x / rms(x) * weight + bias in fp32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), _EPS) + self.bias).to(x.dtype)


class Recurrent(Head, abc.ABC):
    """What both have in common: the walk over steps, the scales and the LM heads.

    Raises ValueError for a wrong setting, or a reduced vocabulary without its map.
    """

    def __init__(
        self, config: Any, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None, *, state_parts: int, lm_heads: int
    ) -> None:
        starts.check_init(config.init, starts.TARGET_STARTS)
        inner = spec.hidden_size if config.inner_size is None else config.inner_size
        if config.num_heads < 1 or inner < 1:
            raise ValueError(f"head.num_heads={config.num_heads} and head.inner_size={inner} must be >= 1")
        if config.init == "target" and config.own_lm_head and inner != spec.hidden_size:
            raise ValueError(
                f"head.init=target copies LM-head rows of width {spec.hidden_size}: leave head.inner_size empty "
                f"instead of {inner}, or use head.init=random"
            )
        n = config.num_heads
        super().__init__(config, spec, vocab, taps=(), max_draft=n, train_steps=n)
        self.hidden_size, self.inner_size, self.state_size = spec.hidden_size, inner, state_parts * inner
        share = 0.5 ** (1.0 / n)  # of the variance that stays with the state at each step
        self.token_scale = math.sqrt((1.0 - share) / share / 2)  # / 2: GELU halves the variance of the state
        if config.own_lm_head:
            self.head = nn.ModuleList([nn.Linear(inner, self.draft_vocab_size, bias=False) for _ in range(lm_heads)])
        else:
            self.out = nn.Linear(inner, spec.hidden_size, bias=False)
        self._lm_head: BorrowedLMHead | None = None

    def draw(self) -> None:
        """Fan-in start, as fms-extras: with it the scales above hold."""
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=part.in_features**-0.5)

    def attach(self, target: Any) -> Self:
        if not self.config.own_lm_head:
            self._lm_head = BorrowedLMHead(self, target)
        return self

    def pack_lm_head(self) -> None:
        if self._lm_head is not None:
            self._lm_head.pack()

    def init_from(self, target: Any, ids: Tensor) -> None:
        starts.recurrent(self, target)

    def feature(self, last: Tensor, taps: Tensor | None) -> Tensor:
        """The target's last feature, normed to half the variance of a unit vector's parts where asked."""
        last = last.float()
        return F.rms_norm(last, last.shape[-1:], eps=_EPS) / math.sqrt(2) if self.config.scale_input else last

    def token(self, embedding: Tensor) -> Tensor:
        """Embedding rows normed: targets differ in their scale by orders of magnitude."""
        return F.rms_norm(embedding.float(), embedding.shape[-1:], eps=_EPS)

    def forward(self, inputs: HeadInput, steps: int) -> list[Tensor]:
        """States of the first `steps` steps, each [B, S, state], at the slots of `inputs`, teacher-forced."""
        cache = self.new_cache()
        state = self.feature(gather_slots(inputs.last, inputs.slots), None)
        states: list[Tensor] = []
        for step in range(steps):
            embedding = gather_slots(shift(inputs.embeddings, 1 + step), inputs.slots)
            state = self.advance(cache, state, embedding, step)
            states.append(state)
        return states

    @abc.abstractmethod
    def advance(self, cache: LayerCache, feature: Tensor, embedding: Tensor, step: int = 0) -> Tensor:
        """The state after one more token, [B, n, state]; nothing is kept, so `cache` stays as it is."""

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """fp32 draft logits [..., D] of a state."""
        state = hidden[..., : self.inner_size]
        if self.config.own_lm_head:
            return self.head[min(step, len(self.head) - 1)](state).float()
        assert self._lm_head is not None, "attach(target) first: the LM head is the target's"
        return self._lm_head(self.out(state))


class Mlp(Recurrent):
    """The MLP speculator."""

    def __init__(self, config: MlpConfig, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        n, tied = config.num_heads, config.tie_weights
        super().__init__(config, spec, vocab, state_parts=1, lm_heads=1 if tied else n)
        H, inner = self.hidden_size, self.inner_size
        self.proj = nn.ModuleList(
            [nn.Linear(H if i == 0 else inner, inner, bias=False) for i in range(min(n, 2) if tied else n)]
        )
        self.emb = nn.ModuleList([nn.Linear(H, inner, bias=False) for _ in range(1 if tied else n)])
        self.ln = nn.ModuleList([StateNorm(inner) for _ in range(1 if tied else n)])
        self.draw()

    def advance(self, cache: LayerCache, feature: Tensor, embedding: Tensor, step: int = 0) -> Tensor:
        proj, emb, norm = (parts[min(step, len(parts) - 1)] for parts in (self.proj, self.emb, self.ln))
        return F.gelu(norm(proj(feature) + self.token_scale * emb(self.token(embedding))))


class Lstm(Recurrent):
    """The LSTM speculator; its state is cat(state, cell). The first step has no cell yet, so nothing to forget."""

    def __init__(self, config: LstmConfig, spec: TargetSpec, vocab: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__(config, spec, vocab, state_parts=2, lm_heads=1)
        H, inner = self.hidden_size, self.inner_size
        gates = [nn.Linear(H, 3 * inner, bias=False), nn.Linear(inner, 4 * inner, bias=False)]
        self.proj = nn.ModuleList(gates[: config.num_heads])  # rows: input, candidate, output, forget
        rows = 1 if config.tie_embeddings else 3 if config.num_heads == 1 else 4
        self.emb = nn.Linear(H, rows * inner, bias=False)
        self.cell_ln, self.state_ln = StateNorm(inner), StateNorm(inner)
        self.draw()

    def advance(self, cache: LayerCache, feature: Tensor, embedding: Tensor, step: int = 0) -> Tensor:
        gates = self.proj[min(step, 1)](feature[..., : self.inner_size] if step else feature)
        token = self.token_scale * self.emb(self.token(embedding))
        rows = gates.shape[-1]
        token = token.tile(rows // self.inner_size) if self.config.tie_embeddings else token[..., :rows]
        taken, candidate, given, *kept = (gates + token).split(self.inner_size, dim=-1)
        cell = taken.sigmoid() * F.gelu(self.cell_ln(candidate))
        if step:
            cell = cell + kept[0].sigmoid() * feature[..., self.inner_size :]
        return torch.cat([given.sigmoid() * F.gelu(self.state_ln(cell)), cell], dim=-1)
