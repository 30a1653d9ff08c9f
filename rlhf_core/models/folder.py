"""What a Hugging Face model folder holds, read from its JSON files and the safetensors headers (no torch)."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import ModelError

#: How the input embedding of a language model is called at the end of its name, and what else may have one.
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_OTHER_TOWERS = ("vision", "visual", "audio", "encoder")

#: Model types whose every layer keeps the keys and values of every token, unless they use a window.
_PLAIN_CACHE = (
    *("cohere", "gemma", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "phi", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a causal language model."""

    architecture: str
    context_length: int
    """Tokens of prompt and response together."""
    vocab_size: int
    """Token ids that the model knows: 0 to vocab_size - 1."""
    eos_ids: tuple[int, ...]
    """Tokens that end a response."""
    cached_per_token: int | None = None
    """Elements of keys and values that an engine keeps for a token of the context; None where the family is not known to keep
    all of them in every layer."""
    window: int | None = None
    """Tokens that the layer with the shortest sight attends to, where that is not all."""


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
    tensors = _tensors(folder)
    vocab_size = _vocab_size(folder, config, tensors)
    pad = config.get("pad_token_id")
    if isinstance(pad, int) and pad >= vocab_size:
        raise ModelError(
            f"model folder {str(folder)!r}: config.json has pad_token_id = {pad}, but the model knows the token ids 0 to "
            f"{vocab_size - 1}: set it to one of them"
        )
    return ModelFacts(
        architecture=architecture,
        context_length=_number(folder, config, "max_position_embeddings", "n_positions", "max_sequence_length"),
        vocab_size=vocab_size,
        eos_ids=_eos_ids(folder, config, generation, vocab_size),
        cached_per_token=_cached_per_token(config),
        window=_window(config),
    )


def _first(*values: Any) -> Any:
    """The first value that is not null: a file may name a key and leave it empty."""
    return next((value for value in values if value is not None), None)


def end_tokens(path: str | Path) -> tuple[int, ...]:
    """Ids of the tokens that end a response, from config.json and generation_config.json alone. ModelError as above."""
    folder = Path(path).expanduser()
    config = _config(folder)
    generation = _json(folder, "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    return _eos_ids(folder, config, generation, _number(folder, config, "vocab_size"))


def _eos_ids(folder: Path, config: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    eos = _first(generation.get("eos_token_id"), config.get("eos_token_id"))
    ids = tuple(e for e in (eos if isinstance(eos, list) else [eos]) if isinstance(e, int))
    if not ids:
        raise ModelError(
            f"model folder {str(folder)!r}: neither generation_config.json nor config.json has an eos_token_id, so a "
            "response would never end: add it"
        )
    known = tuple(e for e in ids if e < vocab_size)
    if not known:
        raise ModelError(
            f"model folder {str(folder)!r}: eos_token_id = {eos}, but the model knows the token ids 0 to {vocab_size - 1}, "
            "so a response would never end: name one that it knows"
        )
    return known


def _vocab_size(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> int:
    said = _number(folder, config, "vocab_size")
    for name, shape in tensors.items():
        if name.endswith(_EMBEDDINGS) and not any(part in name for part in _OTHER_TOWERS) and shape[:1] != (said,):
            raise ModelError(
                f"model folder {str(folder)!r}: config.json has vocab_size = {said}, but {name} has shape {list(shape)}: "
                "save config and weights from one model"
            )
    return said


def _cached_per_token(config: dict[str, Any]) -> int | None:
    windows = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if config.get("model_type") not in _PLAIN_CACHE or windows:
        return None
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        return None
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    hidden = config.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int) and heads > 0):
        return None
    width = _first(config.get("head_dim"), hidden // heads)
    return int(2 * layers * _first(config.get("num_key_value_heads"), heads) * width)


def _window(config: dict[str, Any]) -> int | None:
    limits = [config.get("attention_chunk_size")]
    if config.get("use_sliding_window", True):
        limits.append(config.get("sliding_window"))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


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


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors by name; empty for `.bin` weights, which have to be loaded to be known."""
    found: dict[str, tuple[int, ...]] = {}
    for shard in _shards(folder, "*.safetensors", "model.safetensors"):
        found |= _safetensors_shapes(shard)
    if not found and not _shards(folder, "pytorch_model*.bin", "pytorch_model.bin"):
        raise ModelError(
            f"model folder {str(folder)!r} has no weights (*.safetensors or pytorch_model*.bin): "
            "download or save them into it"
        )
    return found


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


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by the header: 8 bytes little-endian length, then JSON (safetensors format)."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"weights {str(path)!r} are not a safetensors file: {error}; copy the file again") from None
    if end != size:
        raise ModelError(f"weights {str(path)!r} have {size} bytes, but the header says {end}: copy the file again")
    return shapes
