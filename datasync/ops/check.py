"""What a policy needs on this machine, looked at before it runs: folders, keys, certificates, hooks.

A typing error in a path shows at once, with its key in `datasync.toml`, instead of as a folder that nobody
reads or as a hook that does not come on the day it is needed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from datasync.config_values import Place, is_web_url
from datasync.errors import UsageError

if TYPE_CHECKING:
    from datasync.config import Config, Replication

_PLAIN_WORD = re.compile(r"[\w./+@%-]+")  # how else a line may begin is left to the shell


def check_policy(config: Config, policy: Replication) -> None:
    """Refuse a policy that names what this machine does not have.

    Raises:
        UsageError: A folder, a file, a command or a URL is not there; the message names its key.
    """
    place = Place(str(config.path or "")).at("replication").at(policy.name)
    for key in ("metrics", "log"):
        if (value := getattr(policy, key)) is not None:
            _check_target(Path(value), place.at(key))
    for key in ("on_failure", "on_recovery"):
        if (value := getattr(policy, key)) is not None:
            _check_hook(value, place.at(key))
    for at, path in _files(config, policy):
        if not os.access(path, os.R_OK):
            what = "cannot be read" if os.path.exists(path) else "does not exist"
            raise at.wrong(f"{path} {what}", "check the path and its permissions")


def _check_target(path: Path, place: Place) -> None:
    """A file that a run writes: its folder is there, so that nobody looks for it elsewhere."""
    if not path.parent.is_dir():
        raise place.wrong(f"there is no folder {path.parent}", f"check the path, or mkdir -p {path.parent}")
    if path.is_dir():
        raise place.wrong(f"{path} is a folder", "name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise place.wrong(f"{path} cannot be written", "allow this user to write there")


def _check_hook(hook: str, place: Place) -> None:
    """A URL with a host, or a line whose command the shell knows."""
    if hook.startswith(("http://", "https://")):
        if not is_web_url(hook):
            raise place.wrong(f"{hook!r} is no URL", 'write "https://host/path"')
        return
    word = hook.split(maxsplit=1)[0]
    if not _PLAIN_WORD.fullmatch(word):
        return
    known = subprocess.run(
        ["/bin/sh", "-c", 'command -v -- "$1"', "sh", word], capture_output=True, check=False
    )
    if known.returncode != 0:
        raise place.wrong(f"there is no command {word}", "give its whole path, or install it")


def _files(config: Config, policy: Replication) -> Iterator[tuple[Place, str]]:
    """Files that the policy's clusters and datasets name: certificates, keys."""
    file = Place(str(config.path or ""))
    names = policy.datasets or tuple(config.datasets)
    datasets = [config.datasets[name] for name in names if name in config.datasets]
    homes = [policy.source] if policy.source else [dataset.home for dataset in datasets if dataset.home]
    for name in dict.fromkeys([*homes, *policy.to]):
        cluster, at = config.cluster(name), file.at("clusters").at(name)
        if cluster.ca_bundle is not None:
            yield at.at("ca_bundle"), cluster.ca_bundle
        for key in ("access_key", "secret_key", "session_token"):
            value = getattr(cluster, key)
            if value is not None and value.startswith("file:"):
                yield at.at(key), os.path.expanduser(value.removeprefix("file:"))
    for dataset in datasets:
        if dataset.require_signature is not None:
            yield file.at("datasets").at(dataset.name).at("require_signature"), dataset.require_signature


def problem(config: Config, policy: Replication) -> UsageError | None:
    """What `check_policy` raises, or None."""
    try:
        check_policy(config, policy)
    except UsageError as error:
        return error
    return None
