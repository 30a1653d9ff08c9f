"""What comes out of real Ray when an actor fails while it is made or in a call."""

from __future__ import annotations

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError

from rlhf_core.actors.failures import leaves_doubt
from rlhf_core.actors.group import ActorGroup, ActorSpec, create, kill, statuses
from rlhf_core.errors import IntegrityError, ModelError, WorkerDied, WorkerError, WorkerFault

NAMESPACE = "failing"
SECONDS = 60.0


@pytest.fixture
def start(ray_of_two_cores, failing_actors):
    """Function: ways to fail -> group of one actor for each, not claimed yet; they end with the test."""
    made = []

    def make(*ways):
        names = [f"r-engine-{len(made) + n}" for n in range(len(ways))]
        create(
            [
                ActorSpec(name, failing_actors.FailingActor, (how,), {"num_cpus": 0})
                for name, how in zip(names, ways, strict=True)
            ],
            NAMESPACE,
        )
        made.extend(names)
        return ActorGroup(names, NAMESPACE, 1)

    yield make
    kill(made, NAMESPACE)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("value", WorkerFault, "start: r-engine-0 failed: ValueError: the cache holds 3 tokens"),
        ("model", ModelError, "model folder 'x' has no head"),
        (
            "validation",
            WorkerFault,
            "start: r-engine-0 failed: ValidationError: width: Input should be a valid integer",
        ),
        ("file", WorkerFault, "FileNotFoundError: [Errno 2] No such file or directory: 'model.bin'"),
        ("store", WorkerError, "ConnectionError: s3://b: the endpoint does not answer"),
        ("busy", WorkerError, "OSError: [Errno 98] Address already in use"),
        ("memory", WorkerError, "Free memory on device"),
        ("runtime", WorkerError, "RuntimeError: the port is in use"),
        ("unpicklable", WorkerError, "start: r-engine-0 failed: Unpicklable: code 7"),
        ("exit", WorkerDied, "start: r-engine-0 died: The actor is dead because its worker process has died."),
    ],
)
def test_a_constructor_that_fails_reports_its_cause_and_is_ended(start, how, kind, words):
    group = start(how)
    with pytest.raises(kind) as caught:
        group.start(SECONDS)
    assert type(caught.value) is kind
    assert words in str(caught.value).splitlines()[0]
    with pytest.raises(WorkerDied):
        group.call("work", "", seconds=SECONDS)


def test_the_others_live_on(start):
    group = start("", "value", "")
    with pytest.raises(WorkerFault, match="r-engine-1"):
        group.start(SECONDS)
    others = ActorGroup((group.names[0], group.names[2]), NAMESPACE, 1)
    assert [status["name"] for status in others.call_claim(SECONDS)] == list(others.names)
    assert others.call("work", "", seconds=SECONDS) == [1, 1]


def test_an_actor_that_failed_and_was_not_ended_counts_as_gone(start):
    group = start("value", "")
    assert set(statuses(group.names, NAMESPACE, SECONDS)) == {group.names[1]}


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("value", WorkerFault, "failed: ValueError: the cache holds 3 tokens"),
        ("runtime", WorkerError, "failed: RuntimeError: the port is in use"),
        ("integrity", IntegrityError, "a digest differs"),
        ("exit", WorkerDied, "died"),
    ],
)
def test_a_call_that_fails(start, how, kind, words):
    group = start("", "")
    group.start(SECONDS)
    first = ActorGroup(group.names[:1], NAMESPACE, 1)
    if how != "exit":  # what the other worker raised, not that this one called it
        with pytest.raises(kind, match=words) as caught:
            first.call("pass_on", group.handles[1], how, seconds=SECONDS)
        assert type(caught.value) is kind
    with pytest.raises(kind, match=words) as caught:
        first.call("work", how, seconds=SECONDS)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("how", "doubt"),
    [
        ("runtime", "work failed with RuntimeError: the port is in use"),
        ("value", None),
        ("store", None),
        ("integrity", None),
    ],
)
def test_a_worker_that_may_be_broken_says_so_until_the_call_succeeds(start, how, doubt):
    group = start("")
    group.start(SECONDS)
    with pytest.raises((WorkerError, IntegrityError)):
        group.call("work", how, seconds=SECONDS)
    assert group.call_status(SECONDS)[0]["doubt"] == doubt
    group.call("settle", seconds=SECONDS)
    assert group.call_status(SECONDS)[0]["doubt"] == doubt
    group.call("work", "", seconds=SECONDS)
    assert group.call_status(SECONDS)[0]["doubt"] is None


def test_what_happened_to_another_worker_is_no_reason_for_doubt():
    cause = RuntimeError("CUDA error: invalid argument")
    assert leaves_doubt(cause)
    assert not leaves_doubt(RayTaskError("load_bucket", "", cause).as_instanceof_cause())
    assert not leaves_doubt(GetTimeoutError("60 s"))
