"""Whether the installed transformers knows how to train a model."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.errors import ModelError


def check_architecture(folder: str | Path) -> None:
    """ModelError unless transformers reads the folder's config.json and has a causal language model for it."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known_by = f"transformers {transformers.__version__}"
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # boundary: configurations fail in as many ways as there are models
        raise ModelError(
            f"model folder {str(folder)!r}: {known_by} cannot use config.json: {type(error).__name__}: {error}"
        ) from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"model folder {str(folder)!r}: {known_by} has no causal language model for model_type = {config.model_type!r}: "
            "use a model that AutoModelForCausalLM loads"
        )
