"""What is told about finished iterations: each once, in order, whatever failed or died in between, and never in the way."""

from __future__ import annotations

import logging
import shutil
import struct

import pytest

from infra.object_store import LocalObjectStore
from rlhf_core import layout
from rlhf_core.config import parse_config
from rlhf_core.lineage import load_lineage
from rlhf_core.manifests import STAGES, ClusterRef, IterationRecord, ParentRef, ReportedRecord
from rlhf_core.records import load_record
from tasks import reports, tracking
from tasks.commit import commit
from tasks.reports import report
from tasks.tracking import Sink, trackers
from tests.fixtures.whole_run import CONFIG, Run, fork


class Tracker:
    """Remembers what it was told; raises where ``broken``."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.broken = False

    def __call__(self, record: IterationRecord) -> None:
        if self.broken:
            raise ConnectionError("the tracker is away")
        self.told.append(record.iteration)


@pytest.fixture
def store(tmp_path):
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture
def prefect(monkeypatch):
    """Stands for the artifacts of the Prefect server."""
    told = Tracker()
    monkeypatch.setattr(reports, "report_iteration", lambda store, lineage, record: told(record))
    return told


@pytest.fixture
def tracker(monkeypatch, store):
    """The only tracker that is configured."""
    told = Tracker()

    def configured(config, store, branch):
        return [Sink("wandb", told, store, layout.reported(branch, "wandb"))]

    monkeypatch.setattr(reports, "trackers", configured)
    return told


@pytest.fixture(autouse=True)
def log(monkeypatch, caplog):
    """The log of the flow run."""
    monkeypatch.setattr("tasks.unfailing.get_run_logger", lambda: logging.getLogger("run"))
    return caplog


@pytest.fixture
def config(store):
    return parse_config({**CONFIG, "storage": {"url": store.url}, "tracking": {"tensorboard": False}})


def told_up_to(store, sink, branch="r"):
    return load_record(store, layout.reported(branch, sink), ReportedRecord).iterations


def test_each_iteration_is_told_once(store, config, prefect, tracker):
    run = Run(store).start().iterations(0, 1)
    for finished in (0, 1, 2, 2):
        report(config, store, run.lineage, finished)
    assert prefect.told == tracker.told == [0, 1]
    assert told_up_to(store, "wandb") == told_up_to(store, "prefect") == 2


def test_what_a_tracker_missed_is_told_later_and_stops_nobody(store, config, prefect, tracker, log):
    run = Run(store).start().iterations(0, 1, 2)
    report(config, store, run.lineage, 1)
    tracker.broken = True
    report(config, store, run.lineage, 2)
    assert "wandb was not told everything; it will be with the next iteration: ConnectionError" in log.text
    assert prefect.told == [0, 1]
    tracker.broken = False
    report(config, store, run.lineage, 3)
    assert tracker.told == prefect.told == [0, 1, 2]


def test_a_death_before_the_cursor_repeats_one_iteration(store, config, prefect, tracker, monkeypatch):
    run = Run(store).start().iterations(0, 1, 2)
    report(config, store, run.lineage, 1)

    def full(self, key, data):
        raise OSError("no space")

    with monkeypatch.context() as broken:
        broken.setattr(LocalObjectStore, "put", full)
        report(config, store, run.lineage, 3)
    assert tracker.told == [0, 1]
    report(config, store, run.lineage, 3)
    assert tracker.told == [0, 1, 1, 2]


def test_a_damaged_cursor_is_none(store, config, prefect, tracker):
    run = Run(store).start().iterations(0, 1)
    report(config, store, run.lineage, 2)
    store.put(layout.reported("r", "wandb"), b"{")
    report(config, store, run.lineage, 2)
    assert tracker.told == [0, 1, 0, 1]
    assert told_up_to(store, "wandb") == 2


def test_artifacts_that_lag_far_behind_are_left_out(store, config, prefect, tracker, monkeypatch):
    run = Run(store).start().iterations(0, 1, 2)
    monkeypatch.setattr(reports, "_ARTIFACTS", 2)
    report(config, store, run.lineage, 3)
    assert prefect.told == [1, 2]
    assert tracker.told == [0, 1, 2]


def test_a_fork_tells_what_is_its_own(store, config, prefect, tracker):
    parent = Run(store).start().iterations(0, 1)
    report(config, store, parent.lineage, 2)
    child = fork(parent, "f", 1, "score")
    child.stages(1, *STAGES[1:])
    report(config, store, child.lineage, 2)
    assert prefect.told == [0, 1, 1]
    assert told_up_to(store, "wandb", "f") == 2
    assert load_lineage(store, "f").record.parent == ParentRef(run="r", iteration=1, stage="score")


def test_an_iteration_is_committed_without_any_actor_and_without_anybody_to_tell(store, config, prefect, tracker, log):
    prefect.broken = tracker.broken = True
    Run(store).start().stages(0, *STAGES[:-1])
    dead = ClusterRef(namespace="gone", branch="r", epoch=1, trainers=("t",), engines=("e",), rewards=("w",))
    record = commit.fn(config, dead, 0)
    assert load_record(store, layout.iteration_done("r", 0), IterationRecord) == record
    assert log.text.count("ConnectionError") == 2
    prefect.broken = tracker.broken = False
    assert commit.fn(config, dead, 0).name == "Reused"
    assert prefect.told == tracker.told == [0]


# TensorBoard, for real


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tracking, "_WRITERS", {})
    yield tmp_path / "home" / "tensorboard"
    close_all()


@pytest.fixture
def with_tensorboard(store):
    return parse_config({**CONFIG, "storage": {"url": store.url}})


def events(folder):
    """(step, time) of ``reward/mean`` as TensorBoard shows them: what comes behind the step that a file begins with is hidden."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: list[tuple[int, float]] = []
    for file in sorted(folder.glob("events*"), key=lambda path: int(path.name.split(".")[3])):
        data, place = file.read_bytes(), 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            event = Event.FromString(data[place + 12 : place + 12 + length])
            place += 16 + length
            if event.session_log.status == SessionLog.START:
                shown = [(step, time) for step, time in shown if step < event.step]
            shown += [(event.step, event.wall_time) for value in event.summary.value if value.tag == "reward/mean"]
    return shown


