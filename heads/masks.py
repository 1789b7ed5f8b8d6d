"""Which attention masks a target takes: windowed where its layers are, one for each kind of layer, bool or additive."""

from collections.abc import Callable

import torch
from torch import Tensor

from heads.target import Target

# transformers hands the layers the mask of their kind; kinds beside these keep a state that no mask can cut.
KINDS = {"full_attention", "sliding_attention"}


class LayerMasks:
    """Facts of one target's attention, and masks in the form it takes.

    Raises ValueError for layers of another kind (recurrent, chunked); `needs` says what cannot be done with them.
    """

    def __init__(self, target: Target, needs: str) -> None:
        config, name = target.config, target.spec.name
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if bad := sorted(kinds - KINDS):
            raise ValueError(
                f"target {name!r} has layers of type {', '.join(bad)}: {needs}; use a target with full or "
                "sliding-window attention only"
            )
        self.kinds = kinds
        self.window: int | None = getattr(config, "sliding_window", None)
        if "sliding_attention" in kinds and self.window is None:
            raise ValueError(f"target {name!r} has sliding-window layers but its config gives no sliding_window")
        # Mistral: all layers slide, and no list of kinds says so
        everywhere = not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True)
        self.slides = kinds == {"sliding_attention"} or (everywhere and self.window is not None)
        self.additive = getattr(config, "_attn_implementation", "sdpa") == "eager"
        self.dtype = next(target.model.parameters()).dtype

    def __call__(self, seen: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
        """Mask, or a dict by kind of layer, from `seen(window)`: bool [B, 1, T, KV], window None where all is seen."""
        if len(self.kinds) > 1:
            return {kind: self._form(seen(self._window(kind == "sliding_attention"))) for kind in sorted(self.kinds)}
        mask = self._form(seen(self._window(self.slides)))
        return {"sliding_attention": mask} if self.kinds == {"sliding_attention"} else mask

    def _window(self, slides: bool) -> int | None:
        return self.window if slides else None

    def _form(self, seen: Tensor) -> Tensor:
        if not self.additive:
            return seen
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill(~seen, lowest)


def document_masks(layers: LayerMasks, documents: Tensor) -> Tensor | dict[str, Tensor]:
    """Masks of packed rows, documents [B, T]: position t sees s <= t of its own document, inside the window.

    documents 0 0 1 1 -1      row 3 sees 2 and 3; padding sees padding, so that no row of the softmax is empty
    """
    T = documents.shape[1]
    at = torch.arange(T, device=documents.device)
    same = documents[:, :, None] == documents[:, None, :]

    def seen(window: int | None) -> Tensor:
        near = at[None, :] <= at[:, None]
        if window is not None:
            near = near & (at[None, :] > at[:, None] - window)
        return (same & near)[:, None]

    return layers(seen)
