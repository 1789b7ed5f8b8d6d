"""The frozen target: load it, run it, tap its residual stream, rebuild its logits, prove the rebuild right.

Tap id i is the residual stream *entering* decoder layer i (0 = embeddings); id L (the layer count) is the state after
the last block, before the final norm. `last` is always the vector the LM head reads (after the final norm).

    ids      x_0    x_1    x_2
    last     h_0    h_1    h_2        logits(h_t) = the target's distribution of x_{t+1}
    taps[i]  r_0    r_1    r_2        what layer i receives at the same positions
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.embedded import EMBEDDED, embedded_folder
from heads.packed import PackedLinear
from heads.spec import read_spec


class TargetParityError(ValueError):
    """Logits rebuilt from the captured last feature differ from the target's own."""


@dataclasses.dataclass
class TargetSettings:
    """Which target, and how it is loaded."""

    id: str = EMBEDDED  # 'smollm2-135m' (embedded), a folder, or a Hub id
    revision: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False
    packed: bool = True  # oneDNN pre-packed weights on CPU (float32 only)


@dataclasses.dataclass
class TargetOutput:
    last: Tensor  # [B, T, H] after the final norm
    taps: Tensor | None  # [B, T, n, H] in the order asked for


class Target:
    """A frozen causal language model with its tokenizer.

    Raises ValueError when the model has no decoder layers we can tap, no LM head, or a cache that cannot roll back.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, name: str = "in-process", revision: str = "none", packed: bool = False
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = _decoder(model, name)
        self.layers, self.norm = _layers_and_norm(self.decoder, name)
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"target {name!r} has no LM head: drafthead needs a causal language model")
        self.spec = read_spec(self, name, revision)
        self.eos_ids = frozenset(self.spec.eos_ids)
        self._captured: dict[int, Tensor] | None = None
        for i, module in enumerate([*self.layers, self.norm]):
            module.register_forward_pre_hook(self._tap(i), with_kwargs=True)
        self._packed_head: PackedLinear | None = None
        if packed:
            self.pack()

    @classmethod
    def load(cls, settings: TargetSettings, weights: bool = True, chat: bool = True) -> "Target":
        """Load by embedded name, folder or Hub id; without `weights`, all that its `spec` says and nothing to run.

        Raises ValueError when the target is missing, is no decoder, or carries no chat template (where `chat` asks).
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path, name, revision = _resolve(settings)
        options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
        if settings.revision and path == settings.id:
            options["revision"] = settings.revision
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            if weights:
                model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings.dtype), **options)
            else:
                model = _weightless(path, settings, options)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"target.id={settings.id!r} could not be loaded: give {EMBEDDED!r}, a model folder or a Hub id "
                f"that is reachable ({str(error).splitlines()[0]})"
            ) from error
        if chat and not tokenizer.chat_template:
            raise ValueError(
                f"target {settings.id!r} has no chat template: use an instruct model, or put a chat_template.jinja "
                "file into its folder"
            )
        revision = revision or str(getattr(model.config, "_commit_hash", None) or _folder_revision(path))
        return cls(model, tokenizer, name=name, revision=revision, packed=settings.packed and weights)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: torch.device) -> "Target":
        self.model.to(device)
        if self._packed_head is not None:
            self._packed_head.to(device)
        return self

    def forward(
        self,
        ids: Tensor,
        *,
        taps: Sequence[int] = (),
        cache: Any = None,
        positions: Tensor | None = None,
        mask: Tensor | dict[str, Tensor] | None = None,
        grad: bool = False,
    ) -> TargetOutput:
        """One pass over ids [B, T]; 4-D masks [B, 1, T, KV] (heads/masks.py) go straight to attention, None: causal.

        Right padding needs no mask: under a causal mask no real position can see it. `grad` lets gradients through to
        adapters (heads/lora.py); the target's own weights never take any.
        """
        bad = [i for i in taps if not 0 <= i <= self.spec.num_layers]
        if bad:
            raise ValueError(f"taps {bad} lie outside 0..{self.spec.num_layers} of target {self.spec.name!r}")
        grad = grad and torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), self._capturing(bool(taps)) as captured:
            last = self.decoder(
                input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=cache is not None
            ).last_hidden_state
            stacked = torch.stack([captured[i] for i in taps], dim=2) if taps else None
        return TargetOutput(last=last, taps=stacked)

    def logits(self, last: Tensor, rows: Tensor | None = None) -> Tensor:
        """fp32 logits [..., V] (or [..., len(rows)]) of features [..., H]; bias, scale and soft-cap included."""
        if rows is None and self._packed_head is not None:
            logits = self._packed_head(last)
        else:
            weight, bias = self.lm_head(rows)
            logits = F.linear(last.to(weight.dtype), weight, bias)
        return self.finish_logits(logits)

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the model does to its raw LM-head output: fp32, logit scale (Cohere, Granite), soft-cap (Gemma)."""
        logits = logits.float()
        if scale := getattr(self.config, "logit_scale", None):
            logits = logits * scale
        if divisor := getattr(self.config, "logits_scaling", None):
            logits = logits / divisor
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def lm_head(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """LM-head weight [V or len(rows), H] and bias of the target (the embedding matrix where tied)."""
        weight, bias = self.head.weight, getattr(self.head, "bias", None)
        return (weight, bias) if rows is None else (weight[rows], None if bias is None else bias[rows])

    def embed(self, ids: Tensor) -> Tensor:
        """Raw embedding rows [..., H]: never scaled, because serving engines hand a draft head the bare rows."""
        return F.embedding(ids, self.model.get_input_embeddings().weight)

    def check_parity(self, ids: Tensor, tolerance: float = 1e-3) -> float:
        """Largest difference between rebuilt and own logits over ids [B, T], relative to the logits' spread.

        Raises TargetParityError above `tolerance`: training on such a teacher lowers acceptance without any error.
        """
        with torch.no_grad():
            own = self.model(input_ids=ids).logits.float()
        rebuilt = self.logits(self.forward(ids).last)
        if own.shape != rebuilt.shape:
            raise TargetParityError(f"rebuilt logits have shape {tuple(rebuilt.shape)}, target's {tuple(own.shape)}")
        gap = float((own - rebuilt).abs().max() / own.std().clamp_min(1e-6))
        if not gap <= tolerance * (1 if self.spec.dtype == "float32" else 50):
            raise TargetParityError(
                f"teacher parity failed for target {self.spec.name!r}: logits rebuilt from its last feature differ by "
                f"{gap:.3g} of their spread; its final norm, LM head, bias, soft-cap or scale is not reproduced"
            )
        return gap

    def _tap(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._captured is not None:
                self._captured[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    @contextlib.contextmanager
    def _capturing(self, on: bool) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}
        self._captured = captured if on else None
        try:
            yield captured
        finally:
            self._captured = None

    def pack(self) -> None:
        """Take the CPU's fast path through the linears (float32 on CPU only, else nothing changes); for good."""
        if self.spec.dtype != "float32" or self.device.type != "cpu":
            return
        for module in list(self.decoder.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child.weight, child.bias))
        self._packed_head = PackedLinear(*self.lm_head())


