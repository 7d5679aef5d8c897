"""`datasync sample`: the samples of one batch of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from datasync.streaming.dataset import StreamingDataset

_ORDER = (
    "shuffle_algo",
    "shuffle_block_size",
    "sampling_method",
    "sampling_granularity",
    "partition_algo",
    "curriculum",
    "uneven",
)


def sample(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="The run's datasets: names, folders, URLs or cluster:name; with =WEIGHT for a mixture.",
            show_default=False,
        ),
    ],
    step: Annotated[int, typer.Option(min=0, help="Which batch of the epoch.", show_default=False)],
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples of the global batch, of all ranks.", show_default=False)
    ],
    epoch: Annotated[int, typer.Option(min=0, help="Which epoch.")] = 0,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only this rank's samples. [default: all]", show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Of how many ranks.")] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many on a node; for MosaicML's order. [default: all]", show_default=False
        ),
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="The sample at which the run entered the epoch.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The run's shuffle_seed.")] = 9176,
    shuffle: Annotated[bool, typer.Option(help="Whether the run shuffled.")] = True,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="The run's num_canonical_nodes. [default: by batch size]")
    ] = None,
    epoch_size: Annotated[str | None, typer.Option(help="The run's epoch_size.", show_default=False)] = None,
    method: Annotated[str, typer.Option(help="The run's batching_method.")] = "random",
    tail: Annotated[str, typer.Option(help="The run's tail.")] = "pad",
    split: Annotated[str | None, typer.Option(help="The run's split.", show_default=False)] = None,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Another argument of the run's StreamingDataset, such as shuffle_algo=py1e.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="A saved state_dict (JSON): refuse if the order is not the run's.", show_default=False
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Fetch the samples and print their values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Print the samples of one batch of a run, computed again from its order.

    \b
      datasync sample emoji --epoch 1 --step 420 --batch-size 256
      datasync sample emoji --step 420 --batch-size 256 --rank 3 --ranks 8 --show
      datasync sample text=0.7 code=0.3 --step 9000 --batch-size 1024 --epoch-size 10m --json
      datasync sample emoji --step 420 --batch-size 256 --argument sampling_method=fixed
    """
    from datasync.streaming.forensics import batch_places, batch_samples

    more = _arguments(argument or [])
    theirs = more.get("shuffle_algo", "lanes") != "lanes"
    dataset = _dataset(
        names,
        **{"batch_size" if theirs else "global_batch_size": batch_size},
        shuffle=shuffle,
        shuffle_seed=seed,
        num_canonical_nodes=lanes,
        epoch_size=epoch_size,
        batching_method=method,
        tail=tail,
        split=split,
        **more,
    )
    if state is not None:
        _check_state(dataset, state)
    numbers = batch_samples(
        dataset,
        epoch=epoch,
        step=step,
        rank=rank,
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        start=start,
    )
    places = batch_places(dataset, numbers)
    if show:
        from shards.describe import summarize

        for place in places:
            place["values"] = {
                name: summarize(value, width=200) for name, value in dataset[place["sample_id"]].items()
            }
    dataset.close()
    if as_json:
        print(json.dumps(places, indent=2))
        return
    for place in places:
        print(f"{place['sample_id']:>12}  {place['dataset']}  {place['shard']}  row {place['row']}")
        for name, value in place.get("values", {}).items():
            print(f"{'':>12}    {name}: {value}")


def _dataset(names: list[str], **options: Any) -> StreamingDataset:
    """The run's dataset, in a world of one process."""
    import os

    from datasync.cli import load_config
    from datasync.streaming.dataset import StreamingDataset
    from datasync.streaming.stream import Stream

    for variable in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(variable, None)
    config = load_config()
    streams = []
    for name in names:
        place, weight = _weight(name)
        weights: dict[str, Any] = {} if weight is None else {"proportion": weight}
        is_place = os.path.exists(place) or ":" in place or os.sep in place
        where: dict[str, Any] = {"remote": place} if is_place else {"dataset": place}
        streams.append(Stream(**where, **weights, config=config.path))
    return StreamingDataset(streams=streams, **options)


def _arguments(texts: list[str]) -> dict[str, Any]:
    """Arguments of a dataset's order, of NAME=VALUE; the value is JSON, or a word."""
    from datasync.errors import UsageError

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in _ORDER:
            raise UsageError(
                f"--argument {text!r} is no argument of the order",
                mend=f"NAME=VALUE with {', '.join(_ORDER)}",
            )
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _weight(name: str) -> tuple[str, float | None]:
    """A name and the weight behind its last equals sign, if there is one."""
    place, equals, text = name.rpartition("=")
    if not equals:
        return name, None
    try:
        return place, float(text)
    except ValueError:
        return name, None


def _check_state(dataset: StreamingDataset, path: Path) -> None:
    from datasync.errors import UsageError

    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is no saved state: {error}", mend="give the JSON of a state_dict"
        ) from error
    dataset.load_state_dict(saved)
