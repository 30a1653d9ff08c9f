"""Metrics to TensorBoard, Weights & Biases and MLflow, through their own libraries."""

from __future__ import annotations

from typing import Any

from infra.settings import load_settings
from rlhf_core.config import RunConfig
from rlhf_core.manifests import IterationRecord


def track(config: RunConfig, record: IterationRecord) -> None:
    """Log an iteration's metrics at step = iteration, everywhere that is configured. Called once an iteration."""
    if config.tracking.tensorboard:
        _tensorboard(record)
    if config.tracking.wandb_project is not None:
        _wandb(config, record)
    if config.tracking.mlflow_experiment is not None:
        _mlflow(config, record)


def _tensorboard(record: IterationRecord) -> None:
    from tensorboardX import SummaryWriter

    folder = load_settings().home / "tensorboard" / record.run
    # A file an iteration would be one too many for 10,000 iterations; one a process is what readers expect.
    writer = _WRITERS.get(str(folder)) or _WRITERS.setdefault(str(folder), SummaryWriter(str(folder)))
    for name, value in record.metrics.items():
        writer.add_scalar(name, value, record.iteration)
    writer.flush()


def _wandb(config: RunConfig, record: IterationRecord) -> None:
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
    import mlflow

    if mlflow.active_run() is None:
        mlflow.set_experiment(config.tracking.mlflow_experiment)
        found = mlflow.search_runs(filter_string=f"tags.mlflow.runName = '{record.run}'", output_format="list")
        mlflow.start_run(run_id=found[0].info.run_id if found else None, run_name=record.run)
    mlflow.log_metrics(record.metrics, step=record.iteration)


#: Open event files of this process, by folder.
_WRITERS: dict[str, Any] = {}
