"""From a model's parameters to the tensors of its checkpoint: transformers may rename and join them when it loads (experts are one
parameter a layer in memory and many tensors in the file). Engines and exports know the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import ModelError


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint: the parameter that holds it, and its shape."""

    parameter: str
    shape: tuple[int, ...]


class CheckpointNames:
    """Translates the parameters of a transformers model, each on its own, with transformers' own rules for saving."""

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """``shapes``: of all parameters by their names in the model, whole. ModelError if a tensor of the checkpoint is made of
        several parameters."""
        self._model = model
        self.tensors: dict[str, StoredTensor] = {}
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        for name, tensor in empty.items():
            parts = self._revert({name: tensor})
            self.tensors |= {stored: StoredTensor(name, tuple(part.shape)) for stored, part in parts.items()}
        together = {stored: tuple(part.shape) for stored, part in self._revert(empty).items()}
        if together != {stored: part.shape for stored, part in self.tensors.items()}:
            raise ModelError(
                f"{type(model).__name__}: its checkpoint joins what are several parameters in memory, so its weights cannot be "
                "handed over one by one: use another model"
            )
        self._moved = {part.parameter for stored, part in self.tensors.items() if stored != part.parameter}

    def parts(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors that these whole parameters hold; views where that is possible."""
        result: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            result |= self._revert({name: parameter}) if name in self._moved else {name: parameter}
        return result

    def _revert(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, parameters)
