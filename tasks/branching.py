"""Reruns and forks: a new branch that begins at a stage and shares everything before it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rlhf_core import layout
from rlhf_core.config import RunConfig, contradictions, override_config, parse_config
from rlhf_core.errors import ConfigError, NotCommitted
from rlhf_core.lease import Holder, Lease
from rlhf_core.lineage import Lineage, load_lineage, require_reached, start_branch, start_revision
from rlhf_core.manifests import STAGES, ParentRef, RunRecord
from rlhf_core.ports import ObjectStore
from rlhf_core.records import find_record
from tasks.progress import newest_checkpoint, planned_iterations
from tasks.retention import require_experience
from tasks.runs import load_config_of, open_named_store

#: Stages that a rerun or fork may begin with. The commit stage only writes down what the others did.
FIRST_STAGES = STAGES[:-1]

#: Keys of which a fork needs the parent's values, because it shares prompts and weights.
_SHARED = ("model", "prompts", "seed", "storage.url")


def rerun(store_url: str, run: str, iteration: int, stage: str, request: str = "") -> RunConfig:
    """Make the run begin anew at ``stage`` of ``iteration``, as a new revision; returns the configuration to train with.

    What was there stays, as the branch before. ConfigError for a stage that is none, NotCommitted if the run has not got
    there, RunLocked while it is driven. ``request``: a second call with the same one changes nothing.
    """
    store = open_named_store(store_url)
    _checked(store, run, iteration, stage)
    holder = Holder.current()
    with Lease.acquire(store, run, holder):
        lineage = load_lineage(store, run)
        parent = ParentRef(run=lineage.head, iteration=iteration, stage=stage)
        require_replayable(store, lineage, iteration, stage)
        start_revision(store, lineage, parent, str(holder), request)
    return load_config_of(store_url, run)


def fork(store_url: str, run: str, iteration: int, stage: str, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Start run ``name`` with what ``run`` has committed before ``stage`` of ``iteration``, without copying it.

    ``overrides`` (``section.key=value``) hold from that stage on. ConfigError for a name that is taken by another run or
    for keys that cannot differ, NotCommitted if the parent has not got there. Repeating a fork changes nothing.
    """
    store = open_named_store(store_url)
    lineage = _checked(store, run, iteration, stage)
    parent = ParentRef(run=lineage.head, iteration=iteration, stage=stage)
    config = override_config(parse_config(lineage.record.config, origin=f"run {run}"), overrides)
    config = config.model_copy(update={"run": name})
    _require_shared(lineage, config)
    if "iterations" not in {item.partition("=")[0].strip() for item in overrides}:
        config = config.model_copy(update={"iterations": max(planned_iterations(store, lineage), iteration + 1)})
    record = RunRecord(
        run=layout.check_run(name),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        config=config.model_dump(mode="json"),
        versions=lineage.record.versions,
        prompts=lineage.record.prompts,
        parent=parent,
    )
    existing = find_record(store, layout.run_record(name), RunRecord)
    if existing is None:
        start_branch(store, record)  # before the check: from here on retention sees what the fork shares
        try:
            require_replayable(store, load_lineage(store, name), iteration, stage)
        except NotCommitted:
            store.delete([layout.run_record(name)])
            raise
    elif (existing.parent, existing.config) != (parent, record.config):
        raise ConfigError(f"run {name!r} exists already and is not this fork: choose another name (--run NAME)")
    return load_config_of(store_url, name)


def require_replayable(store: ObjectStore, lineage: Lineage, iteration: int, stage: str) -> None:
    """NotCommitted if the policy version that ``stage`` begins with cannot be restored any more."""
    version = iteration + (STAGES.index(stage) > STAGES.index("update"))
    ranks = int(lineage.owner(iteration, stage).config["resources"]["trainer_ranks"])
    checkpoint = newest_checkpoint(store, lineage, version, ranks)
    require_experience(store, lineage, range(checkpoint.policy_version if checkpoint else 0, version))
    if STAGES.index(stage) > 0:
        require_experience(store, lineage, [iteration])


def _checked(store: ObjectStore, run: str, iteration: int, stage: str) -> Lineage:
    if stage not in FIRST_STAGES:
        raise ConfigError(f"stage {stage!r}: name one of {', '.join(FIRST_STAGES)}")
    if iteration < 0:
        raise ConfigError(f"iteration {iteration}: iterations count from 0")
    lineage = load_lineage(store, run)
    require_reached(store, lineage, iteration, stage)
    return lineage


def _require_shared(lineage: Lineage, config: RunConfig) -> None:
    before = parse_config(lineage.record.config)
    wrong = [
        line
        for line in contradictions(before, config, changeable=())
        if any(line.startswith((f"{key}:", f"{key}.")) for key in _SHARED)
    ]
    if wrong:
        raise ConfigError(
            "a fork shares the parent's prompts and weights, so these cannot change:\n"
            + "\n".join(f"  {line}" for line in wrong)
            + "\nstart a run of its own instead: rlhf train"
        )
