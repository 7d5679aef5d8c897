"""`datasync merge`: commit a job whose shares ran on several machines."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def merge(
    out: Annotated[
        str, typer.Argument(help="The destination that the shares were given.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Publish what `datasync shard --task I/N` made, once every share is done.

    \b
      datasync shard crawl/ s3://bucket/crawl --task 0/2
      datasync shard crawl/ s3://bucket/crawl --task 1/2
      datasync merge s3://bucket/crawl

    On Slurm the share is $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT, in an indexed job of Kubernetes
    $JOB_COMPLETION_INDEX/N. Running a share again does only what is missing of it.
    """
    from datasync.cli import load_config
    from datasync.cli.shard import _as_json, show
    from shards.convert import merge as merge_job

    result = merge_job(load_config().resolve(out))
    if as_json:
        print(json.dumps(_as_json(result), indent=2))
    else:
        show(result, task=None, out=out)
    raise typer.Exit(3 if result.skipped else 0)
