"""A ZeRO-3 checkpoint of N ranks for M ranks.

ZeRO-3 cuts every parameter, padded to a multiple of the ranks, into equal parts; rank r's state is the parts number r of all
parameters, one behind the other (in sub-groups, which only cut this list). Joining the ranks' lists parameter by parameter
and cutting them anew loses nothing: the float32 weights and Adam's moments stay what they are, bit by bit.

The new files are made from a template: what the M ranks themselves save before they have learned anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_STATE = "optimizer_state_dict"
_WEIGHTS = "fp32_flat_groups"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def reshard(
    old: Sequence[dict[str, Any]], template: dict[str, Any], sizes: Sequence[int], rank: int, ranks: int
) -> None:
    """Fill the optimizer file ``template`` of rank ``rank`` of ``ranks`` from the optimizer files of all old ranks.

    ``sizes``: elements of each parameter in the optimizer's order. ValueError if the files are not of these parameters.
    """
    states = [file[_STATE] for file in old]
    target = template[_STATE]
    _fill(target[_WEIGHTS], _mine([state[_WEIGHTS] for state in states], sizes, rank, ranks))
    inner, before = target[_STATE], [state[_STATE] for state in states]
    if before[0]["state"]:  # else no step was taken yet, and there are no moments
        step = next(iter(before[0]["state"].values()))["step"]
        inner["state"] = {
            n: {"step": step} | {name: torch.zeros_like(group).detach() for name in _MOMENTS}
            for n, group in enumerate(target[_WEIGHTS])
        }
        for name in _MOMENTS:
            lists = [[group[name] for group in state["state"].values()] for state in before]
            _fill([group[name] for group in inner["state"].values()], _mine(lists, sizes, rank, ranks))
    for new, old_group in zip(inner["param_groups"], before[0]["param_groups"], strict=True):
        new.update({key: value for key, value in old_group.items() if key != "params"})


def _mine(groups: Sequence[Sequence[Tensor]], sizes: Sequence[int], rank: int, ranks: int) -> Tensor:
    """The list of rank ``rank`` of ``ranks``, one flat tensor, from the sub-groups of every old rank."""
    flat = [torch.cat([group.flatten() for group in of_rank]) for of_rank in groups]
    parts, offset = [], 0
    for size in sizes:
        before, after = -(-size // len(flat)), -(-size // ranks)
        whole = torch.cat([values[offset : offset + before] for values in flat])[:size]
        padded = torch.nn.functional.pad(whole, (0, after * ranks - len(whole)))
        parts.append(padded[rank * after : (rank + 1) * after])
        offset += before
    if any(len(values) < offset for values in flat) or offset == 0:
        raise ValueError(
            f"the checkpoint holds {len(flat[0])} elements a rank, the model needs {offset}: another model?"
        )
    return torch.cat(parts)


def _fill(targets: Sequence[Tensor], values: Tensor) -> None:
    """Overwrite the sub-groups in order."""
    room = sum(target.numel() for target in targets)
    if room < len(values):
        raise ValueError(f"{len(values)} elements do not fit into the {room} of this rank: another model?")
    offset = 0
    for target in targets:
        part = values[offset : offset + target.numel()]
        target.view(-1)[: len(part)].copy_(part)
        offset += target.numel()


def optimizer_files(folder: Path) -> Iterator[Path]:
    """The optimizer files of all ranks below ``folder``, in rank order."""
    found = {int(path.name.split("zero_pp_rank_")[1].split("_")[0]): path for path in folder.rglob("*optim_states.pt")}
    for rank in range(len(found)):
        yield found[rank]
