"""Proves that a run is whole: every seal, every byte, and the way of every sample.

Goes iteration by iteration and shard by shard, so memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

from infra.object_store import open_store
from rlhf_core import layout
from rlhf_core.bases import FROM_WEIGHTS, describe_base
from rlhf_core.buffer import read_shard
from rlhf_core.config import RunConfig, past_config
from rlhf_core.errors import CorruptObject, StoreError
from rlhf_core.lineage import Lineage
from rlhf_core.manifests import (
    STAGES,
    GuardRecord,
    IterationRecord,
    RetiredRecord,
    RunRecord,
    Shard,
    StageManifest,
    TargetRecord,
)
from rlhf_core.prompts.order import prompt_rows
from rlhf_core.views import AuditView, IterationAudit
from tasks.audit.damage import Finding, Remedies
from tasks.audit.files import (
    Prompts,
    Updates,
    Version,
    check_checkpoint,
    check_evaluation,
    check_export,
    check_parity,
)
from tasks.audit.ledger import Account, Columns, Plan, PromptUse, Training, account, assemble, project
from tasks.audit.records import Reader, check_links, load_bases, load_branches, survey

_THREADS = 4  # a shard is some 20 MiB, so this bounds memory as well as connections
#: Stages with one row a sample.
_ROWS = ("generate", "score", "advantages")
_SUMS = ("prompts", "samples", "tokens", "trained", "waiting", "retired", "unproven")

State = Literal["intact", "retired", "damaged", "missing", "open"]
Records = dict[str, StageManifest | IterationRecord | None]


def audit_run(store_url: str, run: str, progress: Callable[[int, int], None] | None = None) -> AuditView:
    """Verify every record and object of a run and recompute its ledger; damage is reported, not raised.

    ``progress`` is told (iterations looked at, iterations there are). NotCommitted if there is no such run,
    IntegrityError if a newer version wrote one of its records, OSError if the store fails.
    """
    try:
        store = open_store(store_url)
    except ValueError as error:
        raise StoreError(f"store {store_url!r}: {error}") from None
    reader = Reader(store)
    lineage = load_branches(reader, run)
    if lineage is None:  # nothing else can be told without the branches' records
        damage = tuple(Remedies(run).damage(finding) for finding in reader.findings.found)
        return AuditView(run=run, proven=False, records=reader.records, damage=damage)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="audit") as pool:
        return _Audit(reader, lineage, pool).run(progress)


class _Audit:
    """One pass over a run whose line of branches is known."""

    def __init__(self, reader: Reader, lineage: Lineage, pool: ThreadPoolExecutor) -> None:
        self.reader, self.lineage, self.pool = reader, lineage, pool
        self.survey = survey(reader.store, lineage)
        self.prompts = Prompts(reader)
        self.use = PromptUse()
        self.objects_retired = 0
        self.retired: set[int] = set()
        self.updates: Updates = {}
        self.bases = load_bases(reader, lineage)
        self._configs: dict[str, RunConfig] = {}

    def run(self, progress: Callable[[int, int], None] | None) -> AuditView:
        """Everything, in the order of time."""
        for record in self.lineage.records:
            self.prompts.ids(record, "train")
            self.prompts.ids(record, "heldout")
            self.prompts.ids(record, "dropped")
        positions, iterations = self.survey.positions, []
        count = -(-positions // len(STAGES))
        for iteration in range(count):
            iterations.append(self._iteration(iteration, positions - iteration * len(STAGES)))
            if progress is not None:
                progress(iteration + 1, count)
        self.use.flush()
        checkpoints = []
        for version, branch in self.survey.checkpoints:
            if check_checkpoint(self.reader, self.pool, branch, version, self.updates):
                checkpoints.append(version)
        check_parity(self.reader, self.lineage.branch_of_version(0))
        for branch, key in self.survey.evaluations:
            check_evaluation(self.reader, branch, key)
        for branch, key in self.survey.exports:
            check_export(self.reader, self.pool, branch, key, self.updates)
        return self._view(iterations, checkpoints)

    def _view(self, iterations: list[IterationAudit], checkpoints: list[int]) -> AuditView:
        done, inside = divmod(self.survey.positions, len(STAGES))
        planned = max(self._target(), done)
        remedies = Remedies(
            run=self.lineage.head,
            done=done,
            reached=done + 1 if inside > STAGES.index("update") else done,
            planned=planned,
            damaged=self.reader.findings.damaged,
            retired=self.retired,
            checkpoints=checkpoints,
        )
        damage = tuple(remedies.damage(finding) for finding in self.reader.findings.found)
        left_out: dict[str, int] = {}
        for row in iterations:
            for reason, samples in row.left_out.items():
                left_out[reason] = left_out.get(reason, 0) + samples
        return AuditView(
            run=layout.run_name(self.lineage.head),
            proven=not damage,
            branches=tuple(record.run for record in self.lineage.records),
            iterations=planned,
            iterations_done=done,
            records=self.reader.records,
            objects=self.reader.objects,
            bytes=self.reader.bytes,
            objects_retired=self.objects_retired,
            left_out=left_out,
            epochs=tuple(self.use.finished),
            checkpoints=tuple(checkpoints),
            stages=tuple(iterations),
            replayed=tuple(describe_base(base) for base in self.bases if base.reason),
            damage=damage,
            **{name: sum(getattr(row, name) for row in iterations) for name in _SUMS},
        )

    def _target(self) -> int:
        """Iterations that the run is to have."""
        key = layout.run_target(self.lineage.head)
        again = f"`rlhf train PRESET --run {layout.run_name(self.lineage.head)} --set iterations=N`"
        make = partial(Finding, key, remedy=f"delete it, and give the number of iterations again: {again}")
        target = self.reader.read(key, TargetRecord, make, problem="")
        return target.iterations if target is not None else self._config(self.lineage.record).iterations

    def _iteration(self, iteration: int, stages: int) -> IterationAudit:
        """Audit the first ``stages`` stages of an iteration; the others are open."""
        expected = STAGES[:stages]
        found: Records = dict(
            zip(expected, self.pool.map(lambda stage: self._record(iteration, stage), expected), strict=True)
        )
        manifests = {stage: record for stage, record in found.items() if isinstance(record, StageManifest)}
        done = found.get("commit")
        self._side_records(iteration, manifests)
        record = done if isinstance(done, IterationRecord) else None
        for stage, problem in check_links(iteration, manifests, record, self._replayed(iteration + 1)):
            self._contradiction(iteration, stage, problem)
        columns = {stage: self._rows(manifest) for stage, manifest in manifests.items()}
        ledger = self._ledger(iteration, manifests, columns)
        for stage, problem in ledger.problems:
            self._contradiction(iteration, stage, problem)
        branches = {stage: self.lineage.branch_of(iteration, stage) for stage in expected}
        return IterationAudit(
            iteration=iteration,
            states={stage: self._state(iteration, stage, found) for stage in STAGES},
            shared={stage: branch for stage, branch in branches.items() if branch != self.lineage.head},
            left_out=ledger.left_out,
            skipped=ledger.skipped,
            **{name: getattr(ledger, name) for name in _SUMS},
        )

    def _state(self, iteration: int, stage: str, found: Records) -> State:
        if stage not in found:
            return "open"
        record = found[stage]
        if stage in self.reader.findings.damaged.get(iteration, ()):
            return (
                "missing" if record is None and not self.reader.store.exists(self._key(iteration, stage)) else "damaged"
            )
        retired = isinstance(record, StageManifest) and record.shards and self._is_retired(iteration, stage)
        return "retired" if retired else "intact"

    def _key(self, iteration: int, stage: str) -> str:
        branch = self.lineage.branch_of(iteration, stage)
        if stage == "commit":
            return layout.iteration_done(branch, iteration)
        return layout.stage_commit(branch, iteration, stage)

    def _contradiction(self, iteration: int, stage: str, problem: str) -> None:
        self.reader.findings.add(Finding(self._key(iteration, stage), "inconsistent", problem, iteration, stage))

    def _record(self, iteration: int, stage: str) -> StageManifest | IterationRecord | None:
        """The stage's record; None, with a finding, if it is damaged or not there."""
        branch, key = self.lineage.branch_of(iteration, stage), self._key(iteration, stage)
        make = partial(Finding, key, iteration=iteration, stage=stage)
        model: type[StageManifest | IterationRecord] = IterationRecord if stage == "commit" else StageManifest
        record = self.reader.read(key, model, make, self.survey.behind(iteration, stage))
        if record is not None:
            says = (record.run, record.iteration, getattr(record, "stage", "commit"))
            if says != (branch, iteration, stage):
                self._contradiction(iteration, stage, f"it is the record of {says[0]} iteration {says[1]} {says[2]!r}")
                return None
        return record

    def _side_records(self, iteration: int, manifests: dict[str, StageManifest]) -> None:
        """What guards and retention left, and what the update says about the weights."""
        branch = self.lineage.branch_of(iteration, "update")
        guard = None
        if iteration in self.survey.guarded[branch]:
            key = layout.guard(branch, iteration)
            remedy = "delete it: it matters only until the update is committed, which names the reason too"
            guard = self.reader.read(key, GuardRecord, partial(Finding, key, remedy=remedy))
        for owner in {self.lineage.branch_of(iteration, stage) for stage in _ROWS}:
            if iteration in self.survey.retired[owner]:
                key = layout.iteration_retired(owner, iteration)
                remedy = "the rows were deleted on purpose; take the record from a copy of the store"
                self.reader.read(key, RetiredRecord, partial(Finding, key, remedy=remedy))
        update = manifests.get("update")
        if update is None:
            return
        weights, before = str(update.details.get("weights_digest")), self.updates.get(iteration)
        self.updates[iteration + 1] = Version((weights, *self._replayed(iteration + 1)), update.digest)
        began = update.details.get(FROM_WEIGHTS)
        if before is not None and began is not None and began not in before.weights:
            expected = " or ".join(before.weights)
            self._contradiction(
                iteration, "update", f"it began with weights {began}, version {iteration} has {expected}"
            )
        if "skipped" not in update.details:
            if guard is not None:
                self._contradiction(iteration, "update", f"a guard rolled it back ({guard.reason}), but it was applied")
        elif before is not None and weights not in before.weights:
            expected = " or ".join(before.weights)
            self._contradiction(iteration, "update", f"it was skipped, but its weights {weights} are not {expected}")

    def _replayed(self, version: int) -> list[str]:
        """Digests of the weights that replays gave for a policy version."""
        return [base.weights_digest for base in self.bases if base.policy_version == version]

    def _is_retired(self, iteration: int, stage: str) -> bool:
        return iteration in self.survey.retired[self.lineage.branch_of(iteration, stage)]

    def _rows(self, manifest: StageManifest) -> Columns | None:
        """Verify the shards of a stage; the columns that the ledger needs, None where they cannot be had."""
        iteration, stage = manifest.iteration, manifest.stage
        if self._is_retired(iteration, stage):
            self.objects_retired += len(manifest.shards)
            if stage in _ROWS:
                self.retired.add(iteration)
            return None
        parts = list(self.pool.map(lambda shard: self._shard(manifest, shard), manifest.shards))
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts) or stage not in _ROWS:
            return None
        try:
            columns = assemble(manifest.shards, whole)
            if len(columns["ids"]) != manifest.rows:
                raise ValueError(f"its shards hold {len(columns['ids'])} rows, it says {manifest.rows}")
            if stage == "generate" and manifest.tokens != int(columns["tokens"].sum()):
                raise ValueError(f"its rollouts have {int(columns['tokens'].sum())} tokens, it says {manifest.tokens}")
        except ValueError as error:
            self._contradiction(iteration, stage, str(error))
            return None
        return columns

    def _shard(self, manifest: StageManifest, shard: Shard) -> Columns | None:
        columns: Columns = {}

        def read() -> None:
            table = read_shard(self.reader.store, shard)
            try:
                columns.update(project(manifest.stage, table))
            except ValueError as error:
                raise CorruptObject(f"{shard.key} breaks the schema of its stage: {error}") from None

        make = partial(Finding, shard.key, iteration=manifest.iteration, stage=manifest.stage)
        if not self.reader.findings.guard(shard.key, read, make):
            return None
        self.reader.count_object(shard.bytes)
        return columns

    def _ledger(
        self, iteration: int, manifests: dict[str, StageManifest], columns: dict[str, Columns | None]
    ) -> Account:
        owner = self.lineage.owner(iteration, "generate")
        config, table = self._config(owner), owner.prompts.train
        size = config.generate.prompts_per_iteration
        rows = prompt_rows(table.rows, size, iteration, config.seed)
        training, generate, rollouts = (
            self._training(iteration, manifests),
            manifests.get("generate"),
            columns.get("generate"),
        )
        retired = generate is not None and self._is_retired(iteration, "generate")
        if rollouts is None:
            result = Account(skipped=training.skipped)
            if generate is not None:
                result.samples = result.unproven = generate.rows
                result.tokens, result.prompts = generate.tokens, size if retired else 0
        else:
            known = self.prompts.ids(owner, "train")
            names = None if known is None else [known[row] for row in rows]
            plan = Plan(iteration, names, size, config.generate.samples_per_prompt)
            result = account(plan, rollouts, columns.get("score"), columns.get("advantages"), training)
        if retired or (rollouts is not None and not any(stage == "generate" for stage, _ in result.problems)):
            self.use.add(table, config.seed, iteration * size, rows)
        if result.unproven and not self.reader.findings.damaged.get(iteration) and iteration in self.retired:
            result.retired, result.unproven = result.unproven, 0
        return result

    def _training(self, iteration: int, manifests: dict[str, StageManifest]) -> Training:
        update = manifests.get("update")
        committed = iteration * len(STAGES) + STAGES.index("update") < self.survey.positions
        return Training(
            algorithm=self._config(self.lineage.owner(iteration, "advantages")).algorithm,
            reference=self._config(self.lineage.owner(iteration, "update")).algorithm.kl_coef > 0,
            state="trained" if update is not None else "unproven" if committed else "waiting",
            skipped=str(update.details["skipped"]) if update is not None and "skipped" in update.details else None,
        )

    def _config(self, record: RunRecord) -> RunConfig:
        if record.run not in self._configs:
            self._configs[record.run] = past_config(record)
        return self._configs[record.run]
