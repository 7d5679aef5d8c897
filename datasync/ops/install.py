"""Putting a policy where something runs it: cron, systemd or Kubernetes.

    # >>> datasync nightly (/srv/datasync.toml) >>>        a marked block in a crontab; all other lines are
    30 2 * * * …                                          kept to the byte, and installing again replaces
    # <<< datasync nightly (/srv/datasync.toml) <<<        the block

Texts are made by pure functions; the edge is reading and writing a crontab, a folder of units, or `kubectl`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from datasync.errors import DatasyncError, StoreError, UsageError
from datasync.ops.cron import Cron

if TYPE_CHECKING:
    from datasync.config import Replication

KINDS = ("cron", "systemd", "k8s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be run, and when.

    Args:
        name (str): Of the policy.
        config (Path): The configuration file, absolute.
        cron (Cron): When.
        jitter (float): Seconds of random delay; `schedule run` waits them, but systemd does so itself.
        max_runtime (float | None): Seconds after which a run stops itself.
        image (str | None): Container image, for Kubernetes.
    """

    name: str
    config: Path
    cron: Cron
    jitter: float = 0.0
    max_runtime: float | None = None
    image: str | None = None

    @property
    def unit(self) -> str:
        """Its name where only letters, digits and dashes are allowed."""
        bare = "".join(c if c.isascii() and c.isalnum() else "-" for c in self.name.lower()).strip("-")
        # Of two names that differ only in what is left out, each has a unit of its own.
        told = hashlib.sha256(self.name.encode()).hexdigest()[:6]
        return f"datasync-{bare}" if bare == self.name else f"datasync-{bare}-{told}".replace("--", "-")


def job(policy: Replication, config: Path | None, *, image: str | None = None) -> Job:
    """The job of a policy.

    Raises:
        UsageError: The policy has no schedule, or there is no configuration file that a crontab can name.
    """
    if config is None:
        raise UsageError("there is no configuration file", mend="write datasync.toml")
    if "\n" in str(config.resolve()):
        raise UsageError(f"no crontab can name {str(config.resolve())!r}", mend="rename the folder")
    if policy.schedule is None:
        raise UsageError(
            f"{config}: replication.{policy.name} has no schedule", mend='write schedule = "30 2 * * *"'
        )
    cron = Cron.parse(policy.schedule, where=f"{config}: replication.{policy.name}.schedule")
    return Job(
        name=policy.name,
        config=config.resolve(),
        cron=cron,
        jitter=policy.jitter,
        max_runtime=policy.max_runtime,
        image=image,
    )


def named(name: str, config: Path | None) -> Job:
    """A job by its name alone, to remove it: its policy may have lost its schedule, or be gone."""
    if config is None:
        raise UsageError("there is no configuration file", mend="write datasync.toml")
    return Job(name=name, config=config.resolve(), cron=Cron.parse("@yearly"), image="none")


def command(job: Job, *, python: str = sys.executable) -> list[str]:
    """The command that a scheduler runs."""
    return [python, "-m", "datasync.cli", "--config", str(job.config), "schedule", "run", job.name]


# cron


def _marks(job: Job) -> tuple[str, str]:
    return f"# >>> datasync {job.name} ({job.config}) >>>", f"# <<< datasync {job.name} ({job.config}) <<<"


def crontab_block(job: Job, *, user: str | None = None) -> str:
    """The marked lines of a job; with `user`, as the files of /etc/cron.d want it."""
    begin, end = _marks(job)
    line = shlex.join(command(job)).replace("%", r"\%")
    place = shlex.quote(str(job.config.parent)).replace("%", r"\%")
    who = f"{user} " if user else ""
    return f"{begin}\n{job.cron.text} {who}cd {place} && {line}\n{end}\n"


def with_block(crontab: str, job: Job, *, user: str | None = None) -> str:
    """`crontab` with the job's block, in place of an earlier one or at the end. Idempotent."""
    begin, end = _marks(job)
    block = crontab_block(job, user=user)
    if begin in crontab:
        head, _, rest = crontab.partition(begin)
        _, closed, tail = rest.partition(end)
        if not closed:
            raise StoreError(f"the crontab has {begin!r} without its end", mend="mend that block by hand")
        return head + block.rstrip("\n") + tail
    if crontab and not crontab.endswith("\n"):
        crontab += "\n"
    return crontab + block


def without_block(crontab: str, job: Job) -> str:
    """`crontab` without the job's block; every other line as it was."""
    begin, end = _marks(job)
    if begin not in crontab:
        return crontab
    head, _, rest = crontab.partition(begin)
    _, closed, tail = rest.partition(end)
    if not closed:
        raise StoreError(f"the crontab has {begin!r} without its end", mend="mend that block by hand")
    return head + tail.removeprefix("\n")


def read_crontab(file: Path | None) -> str:
    """This user's crontab, or that in `file`."""
    if file is not None:
        return file.read_text() if file.exists() else ""
    done = _run(["crontab", "-l"], check=False)
    if done.returncode != 0 and "no crontab" not in done.stderr.lower():
        raise StoreError(f"crontab -l failed: {done.stderr.strip()}", mend="see that cron is installed")
    return done.stdout if done.returncode == 0 else ""


def write_crontab(content: str, file: Path | None) -> None:
    """Replace this user's crontab, or `file`."""
    if file is None:
        _run(["crontab", "-"], input=content)
        return
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", mend="check --file")
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(content)
    os.replace(temporary, file)


# systemd


