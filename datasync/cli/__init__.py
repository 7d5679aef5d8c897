"""The command line: `datasync COMMAND`.

Every command is one function in one module of this package, named in `COMMANDS` and imported only when it is
the one that runs (or when its help is asked for), so that `datasync --help` and a cron line start at once.
A command parses, calls and prints; the work is elsewhere. Results go to standard output, progress and logs to
standard error. Errors and their exit codes are those of `shards.errors`.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shards.errors import DatasyncError, UsageError
from shards.version import __version__

if TYPE_CHECKING:
    from datasync.config import Config

COMMANDS: dict[str, tuple[str, str]] = {
    # command: (module:function, one line for the list of commands)
    "shard": ("datasync.cli.shard:shard", "Turn a corpus into compressed, checksummed MDS shards."),
    "merge": ("datasync.cli.merge:merge", "Commit a job whose shares ran on several machines."),
    "inspect": ("datasync.cli.inspect:inspect", "Show what is in a dataset: schema, sizes, samples."),
    "replicate": ("datasync.cli.replicate:replicate", "Copy datasets and trees to other clusters, verified."),
    "verify": ("datasync.cli.verify:verify", "Check that a copy is whole and has the right bytes."),
    "repair": ("datasync.cli.repair:repair", "Fetch bad or missing objects from a good replica."),
    "status": ("datasync.cli.status:status", "Show which cluster has what, and whether it is whole."),
    "wait": ("datasync.cli.wait:wait", "Block until a dataset is whole at a cluster."),
    "gc": ("datasync.cli.gc:gc", "Remove old versions that nothing needs."),
    "schedule": ("datasync.cli.schedule:app", "Run replications by cron, systemd or Kubernetes."),
    "sign": ("datasync.cli.sign:sign", "Sign a dataset's index."),
    "view": ("datasync.cli.view:view", "Show clusters and datasets in a browser."),
    "sample": ("datasync.cli.sample:sample", "Print the samples of one batch of a run."),
    "train": ("datasync.cli.train:train", "Train a multimodal decoder from a stream."),
    "generate": ("datasync.cli.generate:generate", "Generate text or captions from a checkpoint."),
    "runs": ("datasync.cli.runs:runs", "List and compare training runs."),
    "fork": ("datasync.cli.fork:fork", "Start a variant of a run from one of its steps."),
    "demo": ("datasync.cli.demo:demo", "The whole path on a generated corpus, here, in two minutes."),
}

_state: dict[str, Any] = {"config": None}


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer's own, narrowed
        return list(COMMANDS)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:  # type: ignore[override]
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = f"did you mean `datasync {near[0]}`?" if near else "see `datasync --help`"
            raise UsageError(f"there is no command {cmd_name!r}", mend=hint)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        return _as_command(cmd_name, getattr(importlib.import_module(module), attribute))


def _as_command(name: str, target: Callable[..., Any] | typer.Typer) -> TyperCommand:
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        single.command(name=name)(target)
        target = single
    command: TyperCommand = typer.main.get_command(target)  # type: ignore[assignment]
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Shard multimodal corpora, replicate them to every cluster, stream them into training.",
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Option(help="The configuration file. [default: datasync.toml here or above]")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is being done.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"datasync {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
    _state["config"] = config
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def load_config() -> Config:
    """The configuration named by ``--config``, or found in the usual places."""
    from datasync.config import Config

    return Config.load(_state["config"])


def main() -> None:
    """The entry point: run a command, print errors with their mend, exit with their code."""
    for stream in (sys.stdout, sys.stderr):
        # What a terminal's character set or UTF-8 cannot hold is escaped, which in JSON is the right way.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(args=_globals_first(sys.argv[1:]), prog_name="datasync", standalone_mode=False)
        if code == 128 + signal.SIGINT:  # typer turns Ctrl-C into this code
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()  # an exit code is only given for what has been said
    except DatasyncError as error:
        code = _failed(error)
    except typer.TyperException as error:
        code = _failed(UsageError(error.format_message(), mend=f"see `{_command_path(error)} --help`"))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted; run the same command again to continue", file=sys.stderr)
        code = 128 + signal.SIGINT
    except SystemExit as left:
        gone = isinstance(left.__context__, BrokenPipeError)  # typer's way of saying so
        code = _reader_gone() if gone else left.code
    except BrokenPipeError:
        code = _reader_gone()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.close()  # what it still holds cannot be said either
        # The machine's, not ours: a full disk behind standard output, a file that may not be written.
        logging.getLogger(__name__).info("where it was", exc_info=error)
        print(f"error: {_told(error)}", file=sys.stderr)
        code = DatasyncError.exit_code
    sys.exit(code if isinstance(code, int) else 0 if code is None else 1)


def _failed(error: DatasyncError) -> int:
    """Tell an error that ended a command, also as its JSON document where one is read; returns its code."""
    print(f"error: {error}", file=sys.stderr)
    words = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    if "--json" in words:
        import json

        told = {"message": error.message, "mend": error.mend or None}
        with contextlib.suppress(OSError):  # nobody reads it: the code says it too
            print(json.dumps({"error": told, "exit_code": error.exit_code}, ensure_ascii=False), flush=True)
    return error.exit_code


def _reader_gone() -> int:
    """The code for a reader of our output (head, a closed pager) that has gone: the rest was not done."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _told(error: OSError) -> str:
    """What the machine said, about which file."""
    what = error.strerror or str(error) or type(error).__name__
    where = "standard output" if error.filename is None and error.errno == errno.ENOSPC else error.filename
    if where is None:
        return f"{what}\n  mend: `datasync -v` shows where"
    return f"{where}: {what}\n  mend: check the place, its permissions and its space, then run again"


def _globals_first(arguments: list[str]) -> list[str]:
    """Let ``--config`` stand anywhere: `datasync replicate --config c.toml` is what people type."""
    first: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == "--config" and (value := next(words, None)) is not None:
            first += [word, value]
        elif word.startswith("--config="):
            first.append(word)
        else:
            rest.append(word)
    return first + rest


def _command_path(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "datasync"
