"""`datasync schedule show|install|remove|run`: parse, call `datasync.ops`, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from datasync.config import Config, Replication

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run replications by cron, systemd or Kubernetes. Policies are [replication.NAME] in datasync.toml.",
)

_As = Annotated[str, typer.Option("--as", help="cron, systemd or k8s.")]
_File = Annotated[
    Path | None, typer.Option(help="Write there instead: a crontab, a folder of units, a YAML file.")
]
_User = Annotated[str | None, typer.Option(help="The user field, for a file in /etc/cron.d.")]
_Image = Annotated[str | None, typer.Option(help="The container image, for k8s.")]


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="A policy. [default: all]")] = None,
    kind: Annotated[str | None, typer.Option("--as", help="Print what install would write.")] = None,
    image: _Image = None,
    user: _User = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.")
    ] = False,
) -> None:
    """Show policies, their next runs and how the last one ended; with --as, what would be installed."""
    import json
    from datetime import datetime
    from itertools import islice

    from datasync.cli import load_config
    from datasync.ops import install as installing
    from datasync.ops.cron import Cron
    from datasync.ops.schedule import local, missed, read_state, state_folder

    config = load_config()
    chosen = [_policy(config, name)] if name else list(config.replication.values())
    if kind is not None:
        for policy in chosen:
            job = installing.job(policy, config.path, image=image)
            if _kind(kind) == "cron":
                print(installing.crontab_block(job, user=user), end="")
            elif kind == "k8s":
                print(installing.k8s_cronjob(job), end="")
            else:
                for file, content in installing.systemd_units(job).items():
                    print(f"# {file}\n{content}")
        return
    now = datetime.now()
    documents = []
    for policy in chosen:
        state = read_state(state_folder(config.path), policy.name)
        runs: list[str] = []
        if policy.schedule is not None:
            cron = Cron.parse(policy.schedule, where=f"replication.{policy.name}.schedule")
            runs = [when.isoformat(sep=" ", timespec="minutes") for when in islice(cron.after(now), 3)]
        # The run that is due next has not been missed.
        late = missed(policy, state, now) + 1 if state and missed(policy, state, now) else 0
        documents.append(
            {
                "name": policy.name,
                "schedule": policy.schedule,
                "from": policy.source,
                "to": list(policy.to),
                "datasets": list(policy.datasets),
                "next": runs,
                "last": None if state is None else state.finished,
                "last_exit_code": None if state is None else state.exit_code,
                "failures": 0 if state is None else state.failures,
                "missed": late,
            }
        )
    if json_output:
        print(json.dumps({"policies": documents}, indent=1))
        return
    if not documents:
        print("no [replication.NAME] is in datasync.toml")
    for found in documents:
        what = ", ".join(found["datasets"]) or "every dataset"  # type: ignore[arg-type]
        print(f"{found['name']}   {what} from {found['from'] or 'its home'} to {', '.join(found['to'])}")  # type: ignore[arg-type]
        print(f"  schedule  {found['schedule'] or 'none'}")
        if found["next"]:
            print(f"  next      {', '.join(found['next'])}")  # type: ignore[arg-type]
        last = "never"
        if found["last"] is not None:
            last = f"{local(str(found['last'])).isoformat(sep=' ')}, exit code {found['last_exit_code']}"
        print(f"  last      {last}")
        if found["missed"]:
            print(f"  missed    {found['missed']} runs: is the scheduler at work?")


@app.command()
def install(
    name: Annotated[str, typer.Argument(help="A policy.")],
    kind: _As = "cron",
    file: _File = None,
    user: _User = None,
    image: _Image = None,
) -> None:
    """Have a policy run by itself. Installing again changes nothing; foreign lines are never touched."""
    from datetime import datetime

    from datasync.cli import load_config
    from datasync.ops import install as installing
    from datasync.ops.check import check_policy

    config = load_config()
    policy = _policy(config, name)
    if _kind(kind) != "k8s":  # there the paths are those of the pod
        check_policy(config, policy)
    job = installing.job(policy, config.path, image=image)
    where = installing.install(job, _kind(kind), file=file, user=user)
    upcoming = next(job.cron.after(datetime.now()))
    print(f"{name} is in {where}; next run {upcoming.isoformat(sep=' ', timespec='minutes')}")


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="A policy.")], kind: _As = "cron", file: _File = None
) -> None:
    """Undo install, also of a policy that is no longer in the configuration."""
    from datasync.cli import load_config
    from datasync.ops import install as installing

    config = load_config()
    if installing.remove(installing.named(name, config.path), _kind(kind), file=file):
        print(f"{name} removed")
        return
    _policy(config, name)
    print(f"{name} was not installed")


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="A policy.")],
    no_jitter: Annotated[bool, typer.Option("--no-jitter", help="Start at once.")] = False,
    show_progress: Annotated[bool, typer.Option("--progress", help="Show progress.")] = False,
) -> None:
    """What cron calls: replicate as the policy says, quiet when all is well.

    \b
    Exit codes: 0 done, 1 failed, 2 the configuration is wrong, 4 stopped at max_runtime,
    75 another run is at work there, 143 stopped by SIGTERM.
    """
    import sys
    from datetime import datetime
    from functools import partial

    from datasync.cli import load_config
    from datasync.ops import schedule
    from datasync.replicate import Stop
    from datasync.replicate.control import stop_after, stop_on_signals

    config = load_config()
    policy = _policy(config, name)
    stop, began = Stop(), datetime.now()
    last_words = partial(schedule.abandon, config, policy, stop, began)
    with stop_on_signals(stop, last_words=last_words), stop_after(stop, policy.max_runtime):
        record = schedule.run(config, policy, stop, jitter=not no_jitter, quiet=not show_progress)
    for error in schedule.error_lines(record["errors"]):
        print(f"error: {name}: {error}", file=sys.stderr)
    if record["exit_code"]:
        raise typer.Exit(record["exit_code"])


def _policy(config: Config, name: str) -> Replication:
    from datasync.config_values import nearest
    from datasync.errors import UsageError

    if name not in config.replication:
        raise UsageError(f"no replication is called {name!r}", mend=nearest(name, config.replication))
    return config.replication[name]


def _kind(kind: str) -> str:
    from datasync.errors import UsageError
    from datasync.ops.install import KINDS

    if kind not in KINDS:
        raise UsageError(f"cannot install as {kind!r}", mend="use cron, systemd or k8s")
    return kind
