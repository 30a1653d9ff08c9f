"""One name has one meaning: the table of all metrics, what it refuses, and that nothing in the source is missing in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rlhf_core import metric_names
from rlhf_core.config import parse_config
from rlhf_core.manifests import STAGES, ClusterRef, StageManifest
from rlhf_core.metric_names import METRICS, meaning_of, of_iteration, require_own
from rlhf_core.metrics import Max, Mean, united
from tasks.context import StageContext
from tasks.stage import manifest_of
from tests.fixtures.whole_run import CONFIG

ROOT = Path(__file__).parents[2]
#: Metrics of evaluations, and names of the same form that are none.
OTHER = re.compile(r"(greedy|sampled|text|application|docs|runs)/")


def test_every_stage_and_no_other_has_metrics():
    assert {meaning.stage for meaning in METRICS.values()} == set(STAGES)


def test_the_page_about_numerics_has_the_table():
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([a-z0-9_/*]+)` \| (\w+) \| (.+) \| (\w+) \|$", page, re.MULTILINE)
    assert found == [(name, m.stage, m.over, m.reduction) for name, m in METRICS.items()]


def test_two_stages_cannot_share_a_name(monkeypatch):
    names = {"update": {"update/loss": ("steps", "mean")}, "sync": {"update/loss": ("steps", "sum")}}
    monkeypatch.setattr(metric_names, "_BY_STAGE", names)
    with pytest.raises(ValueError, match="'update/loss' belongs to the stages 'update' and 'sync'"):
        metric_names._meanings()


def test_a_stage_cannot_record_the_name_of_another_one():
    cluster = ClusterRef(namespace="none", branch="r", epoch=1, trainers=(), engines=(), rewards=())
    context = StageContext(parse_config(CONFIG), cluster, 3, attempt="a1")
    with pytest.raises(ValueError, match="'policy/entropy' of stage 'update' is one of stage 'advantages'"):
        manifest_of(context, "update", metrics={"policy/entropy": 1.0}, policy_version=3)
    made = manifest_of(context, "update", metrics={"update/entropy": 1.0}, policy_version=3)
    assert made.metrics == {"update/entropy": 1.0}


def test_names_of_a_group_belong_to_its_stage():
    assert meaning_of("reward/component_my_rule").stage == "score"
    assert meaning_of("seconds/sync").stage == "commit"
    assert meaning_of("made/up") is None
    require_own("score", ["reward/component_x", "made/up"])
    with pytest.raises(ValueError, match="'seconds/sync' of stage 'sync'"):
        require_own("sync", ["seconds/sync"])


def manifest(stage, **metrics):
    return StageManifest(run="r", iteration=0, stage=stage, attempt="a", policy_version=0, metrics=metrics)


def test_an_iteration_has_every_metric_once():
    stages = {
        "advantages": manifest("advantages", **{"policy/entropy": 0.4, "x/y": 1.0}),
        "update": manifest("update", **{"policy/entropy": 0.2, "policy/loss": 3.0, "x/y": 2.0}),
    }
    assert of_iteration(stages) == {
        "policy/entropy": 0.4,
        "x/y": 1.0,
        "update/entropy": 0.2,
        "policy/loss": 3.0,
        "update/y": 2.0,
    }


def test_metrics_of_two_sources_do_not_hide_each_other():
    assert united({"a/b": 1.0}, {}, {"c/d": 2.0}) == {"a/b": 1.0, "c/d": 2.0}
    with pytest.raises(ValueError, match=r"\['a/b'\] are there twice"):
        united({"a/b": Mean(1.0, 1.0)}, {"a/b": Max(1.0)})


def names_in(tree):
    """Keys of dict displays and of subscripts that look like a metric's name."""
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    texts = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return {text for text in texts if re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)+", text)}


def test_every_metric_of_the_source_is_in_the_table_and_the_other_way_round():
    files = [f for package in ("rlhf_core", "tasks") for f in (ROOT / package).rglob("*.py")]
    found = set().union(*(names_in(ast.parse(f.read_text(encoding="utf-8"))) for f in files))
    found = {name for name in found if not OTHER.match(name)}
    assert sorted(name for name in found if meaning_of(name) is None) == [], "add them to rlhf_core/metric_names.py"
    assert sorted(name for name in METRICS if not name.endswith("*") and name not in found) == []