def _weightless(path: str, settings: TargetSettings, options: dict[str, Any]) -> Any:
    """The model as `from_pretrained` builds it, its tensors on the meta device: no memory, no weights downloaded."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(path, **options)
    trust = {"trust_remote_code": settings.trust_remote_code}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype), **trust)
    with contextlib.suppress(OSError):  # a model without one: what its config says is all there is
        model.generation_config = GenerationConfig.from_pretrained(path, **options)
    return model


def _decoder(model: Any, name: str) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"target {name!r} is an encoder-decoder: drafthead drafts for decoder-only models")
    return decoder


def _layers_and_norm(decoder: Any, name: str) -> tuple[list[nn.Module], nn.Module]:
    layers = next((getattr(decoder, n) for n in ("layers", "h") if hasattr(decoder, n)), None)
    names = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
    norm = next((getattr(decoder, n) for n in names if hasattr(decoder, n)), None)
    if layers is None or norm is None:
        raise ValueError(f"target {name!r} ({type(decoder).__name__}) shows no decoder layers and final norm to tap")
    return list(layers), norm


def model_place(settings: TargetSettings) -> str:
    """The folder or Hub id under which any other program loads the target."""
    return _resolve(settings)[0]


def _resolve(settings: TargetSettings) -> tuple[str, str, str | None]:
    """(what transformers loads, name for manifests, revision or None to be read from the model)."""
    if settings.id == EMBEDDED:
        folder, digest = embedded_folder()
        return str(folder), EMBEDDED, digest
    looks_local = settings.id.startswith((".", "/", "~")) or Path(settings.id).is_dir()
    path = os.path.expanduser(settings.id) if looks_local else settings.id
    if looks_local and not (Path(path) / "config.json").is_file():
        raise ValueError(f"target.id={settings.id!r}: no model folder there (config.json is missing)")
    return path, Path(path).name if looks_local else settings.id, None


def _folder_revision(path: str) -> str:
    """A content hash of a folder's weight files (names, sizes and the first and last megabyte of each)."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).glob("*.safetensors")) + sorted(Path(path).glob("config.json")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, file.stat().st_size - (1 << 20)))
            digest.update(stream.read())
    return digest.hexdigest()[:16]
