"""The files serving engines load, from a trained head, and the round trip that proves them.

Tap ids: this project and vLLM count the state *entering* layer i, SGLang the output of layer i: i - 1.

    taps [2, 15, 27]  ->  eagle_aux_hidden_state_layer_ids [2, 15, 27] (vLLM), eagle_config [1, 14, 26] (SGLang)

EAGLE-3 was read in vLLM 0.32 / 0.33 and SGLang 0.5.23. Medusa is for vLLM up to 0.32: 0.33 removed it, SGLang never had
it.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from heads.eagle3 import Eagle3, Eagle3Config
from heads.layers import HeadInput
from heads.medusa import Medusa, MedusaConfig
from heads.spec import TargetSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = "model.safetensors"


class ExportError(ValueError):
    """A head that engines would refuse, or worse, load and draft nonsense with."""


@dataclasses.dataclass
class Layout:
    """config.json and the tensors beside it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclasses.dataclass
class LMHead:
    """A target's LM head, weight [V, H] and bias: all that a Medusa head needs of its target."""

    weight: Tensor
    bias: Tensor | None = None

    def lm_head(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        bias = self.bias
        return (self.weight, bias) if rows is None else (self.weight[rows], None if bias is None else bias[rows])

    def rounded(self, dtype: str) -> "LMHead":
        return LMHead(self.weight.to(DTYPES[dtype]).float(), self.bias)


def eagle3_layout(head: Eagle3, spec: TargetSpec, dtype: str, sglang: bool = True) -> Layout:
    """Raises ExportError for taps, maps or shapes that engines load without complaint and misread."""
    check_taps(head, spec.num_layers, sglang)
    check_map(head)
    layer = head.layer_config
    # The layer turns all of head_dim; engines obey this key where transformers' Llama does not look at it.
    rope = {key: value for key, value in layer.rope_parameters.items() if key != "partial_rotary_factor"}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    taps = list(head.taps)
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{key: getattr(layer, key) for key in (*same, "rms_norm_eps", "max_position_embeddings")},
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {"use_aux_hidden_state": True}
        | ({"eagle_aux_hidden_state_layer_ids": [i - 1 for i in taps]} if sglang else {}),
    }
    tensors = cast(head.state_dict(), dtype)
    if head.draft_vocab_size == head.vocab_size:
        del tensors["d2t"], tensors["t2d"]  # vLLM raises when a whole vocabulary comes with a map
    return Layout(config, tensors)


def medusa_layout(head: Medusa, spec: TargetSpec, lm_head: LMHead | None, dtype: str) -> Layout:
    """`lm_head` is needed for a shared one. Raises ExportError for what the format cannot say.

    The format has no draft vocabulary (`token_map` is broken there): a shared LM head is written whole.
    """
    V = spec.vocab_size
    tensors = {name: value for name, value in head.state_dict().items() if name.startswith("medusa_heads.")}
    if lm_head is not None:
        if lm_head.bias is not None:
            raise ExportError("the target's LM head has a bias, which the Medusa format cannot hold: export EAGLE-3")
        tensors["lm_head.weight"] = lm_head.weight
    elif head.draft_vocab_size < V:
        raise ExportError(
            f"own Medusa LM heads over {head.draft_vocab_size} of {V} ids cannot be expressed: the format has no draft "
            "vocabulary; train with head.shared_lm_head=true or head.draft_vocab_size=null"
        )
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": spec.hidden_size,
        "vocab_size": V,
        # vLLM takes any key that holds both "num" and "heads" for K: there must be no second one
        "medusa_num_heads": head.config.num_heads,
        "medusa_num_layers": head.config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": head.config.shared_lm_head,
        "torch_dtype": dtype,
    }
    return Layout(config, cast(tensors, dtype))


def check_taps(head: Eagle3, layers: int, sglang: bool) -> None:
    """Engines sort and de-duplicate tap ids and never compare them with `fc`."""
    taps, (rows, columns) = head.taps, head.fc.weight.shape
    if len(taps) != 3 or columns != 3 * rows:
        raise ExportError(
            f"fc.weight is [{rows}, {columns}] and there are {len(taps)} taps {list(taps)}: engines read exactly three "
            f"taps of width {rows}; train with three taps"
        )
    if sglang and taps[0] == 0:
        raise ExportError(
            f"taps {list(taps)} hold 0, the embeddings, which SGLang cannot tap (it counts layer outputs): train with "
            "taps from 1 on, or set sglang=false to export for vLLM only"
        )
    if taps[-1] >= layers:
        raise ExportError(
            f"taps {list(taps)} hold {taps[-1]}, the state after the last of {layers} layers: no engine captures it; "
            f"train with taps below {layers}"
        )