def systemd_units(job: Job) -> dict[str, str]:
    """File name -> content of the service and its timer."""
    executable, *rest = command(job)
    start = " ".join(_systemd_quote(word) for word in [executable, *rest])
    calendars = "".join(f"OnCalendar={line}\n" for line in job.cron.calendars())
    limit = "" if job.max_runtime is None else f"RuntimeMaxSec={job.max_runtime + 300:.0f}\n"
    service = (
        f"[Unit]\nDescription=datasync replication {job.name}\n"
        "Wants=network-online.target\nAfter=network-online.target\n\n"
        f"[Service]\nType=exec\nWorkingDirectory={_systemd_path(job.config.parent)}\n"
        f"ExecStart={start} --no-jitter\nSuccessExitStatus=75\nTimeoutStopSec=120\n{limit}"
    )
    timer = (
        f"[Unit]\nDescription=When datasync replication {job.name} runs\n\n"
        f"[Timer]\n{calendars}RandomizedDelaySec={job.jitter:.0f}\nPersistent=true\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )
    return {f"{job.unit}.service": service, f"{job.unit}.timer": timer}


def _systemd_quote(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != word or " " in word else word


def _systemd_path(path: Path) -> str:
    return str(path).replace("%", "%%")


# Kubernetes


def k8s_cronjob(job: Job) -> str:
    """A CronJob in YAML. The configuration comes from a ConfigMap of the job's name.

    Raises:
        UsageError: No image was given.
    """
    import json

    if job.image is None:
        raise UsageError("a CronJob needs an image", mend="give --image with datasync installed in it")
    arguments = ["--config", "/etc/datasync/datasync.toml", "schedule", "run", job.name]
    deadline = (
        "" if job.max_runtime is None else f"      activeDeadlineSeconds: {job.max_runtime + 300:.0f}\n"
    )
    return (
        "apiVersion: batch/v1\nkind: CronJob\nmetadata:\n"
        f"  name: {job.unit}\n  labels: {{app.kubernetes.io/managed-by: datasync}}\nspec:\n"
        f"  schedule: {json.dumps(job.cron.text)}\n"
        "  concurrencyPolicy: Forbid\n  startingDeadlineSeconds: 3600\n"
        "  jobTemplate:\n    spec:\n      backoffLimit: 0\n"
        f"{deadline}"
        "      template:\n        spec:\n          restartPolicy: Never\n          containers:\n"
        f"            - name: datasync\n              image: {json.dumps(job.image)}\n"
        f"              command: [datasync]\n              args: {json.dumps(arguments)}\n"
        "              volumeMounts: [{name: config, mountPath: /etc/datasync, readOnly: true}]\n"
        f"          volumes: [{{name: config, configMap: {{name: {job.unit}}}}}]\n"
    )


# Installing and removing


def install(job: Job, kind: str, *, file: Path | None = None, user: str | None = None) -> str:
    """Put a job where it is run from; returns where. Installing again changes nothing."""
    if kind == "cron":
        old = read_crontab(file)
        new = with_block(old, job, user=user)
        if new != old:
            write_crontab(new, file)
        return str(file) if file is not None else "the crontab"
    if kind == "systemd":
        folder = file or _user_units()
        folder.mkdir(parents=True, exist_ok=True)
        units = systemd_units(job)
        before = {name: _content(folder / name) for name in units}
        for name, content in units.items():
            (folder / name).write_text(content)
        if file is None:
            try:
                _run(["systemctl", "--user", "daemon-reload"])
                _run(["systemctl", "--user", "enable", "--now", f"{job.unit}.timer"])
            except DatasyncError as error:
                for name, earlier in before.items():
                    _restore(folder / name, earlier)
                raise type(error)(f"{error.message}; nothing was installed", mend=error.mend) from error
        return str(folder / f"{job.unit}.timer")
    if file is not None:
        file.write_text(k8s_cronjob(job))
        return str(file)
    _run(["kubectl", "apply", "-f", "-"], input=k8s_cronjob(job))
    return f"CronJob {job.unit}"


def remove(job: Job, kind: str, *, file: Path | None = None) -> bool:
    """Take a job away again; False where it was not there. Nothing else is touched."""
    if kind == "cron":
        old = read_crontab(file)
        new = without_block(old, job)
        if new != old:
            write_crontab(new, file)
        return new != old
    if kind == "systemd":
        folder = file or _user_units()
        files = [folder / name for name in systemd_units(job)]
        found = any(path.exists() for path in files)
        if found and file is None:
            _run(["systemctl", "--user", "disable", "--now", f"{job.unit}.timer"], check=False)
        for path in files:
            path.unlink(missing_ok=True)
        if found and file is None:
            _run(["systemctl", "--user", "daemon-reload"], check=False)
        return found
    if file is not None:
        found = file.exists()
        file.unlink(missing_ok=True)
        return found
    done = _run(["kubectl", "delete", "cronjob", job.unit, "--ignore-not-found"])
    return "deleted" in done.stdout


def _content(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _restore(path: Path, content: str | None) -> None:
    """Give a file back what it had; None is that there was none."""
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(content)


def _user_units() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user"


def _run(
    words: list[str], *, input: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"{words[0]} is not installed here",
            mend="install it, or write to a file of your own: --file PATH",
        )
    done = subprocess.run(words, input=input, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        mend = "see its message"
        if words[0] == "systemctl":
            mend = "log in as this user, so that its systemd runs (loginctl enable-linger), or give --file"
        raise StoreError(f"{' '.join(words)} failed: {done.stderr.strip()}", mend=mend)
    return done
