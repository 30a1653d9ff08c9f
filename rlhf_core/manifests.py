"""Small frozen values that cross Prefect and Ray: what was committed where, never the data itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: Version of everything written to the store. A reader refuses what is newer than itself: a new field raises it, because
#: older readers know no other fields than theirs.
FORMAT_VERSION = 3

#: The stages of an iteration in order. The order is the dependency chain.
STAGES = ("generate", "score", "advantages", "update", "sync", "commit")


class Manifest(BaseModel):
    """Base: frozen, closed, JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(Manifest):
    """One immutable Arrow file holding the rows ``first_row .. first_row + rows - 1`` of a stage."""

    key: str = Field(description="Object key below the store's root.")
    first_row: int = Field(ge=0)
    rows: int = Field(ge=0)
    groups: tuple[int, ...] = Field(
        default=(),
        description="Segments of a streamed stage: the groups whose rows it holds, in order, all of one size. "
        "Readers put the rows into the order of the groups. Empty: rows in the order of the stage.",
    )
    bytes: int = Field(ge=0, description="Length of the object.")
    blake3: str = Field(description="Hex digest of the object.")
    ids_digest: str = Field(
        description="blake3 of the sample ids in row order: column groups of one row range agree on it."
    )


class StageManifest(Manifest):
    """The commit record of one stage of one iteration: the only truth about what the stage produced."""

    format: int = FORMAT_VERSION
    run: str
    iteration: int = Field(ge=0)
    stage: str
    attempt: str
    policy_version: int = Field(ge=0, description="The policy that produced (generate) or consumed (update) the rows.")
    parents: dict[str, str] = Field(default_factory=dict, description="Stage name -> digest of the manifest it read.")
    shards: tuple[Shard, ...] = ()
    rows: int = 0
    tokens: int = Field(default=0, description="Response tokens.")
    seconds: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)
    details: dict[str, Any] = Field(
        default_factory=dict, description="What only this stage knows (weights digest, ...)."
    )
    digest: str = Field(default="", description="blake3 of the canonical JSON of all other fields.")


class ClusterRef(Manifest):
    """Names of the living actors: prints, hashes and survives a restart of the flow process."""

    namespace: str
    branch: str = Field(description="Branch of the run that is driven: where its stages are committed.")
    epoch: int = Field(ge=1, description="Epoch of the driver's lease; the actors refuse calls of an older one.")
    device: Literal["cpu", "gpu"] = "cpu"
    exact: bool = Field(default=True, description="A replay on these ranks gives the same bits.")
    trainers: tuple[str, ...]
    engines: tuple[str, ...]
    rewards: tuple[str, ...]


class ParentRef(Manifest):
    """Where a branch begins: what comes before ``stage`` of ``iteration`` is shared with the branch ``run``."""

    run: str = Field(description="Branch of the parent: a run's name, or NAME~REVISION.")
    iteration: int = Field(ge=0)
    stage: str


class RevisionRecord(Manifest):
    """``revisions/N.json``: a rerun; the highest number is what the run consists of now. Older branches stay as they are."""

    format: int = FORMAT_VERSION
    run: str
    revision: int = Field(ge=1)
    parent: ParentRef
    created: str = Field(description="UTC, ISO 8601.")
    by: str = Field(description="Who asked for it: user, host and process.")
    request: str = Field(default="", description="Id of what asked, so that asking again makes no second revision.")
    digest: str = ""


class ChildRecord(Manifest):
    """``children/BRANCH.json``: what a branch or fork shares with its parent. Written before the child exists."""

    format: int = FORMAT_VERSION
    child: str
    parent: ParentRef
    digest: str = ""


class BaseRecord(Manifest):
    """``bases/VERSION/N.json``: the weights that the run goes on with at a policy version, where a replay could not give those
    that were recorded (another machine, other libraries, no deterministic kernels). The highest N counts."""

    format: int = FORMAT_VERSION
    run: str
    policy_version: int = Field(ge=0)
    weights_digest: str
    number: int = Field(default=1, ge=1)
    replaces: str | None = Field(default=None, description="Digest of the weights that this version had before.")
    start: int = Field(default=0, ge=0, description="Policy version of the checkpoint that the replay began with.")
    environment: str = Field(default="", description="Id of the environment that replayed.")
    reason: str = ""
    created: str = Field(default="", description="UTC, ISO 8601.")
    digest: str = ""


class EnvironmentRecord(Manifest):
    """``environments/ID.json``: what the bits of updates depend on, and whether updates are repeatable there."""

    format: int = FORMAT_VERSION
    run: str
    facts: dict[str, Any]
    exact: bool = Field(description="Two updates from one state gave the same bits, with deterministic kernels.")
    reason: str = Field(default="", description="Why not.")
    seconds: float = Field(default=0.0, description="What the test took.")
    digest: str = ""


class ParityRecord(Manifest):
    """``parity.json``: before the first iteration, trainer and engines computed what the plain transformers model computes."""

    format: int = FORMAT_VERSION
    run: str
    dtype: str
    share_prompts: bool = Field(description="Whether samples may share their prompt: the layout agrees.")
    reason: str = Field(default="", description="Why they may not.")
    plain: bool = Field(description="Whether the plain model was there; else the trainer's padded rows stood for it.")
    bound: tuple[float, float] = Field(
        description="Largest mean gap, over all tokens and over those of one row, in nats."
    )
    gaps: dict[str, tuple[float, float]] = Field(description="What was compared with the plain model -> both gaps.")
    rows: int
    seconds: float
    digest: str = ""


