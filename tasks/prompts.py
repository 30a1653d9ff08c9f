"""The prompts of a run: read from their source before it begins, and from the store ever after."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config import RunConfig
from rlhf_core.errors import PromptError
from rlhf_core.manifests import PromptsManifest, RunRecord
from rlhf_core.models import ModelFacts
from rlhf_core.ports import ObjectStore
from rlhf_core.prompts.readers import is_gone, names_files
from rlhf_core.prompts.source import Prompt, load_prompts, split_heldout
from rlhf_core.prompts.table import PromptTable, rows_of, write_prompts
from rlhf_core.prompts.tokenize import tokenize_prompts
from rlhf_core.prompts.vocabulary import check_vocabulary


def read_source(config: RunConfig) -> list[Prompt]:
    """All prompts of the source, of which as many as asked for can be held out. PromptError."""
    prompts = load_prompts(config.prompts, config.seed)
    split_heldout(prompts, config.prompts.heldout, config.seed)
    return prompts


def store_prompts(
    store: ObjectStore, config: RunConfig, folder: Path, facts: ModelFacts, context: int, prompts: list[Prompt]
) -> PromptsManifest:
    """Tokenize with the model in ``folder``, leave out what is too long, split, and store.

    ``context``: longest sequence of the engine, in tokens. PromptError for prompts that do not fit, ModelError for tokens that
    the model does not know.
    """
    table, dropped = tokenize_prompts(
        prompts, folder, config.prompts, context=context, max_new_tokens=config.generate.max_new_tokens
    )
    check_vocabulary(table, folder, facts.vocab_size)
    kept = set(table["prompt_id"].to_pylist())
    try:
        train, heldout = split_heldout([p for p in prompts if p.prompt_id in kept], config.prompts.heldout, config.seed)
    except PromptError as error:
        raise PromptError(f"{error}, or a higher limit: {dropped.num_rows} prompts were dropped as too long") from None
    return PromptsManifest(
        train=write_prompts(store, config.run_id, "train", rows_of(table, train)),
        heldout=write_prompts(store, config.run_id, "heldout", rows_of(table, heldout)) if heldout else None,
        dropped=write_prompts(store, config.run_id, "dropped", dropped) if dropped.num_rows else None,
    )


def dropped_notes(config: RunConfig, manifest: PromptsManifest) -> list[str]:
    """What to tell about prompts that were left out."""
    if manifest.dropped is None:
        return []
    held = manifest.heldout.rows if manifest.heldout else 0
    return [
        f"prompts of {config.prompts.source!r} that are too long and were dropped (prompts.too_long = 'drop'): "
        f"{manifest.dropped.rows}; left for training: {manifest.train.rows}, held out: {held}"
    ]


def recorded_prompts(store: ObjectStore, record: RunRecord) -> list[Prompt]:
    """The prompts that the run trains on, from the store."""
    return PromptTable(store, record.prompts.train).prompts()


def source_notes(store: ObjectStore, config: RunConfig, record: RunRecord) -> list[str]:
    """What to tell about the source of a run that has begun: that it is gone, or differs. What is recorded counts.

    A data set of a hub is not asked for again.
    """
    source = config.prompts.source
    if source == "arithmetic" or not names_files(source):
        return []
    if is_gone(source):
        return [f"prompts.source = {source!r} is gone: the run goes on with the prompts that it began with"]
    try:
        found = load_prompts(config.prompts, config.seed)
    except PromptError as error:
        return [f"the run goes on with the prompts that it began with, but their source has become unusable: {error}"]
    differences = _differences(store, record.prompts, found)
    if not differences:
        return []
    return [
        f"prompts.source = {source!r} has changed since the run began ({', '.join(differences)}): the run goes on with the "
        "prompts that it began with; give it another name (--run NAME) to begin with the new ones"
    ]


def _differences(store: ObjectStore, manifest: PromptsManifest, found: list[Prompt]) -> list[str]:
    heldout = PromptTable(store, manifest.heldout).prompts() if manifest.heldout else []
    before = {p.prompt_id: p for p in [*PromptTable(store, manifest.train).prompts(), *heldout]}
    dropped = set(PromptTable(store, manifest.dropped).ids) if manifest.dropped else set()
    now = {p.prompt_id: p for p in found if p.prompt_id not in dropped}
    held = {p.prompt_id.partition("-")[0] for p in heldout}  # what repeats a held-out prompt is stored nowhere
    new = sum(name not in before and name.partition("-")[0] not in held for name in now)
    gone = len(before.keys() - now.keys())
    altered = sum(
        (now[name].answer, now[name].metadata) != (p.answer, p.metadata) for name, p in before.items() if name in now
    )
    counts = (("new", new), ("gone", gone), ("with another answer or other columns", altered))
    return [f"{what}: {count}" for what, count in counts if count]
