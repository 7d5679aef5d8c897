"""`datasync runs`: list runs, compare them, export one's weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from train.runs import Run


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of runs. [default: runs]")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the losses: .png, .svg, or .html with tables.")
    ] = None,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Each start of each run, and where its time went.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write one run's weights as safetensors for transformers."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="With --export: which checkpoint. [default: the newest]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """List training runs; with several, show what differs between their configs.

    \b
      datasync runs
      datasync runs runs/a runs/b --plot compare.html
      datasync runs runs/a --export a-weights
    """
    from shards.errors import DatasyncError, UsageError
    from train import runs as library

    found = library.find(folders or [Path("runs")])
    if export is not None:
        if len(found) != 1:
            raise UsageError(f"--export takes one run, not {len(found)}", mend="name the run's folder")
        _export(found[0], export, step)
        return
    table, unread = [], 0
    for path in found:
        try:
            table.append(library.summarise(path))
        except DatasyncError as error:
            if path in (folders or []):
                raise
            unread += 1
            print(f"left out: {error.message}", file=sys.stderr)
    if plot is not None:
        library.write_report(table, plot)
    if as_json:
        rows = [
            {**asdict(run), "path": str(run.path), "state": run.state, "goodput": run.goodput}
            for run in table
        ]
        print(json.dumps(rows))
    else:
        _list(table)
        if goodput:
            _goodput(table)
        if len(folders or []) > 1:
            _differences(table)
        if plot is not None:
            print(plot)
    if unread:
        raise typer.Exit(3)


def _list(table: Sequence[Run]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from train.runs import show

    titles = ("state", "step", "loss", "eval", "tok/s", "wait", "goodput", "starts")
    grid = Table(
        Column("run", overflow="fold"),  # where it gets narrow, the path goes on in the next line
        *(Column(title, no_wrap=True) for title in titles),
        box=None,
        pad_edge=False,
    )
    for run in table:
        grid.add_row(
            str(run.path),
            run.state,
            f"{run.step}/{run.steps}",
            show(run.loss),
            show(run.eval_loss),
            f"{run.tokens_per_s:,.0f}" if run.tokens_per_s else "-",
            f"{100 * run.wait:.1f}%" if run.wait is not None else "-",
            f"{100 * run.goodput:.0f}%" if run.goodput is not None else "-",
            str(len(run.attempts)),
        )
    Console().print(grid)


def _goodput(table: Sequence[Run]) -> None:
    from rich.console import Console
    from rich.table import Table

    from shards.progress import format_seconds as seconds

    for run in table:
        titles = ("start", "steps that count", "setting up", "done again", "pause before", "in all", "ended")
        grid = Table(*titles, box=None, pad_edge=False)
        for a in run.attempts:
            again = f"{seconds(a.lost_s)} ({a.redone} steps)" if a.redone else "-"
            pause = seconds(a.idle_s) if a.idle_s else "-"
            grid.add_row(
                str(a.number),
                seconds(a.productive_s),
                seconds(a.setup_s),
                again,
                pause,
                seconds(a.seconds),
                a.cause,
            )
        print(f"\n{run.path}")
        Console().print(grid)


def _differences(table: Sequence[Run]) -> None:
    from rich.console import Console
    from rich.table import Table

    from train.runs import differences, show

    grid = Table("", *(str(run.path) for run in table), box=None, pad_edge=False)
    grid.add_row("weights", *((run.digest or "-")[:12] for run in table))
    for key, values in differences(table).items():
        grid.add_row(key, *(show(value) for value in values))
    print()
    Console().print(grid)


def _export(run: Path, folder: Path, step: int | None) -> None:
    from train.generate import load
    from train.model.llama import export_weights

    trained = load(run, step=step, device="cpu")
    tokenizer = trained.encoder.tokenizer
    export_weights(trained.model, folder, bos=tokenizer.bos, eos=tokenizer.eos)
    print(f"{folder}: weights of {run} after step {trained.step}")
