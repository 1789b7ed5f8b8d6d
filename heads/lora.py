"""Low-rank adapters on the target's projections (LoRA, arXiv 2106.09685): how Medusa-2 tunes a backbone.

    y = W x + b                     off: the base target, exactly (B = 0 at start, so at first on is the same)
    y = W x + b + alpha/r * B A x   on; merged: W + alpha/r * B A in place of W

Every `nn.Linear` of the decoder layers gets one (q, k, v, o, gate, up, down; fused ones whole). The embeddings, the LM
head, which may be tied to them and which heads borrow, and expert weights kept in one fused tensor stay as they are.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A frozen linear and its fp32 adapter: a [r, in], b [out, r]."""

    def __init__(self, base: nn.Linear, r: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale, self.on = base, alpha / r, True
        place, fp32 = base.weight.device, torch.float32
        self.a = nn.Parameter(torch.empty(r, base.in_features, device=place, dtype=fp32))
        self.b = nn.Parameter(torch.zeros(base.out_features, r, device=place, dtype=fp32))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if not self.on:
            return y
        return y + (self.scale * F.linear(F.linear(x.float(), self.a), self.b)).to(y.dtype)


class Lora(nn.Module):
    """The adapters of one target, put into it. Its parameters are theirs alone, never the base weights.

    Raises ValueError for a rank below 1 and for a target whose layers hold no `nn.Linear` (packed, or GPT-2's Conv1D).
    """

    def __init__(self, target: Any, r: int, alpha: float) -> None:
        super().__init__()
        if r < 1:
            raise ValueError(f"train.joint.lora_r={r} must be at least 1")
        self.r, self.alpha = r, alpha
        self._places: dict[str, tuple[nn.Module, str, LoRALinear]] = {}  # a plain dict: base weights are not ours
        for i, layer in enumerate(target.layers):
            for name, module in list(layer.named_modules()):
                if type(module) is nn.Linear:
                    path, _, last = name.rpartition(".")
                    self._places[f"layers.{i}.{name}"] = (layer.get_submodule(path), last, LoRALinear(module, r, alpha))
        if not self._places:
            raise ValueError(
                f"target {target.spec.name!r} ({target.spec.architecture}) shows no nn.Linear in its layers for an "
                "adapter: load it with target.packed=false, or train its heads alone with train.joint.mode=null"
            )
        for parent, last, linear in self._places.values():
            setattr(parent, last, linear)
        self.values = nn.ParameterList([p for *_, linear in self._places.values() for p in (linear.a, linear.b)])

    def tensors(self) -> dict[str, Tensor]:
        """What a file of this adapter holds: layers.3.self_attn.q_proj.a, .b, ..."""
        linears = {name: linear for name, (*_, linear) in self._places.items()}
        return {f"{name}.{part}": getattr(linear, part) for name, linear in linears.items() for part in ("a", "b")}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take the values of `tensors`. Raises ValueError naming one that is missing, unknown or of another shape."""
        own = self.tensors()
        for name in sorted(own.keys() | tensors.keys()):
            have, want = (tuple(held[name].shape) if name in held else "none" for held in (tensors, own))
            if have != want:
                raise ValueError(f"adapter tensor {name} is {have}, this target's is {want}: it is another target's")
            own[name].copy_(tensors[name])

    def digest(self) -> str:
        """Of everything that makes the tuned target differ from the base."""
        found = hashlib.sha256(json.dumps([self.r, float(self.alpha)]).encode())
        for name, value in sorted(self.tensors().items()):
            found.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:16]

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """The base target while it lasts."""
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        for *_, linear in self._places.values():
            linear.on = on

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapters to the target's weights and take them out of it."""
        for parent, last, linear in self._places.values():
            weight = linear.base.weight
            weight.copy_(weight.float() + linear.scale * linear.b @ linear.a)
            setattr(parent, last, linear.base)
