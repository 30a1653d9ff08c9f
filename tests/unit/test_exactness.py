"""Deterministic kernels: what has none is named, and how often checkpoints are made without exactness."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import parse_config
from rlhf_core.engines.exactness import describe_environment, missing_kernel
from rlhf_core.errors import ConfigError
from tasks.checkpoint import checkpoint_interval, due


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def test_an_operation_without_a_deterministic_kernel_is_named(deterministic):
    with pytest.raises(RuntimeError) as refused:
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
    error = missing_kernel(refused.value)
    assert isinstance(error, ConfigError)
    assert str(error).startswith("optim.deterministic = true, but put_ has no deterministic kernel")
    assert "optim.deterministic = false" in str(error)


def test_other_errors_stay_what_they_are():
    assert missing_kernel(RuntimeError("CUDA out of memory")) is None


def test_the_environment_is_plain_and_says_what_decides_about_bits():
    facts = describe_environment("cpu", 1, deterministic=True)
    assert facts == describe_environment("cpu", 1, deterministic=True)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert len(facts["processors"]) == 1


@pytest.mark.parametrize(
    ("every", "exact", "expected"), [(10, True, 10), (10, False, 2), (3, False, 1), (0, True, 0), (0, False, 5)]
)
def test_without_exactness_checkpoints_come_more_often(every, exact, expected):
    config = parse_config({"run": "r", "iterations": 100, "checkpoint": {"every": every}})
    assert checkpoint_interval(config, exact) == expected
    assert [k for k in range(20) if due(config, exact, k)] == [
        k for k in range(20) if expected and (k + 1) % expected == 0
    ]
