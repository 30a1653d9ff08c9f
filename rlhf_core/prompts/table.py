"""The tokenized prompts of a run as one Arrow table in the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rlhf_core import layout
from rlhf_core.buffer import decode, encode, read_object
from rlhf_core.manifests import Shard
from rlhf_core.ports import ObjectStore
from rlhf_core.prompts.prompt import Prompt
from rlhf_core.records import digest


def rows_of(table: pa.Table, prompts: Sequence[Prompt]) -> pa.Table:
    """The rows of these prompts, in their order. KeyError for a prompt that is not in the table."""
    row = {name: number for number, name in enumerate(table["prompt_id"].to_pylist())}
    return table.take(pa.array([row[prompt.prompt_id] for prompt in prompts], pa.int64())).combine_chunks()


def write_prompts(store: ObjectStore, run: str, name: str, table: pa.Table) -> Shard:
    """Store the table under its digest. The same prompts give the same key."""
    data = encode(table)
    content = digest(data)
    key = layout.prompts(run, f"{name}-{content[:16]}.arrow")
    if not store.exists(key):
        store.put(key, data)
    ids = digest("\0".join(table["prompt_id"].to_pylist()).encode())
    return Shard(key=key, first_row=0, rows=table.num_rows, bytes=len(data), blake3=content, ids_digest=ids)


class PromptTable:
    """Read access by row and by prompt id; loaded on first use, verified against its digest."""

    def __init__(self, store: ObjectStore, shard: Shard) -> None:
        self._table = decode(read_object(store, shard))
        self._row = {name: row for row, name in enumerate(self._table["prompt_id"].to_pylist())}

    @property
    def rows(self) -> int:
        """Number of prompts."""
        return self._table.num_rows

    @property
    def ids(self) -> list[str]:
        """Prompt ids in the order of the table."""
        return list(self._row)

    def at(self, rows: list[int]) -> list[dict[str, Any]]:
        """The prompts of these rows: ``prompt_id``, ``prompt_text``, ``prompt_ids``, ``answer``, ``metadata`` (a dict)."""
        records = self._table.take(pa.array(rows, type=pa.int64())).to_pylist()
        for record in records:
            record["metadata"] = json.loads(record["metadata"]) if record["metadata"] else {}
        return records

    def prompts(self) -> list[Prompt]:
        """All prompts as a reward sees them: without chat messages and tools, which are token ids by now."""
        rows = self._table.select(["prompt_id", "prompt_text", "answer", "metadata"]).to_pylist()
        return [
            Prompt(row["prompt_id"], row["prompt_text"], (), row["answer"], json.loads(row["metadata"] or "{}"))
            for row in rows
        ]

    def by_id(self, prompt_ids: list[str]) -> list[dict[str, Any]]:
        """The prompts with these ids, in the order asked for."""
        return self.at([self._row[name] for name in prompt_ids])
