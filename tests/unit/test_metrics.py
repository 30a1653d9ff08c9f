"""Metrics carry their reduction: merging parts gives the value of the whole, in any order."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from rlhf_core.metrics import Max, Mean, Min, Std, Sum, merge_metrics, values

KINDS = {
    Mean: lambda x: Mean(float(np.sum(x)), len(x)),
    Sum: lambda x: Sum(float(np.sum(x))),
    Max: lambda x: Max(float(np.max(x, initial=-np.inf))),
    Min: lambda x: Min(float(np.min(x, initial=np.inf))),
    Std: Std.of,
}
TRUTH = {Mean: np.mean, Sum: np.sum, Max: np.max, Min: np.min, Std: np.std}


@pytest.mark.parametrize("kind", KINDS)
def test_merging_parts_is_the_whole(kind):
    x = np.random.default_rng(0).normal(1e6, 1.0, size=100)  # a large offset: raw squares would lose the deviation
    parts = [KINDS[kind](p) for p in np.split(x, [0, 1, 40, 40, 97])]
    for order in (parts, parts[::-1]):
        merged = values(merge_metrics([{"a/b": p} for p in order]))
        assert merged == pytest.approx({"a/b": float(TRUTH[kind](x))}, rel=1e-9)


def test_mean_is_not_the_mean_of_means():
    assert Mean(1.0, 1).merge(Mean(9.0, 9)).value == 1.0
    assert Mean(4.0, 1).merge(Mean(0.0, 3)).value == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_empty_is_the_identity(kind):
    some = KINDS[kind]([3.0, 5.0])
    assert kind().merge(some) == some == some.merge(kind())
    assert kind().merge(kind()) == kind()


def test_empty_values_are_left_out_and_observed_nan_stays():
    result = values({"a/mean": Mean(), "a/max": Max(), "a/min": Min(), "a/std": Std(), "a/sum": Sum()})
    assert result == {"a/sum": 0.0}
    assert all(math.isnan(m.value) for m in (Mean(), Max(), Min(), Std()))
    assert math.isnan(values({"a/mean": Mean(math.nan, 2)})["a/mean"])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_never_lost(kind):
    broken, fine = KINDS[kind]([math.nan]), KINDS[kind]([1.0])
    assert math.isnan(broken.merge(fine).value)
    assert math.isnan(fine.merge(broken).value)


def test_std_by_hand():
    assert Std.of([2, 4, 4, 4, 5, 5, 7, 9]).value == 2.0
    assert Std.of([7.0]).value == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_pickle(kind):
    metric = KINDS[kind]([1.0, 2.5])
    assert pickle.loads(pickle.dumps(metric)) == metric


def test_merge_takes_the_union_of_names():
    merged = merge_metrics([{"a/x": Sum(1)}, {}, {"b/y": Max(3.0)}, {"a/x": Sum(2), "b/y": Max(-1.0)}])
    assert values(merged) == {"a/x": 3.0, "b/y": 3.0}
    assert merge_metrics([]) == {}


def test_merge_refuses_two_kinds_and_bad_names():
    with pytest.raises(ValueError, match="'a/x' comes as Sum and Mean"):
        merge_metrics([{"a/x": Sum(1)}, {"a/x": Mean(1, 1)}])
    for name in ("loss", "A/b", "a/", "/a", "a b/c"):
        with pytest.raises(ValueError, match="area/thing"):
            merge_metrics([{name: Sum(1)}])


def test_inputs_are_not_changed():
    first = {"a/x": Sum(1)}
    merge_metrics([first, {"a/x": Sum(2)}])
    assert first == {"a/x": Sum(1)}


def test_importing_loads_no_torch():
    code = "import sys, rlhf_core.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
