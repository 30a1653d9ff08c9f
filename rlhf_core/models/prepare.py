"""From `model.source` to a checked local folder."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_core.errors import ModelError
from rlhf_core.models import smollm2
from rlhf_core.models.folder import ModelFacts, check_model_folder

__all__ = ["ModelFacts", "check_model_folder", "prepare_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def prepare_model(source: str, revision: str | None, dtype: str, cache: str | Path) -> Path:
    """The local folder of the model, complete and checked.

    ``source``: an existing folder (used as it is), ``builtin:smollm2-135m`` (converted to ``dtype`` once, below
    ``cache``), or a Hugging Face id (downloaded into the hub's own cache). ModelError with the reason and the fix.
    """
    if source.startswith("builtin:"):
        if source != smollm2.NAME:
            raise ModelError(f"model.source = {source!r}: there is no such builtin model; there is {smollm2.NAME!r}")
        if revision is not None:
            raise ModelError(f"model.revision = {revision!r} needs a Hugging Face id, but model.source = {source!r}")
        if dtype not in ("bfloat16", "float32"):
            raise ModelError(f"model.dtype = {dtype!r}: use 'bfloat16' or 'float32'")
        return smollm2.prepare_smollm2(dtype, cache)
    folder = Path(source).expanduser()
    if folder.exists():
        if revision is not None:
            raise ModelError(
                f"model.revision = {revision!r} needs a Hugging Face id, but model.source = {source!r} is "
                "a local folder"
            )
        check_model_folder(folder)
        return folder.absolute()
    if not _HUB_ID.fullmatch(source):
        raise ModelError(
            f"model.source = {source!r} is neither an existing folder nor a Hugging Face id (`owner/name`); looked at "
            f"{str(folder.absolute())!r}"
        )
    downloaded = _download(source, revision)
    check_model_folder(downloaded)
    return downloaded


def _download(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(source, revision=revision, allow_patterns=[*_FILES, "*.safetensors"])
        if not any(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(source, revision=revision, allow_patterns=[*_FILES, "pytorch_model*.bin"])
    except Exception as error:  # boundary: hub, network and disk errors have no common base
        reason = " ".join(str(error).split()).rstrip(".")
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"model.source = {source!r}{at} is no existing folder and could not be downloaded from the Hugging Face "
            f"hub: {type(error).__name__}: {reason}. Check the id, the network and the access token, or name a local "
            f"folder or {smollm2.NAME!r}"
        ) from error
    return Path(folder)
