"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
StoreUrl = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="A folder or s3://bucket/prefix.  [default: .rlhf/store]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, as in --set iterations=5"),
]
