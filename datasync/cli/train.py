"""`datasync train`: parse, call `train.loop`, print what came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from train.config import Config


def train(
    config: Annotated[Path | None, typer.Argument(help="The run's TOML file.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as optim.lr=1e-4.")
    ] = None,
    accept: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Continue a run although this key has changed.")
    ] = None,
    reproduce: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Repeat the run in this folder, and compare.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every key, its value and where it comes from.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print parameters, FLOPs and memory; train nothing.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="With --plan: how many ranks.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Train a multimodal decoder from a stream, or continue where the run was stopped.

    The same command starts a run and continues it. On several GPUs or nodes put torchrun before it.

    \b
      datasync train run.toml --set data.remote=cluster-b:emoji
      datasync train run.toml --set model.size=1b --plan
      torchrun --nproc-per-node 8 --no-python datasync train run.toml
    """
    from shards.errors import UsageError

    if (config is None) == (reproduce is None):
        raise UsageError("give a config, or --reproduce RUN", mend="datasync train run.toml")
    if reproduce is not None:
        _reproduce(reproduce, sets or [], as_json)
        return
    from train.config import Config

    assert config is not None
    use_clusters()
    loaded, sources = Config.load(config, sets or [])
    if explain:
        _explain(loaded, sources, as_json)
    elif plan:
        _plan(loaded, ranks, as_json)
    else:
        print_summary(_run(loaded, accept or []), as_json)


def use_clusters() -> None:
    """Let streams, also in worker processes, find the clusters of ``--config``."""
    import os

    from datasync.cli import load_config
    from datasync.config import VARIABLE

    path = load_config().path
    if path is not None:
        os.environ[VARIABLE] = str(path.resolve())


def _reproduce(run: Path, sets: list[str], as_json: bool) -> None:
    import logging

    from train.fork import reproduce

    use_clusters()
    logging.getLogger("train").setLevel(logging.INFO)
    result = reproduce(run, sets)
    print_summary(result, as_json)
    if not result["reproduced"]:
        raise typer.Exit(3)


def _run(config: Config, accept: list[str]) -> dict[str, object]:
    import logging

    from train.folder import process_start
    from train.loop import run

    logging.getLogger("train").setLevel(logging.INFO)
    return run(config, accept=accept, began=process_start())


def print_summary(summary: dict[str, object], as_json: bool) -> None:
    """The summary of a run; under torchrun once."""
    import os

    if int(os.environ.get("RANK", 0)):
        return
    if as_json:
        print(json.dumps(summary))
        return
    for key, value in summary.items():
        if value is not None:
            print(f"{key:<10} {value:.6f}" if isinstance(value, float) else f"{key:<10} {value}")


def _explain(config: Config, sources: dict[str, str], as_json: bool) -> None:
    from train.config import explain

    rows = list(explain(config, sources))
    if as_json:
        print(json.dumps([{"key": k, "value": v, "source": s, "meaning": d} for k, v, s, d in rows]))
        return
    width = max(len(f"{key} = {json.dumps(value)}") for key, value, _, _ in rows)
    for key, value, source, meaning in rows:
        print(f"{f'{key} = {json.dumps(value)}':<{min(width, 48)}}  # {source}. {meaning}")


def _plan(config: Config, ranks: int, as_json: bool) -> None:
    from dataclasses import asdict

    from shards.progress import format_bytes, format_count
    from train.plan import chosen, plan

    made = plan(config, ranks)
    how = ", ".join(chosen(config, made.parameters, ranks))
    if as_json:
        print(json.dumps({**asdict(made), "total": made.total}))
        return
    print(f"parameters        {made.parameters:,}")
    print(f"FLOPs a position  {made.flops_per_position:.3g}")
    print(
        f"FLOPs in all      {made.flops:.3g}   ({config.run.steps:,} steps, {config.data.batch_size:,} rows)"
    )
    print(f"memory of a rank  {format_bytes(made.total)}   on {format_count(ranks, 'rank')}, {how}")
    for name in ("weights", "gradients", "moments", "activations"):
        print(f"  {name:<15} {format_bytes(getattr(made, name))}")
    print(f"checkpoint        {format_bytes(made.checkpoint)}")
