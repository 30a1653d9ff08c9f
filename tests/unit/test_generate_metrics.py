"""The time of a generation in which an engine died: calls that follow one another add up, those side by side do not."""

from __future__ import annotations

import pytest

from rlhf_core.actors.jobs import StageResult
from rlhf_core.errors import WorkerDied
from rlhf_core.metrics import Max, Sum, merge_metrics, values
from tasks.generate import _collect, _Gathered


def answer(tokens, seconds):
    metrics = {"generate/tokens": Sum(tokens), "generate/engine_seconds": Max(seconds)}
    return StageResult(metrics=metrics, peak_gib=1.0)


@pytest.mark.parametrize(
    ("rounds", "seconds"),
    [
        ([[answer(10, 3.0), answer(20, 5.0)]], 5.0),
        ([[answer(10, 3.0), WorkerDied("e1")], [answer(20, 4.0)]], 7.0),
        ([[WorkerDied("e0"), answer(10, 3.0)], [answer(20, 4.0)], [answer(5, 0.5)]], 7.5),
        ([[WorkerDied("e0"), WorkerDied("e1")], [answer(20, 4.0)]], 4.0),
    ],
)
def test_seconds_of_rounds_add_up(rounds, seconds):
    gathered = _Gathered()
    for results in rounds:
        _collect(gathered, results)
    found = values(merge_metrics(gathered.metrics))
    assert found["generate/engine_seconds"] == pytest.approx(seconds)
    tokens = sum(
        r.metrics["generate/tokens"].value for results in rounds for r in results if isinstance(r, StageResult)
    )
    assert found["generate/new_tokens"] == tokens
