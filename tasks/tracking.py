"""Metrics to TensorBoard, Weights & Biases and MLflow, through their own libraries."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from infra.object_store import LocalObjectStore
from infra.settings import load_settings
from rlhf_core import layout
from rlhf_core.config import RunConfig
from rlhf_core.manifests import IterationRecord
from rlhf_core.ports import ObjectStore


@dataclass(frozen=True)
class Sink:
    """Somebody who is told every finished iteration of a branch, in order, and the place of the cursor that counts them."""

    name: str
    tell: Callable[[IterationRecord], None]
    """A death between it and the cursor repeats the iteration: it must bear that."""
    cursors: ObjectStore
    cursor: str
    """Key of its ReportedRecord in ``cursors``."""
    backlog: int | None = None
    """Iterations that it is told at most when it lags; older ones are left out. None: all of them."""


def trackers(config: RunConfig, store: ObjectStore, branch: str) -> list[Sink]:
    """The trackers that are configured.

    A service keeps what any machine told it, so its cursor lies in the run's store. Event files lie on this machine, and
    their cursor beside them: a run that goes on elsewhere has all its curves there too.
    """
    found = []
    if config.tracking.tensorboard:
        folder = load_settings().home / "tensorboard"
        key = f"{branch}/reported.json"
        found.append(Sink("tensorboard", partial(_tensorboard, str(folder / branch)), LocalObjectStore(folder), key))
    if config.tracking.wandb_project is not None:
        found.append(Sink("wandb", partial(_wandb, config), store, layout.reported(branch, "wandb")))
    if config.tracking.mlflow_experiment is not None:
        found.append(Sink("mlflow", partial(_mlflow, config), store, layout.reported(branch, "mlflow")))
    return found


def _tensorboard(folder: str, record: IterationRecord) -> None:
    """A step that was written before, by this process or one that died, is hidden by the file that begins with it.

    Written by hand and not by a SummaryWriter, whose ``flush`` leaves events in a queue that a killed process loses.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

    # A file an iteration would be one too many for 10,000 iterations; one a process is what readers expect.
    writer, following = _WRITERS.pop(folder, (None, None))
    if writer is not None and following != record.iteration:
        writer.close()
        writer = None
    if writer is None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        writer = EventsWriter(f"{folder}/events", f".{uuid.uuid4().hex[:8]}")
        writer.write_event(Event(step=record.iteration, session_log=SessionLog(status=SessionLog.START)))
    finished = datetime.fromisoformat(record.finished).timestamp()
    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in record.metrics.items()]
    writer.write_event(Event(step=record.iteration, wall_time=finished, summary=Summary(value=scalars)))
    writer.flush()
    _WRITERS[folder] = (writer, record.iteration + 1)


def _wandb(config: RunConfig, record: IterationRecord) -> None:
    """A step that was logged before is left out by the service, which only takes growing steps."""
    import wandb

    run = wandb.run or wandb.init(
        project=config.tracking.wandb_project,
        id=record.run,
        name=record.run,
        resume="allow",
        config=config.model_dump(),
    )
    run.log(record.metrics, step=record.iteration)


def _mlflow(config: RunConfig, record: IterationRecord) -> None:
    """A step that was logged before stands there twice with the same values: the curve is the same."""
    import mlflow

    if mlflow.active_run() is None:
        mlflow.set_experiment(config.tracking.mlflow_experiment)
        found = mlflow.search_runs(filter_string=f"tags.mlflow.runName = '{record.run}'", output_format="list")
        mlflow.start_run(run_id=found[0].info.run_id if found else None, run_name=record.run)
    mlflow.log_metrics(record.metrics, step=record.iteration)


#: Open event files of this process, by folder, and the iteration that comes next in each.
_WRITERS: dict[str, tuple[Any, int]] = {}
