"""Write the trained policy as a plain Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Bytes of one safetensors file.
_FILE_BYTES = 4 << 30
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


def write_hf_folder(state: dict[str, Tensor], model: str, folder: str) -> None:
    """Weights from ``state``, everything else (config, tokenizer, chat template) from the folder ``model``.

    The folder appears whole or not at all; an older export at the same place is replaced.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{os.getpid()}.part"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    for source in sorted(Path(model).iterdir()):
        if source.is_file() and not source.name.endswith(_WEIGHTS):
            shutil.copy2(source, staging / source.name)
    files = _split(state)
    if len(files) == 1:
        save_file(state, staging / "model.safetensors", metadata={"format": "pt"})
    else:
        index: dict[str, str] = {}
        for number, names in enumerate(files, 1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            save_file({n: state[n] for n in names}, staging / name, metadata={"format": "pt"})
            index |= dict.fromkeys(names, name)
        total = sum(t.numel() * t.element_size() for t in state.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (staging / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    staging.replace(target)


def _split(state: dict[str, Tensor]) -> list[list[str]]:
    files: list[list[str]] = [[]]
    used = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if files[-1] and used + size > _FILE_BYTES:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files
