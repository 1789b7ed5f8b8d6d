"""A draft model made of the target's own first layers: the stand-in where no small model of the family is at hand.

LayerSkip (Elhoushi et al., arXiv 2404.16710) drafts with the early layers of a model trained for it; a target that was
not trained for it drafts far worse so. The layers, the norm and the LM head are the target's own objects: nothing is
copied, and packed linears stay packed.
"""

import copy
from typing import Any

from torch import nn

from heads.target import Target


def truncated(target: Target, layers: int) -> Target:
    """The target without its layers from `layers` on. Raises ValueError where that leaves none out, or nothing."""
    L = target.spec.num_layers
    if not 1 <= layers < L:
        raise ValueError(f"draft_model.layers={layers}: give 1 to {L - 1}, fewer layers than the target's {L}")
    model, decoder = _shallow(target.model), _shallow(target.decoder)
    name = next(name for name in ("layers", "h") if hasattr(decoder, name))
    setattr(decoder, name, nn.ModuleList(target.layers[:layers]))
    for module in (model, decoder):
        module.config = copy.deepcopy(target.model.config)
        text = module.config.get_text_config(decoder=True)
        text.num_hidden_layers = layers
        if kinds := getattr(text, "layer_types", None):
            text.layer_types = kinds[:layers]
    _replace(model, target.decoder, decoder)
    draft = Target(model, target.tokenizer, f"first {layers} of {L} layers of {target.spec.name}", target.spec.revision)
    draft._packed_head = target._packed_head
    return draft


def _shallow(module: Any) -> Any:
    """The same module with tables of its own for submodules and hooks; parameters are shared."""
    twin = copy.copy(module)
    for name, table in vars(module).items():
        if name == "_modules" or "hooks" in name:
            setattr(twin, name, type(table)(table) if name == "_modules" else type(table)())
    return twin


def _replace(model: Any, old: nn.Module, new: nn.Module) -> None:
    """Put `new` where `old` stands directly below a model."""
    for name, child in model._modules.items():
        if child is old:
            model._modules[name] = new
            return
    raise ValueError(f"{type(model).__name__} does not hold its decoder directly: give a draft model's folder instead")
