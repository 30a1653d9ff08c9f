"""The configuration as a surface: a knob more or less is a reviewed change of ``knobs.txt`` beside this file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import get_args

import pytest

from rlhf_core.config import load_config
from rlhf_core.config.base import Section
from rlhf_core.config.run import CHANGEABLE, RunConfig

KNOBS = Path(__file__).with_name("knobs.txt")
PRESETS = sorted((Path(__file__).parents[2] / "infra" / "presets").glob("*.toml"))


def fields(model: type[Section], prefix: str = ""):
    """(dotted name, field, section inside it or None) of everything that a user can set."""
    for name, field in model.model_fields.items():
        inner = [
            part
            for part in (field.annotation, *get_args(field.annotation))
            if isinstance(part, type) and issubclass(part, Section)
        ]
        yield f"{prefix}{name}", field, inner[0] if inner else None
        for section in inner:
            yield from fields(section, f"{prefix}{name}.")


def test_the_knobs_are_the_listed_ones():
    found = sorted(name for name, field, inner in fields(RunConfig) if inner is not field.annotation)
    assert "\n".join(found) + "\n" == KNOBS.read_text(encoding="utf-8"), f"review the change and edit {KNOBS.name}"


def test_every_knob_is_described_and_has_a_default():
    for name, field, inner in fields(RunConfig):
        assert field.description or inner is field.annotation, f"{name} has no docstring"
        assert not field.is_required(), f"{name} has no default"


def test_every_section_is_closed_and_frozen():
    for name, _, inner in fields(RunConfig):
        if inner is not None:
            assert inner.model_config["extra"] == "forbid", name
            assert inner.model_config["frozen"], name


def test_changeable_keys_exist():
    names = {name for name, _, _ in fields(RunConfig)}
    assert set(CHANGEABLE) <= names


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_are_valid(preset):
    assert isinstance(load_config(preset), RunConfig)
    assert preset.read_text(encoding="utf-8").startswith("# "), "a preset says what it is for"


def test_there_are_presets():
    assert "laptop" in {path.stem for path in PRESETS}


def test_the_page_about_the_configuration_is_current(root):
    script = root / "docs" / "generate_configuration.py"
    spec = importlib.util.spec_from_file_location("generate_configuration", script)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text(encoding="utf-8") == generator.render(), "run `make docs`"
