"""Reruns and forks: a new branch that begins at a stage and shares everything before it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rlhf_core import layout
from rlhf_core.config import (
    RunConfig,
    config_fields,
    contradictions,
    past_config,
    stored_config,
)
from rlhf_core.errors import ConfigError, NotCommitted
from rlhf_core.lease import Holder, Lease
from rlhf_core.lineage import Lineage, load_lineage, require_reached, start_branch, start_revision
from rlhf_core.manifests import STAGES, ParentRef, RunRecord
from rlhf_core.ports import ObjectStore
from rlhf_core.records import find_record
from tasks.progress import newest_checkpoint, next_stage, planned_iterations
from tasks.retention import require_experience
from tasks.runs import load_config_of, open_named_store

#: Stages that a rerun or fork may begin with. The commit stage only writes down what the others did.
FIRST_STAGES = STAGES[:-1]

#: Keys of which a fork needs the parent's values, because it shares prompts and weights.
_SHARED = ("model", "prompts", "seed", "storage.url")

#: Stages that read rollouts of the same iteration, and what a fork that begins there shares with them.
_READ_ROLLOUTS = ("score", "advantages", "update")
_SAMPLED_WITH = ("generate.prompts_per_iteration", "generate.samples_per_prompt", "generate.temperature")


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
        # The number that was asked for last belongs to the head of before.
        planned = max(planned_iterations(store, lineage), iteration + 1)
        start_revision(store, lineage, parent, str(holder), request, {"iterations": planned})
    return load_config_of(store_url, run)


def change_topology(store_url: str, run: str, overrides: Sequence[str]) -> RunConfig:
    """Let the run go on where it stands with other ``resources``, as a new revision; returns its configuration.

    Nothing is generated, scored or trained twice. The updates from here on are not bit by bit what they would have been:
    another number of ranks or threads adds gradients in another order. ConfigError for keys outside ``resources``.
    """
    store = open_named_store(store_url)
    lineage = load_lineage(store, run)
    before, config = past_config(lineage.record), stored_config(lineage.record, overrides)
    others = [line for line in contradictions(before, config, changeable=("resources",)) if line]
    if others or config.resources == before.resources:
        what = "\n".join(f"  {line}" for line in others) or "  nothing changes"
        raise ConfigError(f"a new topology changes keys of `resources` and nothing else, but here:\n{what}")
    holder = Holder.current()
    with Lease.acquire(store, run, holder):
        iteration, stage = next_stage(store, lineage)
        require_replayable(store, lineage, iteration, stage)
        parent = ParentRef(run=lineage.head, iteration=iteration, stage=stage)
        planned = max(planned_iterations(store, lineage), iteration + 1)
        changes = {"iterations": planned, "resources": config.model_dump(mode="json")["resources"]}
        start_revision(store, lineage, parent, str(holder), changes=changes)
    return load_config_of(store_url, run)


def fork(store_url: str, run: str, iteration: int, stage: str, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Start run ``name`` with what ``run`` has committed before ``stage`` of ``iteration``, without copying it.

    ``overrides`` (``section.key=value``) hold from that stage on. ConfigError for a name that is taken by another run or
    for keys that cannot differ, NotCommitted if the parent has not got there. Repeating a fork changes nothing.
    """
    store = open_named_store(store_url)
    lineage = _checked(store, run, iteration, stage)
    parent = ParentRef(run=lineage.head, iteration=iteration, stage=stage)
    config = stored_config(lineage.record, overrides)
    config = config.model_copy(update={"run": name})
    _require_shared(lineage, iteration, stage, config)
    existing = find_record(store, layout.run_record(layout.check_run(name)), RunRecord)
    if "iterations" not in {item.partition("=")[0].strip() for item in overrides}:
        planned = max(planned_iterations(store, lineage), iteration + 1)
        # The parent may have been asked for more since; the fork stays what it is.
        planned = planned if existing is None else past_config(existing).iterations
        config = config.model_copy(update={"iterations": planned})
    record = RunRecord(
        run=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **config_fields(config),
        versions=lineage.record.versions,
        prompts=lineage.record.prompts,
        parent=parent,
    )
    if existing is None:
        start_branch(store, record)  # before the check: from here on retention sees what the fork shares
        try:
            require_replayable(store, load_lineage(store, name), iteration, stage)
        except NotCommitted:
            store.delete([layout.run_record(name), *(layout.child(shared.run, name) for shared in lineage.records)])
            raise
    elif (existing.parent, stored_config(existing)) != (parent, config):
        raise ConfigError(f"run {name!r} exists already and is not this fork: choose another name (--run NAME)")
    return load_config_of(store_url, name)


def require_replayable(store: ObjectStore, lineage: Lineage, iteration: int, stage: str) -> None:
    """NotCommitted if the policy version that ``stage`` begins with cannot be restored any more."""
    version = iteration + (STAGES.index(stage) > STAGES.index("update"))
    checkpoint = newest_checkpoint(store, lineage, version)
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


def _require_shared(lineage: Lineage, iteration: int, stage: str, config: RunConfig) -> None:
    """ConfigError naming the keys in which a fork cannot differ from what it shares."""
    own = "start a run of its own instead: rlhf train"
    _require_same(lineage.record, config, _SHARED, "a fork shares the parent's prompts and weights", own)
    if stage in _READ_ROLLOUTS:
        sampled = lineage.owner(iteration, "generate")
        reason = f"stage {stage!r} reads the parent's rollouts of iteration {iteration}"
        _require_same(sampled, config, _SAMPLED_WITH, reason, "fork from stage generate instead")
    if stage == "update" and config.algorithm.kl_coef:
        scored = lineage.owner(iteration, "advantages")
        if not past_config(scored).algorithm.kl_coef:
            raise ConfigError(
                f"algorithm.kl_coef = {config.algorithm.kl_coef}, but the parent's experience of iteration {iteration} "
                "holds no reference logprobs: fork from stage advantages instead"
            )


def _require_same(record: RunRecord, config: RunConfig, keys: Sequence[str], reason: str, fix: str) -> None:
    before = past_config(record)
    wrong = [
        line
        for line in contradictions(before, config, changeable=())
        if any(line.startswith((f"{key}:", f"{key}.")) for key in keys)
    ]
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise ConfigError(f"{reason}, so these cannot change:\n{lines}\n{fix}")
