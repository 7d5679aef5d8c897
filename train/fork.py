"""Variants of a run: from one of its steps with something changed, or the whole of it once more.

    fork        RUN at step N ──► new run folder: a copy of that checkpoint, a changed config ──► train on
    reproduce   RUN's config  ──► new run folder, from the beginning ──► the same losses, the same weights?

A fork's checkpoint is copied, so the parent's retention cannot take it away; from there on it is a run like
any other.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.errors import UsageError
from train.config import Config
from train.folder import RunFolder, environment
from train.metrics import steps_of

if TYPE_CHECKING:
    from train.checkpoint import Checkpoints

log = logging.getLogger("train")


def fork(run: Path, *, step: int | None, sets: Sequence[str], into: Path | None = None) -> Config:
    """Make the folder of a variant; `train.loop.run` on the returned config trains it.

    Args:
        run (Path): The parent's folder.
        step (int | None): A step with a checkpoint. Default: the newest.
        sets (Sequence[str]): ``KEY=VALUE``, on top of the parent's config.
        into (Path | None): The new folder. Default: the parent's name with the step and a number.

    Raises:
        UsageError: No checkpoint of that step (the message lists those there are), or the folder exists.
        CorruptError: The checkpoint does not verify.
    """
    from train.checkpoint import Checkpoints
    from train.distributed import Team
    from train.loop import open_store

    parent = config_of(run)
    team = Team(parent.parallel)
    with tempfile.TemporaryDirectory() as scratch:
        kept = Checkpoints(open_store(parent), team, parent.checkpoint, Path(scratch))
        return _fork(run, kept, parent, step=step, sets=sets, into=into)


def _fork(
    run: Path, kept: Checkpoints, parent: Config, *, step: int | None, sets: Sequence[str], into: Path | None
) -> Config:
    from train.checkpoint import folder
    from train.loop import open_store

    steps = kept.steps()
    if not steps or (step is not None and step not in steps):
        have = ", ".join(map(str, reversed(steps))) or "none"
        raise UsageError(f"{run} has no checkpoint of step {step or 0}", mend=f"there are: {have}")
    step = steps[0] if step is None else step
    target = into or _free(run.with_name(f"{run.name}-step{step}"))
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} is not empty", mend="name another folder with --into")
    config, _ = Config.from_tree(
        parent.to_dict(), [f"run.dir={target}", "checkpoint.url=", *sets], where=str(run / "config.json")
    )
    kept.copy(step, open_store(config))
    new = RunFolder(target)
    target.mkdir(parents=True, exist_ok=True)
    new.write("config.json", config.to_dict())
    new.write("fork.json", {"parent": str(run), "step": step, "sets": list(sets)})
    log.info("%s: a copy of %s of %s", target, folder(step), run)
    return config


def reproduce(run: Path, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Train a run again from its beginning and compare; logs each difference of the environment first.

    Returns:
        The new run's summary, with `reproduced` (the weights are the same) and `first_difference` (the first
        step whose loss or samples differ, or None).

    Raises:
        UsageError: Not a run folder, or the run has not ended.
    """
    from train.loop import run as train

    config = config_of(run)
    summary = RunFolder(run).read("summary.json")
    if summary is None:
        raise UsageError(f"{run} has not ended: it has no summary to compare with", mend="let it end first")
    target = _free(run.with_name(f"{run.name}-again"))
    config, _ = Config.from_tree(
        config.to_dict(), [f"run.dir={target}", "checkpoint.url=", *sets], where=str(run / "config.json")
    )
    first = next(entry for entry in RunFolder(run).lines("attempts.jsonl") if entry["event"] == "start")
    now = environment()
    for name in ("python", "datasync", "torch", "numpy", "gpus", "cpus", "git"):
        if first.get(name) != now[name]:
            log.warning("%s was %s, is %s", name, first.get(name), now[name])
    result = train(config)
    before, after = steps_of(run / "metrics.jsonl"), steps_of(target / "metrics.jsonl")
    differing = (
        a["step"]
        for a, b in zip(before, after, strict=False)
        if (a["loss"], a["ledger"]) != (b["loss"], b["ledger"])
    )
    return {
        **result,
        "reproduced": result["digest"] == summary["digest"],
        "first_difference": next(differing, None),
    }


def config_of(run: Path) -> Config:
    """The config of a run folder."""
    tree = RunFolder(run).read("config.json")
    if tree is None:
        raise UsageError(
            f"{run} is no run folder", mend="name the folder that run.dir names in the run's config"
        )
    config, _ = Config.from_tree(tree, [f"run.dir={run}"], where=str(run / "config.json"))
    return config


def _free(path: Path) -> Path:
    """This folder, or the first of path-2, path-3, … that is not there."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
