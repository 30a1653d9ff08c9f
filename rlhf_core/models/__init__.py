"""Model folders: checked, prepared once, described without loading weights."""

from rlhf_core.models.architecture import check_architecture
from rlhf_core.models.folder import ModelFacts, check_model_folder, end_tokens
from rlhf_core.models.prepare import prepare_model

__all__ = ["ModelFacts", "check_architecture", "check_model_folder", "end_tokens", "prepare_model"]