class GuardRecord(Manifest):
    """``GUARD.json``: an update of this iteration went out of bounds and was rolled back; the batch is to be left out."""

    format: int = FORMAT_VERSION
    run: str
    iteration: int = Field(ge=0)
    reason: str
    digest: str = ""


class RetiredRecord(Manifest):
    """``RETIRED.json``: the shards of an iteration were deleted on purpose; the manifests stay."""

    format: int = FORMAT_VERSION
    run: str
    iteration: int = Field(ge=0)
    retired: str = Field(description="UTC, ISO 8601.")
    reason: str
    digest: str = ""


class RunRecord(Manifest):
    """``run.json``: what the run (or a branch of it) is. Written once, before anything else."""

    format: int = FORMAT_VERSION
    run: str
    created: str = Field(description="UTC, ISO 8601.")
    config: dict[str, Any] = Field(
        description="The resolved configuration, as it was written; `rlhf_core.config.stored_config` reads it."
    )
    config_schema: int = Field(default=1, ge=1, description="Schema of ``config``; records without it have the first.")
    versions: dict[str, str] = Field(default_factory=dict, description="Versions of the packages that matter.")
    prompts: PromptsManifest
    parent: ParentRef | None = Field(default=None, description="What this branch shares; None for a run of its own.")
    digest: str = ""


class TargetRecord(Manifest):
    """``target.json``: the number of iterations that the run was last asked for. Rewritten; the run's driver alone does."""

    format: int = FORMAT_VERSION
    iterations: int = Field(ge=1)
    digest: str = ""


class ReportedRecord(Manifest):
    """``reported/SINK.json``: what a tracker or the Prefect server was told. Rewritten; the run's driver alone does."""

    format: int = FORMAT_VERSION
    run: str
    sink: str
    iterations: int = Field(ge=0, description="It was told the iterations below this one.")
    digest: str = ""


class PromptsManifest(Manifest):
    """The tokenized prompts of a run."""

    train: Shard
    heldout: Shard | None = None
    dropped: Shard | None = Field(
        default=None,
        description="Prompts of the source that were left out because they are too long; without token ids.",
    )


class IterationRecord(Manifest):
    """``DONE.json``: the iteration is finished, and what came of it. The only truth for resume."""

    format: int = FORMAT_VERSION
    run: str
    iteration: int = Field(ge=0)
    policy_version: int = Field(ge=1, description="Version that the iteration's update produced.")
    weights_digest: str
    stages: dict[str, str] = Field(description="Stage -> digest of its manifest.")
    metrics: dict[str, float]
    stage_seconds: dict[str, float]
    finished: str = Field(description="UTC, ISO 8601.")
    digest: str = ""


class EvaluationRecord(Manifest):
    """Result of one evaluation on the held-out prompts."""

    format: int = FORMAT_VERSION
    run: str
    name: str
    policy_version: int = Field(ge=0)
    prompts: int
    metrics: dict[str, float]
    samples: list[dict[str, Any]] = Field(default_factory=list, description="A few answers with their rewards.")
    digest: str = ""


class StoredFile(Manifest):
    """One file of a checkpoint or an export."""

    path: str
    key: str
    bytes: int
    blake3: str


class CheckpointRecord(Manifest):
    """A committed checkpoint: all ranks' files at one policy version."""

    format: int = FORMAT_VERSION
    run: str
    policy_version: int = Field(ge=1)
    world_size: int = Field(ge=1)
    weights_digest: str
    update: str = Field(default="", description="Digest of the manifest of the update that made this version.")
    files: tuple[StoredFile, ...]
    digest: str = ""


class ExportRecord(Manifest):
    """The policy as a Hugging Face folder."""

    format: int = FORMAT_VERSION
    run: str
    policy_version: int = Field(ge=0)
    weights_digest: str
    folder: str = Field(description="Where it was written on the driver's machine.")
    files: tuple[StoredFile, ...] = Field(default=(), description="Copies in the object store.")
    digest: str = ""


class Progress(Manifest):
    """Where a run stands, read from the store alone."""

    run: str
    next_iteration: int = Field(ge=0, description="First iteration without DONE.json.")
    policy_version: int = Field(
        ge=0, description="Version after the last committed update, also inside next_iteration."
    )


class RunSummary(Manifest):
    """What a flow run hands back."""

    run: str
    iterations: int = Field(description="Finished iterations.")
    finished: bool = Field(default=True, description="False: another flow run goes on.")
    policy_version: int
    learned: str | None = Field(
        default=None,
        description="From how many iterations something was learned, and why not from the others; None: each.",
    )
    reward_before: float | None = None
    reward_after: float | None = None
    sampled_reward_last: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    stage_seconds: dict[str, float] = Field(default_factory=dict, description="Mean seconds of each stage.")
    evaluation: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="Metrics on the held-out prompts: `before` and `after`."
    )
    export: str | None = Field(default=None, description="Folder of the exported HF model.")


RunRecord.model_rebuild()  # it names a model defined below it
