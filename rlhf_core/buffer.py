"""The rollout buffer: shards of Arrow rows, and one commit record a stage that alone says which of them count.

A stage writes shards under its own attempt and then commits a StageManifest by put-if-absent. Until then nothing it
wrote exists for anybody; afterwards nothing can change it. Readers follow manifests, never listings, and check every
byte.

The stages of an iteration are column groups: the same rows in the same order, in shards that may be cut differently,
chained by the digests of the manifests they read, and merged by position.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.ipc as ipc

from rlhf_core import layout
from rlhf_core.errors import ConflictingCommit, CorruptObject
from rlhf_core.manifests import Shard, StageManifest
from rlhf_core.ports import ObjectStore
from rlhf_core.records import commit_record, digest, find_record, load_record

_ROWS_PER_BATCH = 256
_READ_TRIES = 3
_READS_AT_ONCE = 4  # a shard is some 20 MiB, so this bounds memory as well as connections


def encode(table: pa.Table) -> bytes:
    """The table as an Arrow IPC file, zstd level 1. The same table gives the same bytes.

    The file format and not the stream: a stream that was cut at a message boundary reads as a shorter table.
    """
    options = ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1), unify_dictionaries=True)
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_ROWS_PER_BATCH)
    return sink.getvalue().to_pybytes()


def decode(data: bytes) -> pa.Table:
    """The table of an Arrow IPC file. CorruptObject if it is none; Arrow has no checksum, so check a digest first."""
    try:
        return ipc.open_file(pa.py_buffer(data)).read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptObject(f"{len(data)} bytes are no Arrow IPC file: {error}") from None


class StageWriter:
    """Writes the shards of one attempt at one stage. Any process may hold one; the driver commits.

    Writing the same rows again gives the same key and the same bytes, so a retried write does no harm.
    """

    def __init__(self, store: ObjectStore, run: str, iteration: int, stage: str, attempt: str) -> None:
        self.store, self.run, self.iteration = store, layout.check_branch(run), iteration
        self.stage, self.attempt = layout.check_name(stage, "stage"), layout.check_name(attempt, "attempt")

    def write_shard(self, table: pa.Table, first_row: int) -> Shard:
        """Write the rows ``first_row ..`` of the stage as one object. It counts once a commit names it."""
        shard, data = self.prepare(table, first_row)
        self.store.put(shard.key, data)
        return shard

    def prepare(self, table: pa.Table, first_row: int, groups: Sequence[int] = ()) -> tuple[Shard, bytes]:
        """A shard and its bytes, not yet written. With ``groups`` a segment: the rows are those of whole groups."""
        if "sample_id" not in table.column_names:
            raise ValueError(f"stage {self.stage!r}: a shard needs the column 'sample_id', it has {table.column_names}")
        data = encode(table)
        content = digest(data)
        key = layout.shard(self.run, self.iteration, self.stage, self.attempt, first_row, content)
        shard = Shard(
            key=key,
            first_row=first_row,
            rows=table.num_rows,
            groups=tuple(groups),
            bytes=len(data),
            blake3=content,
            ids_digest=_ids_digest(table),
        )
        return shard, data


def commit_stage(store: ObjectStore, manifest: StageManifest) -> tuple[StageManifest, bool]:
    """Commit the stage, or adopt the attempt that committed it first; returns (what is committed, whether it is ours).

    The shards must cover the rows from 0 without gaps; segments, the groups from 0. Their order, ``rows`` and ``digest``
    are filled in. Adopting needs the same parents and policy version, else ConflictingCommit. ValueError for gaps,
    overlaps or a wrong row count.
    """
    where = f"{manifest.run} iteration {manifest.iteration} stage {manifest.stage!r}"
    if any(shard.groups for shard in manifest.shards):
        shards = _segments_in_order(where, manifest.shards)
    else:
        shards = _shards_in_order(where, manifest.shards)
    expected = sum(shard.rows for shard in shards)
    if shards and manifest.rows not in (0, expected):
        raise ValueError(f"{where}: the manifest says {manifest.rows} rows, its shards hold {expected}")
    ours = manifest.model_copy(update={"shards": shards, "rows": expected if shards else manifest.rows})
    key = layout.stage_commit(manifest.run, manifest.iteration, manifest.stage)
    committed, mine = commit_record(store, key, ours)
    if not mine:
        for name in ("run", "iteration", "stage", "parents", "policy_version"):
            theirs, wanted = getattr(committed, name), getattr(ours, name)
            if theirs != wanted:
                raise ConflictingCommit(
                    f"{key} was committed by attempt {committed.attempt!r} with {name} = {theirs!r}, attempt "
                    f"{ours.attempt!r} has {wanted!r}: it was computed from something else and is not committed"
                )
    return committed, mine


def _shards_in_order(where: str, shards: Sequence[Shard]) -> tuple[Shard, ...]:
    ordered = sorted(shards, key=lambda shard: (shard.first_row, shard.rows))
    expected = 0
    for shard in ordered:
        if shard.first_row != expected:
            problem = "missing" if shard.first_row > expected else "there twice"
            raise ValueError(
                f"{where}: rows {min(expected, shard.first_row)} to {max(expected, shard.first_row) - 1} are "
                f"{problem}: {shard.key} starts at row {shard.first_row}, expected {expected}"
            )
        expected += shard.rows
    return tuple(ordered)


def _segments_in_order(where: str, segments: Sequence[Shard]) -> tuple[Shard, ...]:
    """By their first group; ``first_row`` then counts the rows as they lie, which only identifies a segment."""
    whole = next((segment.key for segment in segments if not segment.groups), None)
    if whole is not None:
        raise ValueError(f"{where}: {whole} names no groups, other shards do")
    groups = sorted(group for segment in segments for group in segment.groups)
    wrong = next((n for n, group in enumerate(groups) if n != group), None)
    if wrong is not None:
        problem = "there twice" if groups[wrong] < wrong else "missing"
        raise ValueError(f"{where}: group {min(wrong, groups[wrong])} is {problem} in its {len(segments)} segments")
    sizes = {segment.rows / len(segment.groups) for segment in segments}
    if len(sizes) != 1 or not sizes.pop().is_integer():
        raise ValueError(f"{where}: its segments hold groups of different sizes: {[s.key for s in segments][:4]}")
    ordered, first = [], 0
    for segment in sorted(segments, key=lambda s: s.groups[0]):
        ordered.append(segment.model_copy(update={"first_row": first}))
        first += segment.rows
    return tuple(ordered)


def load_stage(store: ObjectStore, run: str, iteration: int, stage: str) -> StageManifest:
    """The committed manifest. NotCommitted if there is none; CorruptObject and IntegrityError as for every record."""
    key = layout.stage_commit(run, iteration, stage)
    return _belongs(load_record(store, key, StageManifest), key, run, iteration, stage)


def find_stage(store: ObjectStore, run: str, iteration: int, stage: str) -> StageManifest | None:
    """As load_stage, but None if nobody committed the stage."""
    key = layout.stage_commit(run, iteration, stage)
    manifest = find_record(store, key, StageManifest)
    return None if manifest is None else _belongs(manifest, key, run, iteration, stage)


def read_shard(store: ObjectStore, shard: Shard) -> pa.Table:
    """The rows of a shard, verified: bytes, number of rows and sample ids. Errors as in ``read_object``."""
    return _checked(decode(read_object(store, shard)), shard)


def read_object(store: ObjectStore, shard: Shard) -> bytes:
    """The bytes of a shard, verified: length and blake3.

    Read again when damaged, since that may have happened on the way. CorruptObject names the key, also when the object
    is missing; OSError if the store fails.
    """
    problem = ""
    for _ in range(_READ_TRIES):
        try:
            data = store.get(shard.key)
        except FileNotFoundError:
            raise CorruptObject(f"{shard.key} is named by a commit but missing in {store.url}") from None
        except OSError as error:
            if error.errno != errno.EBADMSG:
                raise
            raise CorruptObject(f"{shard.key}: {error}") from None
        if len(data) != shard.bytes:
            problem = f"has {len(data)} bytes, its commit says {shard.bytes}"
        elif (found := digest(data)) != shard.blake3:
            problem = f"has blake3 {found}, its commit says {shard.blake3}"
        else:
            return data
    raise CorruptObject(f"{shard.key} in {store.url} {problem} (read {_READ_TRIES} times)")


def read_rows(
    store: ObjectStore,
    manifests: Sequence[StageManifest],
    columns: Sequence[str] | None = None,
    rows: range | None = None,
) -> pa.Table:
    """Rows ``rows`` (all by default) of the column groups, merged by position, with ``columns`` (by default all that each shard
    of a group has).

    Only shards that overlap ``rows`` are fetched. The groups may be cut differently. CorruptObject if they disagree on
    the sample ids or on the number of rows; ConflictingCommit if a later group was computed from another first group;
    ValueError for rows or columns that are not there, a column in two groups, or a manifest without shards.
    """
    if not manifests:
        raise ValueError("read_rows: no manifest given")
    first = manifests[0]
    for manifest in manifests:
        _check_group(manifest, first)
    wanted = range(first.rows) if rows is None else rows
    if wanted.step != 1 or wanted.start < 0 or wanted.stop > first.rows or wanted.start > wanted.stop:
        raise ValueError(
            f"rows {wanted}: stage {first.stage!r} has the rows 0 to {first.rows - 1}; take a part of them"
        )
    groups = _fetch(store, manifests, wanted)
    merged = groups[0]
    for manifest, group in zip(manifests[1:], groups[1:], strict=True):
        if not merged["sample_id"].equals(group["sample_id"]):
            raise CorruptObject(
                f"{first.run} iteration {first.iteration}: stage {manifest.stage!r} has other sample ids than "
                f"{first.stage!r} in the rows {wanted.start} to {wanted.stop - 1}"
            )
        for name in group.column_names:
            if name == "sample_id":
                continue
            if name in merged.column_names:
                raise ValueError(
                    f"column {name!r} is in stage {manifest.stage!r} and in another stage: read one of them"
                )
            merged = merged.append_column(group.schema.field(name), group[name])
    if columns is None:
        return merged
    missing = [name for name in columns if name not in merged.column_names]
    if missing:
        stages = ", ".join(manifest.stage for manifest in manifests)
        raise ValueError(f"columns {missing} are not in the stages {stages}; there are {merged.column_names}")
    return merged.select(list(columns))


def _check_group(manifest: StageManifest, first: StageManifest) -> None:
    where = f"{manifest.run} iteration {manifest.iteration} stage {manifest.stage!r}"
    if not manifest.shards:
        raise ValueError(f"{where} has no shards to read")
    if manifest.rows != first.rows:
        raise CorruptObject(f"{where} has {manifest.rows} rows, {first.stage!r} has {first.rows}")
    if manifest.stage != first.stage and manifest.parents.get(first.stage) != first.digest:
        raise ConflictingCommit(
            f"{where} was computed from {first.stage!r} {manifest.parents.get(first.stage)}, not from {first.digest}"
        )


def _fetch(store: ObjectStore, manifests: Sequence[StageManifest], rows: range) -> list[pa.Table]:
    """The rows of each group. All shards of all groups are read side by side."""
    needed = [_needed(manifest, rows) for manifest in manifests]
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="read-rows") as pool:
        jobs = [[pool.submit(read_shard, store, shard) for shard in shards] for shards in needed]
        try:
            tables = [[job.result() for job in group] for group in jobs]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)  # one damaged shard decides: do not fetch the others
            raise
    merged = []
    for shards, parts in zip(needed, tables, strict=True):
        table = pa.concat_tables(_with_common_columns(parts))
        if shards[0].groups:
            merged.append(_rows_of_groups(table, shards, rows))
        else:
            merged.append(table.slice(rows.start - shards[0].first_row if rows else 0, len(rows)))
    return merged


def _with_common_columns(parts: Sequence[pa.Table]) -> list[pa.Table]:
    """What one version left behind and the next one finished lies in shards of one stage: what only some have, nobody reads."""
    common = [name for name in parts[0].column_names if all(name in part.column_names for part in parts)]
    return [part.select(common) for part in parts]


def _needed(manifest: StageManifest, rows: range) -> list[Shard]:
    """The shards that hold any of the rows; at least one, because an empty range still has a schema."""
    if manifest.shards[0].groups:
        size = _group_size(manifest.shards[0])
        groups = range(rows.start // size, -(-rows.stop // size)) if rows else range(0)
        found = [shard for shard in manifest.shards if any(group in groups for group in shard.groups)]
    else:
        found = [shard for shard in manifest.shards if _overlaps(shard, rows)]
    return found or [manifest.shards[0]]


def _rows_of_groups(table: pa.Table, segments: Sequence[Shard], rows: range) -> pa.Table:
    """Rows ``rows`` of the stage, in the order of its groups, of segments that lie one after another in ``table``."""
    size = _group_size(segments[0])
    position = {group: n for n, group in enumerate(group for segment in segments for group in segment.groups)}
    picked = [position[row // size] * size + row % size for row in rows]
    if picked and picked == list(range(picked[0], picked[0] + len(picked))):
        return table.slice(picked[0], len(picked))  # in order already: nothing is copied
    return table.take(pa.array(picked, type=pa.int64()))


def _group_size(segment: Shard) -> int:
    return segment.rows // len(segment.groups)


def _overlaps(shard: Shard, rows: range) -> bool:
    return shard.first_row < rows.stop and rows.start < shard.first_row + shard.rows


def _checked(table: pa.Table, shard: Shard) -> pa.Table:
    if table.num_rows != shard.rows:
        raise CorruptObject(f"{shard.key} holds {table.num_rows} rows, its commit says {shard.rows}")
    if "sample_id" not in table.column_names or _ids_digest(table) != shard.ids_digest:
        raise CorruptObject(f"{shard.key} holds other sample ids than its commit says")
    return table


def _ids_digest(table: pa.Table) -> str:
    return digest(b"\0".join(sample.encode() for sample in table["sample_id"].to_pylist()))


def _belongs(manifest: StageManifest, key: str, run: str, iteration: int, stage: str) -> StageManifest:
    if (manifest.run, manifest.iteration, manifest.stage) != (run, iteration, stage):
        raise CorruptObject(
            f"{key} holds the commit of {manifest.run} iteration {manifest.iteration} stage {manifest.stage!r}"
        )
    return manifest
