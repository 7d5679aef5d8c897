"""`datasync wait`: parse, call `datasync.ops.status.wait`, print."""

from __future__ import annotations

from typing import Annotated

import typer


def wait(
    name: Annotated[str, typer.Argument(metavar="NAME|URL", help="A dataset by name, a URL or a folder.")],
    cluster: Annotated[str | None, typer.Option(help="Where it must be.")] = None,
    version: Annotated[
        str | None, typer.Option(help="Which version, or its first digits. [default: any]")
    ] = None,
    timeout: Annotated[str | None, typer.Option(help="Give up after this long: 90s, 2h30m.")] = None,
    poll: Annotated[str, typer.Option(help="Time between two looks.")] = "5s",
    json_output: Annotated[bool, typer.Option("--json", help="Print the receipt.")] = False,
) -> None:
    """Block until a dataset is whole at a cluster; for job scripts.

    \b
      datasync wait emoji --cluster cluster-b --version 3f9a1c && sbatch train.sh

    \b
    Exit codes: 0 it is there, 1 not within --timeout, 2 usage.
    """
    import json
    from dataclasses import asdict

    from datasync.cli import load_config
    from datasync.config_values import Place, duration
    from datasync.errors import StoreError, UsageError
    from datasync.ops.status import wait as block
    from datasync.ops.targets import locate

    if version is not None and (len(version) < 4 or not set(version) <= set("0123456789abcdef")):
        raise UsageError(f"{version!r} is no version", mend="give at least 4 of its hexadecimal digits")
    seconds = duration(timeout, Place("--timeout")) if timeout is not None else None
    config = load_config()
    name, place, store = locate(config, name, cluster)
    receipt, why = block(
        store,
        name=name,
        version=version,
        timeout=seconds,
        poll=duration(poll, Place("--poll")),
        public=config.signed_by(name),
    )
    if receipt is None:
        which = f"version {version} is not whole" if version else "nothing is whole"
        raise StoreError(
            f"{name}: {which} at {place} after {timeout}: {why}",
            mend="datasync status; then datasync replicate",
        )
    if json_output:
        print(json.dumps(asdict(receipt), indent=1, ensure_ascii=False))
    else:
        since = f" since {receipt.finished}" if receipt.finished else ""
        print(f"{name} {receipt.version[:6]}… is whole at {place}{since}")
