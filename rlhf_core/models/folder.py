"""What a Hugging Face model folder holds, read from its JSON files and the safetensors headers (no torch)."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import ModelError


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a causal language model."""

    architecture: str
    context_length: int
    """Tokens of prompt and response together."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    """Tokens that end a response."""
    pad_id: int | None
    """May equal an EOS id: never mask by it."""
    tied_embeddings: bool
    parameters: int
    """Elements of all stored tensors; estimated from the file size for `.bin` weights."""
    dtype: str | None
    """Type named in config.json."""


def check_model_folder(path: str | Path) -> ModelFacts:
    """Check that the folder has everything training and serving need, and describe it.

    ModelError names what is missing, damaged or unsuitable, and the fix.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"model folder {str(folder)!r} does not exist or is not a folder")
    config = _config(folder)
    _check_tokenizer(folder)
    architecture = _architecture(folder, config)
    generation = _json(folder, "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = tuple(e for e in (eos if isinstance(eos, list) else [eos]) if isinstance(e, int))
    if not eos_ids:
        raise ModelError(
            f"model folder {str(folder)!r}: neither generation_config.json nor config.json has an eos_token_id, so a "
            "response would never end: add it"
        )
    dtype = config.get("dtype") or config.get("torch_dtype")
    return ModelFacts(
        architecture=architecture,
        context_length=_number(folder, config, "max_position_embeddings", "n_positions", "max_sequence_length"),
        vocab_size=_number(folder, config, "vocab_size"),
        eos_ids=eos_ids,
        pad_id=generation.get("pad_token_id", config.get("pad_token_id")),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        parameters=_parameters(folder, dtype),
        dtype=dtype,
    )


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"model folder {str(folder)!r}: {name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"model folder {str(folder)!r}: {name} is not a JSON object")
    return value


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"model folder {str(folder)!r} is an adapter without its base model: merge it into the base model first"
            )
        present = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"model folder {str(folder)!r} has no config.json (it has: {present}): name the folder that "
            "`save_pretrained` wrote"
        )
    config = _json(folder, "config.json")
    if config.get("quantization_config"):
        raise ModelError(
            f"model folder {str(folder)!r} is quantized (quantization_config in config.json) and cannot be trained: "
            "use the unquantized model"
        )
    nested = config.get("text_config")  # multimodal models keep the language model's numbers there
    return {**config, **nested, "architectures": config.get("architectures")} if isinstance(nested, dict) else config


def _architecture(folder: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"model folder {str(folder)!r}: config.json names no architecture: add `architectures`")
    name: str = names[0]
    generates = name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    if not generates or config.get("is_encoder_decoder"):
        raise ModelError(f"model folder {str(folder)!r} holds {name!r}: a policy must be a causal language model")
    return name


def _number(folder: Path, config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"model folder {str(folder)!r}: config.json has no {' or '.join(keys)}: add it")


def _check_tokenizer(folder: Path) -> None:
    def has(name: str) -> bool:
        return (folder / name).is_file()

    vocabulary = has("tokenizer.json") or has("tokenizer.model") or (has("vocab.json") and has("merges.txt"))
    if not vocabulary or not has("tokenizer_config.json"):
        missing = "tokenizer_config.json" if vocabulary else "tokenizer.json"
        raise ModelError(
            f"model folder {str(folder)!r} has no {missing}: copy the tokenizer files of the model into it "
            "(`AutoTokenizer.from_pretrained(...).save_pretrained(folder)`)"
        )
    if not has("chat_template.jinja") and not has("chat_template.json"):
        template = _json(folder, "tokenizer_config.json").get("chat_template")
        if not template:
            raise ModelError(
                f"model folder {str(folder)!r} has no chat template: use an instruction-tuned model, or add "
                "chat_template.jinja"
            )


def _parameters(folder: Path, dtype: str | None) -> int:
    shards = _shards(folder, "*.safetensors", "model.safetensors")
    if shards:
        return sum(_safetensors_elements(shard) for shard in shards)
    shards = _shards(folder, "pytorch_model*.bin", "pytorch_model.bin")
    if shards:
        width = 4 if dtype in ("float32", None) else 2
        return sum(shard.stat().st_size for shard in shards) // width
    raise ModelError(
        f"model folder {str(folder)!r} has no weights (*.safetensors or pytorch_model*.bin): "
        "download or save them into it"
    )


def _shards(folder: Path, pattern: str, whole: str) -> list[Path]:
    """The weight files: the single file, those the index names (all must exist), else what matches the pattern."""
    if (folder / whole).is_file():
        return [folder / whole]
    index = f"{whole}.index.json"
    if not (folder / index).is_file():
        return sorted(folder.glob(pattern))
    names = sorted(set(_json(folder, index).get("weight_map", {}).values()))
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(
                f"model folder {str(folder)!r}: {index} names {name}, which is not there: finish the download or copy"
            )
    return [folder / name for name in names]


def _safetensors_elements(path: Path) -> int:
    """Elements of all tensors by the header: 8 bytes little-endian length, then JSON (safetensors format)."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        tensors = [v for k, v in header.items() if k != "__metadata__"]
        end = 8 + length + max((t["data_offsets"][1] for t in tensors), default=0)
        elements = sum(math.prod(t["shape"]) for t in tensors)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"weights {str(path)!r} are not a safetensors file: {error}; copy the file again") from None
    if end != size:
        raise ModelError(f"weights {str(path)!r} have {size} bytes, but the header says {end}: copy the file again")
    return elements
