"""Segments of a streamed ``generate`` stage: finished groups, durable seconds after their last token.

An attempt writes segments while it runs, and the next attempt at the same stage takes them over, so a generation that was
cut off generates only what is missing. A segment says itself what it is: its schema carries the identity of the request
that it answers, its name a digest of its bytes. The listing that finds them is no truth about anything: a segment that it
misses is generated again, and only the stage's manifest says which ones count.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core import layout
from rlhf_core.buffer import StageWriter, decode
from rlhf_core.errors import CorruptObject
from rlhf_core.manifests import Shard
from rlhf_core.metrics import Max, Mean, Metric, Min, Std, Sum
from rlhf_core.ports import ObjectStore
from rlhf_core.records import canonical, digest
from rlhf_core.schema import ROLLOUTS, check_table

_LOG = logging.getLogger(__name__)
_STAGE = "generate"
_IDENTITY = b"rlhf.request"


@dataclass(frozen=True)
class Segment:
    """A segment that exists, and what its rows add to the stage's metrics."""

    shard: Shard
    metrics: dict[str, Metric]


def request_identity(**request: Any) -> str:
    """Digest of everything that decides what a generate stage samples. Segments of another request are not taken over."""
    return digest(canonical(request))


def prepare_segment(writer: StageWriter, rollouts: pa.Table, identity: str) -> tuple[Shard, bytes]:
    """The segment of these rollouts (whole groups, one after another) and its bytes. ValueError for a wrong table."""
    check_table(rollouts, ROLLOUTS)
    groups = _groups(rollouts)
    marked = rollouts.replace_schema_metadata({**(ROLLOUTS.metadata or {}), _IDENTITY: identity.encode()})
    return writer.prepare(marked, groups[0] * (rollouts.num_rows // len(groups)), groups)


def find_segments(
    store: ObjectStore, run: str, iteration: int, identity: str, known: Collection[int] = ()
) -> list[Segment]:
    """Intact segments that earlier attempts at this request left, no group twice. Damaged ones are logged and left out.

    ``known``: groups that the caller has already; segments that hold any of them are left out too.
    """
    found: list[Segment] = []
    known = set(known)
    for key in store.list(layout.stage_data(run, iteration, _STAGE)):
        try:
            segment = _read(store, key, identity)
        except CorruptObject as error:
            _LOG.warning("%s: its groups are generated again", error)
            continue
        if segment is not None and known.isdisjoint(segment.shard.groups):
            known.update(segment.shard.groups)
            found.append(segment)
    return found


def rollout_metrics(rollouts: pa.Table) -> dict[str, Metric]:
    """Metrics ``generate/...`` that follow from the rows themselves."""
    lengths = [float(n) for n in pc.list_value_length(rollouts["response_ids"]).to_pylist()]
    reasons = rollouts["finish_reason"].to_pylist()
    return {
        "generate/tokens": Sum(sum(lengths)),
        "generate/response_length": Mean(sum(lengths), float(len(lengths))),
        "generate/response_length_std": Std.of(lengths),
        "generate/response_length_max": Max(max(lengths, default=0.0)),
        "generate/response_length_min": Min(min(lengths, default=0.0)),
        "generate/finished_fraction": Mean(float(reasons.count("stop")), float(len(reasons))),
        "generate/truncated_fraction": Mean(float(reasons.count("length")), float(len(reasons))),
    }


def _read(store: ObjectStore, key: str, identity: str) -> Segment | None:
    """The segment at this key, verified; None for one of another request, or one that was deleted meanwhile."""
    try:
        data = store.get(key)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EBADMSG:
            raise
        raise CorruptObject(f"{key}: {error}") from None
    content = digest(data)
    if not key.removesuffix(".arrow").endswith(content[: layout.DIGEST_CHARACTERS]):
        raise CorruptObject(f"{key} in {store.url} has blake3 {content}, its name says something else")
    table = decode(data)
    if (table.schema.metadata or {}).get(_IDENTITY) != identity.encode():
        return None
    groups = _groups(table)
    ids = digest(b"\0".join(sample.encode() for sample in table["sample_id"].to_pylist()))
    shard = Shard(
        key=key,
        first_row=0,
        rows=table.num_rows,
        groups=groups,
        bytes=len(data),
        blake3=content,
        ids_digest=ids,
    )
    return Segment(shard, rollout_metrics(table))


def _groups(rollouts: pa.Table) -> tuple[int, ...]:
    """The groups of the rows in order. ValueError unless each is there once, whole."""
    return tuple(_runs(rollouts["group"].to_pylist()))


def _runs(groups: list[int]) -> Iterator[int]:
    sizes: dict[int, int] = {}
    for before, group in zip([None, *groups], groups, strict=False):
        if group != before and group in sizes:
            raise ValueError(f"group {group} of a segment is in two places")
        sizes[group] = sizes.get(group, 0) + 1
    if len(set(sizes.values())) != 1:
        raise ValueError(f"a segment holds groups of different sizes: {sizes}")
    yield from sizes