def check_map(head: Eagle3) -> None:
    """The draft ids must be distinct target ids in ascending order, and t2d the same set."""
    ids = head.to_target(torch.arange(head.draft_vocab_size))
    inside = bool(((ids >= 0) & (ids < head.vocab_size)).all())
    if not inside or not torch.equal(ids, head.t2d.nonzero().squeeze(1)):
        raise ExportError("tensors d2t and t2d are not the same ascending target ids: the head folder is damaged")


def cast(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Floating tensors in `dtype`. Raises ExportError naming one that overflows."""
    found = {}
    for name, value in tensors.items():
        found[name] = value.detach().to(DTYPES[dtype]) if value.is_floating_point() else value.detach()
        if value.is_floating_point() and not bool(torch.isfinite(found[name]).all()):
            raise ExportError(f"tensor {name} is not finite in {dtype}: export in bfloat16 or float32")
    return found


def read_eagle3(folder: Path, spec: TargetSpec) -> Eagle3:
    """A fresh head from the written files alone, loaded strictly, computing in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    written = {name: config[name] for name in names}
    # rope as transformers reads it, which is how both engines get it
    rope = dict(LlamaConfig.from_pretrained(folder).rope_parameters)
    own = dataclasses.replace(spec, **written, rope=rope, num_heads=config["num_attention_heads"])
    tensors = load_file(folder / WEIGHTS)
    D, V = config["draft_vocab_size"], config["vocab_size"]
    if D == V:
        tensors |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    settings = Eagle3Config(
        taps=config["eagle_aux_hidden_state_layer_ids"], draft_vocab_size=D, num_kv_heads=config["num_key_value_heads"]
    )
    head = Eagle3(settings, own, (tensors["d2t"], tensors["t2d"]))
    head.load_state_dict(_float32(tensors), strict=True)
    return head.eval()


def read_medusa(folder: Path, spec: TargetSpec) -> Medusa:
    """A fresh head from the written files alone, with the LM head that lies in them."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = _float32(load_file(folder / WEIGHTS))
    K, blocks, shared = config["medusa_num_heads"], config["medusa_num_layers"], config["original_lm_head"]
    head = Medusa(MedusaConfig(num_heads=K, num_layers=blocks, shared_lm_head=shared), spec)
    weight = tensors.pop("lm_head.weight", None)
    head.load_state_dict({**tensors, "d2t": head.d2t, "t2d": head.t2d}, strict=True)
    return (head if weight is None else head.attach(LMHead(weight))).eval()


def _float32(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def round_trip(folder: Path, head: Eagle3 | Medusa, spec: TargetSpec, dtype: str, lm_head: LMHead | None) -> float:
    """Compare the written head with the trained one on random features; returns the largest difference of logits.

    Rounding to `dtype` apart there must be none. Raises ExportError.
    """
    rounded: Any = copy.deepcopy(head)
    rounded.load_state_dict(_float32(cast(head.state_dict(), dtype)))
    written: Any = read_eagle3(folder, spec) if isinstance(head, Eagle3) else read_medusa(folder, spec)
    rows = None
    if isinstance(head, Medusa):
        rows = head.target_rows()
        if lm_head is not None:
            rounded.attach(lm_head.rounded(dtype))
    gap = 0.0
    for ours, exact, theirs in zip(_logits(head, spec), _logits(rounded, spec), _logits(written, spec), strict=True):
        theirs = theirs if rows is None else theirs[..., rows]
        if not torch.allclose(exact, theirs, atol=1e-5, rtol=1e-5):
            raise ExportError(
                f"{folder}: the written head gives other logits than the trained one: nothing was exported"
            )
        gap = max(gap, float((ours - theirs).abs().max()))
    return gap


@torch.no_grad()
def _logits(head: Any, spec: TargetSpec, T: int = 8, steps: int = 3) -> list[Tensor]:
    """Logits of the first steps on fixed random features."""
    generator = torch.Generator().manual_seed(0)
    H, count = spec.hidden_size, len(head.taps)
    last, embeddings = (torch.randn(1, T, H, generator=generator) for _ in range(2))
    taps = torch.randn(1, T, count, H, generator=generator) if count else None
    zeros, slots = torch.zeros(1, T, dtype=torch.int64), torch.arange(T - steps)[None]
    inputs = HeadInput(last, taps, embeddings, torch.arange(T)[None], zeros, slots)
    return [head.logits(hidden, i) for i, hidden in enumerate(head(inputs, min(steps, head.max_draft)))]
