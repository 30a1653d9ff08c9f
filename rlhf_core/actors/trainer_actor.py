"""One ZeRO-3 rank as a Ray actor: experience, update, weights, checkpoints."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rlhf_core.actors.checkpointing import CheckpointUpload, Room, SavedCheckpoint, discard, fetch
from rlhf_core.actors.fence import Fenced
from rlhf_core.actors.jobs import ExperienceJob, StageResult, UpdateJob
from rlhf_core.actors.one_thread import on_one_thread
from rlhf_core.actors.watched_store import WatchedStore
from rlhf_core.actors.weight_push import EngineSink
from rlhf_core.algorithms.advantages import group_relative, per_token
from rlhf_core.algorithms.batching import plan_microbatches
from rlhf_core.algorithms.correction import mismatch
from rlhf_core.algorithms.parity import ParityRows, PlainLogprobs
from rlhf_core.arrays import flat, ragged
from rlhf_core.bases import environment_id
from rlhf_core.buffer import StageWriter, read_rows
from rlhf_core.config.learning import LearnSettings
from rlhf_core.engines.exactness import SelfTest, self_test
from rlhf_core.engines.experience import Experience
from rlhf_core.engines.plain_model import plain_logprobs
from rlhf_core.engines.probes import layout_logprobs, probe_logprobs
from rlhf_core.engines.rows import TokenRows, units_of
from rlhf_core.engines.zero3_engine import TrainerSettings, Zero3Engine
from rlhf_core.errors import RunStateError
from rlhf_core.manifests import CheckpointRecord, StageManifest
from rlhf_core.metrics import Mean, Metric, Sum
from rlhf_core.ports import ObjectStore
from rlhf_core.schema import check_table, experience_schema


@on_one_thread
class TrainerActor(Fenced):
    """Holds one rank. Every call that runs the model must reach all ranks. ``staging``: a local folder for checkpoints."""

    def __init__(self, name: str, settings: TrainerSettings, store: ObjectStore, staging: Path) -> None:
        super().__init__(name)
        self.staging = staging
        self.settings = settings
        self.store = WatchedStore(store, self.progress)
        self.engine = Zero3Engine(settings, self.progress)
        self.version: int | None = 0  # what the model folder holds; None while an update is under way or has failed
        self.digest: str | None = None  # of the weights that it holds, None for those of the model folder
        self._last: tuple[UpdateJob, StageResult] | None = None
        self._upload: CheckpointUpload | None = None
        self._fetched = staging / "restored" / f"rank-{settings.rank}"

    def status(self) -> dict[str, Any]:
        """As in Fenced, with the policy version that the rank holds (None: it failed inside an update), the digest of its
        weights, the digest of the experience that it has applied last, and what its bits depend on (``environment``)."""
        applied = self._last[0].experience.digest if self._last is not None else None
        return super().status() | {
            "version": self.version,
            "digest": self.digest,
            "applied": applied,
            "environment": self.engine.environment,
        }

    def self_test(self, epoch: int) -> SelfTest:
        """Whether this rank computes an update twice to the same bits; collective. Nothing changes."""
        self.require_epoch(epoch)
        return self_test(self.engine)

    def experience(self, epoch: int, job: ExperienceJob) -> StageResult:
        """Old (and reference) logprobs of this rank's rows, and their advantages, as one shard of ``experience``.

        Advantages need whole groups, so every rank computes those of all rows and keeps its own.
        """
        self._require(epoch, job.version)
        self.engine.use(job.learn)
        started = time.monotonic()
        columns = ["sample_id", "group", "prompt_ids", "response_ids", "logprobs", "reward"]
        table = read_rows(self.store, [job.rollouts, job.rewards], columns=columns)
        tokens, groups = _tokens(table), _groups(table)
        algorithm, settings = job.learn.algorithm, self.settings
        reward = torch.from_numpy(table["reward"].to_numpy().copy())
        relative = group_relative(reward, groups, ~reward.isnan(), algorithm.normalize_std, algorithm.epsilon)
        mine = _contiguous(tokens, groups, settings.world_size)
        microbatches = self._forward_plan(tokens, groups, mine)
        scores = self.engine.logprobs(tokens, microbatches, job.learn.temperature)
        reference = {}
        if algorithm.kl_coef > 0:
            reference = self.engine.logprobs(tokens, microbatches, job.learn.temperature, reference=True)
        rows = mine[settings.rank]
        metrics = self._experience_metrics(table, rows, scores) if len(rows) else {}
        if settings.rank == 0:
            metrics |= {
                "advantages/equal_groups": Sum(float(relative.equal_groups)),
                "advantages/degenerate_groups": Sum(float(relative.degenerate_groups)),
                "advantages/learning_fraction": Mean(
                    float(((relative.advantages_N != 0) & (tokens.response_lengths > 0)).sum()), float(len(groups))
                ),
            }
        if not len(rows):
            return StageResult((), metrics, time.monotonic() - started)
        lengths = tokens.response_lengths[rows.start : rows.stop]
        lists: dict[str, Any] = {"old_logprobs": _ragged([scores[r][0] for r in rows], lengths)}
        if reference:
            lists["ref_logprobs"] = _ragged([reference[r][0] for r in rows], lengths)
        lists["advantages"] = ragged(per_token(relative.advantages_N[rows.start : rows.stop].float(), lengths), lengths)
        schema = experience_schema(bool(reference))
        part = table.slice(rows.start, len(rows))
        shard_table = pa.table({"sample_id": part["sample_id"], **lists}, schema=schema)
        check_table(shard_table, schema)
        writer = StageWriter(self.store, job.run, job.iteration, "advantages", job.attempt)
        return StageResult((writer.write_shard(shard_table, rows.start),), metrics, time.monotonic() - started)

    def update(self, epoch: int, job: UpdateJob) -> StageResult:
        """Apply the iteration's optimizer steps once: version v becomes v + 1.

        Asked again for the update it has just applied, the rank answers from its record. A failure inside leaves the rank
        without a version: it is dirty and must be rebuilt.
        """
        self.require_epoch(epoch)
        if self._last is not None and self._last[0] == job:
            return self._last[1]
        self._require(epoch, job.version)
        started, before = time.monotonic(), self.digest
        if job.skipped:
            metrics: dict[str, Metric] = {}
        else:
            self.engine.use(job.learn)
            experience = self._load_experience(job)
            self.version = None
            metrics = self.engine.update(experience, job.groups, job.iteration)
        digest = self.engine.digest()
        self.version, self.digest = job.version + 1, digest
        seconds, environment = time.monotonic() - started, environment_id(self.engine.environment)
        result = StageResult((), metrics, seconds, digest, before, environment)
        self._last = (job, result)
        return result

    def push(self, epoch: int, version: int, sink: EngineSink, bucket_bytes: int) -> dict[str, float]:
        """Gather the policy bucket by bucket and hand each to this rank's engines. Returns seconds and bytes."""
        self._require(epoch, version)
        started = time.monotonic()
        sent = 0
        for spec, payload in self.engine.buckets(bucket_bytes):
            sink.send(epoch, spec, payload)
            sent += spec.bytes * len(sink.engines)
        sink.drain()
        return {"seconds": time.monotonic() - started, "bytes": float(sent)}

    def probe(
        self, epoch: int, version: int, rollouts: StageManifest, rows: int, learn: LearnSettings
    ) -> list[np.ndarray] | None:
        """Logprobs at temperature 1 of the responses of the first rows, cut as updates cut them, as rank 0 computes them; None
        elsewhere."""
        self._require(epoch, version)
        self.engine.use(learn)
        columns = ["group", "prompt_ids", "response_ids"]
        table = read_rows(self.store, [rollouts], columns=columns, rows=range(rows))
        scores = probe_logprobs(self.engine, _tokens(table), _groups(table))
        return [scores[row] for row in range(rows)] if self.settings.rank == 0 else None

    def layout_logprobs(
        self, epoch: int, version: int, rows: ParityRows, learn: LearnSettings
    ) -> dict[int, np.ndarray] | str:
        """This rank's share of the rows, cut and computed as in an update: row -> logprobs at temperature 1. Or why the model
        does not let samples share a prompt."""
        self._require(epoch, version)
        self.engine.use(learn)
        return layout_logprobs(self.engine, rows)

    def plain_logprobs(self, epoch: int, rows: ParityRows) -> PlainLogprobs | None:
        """The rows as the plain transformers model computes them, by rank 0; not collective. None elsewhere, and where a second
        copy of the model does not fit the memory."""
        self.require_epoch(epoch)
        settings = self.settings
        if settings.rank:
            return None
        return plain_logprobs(settings.model, settings.dtype, self.engine.device, rows.prompts, rows.responses)

    def weights_digest(self, epoch: int, version: int) -> str:
        """Digest of the weights that the ranks hold; collective."""
        self._require(epoch, version)
        return self.engine.digest()

    def checkpoint_room(self, epoch: int) -> Room:
        """What ``save_checkpoint`` needs on this rank's disk. A disk that fills up inside leaves ranks in a collective."""
        self.require_epoch(epoch)
        return Room.at(self.staging / "checkpoints", self.engine.checkpoint_bytes())

    def save_checkpoint(self, epoch: int, version: int, attempt: str, prefix: str) -> None:
        """Save this rank's part locally, collective; its upload to ``prefix`` goes on in the background."""
        self._require(epoch, version)
        if self._upload is not None:
            with self.progress.waiting("the upload of the checkpoint before"):
                self._upload.wait()  # two at once would only share the bandwidth and double the disk space
        folder = self.staging / "checkpoints" / attempt
        self.engine.save(str(folder), f"v{version:010d}")
        self._upload = CheckpointUpload(self.store.inner, version, attempt, folder, prefix, self.settings.rank)
        self._upload.start()

    def saved_checkpoint(self, epoch: int, wait: bool) -> SavedCheckpoint | None:
        """Where the upload of the newest checkpoint stands; None if this process has saved none."""
        self.require_epoch(epoch)
        if self._upload is None:
            return None
        if not wait:
            return self._upload.state
        with self.progress.waiting("the upload of the checkpoint"):
            return self._upload.wait()

    def fetch_checkpoint(self, epoch: int, record: CheckpointRecord) -> None:
        """Bring this rank's files to its disk, verified. Not collective: a rank that fails here leaves no other waiting."""
        self.require_epoch(epoch)
        discard(self._fetched)
        everything = record.world_size != self.settings.world_size  # then each rank cuts its part from all of it
        fetch(self.store, record.files, None if everything else self.settings.rank, self._fetched)

    def load_checkpoint(self, epoch: int, record: CheckpointRecord) -> str:
        """Load what was fetched and hold its version; returns the weights' digest; collective."""
        self.require_epoch(epoch)
        self.version = None
        try:
            folder, tag = str(self._fetched), f"v{record.policy_version:010d}"
            if record.world_size == self.settings.world_size:
                self.engine.load(folder, tag)
            else:
                self.engine.load_resharded(folder, tag, str(self._fetched.with_name(f"cut-{self.settings.rank}")))
        finally:
            discard(self._fetched)
        self.digest = self.engine.digest()
        self.version = record.policy_version
        return self.digest

    def export(self, epoch: int, version: int, model: str, folder: str) -> None:
        """Write the policy as a plain Hugging Face folder (rank 0); collective."""
        from rlhf_core.models.export import write_hf_folder

        self._require(epoch, version)
        state = self.engine.state_dict()
        if state is not None:
            write_hf_folder(state, model, folder)

    def offload(self, epoch: int) -> None:
        """Free the GPU for the engine."""
        self.require_epoch(epoch)
        self.engine.offloader.offload()

    def reload(self, epoch: int) -> None:
        """Come back to the GPU."""
        self.require_epoch(epoch)
        self.engine.offloader.reload()

    def _require(self, epoch: int, version: int) -> None:
        self.require_epoch(epoch)
        if self.version != version:
            raise RunStateError(f"{self.name} holds policy version {self.version}, not {version}: restore it first")

    def _forward_plan(self, tokens: TokenRows, groups: torch.Tensor, parts: list[range]) -> list[list[list[int]]]:
        """This rank's micro-batches; as many as on the busiest rank, because forward passes are collective."""
        optim = self.engine.settings.optim
        plans: list[list[list[list[int]]]] = []
        for rows in parts:
            units = units_of(list(rows), groups, optim.share_prompts)
            if not units:
                plans.append([])
                continue
            lengths, responses = tokens.unit_lengths(units)
            plan = plan_microbatches(
                lengths.numpy(),
                1,
                optim.tokens_per_microbatch,
                response_lengths=responses.numpy(),
            )
            plans.append([[units[u] for u in microbatch] for microbatch in plan[0]])
        mine = plans[self.settings.rank]
        return mine + [[] for _ in range(max(map(len, plans)) - len(mine))]

    def _experience_metrics(self, table: pa.Table, rows: range, scores: dict[int, Any]) -> dict[str, Metric]:
        behaviour, offsets = flat(table["logprobs"])
        old = torch.cat([scores[row][0] for row in rows])
        entropy = torch.cat([scores[row][1] for row in rows])
        behaviour = behaviour[int(offsets[rows.start]) : int(offsets[rows.stop])]
        mask = torch.ones(1, len(old), dtype=torch.bool)
        stats = mismatch(old[None], behaviour[None], mask, self.engine.settings.algorithm.importance_cap or None)
        return {"policy/entropy": Mean(float(entropy.sum()), float(len(entropy))), **stats.as_metrics()}

    def _load_experience(self, job: UpdateJob) -> Experience:
        per_token = ["logprobs", "old_logprobs", "advantages"]
        if job.learn.algorithm.kl_coef > 0:
            per_token.append("ref_logprobs")
        columns = ["sample_id", "group", "prompt_ids", "response_ids", "status", *per_token]
        table = read_rows(self.store, [job.rollouts, job.rewards, job.experience], columns=columns)
        return Experience(
            tokens=_tokens(table),
            groups=_groups(table),
            behaviour_logprobs=flat(table["logprobs"])[0],
            old_logprobs=flat(table["old_logprobs"])[0],
            advantages=flat(table["advantages"])[0],
            scored=torch.tensor([status == "ok" for status in table["status"].to_pylist()]),
            ref_logprobs=flat(table["ref_logprobs"])[0] if "ref_logprobs" in per_token else None,
        )


def _tokens(table: pa.Table) -> TokenRows:
    return TokenRows(*flat(table["prompt_ids"]), *flat(table["response_ids"]))


def _groups(table: pa.Table) -> torch.Tensor:
    return torch.from_numpy(table["group"].to_numpy().astype(np.int64))


def _ragged(rows: list[torch.Tensor], lengths: torch.Tensor) -> pa.ListArray:
    return ragged(torch.cat(rows), lengths)


def _contiguous(tokens: TokenRows, groups: torch.Tensor, ranks: int) -> list[range]:
    """Cut the rows into one range a rank with about the same number of tokens each; groups stay whole."""
    lengths = tokens.prompt_lengths + tokens.response_lengths
    done = lengths.cumsum(0).double() / max(1, int(lengths.sum()))
    starts = [0] + [i for i in range(1, len(groups)) if groups[i] != groups[i - 1]]
    cuts = [0]
    for rank in range(1, ranks):
        later = [s for s in starts if s >= cuts[-1] and s > 0 and float(done[s - 1]) >= rank / ranks]
        cuts.append(later[0] if later else len(groups))
    cuts.append(len(groups))
    return [range(first, last) for first, last in itertools.pairwise(cuts)]
