"""Object keys: their exact form, and that no id can leave its folder."""

from __future__ import annotations

import pytest

from infra.object_store import check_key
from rlhf_core import layout
from rlhf_core.errors import UserError

DIGEST = "0123456789abcdef" * 4


def test_keys_are_the_documented_ones_and_every_store_takes_them():
    keys = {
        layout.run_record("r"): "runs/r/run.json",
        layout.lease("r", 1): "runs/r/lease/000001.json",
        layout.heartbeat("r", 1): "runs/r/lease/000001.beat.json",
        layout.prompts("r", "train/0.arrow"): "runs/r/prompts/train/0.arrow",
        layout.stage_commit("r", 7, "generate"): "runs/r/iterations/000007/commits/generate.json",
        layout.stage_data("r", 7, "score"): "runs/r/iterations/000007/data/score",
        layout.shard("r", 7, "score", "a-1", 1000, DIGEST): (
            "runs/r/iterations/000007/data/score/a-1/00001000-0123456789abcdef.arrow"
        ),
        layout.iteration_done("r", 999_999): "runs/r/iterations/999999/DONE.json",
        layout.checkpoint_commit("r", 12): "runs/r/checkpoints/commits/0000000012.json",
        layout.checkpoint_attempt("r", 12, "a"): "runs/r/checkpoints/0000000012/a",
        layout.evaluation("r", "v3"): "runs/r/evaluations/v3.json",
        layout.export("r", "model.safetensors"): "runs/r/export/model.safetensors",
    }
    for key, expected in keys.items():
        assert key == expected
        assert check_key(key) == key
    assert len(set(keys)) == 12


def test_checkpoint_version_reads_commit_keys_only():
    assert layout.checkpoint_version(layout.checkpoint_commit("r", 12)) == 12
    assert layout.checkpoint_commit("r", 12).startswith(layout.checkpoint_commits("r") + "/")
    for key in (
        f"{layout.checkpoint_attempt('r', 12, 'a')}/x.json",
        layout.run_record("r"),
        "runs/r/checkpoints/commits/12.json",
    ):
        assert layout.checkpoint_version(key) is None


HOSTILE = ["", ".", "..", "a/b", "../x", "/a", "a..b", ".a", "a.", "-a", "a b", "ä", "a\n", "a" * 64, None, 1]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_ids(name):
    with pytest.raises(UserError, match="run id"):
        layout.run_root(name)
    for call in (
        lambda: layout.stage_commit("r", 0, name),
        lambda: layout.shard("r", 0, "s", name, 0, DIGEST),
        lambda: layout.checkpoint_attempt("r", 0, name),
        lambda: layout.evaluation("r", name),
    ):
        with pytest.raises(ValueError, match="use letters"):
            call()


@pytest.mark.parametrize("relpath", ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\\b", "a/..b"])
def test_hostile_relative_paths(relpath):
    with pytest.raises(ValueError, match="relative path"):
        layout.export("r", relpath)


@pytest.mark.parametrize("number", [-1, 1.0, True, "1", None])
def test_hostile_numbers(number):
    for call in (lambda: layout.iteration_root("r", number), lambda: layout.checkpoint_commit("r", number)):
        with pytest.raises(ValueError, match="non-negative int"):
            call()


def test_shard_needs_a_digest():
    with pytest.raises(ValueError, match="64 hex digits"):
        layout.shard("r", 0, "s", "a", 0, "abc")
