"""What a driver does about errors of workers: rebuild and go on, or stop."""

from __future__ import annotations

import logging

import pytest

from rlhf_core.config import parse_config
from rlhf_core.errors import CapacityError, ConfigError, StaleEngine, WorkerDied, WorkerError, WorkerFault
from tasks import driver as module
from tasks.driver import Driver

RECOVERIES = 3


class Lease:
    """A lease that is held."""

    epoch = 1

    def check(self) -> None:
        pass


class Lineage:
    head = "r"


class Cluster:
    """What a start gives."""

    device = "cpu"


@pytest.fixture
def builds(monkeypatch):
    """Errors that the next starts of the cluster raise, in order, and the list of starts; afterwards they succeed."""
    planned: list[Exception] = []
    made = []

    def start_cluster(*_):
        made.append(1)
        if planned:
            raise planned.pop(0)
        return Cluster()

    monkeypatch.setattr(module, "start_cluster", start_cluster)
    monkeypatch.setattr(module, "reconnect", lambda namespace: None)
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("driver"))
    monkeypatch.setattr(module, "_REST_SECONDS", 0.0)
    return planned, made


@pytest.fixture
def driver(tmp_path):
    config = parse_config(
        {"run": "r", "limits": {"recoveries": RECOVERIES}, "storage": {"url": str(tmp_path / "store")}}
    )
    return Driver(config, Lease(), Lineage())


def work(*errors):
    """Function that raises these errors one call after the other, and the list of its calls."""
    left, calls = list(errors), []

    def do(cluster):
        calls.append(cluster)
        if left:
            raise left.pop(0)

    return do, calls


@pytest.mark.parametrize("error", [WorkerFault("start: a failed: ValueError: b"), ConfigError("c")])
def test_what_new_actors_fail_by_for_good_ends_the_start_at_once(driver, builds, error):
    planned, made = builds
    planned.extend([error] * 9)
    with pytest.raises(type(error)):
        driver.start_cluster()
    assert len(made) == 1


def test_what_new_actors_fail_by_in_a_recovery_is_tried_once_more(driver, builds):
    planned, made = builds
    planned.extend([WorkerFault("start: a failed: ValueError: no memory")] * 9)
    do, _ = work(WorkerDied("a died"))
    with pytest.raises(WorkerFault):
        driver.persevere(Cluster(), do)
    assert len(made) == 2


@pytest.mark.parametrize("error", [WorkerDied("a died"), WorkerError("port in use"), ConnectionError("ray")])
def test_what_may_pass_is_tried_again(driver, builds, error):
    planned, made = builds
    planned.extend([error] * RECOVERIES)
    driver.start_cluster()
    assert len(made) == RECOVERIES + 1
    planned.extend([error] * 9)
    with pytest.raises(type(error)):
        driver.start_cluster()
    assert len(made) == 2 * (RECOVERIES + 1)


def test_a_fault_in_the_work_is_tried_once_more(driver, builds):
    fault = [WorkerFault("generate: a failed: KeyError: 'x'") for _ in range(9)]
    do, calls = work(*fault[:1])
    driver.persevere(Cluster(), do)
    assert len(calls) == 2
    do, calls = work(*fault)
    with pytest.raises(WorkerFault):
        driver.persevere(Cluster(), do)
    assert len(calls) == 2


def test_other_words_are_another_fault(driver, builds):
    do, calls = work(WorkerFault("one"), WorkerDied("two"), WorkerFault("one"))
    driver.persevere(Cluster(), do)
    assert len(calls) == 4


def test_deaths_with_the_same_words_are_tried_as_often_as_the_limit_says(driver, builds):
    do, calls = work(*[WorkerDied("a died")] * 9)
    with pytest.raises(WorkerDied):
        driver.persevere(Cluster(), do)
    assert len(calls) == RECOVERIES + 1
    do, calls = work(StaleEngine("a"), StaleEngine("a"))
    driver.persevere(Cluster(), do)
    assert len(calls) == 3


def test_a_cluster_that_is_too_small_for_a_while_is_waited_for(driver, builds):
    planned, made = builds
    planned.extend([CapacityError("no node"), CapacityError("no node")])
    do, calls = work(WorkerDied("a node died"))
    driver.persevere(Cluster(), do)
    assert (len(made), len(calls)) == (3, 2)
