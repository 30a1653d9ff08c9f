"""The one door to the configurations inside stored records, whatever version wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_origin

from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.base import Section
from rlhf_core.config.run import RunConfig, apply_override, parse_config
from rlhf_core.config.sampling import check_sampling
from rlhf_core.config.upgrades import newest_schema, upgrade
from rlhf_core.errors import ConfigError, IntegrityError
from rlhf_core.manifests import RunRecord


def config_fields(config: RunConfig, **changes: Any) -> dict[str, Any]:
    """The fields of a ``RunRecord`` that store this configuration. ``changes``: top-level keys that differ."""
    return {"config": {**config.model_dump(mode="json"), **changes}, "config_schema": newest_schema()}


def upgraded_fields(record: RunRecord, **changes: Any) -> dict[str, Any]:
    """As ``config_fields``, for the configuration of another record, whose values are kept as they are."""
    return {"config": {**_upgraded(record), **changes}, "config_schema": newest_schema()}


def stored_config(record: RunRecord, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run that is to go on, with defaults for what was no knob when it was stored.

    ``overrides``: ``section.key=value``, as for a preset. ConfigError names every key that this version does not know or
    allow any more, IntegrityError a newer schema.
    """
    raw = _upgraded(record)
    for override in overrides:
        apply_override(raw, override)
    if overrides:
        config = parse_config(raw, origin=f"the stored configuration of run {record.run} with --set")
        check_sampling(config.generate)
        return config
    try:
        return parse_config(raw, origin=f"the stored configuration of run {record.run}")
    except ConfigError as error:
        raise ConfigError(
            f"{error}\ncontinue it with the version that started it, or as a fork with other values: "
            f"rlhf fork {record.run} --iteration K --from STAGE --set KEY=VALUE"
        ) from None


def past_config(record: RunRecord) -> RunConfig:
    """As ``stored_config``, to read and replay what was done with it: nothing that it says is refused.

    A run keeps its story though this version would not start it: bounds do not count, and keys that are unknown here are
    left out.
    """
    raw = _upgraded(record)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError:
        return _as_it_was(RunConfig, raw)


def _upgraded(record: RunRecord) -> dict[str, Any]:
    newest = newest_schema()
    if record.config_schema > newest:
        raise IntegrityError(
            f"the configuration of run {record.run} has schema {record.config_schema}, this version reads schemas up to "
            f"{newest}: use a newer prefect-rlhf"
        )
    return upgrade(record.config, record.config_schema)


def _as_it_was(section: type[Section], raw: Mapping[str, Any]) -> Any:
    """The section with these values, of the right types where they have one, but without bounds and rules."""
    values: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if name not in raw:
            continue
        kind: Any = field.annotation
        value = raw[name]
        if (
            isinstance(kind, type)
            and get_origin(kind) is None
            and issubclass(kind, Section)
            and isinstance(value, Mapping)
        ):
            values[name] = _as_it_was(kind, value)
            continue
        try:
            values[name] = TypeAdapter(kind).validate_python(value)  # the annotation alone: bounds are beside it
        except ValidationError:
            values[name] = value
    return section.model_construct(**values)
