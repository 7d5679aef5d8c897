"""`datasync fork`: a variant of a run from one of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fork(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    step: Annotated[int | None, typer.Option(help="A step with a checkpoint. [default: the newest]")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="What to change.")
    ] = None,
    accept: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Go on although this of the data has changed.")
    ] = None,
    into: Annotated[Path | None, typer.Option(help="The variant's folder. [default: RUN-stepN]")] = None,
    no_train: Annotated[bool, typer.Option("--no-train", help="Make the folder, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Start a variant of a run from one of its steps: the cheap experiment.

    \b
      datasync fork runs/a --step 2000 --set optim.lr=1e-4
      datasync fork runs/a --step 2000 --set data.remote=cleaner --accept dataset
      datasync runs runs/a runs/a-step2000 --plot compare.png
    """
    import logging

    from datasync.cli.train import print_summary, use_clusters
    from train.fork import fork as make

    logging.getLogger("train").setLevel(logging.INFO)
    use_clusters()
    config = make(run, step=step, sets=sets or [], into=into)
    if no_train:
        print(config.run.dir)
        return
    from train.folder import process_start
    from train.loop import run as train

    print_summary(train(config, accept=accept or [], began=process_start()), as_json)