def another_process(monkeypatch):
    """Nothing is open yet, and the next file of events is a second younger."""
    monkeypatch.setattr("tensorboardX.event_file_writer.time", Later)
    close_all()


def close_all():
    for writer, _ in tracking._WRITERS.values():
        writer.close()
    tracking._WRITERS.clear()


class Later:
    """The clock of another process."""

    @staticmethod
    def time() -> float:
        return 2e9


def test_tensorboard_shows_every_iteration_once(store, with_tensorboard, home, prefect, monkeypatch):
    run = Run(store).start().iterations(0, 1, 2)
    report(with_tensorboard, store, run.lineage, 2)
    assert [step for step, _ in events(home / "r")] == [0, 1]
    cursor = home / "r" / "reported.json"
    before = cursor.read_bytes()
    report(with_tensorboard, store, run.lineage, 3)
    cursor.write_bytes(before)  # as if the driver had died before the cursor was moved
    another_process(monkeypatch)
    report(with_tensorboard, store, run.lineage, 3)
    assert [step for step, _ in events(home / "r")] == [0, 1, 2]
    assert {time for _, time in events(home / "r")} == {1767225600.0}, "when the iteration ended, not when it was told"


def test_another_machine_begins_event_files_of_its_own(store, with_tensorboard, home, prefect, monkeypatch):
    run = Run(store).start().iterations(0, 1)
    report(with_tensorboard, store, run.lineage, 1)
    another_process(monkeypatch)
    shutil.rmtree(home)
    report(with_tensorboard, store, run.lineage, 2)
    assert [step for step, _ in events(home / "r")] == [0, 1]


def test_where_cursors_lie(store, home):
    names = {"tensorboard": True, "wandb_project": "p", "mlflow_experiment": "e"}
    config = parse_config({**CONFIG, "storage": {"url": store.url}, "tracking": names})
    cursors = {sink.name: (sink.cursors.url, sink.cursor) for sink in trackers(config, store, "r~1")}
    assert cursors == {
        "tensorboard": (LocalObjectStore(home).url, "r~1/reported.json"),
        "wandb": (store.url, "runs/r~1/reported/wandb.json"),
        "mlflow": (store.url, "runs/r~1/reported/mlflow.json"),
    }
