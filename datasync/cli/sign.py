"""`datasync sign`: parse, call `datasync.ops.signatures`, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sign(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME|URL]...", help="Datasets by name, URLs or folders.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The private key, a PEM file.")] = None,
    new_key: Annotated[
        Path | None, typer.Option(help="Make a pair of keys: PATH.pem and PATH.pub.pem.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Whose copy of the named datasets. [default: the home]")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Check the signature by this public key instead.")
    ] = None,
) -> None:
    """Sign a dataset's index, so that a compromised store cannot put another in its place.

    Set require_signature = "keys/team.pub.pem" for the dataset in datasync.toml; replicate then refuses an
    index that is not signed by that key, and copies the signature with it.

    \b
      datasync sign --new-key keys/team
      datasync sign emoji --key keys/team.pem
      datasync sign emoji --cluster cluster-b --check keys/team.pub.pem
    """
    from datasync.cli import load_config
    from datasync.errors import UsageError
    from datasync.ops import signatures
    from datasync.ops.targets import find_source, is_place, locate
    from datasync.replicate.layout import INDEX

    if new_key is not None:
        private, public = (
            new_key.with_name(f"{new_key.name}.pem"),
            new_key.with_name(f"{new_key.name}.pub.pem"),
        )
        private.parent.mkdir(parents=True, exist_ok=True)
        signatures.make_keys(private, public)
        print(f"{private} signs; keep it secret. {public} checks; give it to everybody.")
        key = key or private
    if not names:
        if new_key is None:
            raise UsageError("no dataset was named", mend="datasync sign NAME --key keys/team.pem")
        return
    if (key is None) == (check is None):
        raise UsageError("either sign or check", mend="give --key to sign, or --check with a public key")
    config = load_config()
    for spec in names:
        if cluster is not None or is_place(spec):
            name, place, store = locate(config, spec, cluster)
        else:
            found, store = find_source(config, spec)
            name, place = spec, found or store.url
        if check is not None:
            signatures.check_signature(store, store.read(INDEX), check)
            print(f"{name} at {place} is signed by {check}")
        elif key is not None:
            print(f"{name} at {place} signed: {signatures.sign(store, key)}")
