"""From hidden states to logprobs: the model's own way to its logits, with the output layer in float32.

What a model does to its logits (scales, soft caps) stands in its ``forward``. It is called here as it is, with the decoder
replaced by what the decoder has computed already, so nothing of it is repeated.

Shapes: R response tokens, n of one chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.algorithms.logprobs import chunked_head_logprobs
from rlhf_core.errors import ModelError


class LogprobHead(nn.Module):
    """The output layer. It owns the (possibly tied) weight and bias, so that ZeRO-3 gathers them once for all chunks."""

    def __init__(self, model: Any) -> None:
        """ModelError if the model's output layer is not a linear one."""
        super().__init__()
        layer = model.get_output_embeddings()
        if type(layer) is not nn.Linear:
            raise ModelError(
                f"{type(model).__name__}: its output layer is {type(layer).__name__}, which this trainer cannot cut into "
                "chunks: use a model whose output layer is a torch.nn.Linear"
            )
        self.weight = layer.weight
        self.bias = layer.bias
        self._own = _OwnForward(model, self)

    def forward(self, hidden_RD: Tensor, targets_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies, float32 [R]."""
        return chunked_head_logprobs(hidden_RD, self._own.logits, targets_R, temperature)


class _OwnForward:
    """The model's ``forward`` between its decoder and its logits. No module: its parts are the model's and the head's."""

    def __init__(self, model: Any, head: LogprobHead) -> None:
        shell = copy.copy(model)
        layer = model.get_output_embeddings()
        (name,) = [name for name, child in model.named_children() if child is layer]
        replaced: dict[str, Any] = {name: lambda hidden: linear_float32(hidden, head.weight, head.bias)}
        replaced[model.base_model_prefix] = _Computed(model.base_model)
        shell.__dict__["_modules"] = model._modules | replaced
        self._shell = shell

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """[n, V] float32."""
        # Not called as a module: hooks that gather partitioned parameters belong to the real one.
        output = type(self._shell).forward(self._shell, inputs_embeds=hidden_nD.unsqueeze(0), use_cache=False)
        return output.logits.squeeze(0)


class _Computed:
    """In the decoder's place: answers with the hidden states that it is given; its other attributes are the decoder's."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder

    def __call__(self, *, inputs_embeds: Tensor, **_: Any) -> _Output:
        return _Output(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_decoder"], name)


class _Output:
    """What a decoder returns; everything but the hidden states is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def linear_float32(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``hidden @ weight.T + bias`` [..., V] accumulated and returned in float32, whatever the type of the inputs.

    A bfloat16 result would keep 8 bits of each logit, an error of 1/32 for a logit of 10.
    """
    if weight.dtype == torch.float32:
        return nn.functional.linear(hidden, weight, bias)
    flat = _LinearFloat32.apply(hidden.reshape(-1, hidden.shape[-1]), weight)
    logits = flat.view(*hidden.shape[:-1], -1)
    return logits if bias is None else logits + bias.float()


class _LinearFloat32(torch.autograd.Function):
    """[n, D] x [V, D] -> float32 [n, V]. The backward pass is that of the layer in its own type."""

    @staticmethod
    def forward(ctx: Any, hidden_nD: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_nD, weight_VD)
        if hidden_nD.is_cuda:
            return torch.mm(hidden_nD, weight_VD.t(), out_dtype=torch.float32)
        return hidden_nD.float() @ weight_VD.float().t()  # a CPU has no kernel for mixed types

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden_nD, weight_VD = ctx.saved_tensors
        gradient_nV = gradients[0].to(weight_VD.dtype)
        return gradient_nV @ weight_VD, gradient_nV.t() @ hidden_nD
