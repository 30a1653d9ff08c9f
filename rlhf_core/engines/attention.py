"""What kinds of layers a model has, and the attention masks that each kind needs.

transformers takes a mask as it is: a window is lost where a mask is given, and layers without attention ignore it. So a mask is
built here for every kind of layer, and where a kind cannot be masked, samples cannot share their prompt.

Shapes: B units, T padded width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of a model's layers, sorted; ``window``: tokens that a sliding layer sees, the query's own included."""

    names: tuple[str, ...]
    window: int | None

    @property
    def unmaskable(self) -> tuple[str, ...]:
        """Kinds that let samples behind one prompt see each other, whatever the mask: convolutions, recurrences, chunks."""
        return tuple(name for name in self.names if name not in (_FULL, _SLIDING))

    def masks(self, mask_B1TT: Tensor, positions_BT: Tensor) -> Tensor | dict[str, Tensor]:
        """The mask of each kind, as transformers wants it: one tensor, or a dictionary for a model of several kinds."""
        masks = {name: self._mask(name, mask_B1TT, positions_BT) for name in self.names}
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _mask(self, name: str, mask_B1TT: Tensor, positions_BT: Tensor) -> Tensor:
        if name != _SLIDING or self.window is None:
            return mask_B1TT
        distance_BTT = positions_BT[:, :, None] - positions_BT[:, None, :]
        return mask_B1TT & (distance_BTT < self.window).unsqueeze(1)


def layer_kinds(config: Any) -> LayerKinds:
    """From a transformers configuration."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not kinds:
        kinds = [_FULL if window is None else _SLIDING]
    kinds = [_FULL if kind == "attention" else kind for kind in kinds]
    return LayerKinds(tuple(sorted(set(kinds))), window)


def attention_for(config: Any) -> str | None:
    """The implementation that computes what the configuration says; None: transformers' own choice, SDPA where it is supported.

    SDPA has no place for a soft cap on attention scores and leaves it out without a word.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers that are added to the scores: what eager attention takes."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
