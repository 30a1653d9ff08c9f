"""When a worker counts as dead: from what it answered and when, with clocks of our own."""

from __future__ import annotations

import random

import pytest

from rlhf_core.actors.watch import POLL_SECONDS, AwakeTime, Patience, Vigil
from rlhf_core.progress import Progress, Pulse

PATIENCE = Patience(stall=90, first=900, outage=600)
WORKING = Pulse(1, "update, after 3 x micro-batch", longest=2.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def first_complaint(answers, patience=PATIENCE, until=5000.0):
    """(seconds, text) of the first complaint when the worker answers ``answers(now)`` to each poll; None for no answer."""
    vigil, now = Vigil(0.0), 0.0
    while now < until:
        now += POLL_SECONDS
        pulse = answers(now)
        if pulse is not None:
            vigil.hear(pulse, now)
        complaint = vigil.complaint(now, patience)
        if complaint is not None:
            return now, complaint
    return None


def test_a_worker_that_never_answers():
    seconds, text = first_complaint(lambda now: None)
    assert 90 < seconds <= 90 + 2 * POLL_SECONDS
    assert text == "has not answered for 92 s"


def test_a_worker_that_stops_answering_says_where_it_was():
    seconds, text = first_complaint(lambda now: Pulse(int(now), WORKING.doing, 2.0) if now <= 100 else None)
    assert 190 < seconds <= 190 + 2 * POLL_SECONDS
    assert text.startswith("has not answered for 92 s; it was in update, after 3 x micro-batch")


def test_a_worker_that_answers_and_does_not_move():
    seconds, text = first_complaint(lambda now: WORKING)
    assert 90 < seconds <= 92 + 2 * POLL_SECONDS
    assert text.startswith("answers, but has not moved for 92 s; it was in update, after 3 x micro-batch")


@pytest.mark.parametrize(
    ("pulse", "allowed"),
    [
        (WORKING, 90),
        (Pulse(1, "update", longest=30.0), 150),
        (Pulse(1, "update", longest=1e6), 900),
        (Pulse(1, "update"), 900),
        (Pulse(1, "score", 1.0, "the reward functions", 300.0), 390),
        (Pulse(1, "score", 1.0, "the object store"), 90 + 600 + 900),
    ],
    ids=["normal", "slow by nature", "after a pause of hours", "for the first time", "bounded wait", "store"],
)
def test_what_a_step_may_take(pulse, allowed):
    seconds, _ = first_complaint(lambda now: pulse)
    assert allowed < seconds <= allowed + 2 * POLL_SECONDS + 2


def test_a_first_step_may_be_long_but_must_answer():
    seconds, _ = first_complaint(lambda now: Pulse(1, "update") if now <= 100 else None)
    assert 190 < seconds < 200


def test_short_patience_for_first_steps_is_no_less_than_for_others():
    assert first_complaint(lambda now: Pulse(1, "update"), Patience(90, 20, 0))[0] > 90


def test_an_idle_worker_is_not_blamed():
    assert first_complaint(lambda now: Pulse(7, None)) is None


def test_slow_but_moving():
    assert first_complaint(lambda now: Pulse(int(now // 80), WORKING.doing, 1.0)) is None


def test_time_in_which_this_process_was_stopped_does_not_count():
    clock = Clock()
    awake = AwakeTime(clock)
    for _ in range(10):
        clock.now += 2
        awake.read()
    assert awake.read() == 20
    clock.now += 8 * 3600  # a closed laptop
    assert awake.read() == 20 + 3 * POLL_SECONDS
    clock.now -= 1000  # no monotonic clock does that; it must not hurt
    assert awake.read() == 20 + 3 * POLL_SECONDS
    clock.now += 1
    assert awake.read() == 21 + 3 * POLL_SECONDS


def test_a_pause_of_everything_ends_without_a_complaint():
    """Driver and worker stop in the middle of a step, for an hour; the worker needs a moment to answer again."""
    clock = Clock()
    awake, progress = AwakeTime(clock), Progress(clock)
    vigil = Vigil(awake.read())
    with progress.call("update"):
        for number in range(200):
            clock.now += 2 if number != 100 else 3600
            if number not in (100, 101):
                progress.count("micro-batch")
                vigil.hear(progress.pulse(), awake.read())
            assert vigil.complaint(awake.read(), PATIENCE) is None


@pytest.mark.parametrize("seed", range(200))
def test_no_false_alarm_and_none_too_late(seed):
    """A worker of random habits: steps up to 4 times as long as the longest of their kind before, or up to the stall. It is
    never blamed; then it stops, answering or not, and is found when its patience is used up."""
    chance, clock = random.Random(seed), Clock()
    awake, progress = AwakeTime(clock), Progress(clock)
    patience = Patience(stall=chance.uniform(5, 120), first=chance.uniform(5, 900), outage=0)
    vigil, polled = Vigil(awake.read()), 0.0

    def advance(seconds, answers=True):
        nonlocal polled
        end = clock.now + seconds
        while clock.now < end:
            clock.now = min(end, polled + POLL_SECONDS)
            if clock.now >= polled + POLL_SECONDS:
                polled = clock.now
                if answers:
                    vigil.hear(progress.pulse(), awake.read())
                if (text := vigil.complaint(awake.read(), patience)) is not None:
                    return text
        return None

    with progress.call("update"):
        for _ in range(chance.randrange(2, 30)):
            longest = progress.pulse().longest
            bound = patience.first if longest is None else min(4 * longest, patience.first)
            assert advance(chance.uniform(0, 0.95) * max(patience.stall, bound) - POLL_SECONDS) is None
            progress.count(chance.choice(["micro-batch", "micro-batch", "bucket"]))
        answers, stopped = chance.random() < 0.5, clock.now
        vigil.hear(progress.pulse(), awake.read())
        allowed = patience.standstill(progress.pulse()) if answers else patience.silence(progress.pulse())
        assert advance(allowed + 3 * POLL_SECONDS, answers) is not None
        assert clock.now - stopped > allowed
