"""Scheduled runs: quiet when well, loud when not, never twice at once; and where they are installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from datasync.config import Config
from datasync.errors import StoreError, UsageError
from datasync.ops import receipts, schedule
from datasync.ops.check import check_policy
from datasync.ops.cron import Cron
from datasync.ops.install import Job, crontab_block, k8s_cronjob, systemd_units, with_block, without_block
from datasync.replicate.lease import held
from datasync.storage.local import LocalStore
from tests.replicate.kit import datasync, environment, make_dataset, start

CONFIG = """
[clusters.a]
url = "a"
[clusters.b]
url = "b"
{limit}
[datasets.emoji]
home = "a"
[replication.nightly]
to = ["b"]
schedule = "30 2 * * *"
retries = 1
retry_delay = 0.1
metrics = "datasync.prom"
log = "runs.jsonl"
{more}
"""


@pytest.fixture
def work(tmp_path):
    configure(tmp_path)
    make_dataset(LocalStore(tmp_path / "a" / "emoji"), count=4)
    return tmp_path


def configure(folder: Path, more: str = "", limit: str = "") -> None:
    (folder / "datasync.toml").write_text(CONFIG.format(more=more, limit=limit))


def run(work: Path, check: int = 0, *arguments: str):
    return datasync(
        "schedule",
        "run",
        "nightly",
        *arguments,
        cwd=work,
        env={"XDG_STATE_HOME": str(work / "state")},
        check=check,
    )


def lines(work: Path) -> list[dict]:
    return [json.loads(line) for line in (work / "runs.jsonl").read_text().splitlines()]


def test_a_good_run_is_silent_and_leaves_a_receipt_a_line_and_metrics(work):
    done = run(work)
    assert done.stdout == done.stderr == ""
    assert receipts.read(LocalStore(work / "b" / "emoji")).whole
    (line,) = lines(work)
    assert (line["exit_code"], line["attempts"], line["copied"]["objects"]) == (0, 1, 4)
    assert line["places"][0]["state"] == "published"
    metrics = (work / "datasync.prom").read_text()
    assert 'datasync_last_exit_code{policy="nightly"} 0.0' in metrics
    assert 'datasync_whole{dataset="emoji",destination="b",policy="nightly"} 1.0' in metrics
    run(work)
    assert lines(work)[1]["places"][0]["state"] == "already"


def test_a_failure_is_told_retried_and_hooked_and_so_is_the_recovery(work):
    configure(
        work, "on_failure = \"sh -c 'cat > failed.json'\"\non_recovery = \"sh -c 'cat > recovered.json'\""
    )
    shard = next((work / "a" / "emoji" / "shards").iterdir())
    good = shard.read_bytes()
    shard.write_bytes(b"?" * len(good))
    done = run(work, 1)
    assert shard.name in done.stderr
    assert lines(work)[0]["attempts"] == 2
    assert json.loads((work / "failed.json").read_text())["exit_code"] == 1
    assert not (work / "recovered.json").exists()
    shard.write_bytes(good)
    run(work)
    assert json.loads((work / "recovered.json").read_text())["exit_code"] == 0
    (work / "recovered.json").unlink()
    run(work)
    assert not (work / "recovered.json").exists()


def test_an_error_names_dataset_and_destination_and_what_helps_and_times_say_their_zone(work):
    configure(
        work, '[clusters.c]\nurl = "c"\n[replication.weekly]\nto = ["b", "c"]\nlog = "w.jsonl"\nretries = 0'
    )
    (work / "b").write_text("in the way")
    began = datetime.now(UTC).replace(microsecond=0)
    done = datasync("schedule", "run", "weekly", cwd=work, check=1, env={"TZ": "America/New_York"})
    first, second, *rest = done.stderr.splitlines()
    assert first.startswith("error: weekly: emoji → b: ")
    assert second.startswith("  mend: ")
    assert not rest
    (line,) = map(json.loads, (work / "w.jsonl").read_text().splitlines())
    (error,) = line["errors"]
    assert (error["dataset"], error["destination"]) == ("emoji", "b")
    assert "is a file" in error["message"]
    assert error["mend"]
    assert began <= datetime.fromisoformat(line["started"]) <= datetime.fromisoformat(line["finished"])
    assert line["started"].endswith("Z")


def test_what_fails_at_its_source_is_told_once_for_all_places(work):
    configure(work, '[clusters.c]\nurl = "c"\n[replication.weekly]\nto = ["b", "c"]\nretries = 0')
    shutil.rmtree(work / "a")
    done = datasync("schedule", "run", "weekly", cwd=work, check=1)
    assert done.stderr.count("error: ") == 1
    assert "error: weekly: emoji → b, c: " in done.stderr


def test_a_stop_between_two_attempts_has_its_own_code(work):
    (work / "b").write_text("in the way")
    configure(work, '[replication.weekly]\nto = ["b"]\nlog = "w.jsonl"\nretries = 3\nretry_delay = 60')
    process = start("-v", "schedule", "run", "weekly", cwd=work)
    for line in process.stderr:
        if "attempt 2 in" in line:
            break
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    (line,) = map(json.loads, (work / "w.jsonl").read_text().splitlines())
    assert (line["exit_code"], line["stopped"]) == (143, "by SIGTERM")


def test_a_stop_while_a_dead_place_is_tried_again_has_its_own_code(work):
    configure(
        work,
        '[clusters.c]\nurl = "s3://x"\nendpoint = "http://127.0.0.1:9"\naccess_key = "env:K"\n'
        'secret_key = "env:K"\n[replication.weekly]\nto = ["c"]\nlog = "w.jsonl"',
    )
    process = start("-v", "schedule", "run", "weekly", cwd=work, env={"K": "key"})
    for line in process.stderr:
        if "nothing listens" in line:
            break
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    (line,) = map(json.loads, (work / "w.jsonl").read_text().splitlines())
    assert (line["exit_code"], line["errors"], line["places"][0]["state"]) == (143, [], "stopped")


def test_webhook_and_heartbeat(work):
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(("GET", self.path, None))
            self.send_response(204)
            self.end_headers()

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(("POST", self.path, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    configure(work, f'on_failure = "{base}/failed"\nheartbeat = "{base}/alive"')
    run(work)
    assert seen == [("GET", "/alive", None)]
    shutil.rmtree(work / "a")
    run(work, 1)
    server.shutdown()
    assert seen[1][:2] == ("POST", "/failed")
    assert seen[1][2]["exit_code"] == 1


def test_a_hook_is_run_by_the_shell(work):
    configure(work, 'on_failure = "cat > failed.json && echo $((1 + 1)) | cat > two"')
    (work / "a" / "emoji" / "index.json").write_text("{")
    run(work, 1)
    assert json.loads((work / "failed.json").read_text())["exit_code"] == 1
    assert (work / "two").read_text() == "2\n"


def test_a_log_that_cannot_be_written_is_a_failure_that_the_hook_hears_of(work):
    configure(work, 'on_failure = "cat > failed.json"')
    (work / "runs.jsonl").symlink_to("/dev/full")
    done = run(work, 1)
    assert "the log could not be written" in done.stderr
    assert "the log could not be written" in (work / "failed.json").read_text()


def test_a_run_without_a_place_for_its_state_is_good_and_says_so(work):
    config = work / "datasync.toml"
    config.write_text(config.read_text().replace('log = "runs.jsonl"\n', ""))
    (work / "state").write_text("a file in the way")
    done = run(work)
    assert "state: " in done.stderr
    assert "the log could not be written" in done.stderr
    assert receipts.read(LocalStore(work / "b" / "emoji")).whole


def test_a_defect_is_a_failure_that_the_hook_hears_of(work, monkeypatch):
    from datasync.config import Config
    from datasync.replicate import Stop

    def broken(*_args, **_more):
        raise RuntimeError("a defect")

    configure(work, 'on_failure = "cat > failed.json"')
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_STATE_HOME", str(work / "state"))
    monkeypatch.setattr(schedule, "targets", broken)
    config = Config.load(None)
    record = schedule.run(config, config.replication["nightly"], Stop())
    assert record["exit_code"] == 1
    assert [error["message"] for error in record["errors"]] == ["RuntimeError: a defect"]
    assert "RuntimeError: a defect" in (work / "failed.json").read_text()


def test_a_policy_that_is_gone_can_still_be_removed(work):
    (work / "units").mkdir()
    table = work / "table"
    for file, kind in ((table, "cron"), (work / "units", "systemd")):
        configure(work)
        options = ("--as", kind, "--file", str(file))
        datasync("schedule", "install", "nightly", *options, cwd=work)
        config = work / "datasync.toml"
        config.write_text(config.read_text().replace('schedule = "30 2 * * *"\n', ""))
        if kind == "systemd":
            config.write_text(config.read_text().partition("[replication.nightly]")[0])
        assert "nightly removed" in datasync("schedule", "remove", "nightly", *options, cwd=work).stdout
        assert not list((work / "units").iterdir())
        assert not table.read_text()
    again = datasync("schedule", "remove", "nightly", *options, cwd=work, check=2)
    assert "no replication is called 'nightly'" in again.stderr


@pytest.mark.parametrize(
    ("more", "limit", "told"),
    [
        ('metrics = "typo/datasync.prom"', "", "replication.weekly.metrics: there is no folder"),
        ('log = "typo/runs.jsonl"', "", "replication.weekly.log: there is no folder"),
        ('log = "a"', "", "a is a folder"),
        ('on_failure = "/no/such/hook --now"', "", "replication.weekly.on_failure: there is no command"),
        ('on_recovery = "no-such-command x"', "", "weekly.on_recovery: there is no command no-such-command"),
        ('on_failure = "https:///path"', "", "is no URL"),
        ('heartbeat = "ping.example/abc"', "", "replication.weekly.heartbeat: 'ping.example/abc' is no URL"),
        ("", 'ca_bundle = "ca.pem"', "clusters.b.ca_bundle: "),
        ("", 'access_key = "file:k"\nsecret_key = "file:k"', "clusters.b.access_key: "),
        ("", '[datasets.signed]\nhome = "a"\nrequire_signature = "keys/x.pem"', "datasets.signed.require_"),
    ],
)
def test_what_is_mistyped_is_told_before_anything_runs(work, more, limit, told):
    configure(work, f'[replication.weekly]\nto = ["b"]\nschedule = "@weekly"\n{more}', limit)
    for command in ("run", "install"):
        file = ["--file", "table"] if command == "install" else []
        done = datasync("schedule", command, "weekly", *file, cwd=work, check=2)
        assert told in done.stderr
    assert "mend: " in done.stderr
    assert not (work / "typo").exists()
    assert not (work / "table").exists()
    assert not (work / "b").exists()


def test_a_failure_hook_hears_of_a_policy_that_cannot_run(work):
    configure(work, 'on_failure = "cat > failed.json"\non_recovery = "nowhere"')
    run(work, 2)
    told = json.loads((work / "failed.json").read_text())
    assert (told["exit_code"], told["attempts"]) == (2, 0)
    assert "there is no command nowhere" in told["errors"][0]["message"]
    assert told["errors"][0]["mend"]


@pytest.mark.parametrize(
    "hook", ["cat > failed.json", "[ -d . ] && false", "X=1 env", "(exit 0)", "https://host:80/path"]
)
def test_hooks_that_a_shell_understands_pass(hook, work):
    configure(work, f"on_failure = {json.dumps(hook)}")
    config = Config.load(work / "datasync.toml")
    check_policy(config, config.replication["nightly"])


def test_no_folder_is_made_for_a_mistyped_crontab(work):
    done = datasync("schedule", "install", "nightly", "--file", "typo/table", cwd=work, check=2)
    assert "there is no folder typo" in done.stderr
    assert not (work / "typo").exists()


@pytest.mark.parametrize("command", ["replicate", "schedule"])
def test_a_place_that_never_answers_does_not_keep_a_run_that_was_stopped(work, command):
    silent = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    limit = f'[clusters.silent]\nurl = "s3://bucket"\nendpoint = "{url}"\nanonymous = true\n'
    configure(work, 'on_failure = "cat > failed.json"\nmax_runtime = 1', limit=limit)
    config = work / "datasync.toml"
    config.write_text(config.read_text().replace('to = ["b"]', 'to = ["silent"]'))
    arguments = {
        "replicate": ["replicate", "emoji", "--to", "silent", "-q"],
        "schedule": ["schedule", "run", "nightly"],
    }[command]
    code = (
        "import datasync.replicate.control as c; c.GRACE_SECONDS = 1; from datasync.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=work,
        env=environment({"XDG_STATE_HOME": str(work / "state")}),
        stderr=subprocess.PIPE,
        text=True,
    )
    if command == "replicate":
        connection, _ = silent.accept()
        process.terminate()
    _, told = process.communicate(timeout=30)
    if command == "replicate":
        connection.close()
    silent.close()
    assert process.returncode == {"replicate": 143, "schedule": 4}[command]
    assert "what was under way had still not ended" in told
    if command == "schedule":
        assert lines(work)[0]["exit_code"] == 4
        assert "silent or slow" in (work / "failed.json").read_text()


def test_a_hook_that_fails_does_not_change_how_the_run_ended(work):
    configure(work, 'heartbeat = "http://127.0.0.1:9/nobody"\non_failure = "false"')
    run(work, 0)
    assert lines(work)[0]["exit_code"] == 0


def test_an_overlapping_run_is_answered_busy_without_noise(work):
    with held(LocalStore(work / "b" / "emoji"), "another run"):
        began = time.monotonic()
        done = run(work, 75)
        assert time.monotonic() - began < 30
    assert "another run" in done.stderr
    assert lines(work)[0]["attempts"] == 1


def test_one_dataset_that_fails_does_not_keep_the_others(work):
    make_dataset(LocalStore(work / "a" / "flags"), count=2)
    config = (
        (work / "datasync.toml")
        .read_text()
        .replace("[datasets.emoji]", '[datasets.gone]\nhome = "a"\n[datasets.emoji]')
    )
    (work / "datasync.toml").write_text(config + 'datasets = ["gone", "flags", "emoji"]\n')
    done = run(work, 1)
    assert "gone" in done.stderr
    assert receipts.read(LocalStore(work / "b" / "flags")).whole
    assert receipts.read(LocalStore(work / "b" / "emoji")).whole


def test_a_deadline_ends_the_run_with_its_code(work):
    configure(work, "max_runtime = 1", limit='rate_limit = "10 KiB/s"')
    run(work, 4)
    assert "max-runtime" in lines(work)[0]["stopped"]
    assert lines(work)[0]["seconds"] < 4  # what waits for its share of the rate does not keep it


def test_old_versions_go_where_the_policy_says_how_many_stay(work):
    configure(work, "keep = 1")
    run(work)
    make_dataset(LocalStore(work / "a" / "emoji"), count=3, seed="new")
    run(work)
    assert len(list((work / "b" / "emoji" / "shards").iterdir())) == 3


def test_missed_runs_are_counted():
    from datasync.config import Replication

    policy = Replication(name="n", to=("b",), schedule="0 * * * *")
    now = datetime(2026, 12, 1, 12, 0, 5)
    state = schedule.State(started="2026-12-01T11:00:03", finished="x", exit_code=0, good=None, failures=0)
    assert schedule.missed(policy, state, now) == 0
    assert schedule.missed(policy, replace(state, started="2026-12-01T08:00:03"), now) == 3
    assert schedule.missed(policy, None, now) == 0


def test_show_tells_the_next_runs_and_what_was_missed(work):
    run(work)
    state = work / "state" / "datasync"
    (file,) = state.rglob("nightly.json")
    old = json.loads(file.read_text())
    file.write_text(json.dumps({**old, "started": (datetime.now() - timedelta(days=4)).isoformat()}))
    env = {"XDG_STATE_HOME": str(work / "state")}
    text = datasync("schedule", "show", cwd=work, env=env).stdout
    assert "30 2 * * *" in text
    assert "exit code 0" in text
    assert "missed" in text
    document = json.loads(datasync("schedule", "show", "--json", cwd=work, env=env).stdout)
    assert len(document["policies"][0]["next"]) == 3


JOB = Job(
    name="nightly", config=Path("/srv/my 100%/datasync.toml"), cron=Cron.parse("30 2 * * *"), jitter=300
)
FOREIGN = "MAILTO=ops\n# mine\n0 1 * * * backup --all\n"


def test_a_crontab_keeps_every_foreign_line_and_installing_twice_changes_nothing():
    once = with_block(FOREIGN, JOB)
    assert once.startswith(FOREIGN)
    assert with_block(once, JOB) == once
    assert without_block(once, JOB) == FOREIGN
    later = with_block(once + "5 5 * * * after\n", replace(JOB, cron=Cron.parse("0 4 * * *")))
    assert "0 4 * * * cd" in later
    assert "30 2" not in later
    assert later.endswith("5 5 * * * after\n")
    assert without_block(later, JOB) == FOREIGN + "5 5 * * * after\n"
    other = with_block(once, replace(JOB, config=Path("/other/datasync.toml")))
    assert without_block(other, JOB).count("schedule run nightly") == 1


def test_a_block_without_its_end_is_left_to_a_person():
    broken = crontab_block(JOB).splitlines()[0] + "\n" + FOREIGN
    for change in (with_block, without_block):
        with pytest.raises(StoreError, match="without its end"):
            change(broken, JOB)


def test_percent_and_spaces_are_safe_in_a_crontab():
    line = crontab_block(JOB).splitlines()[1]
    assert r"'/srv/my 100\%'" in line
    assert r"'/srv/my 100\%/datasync.toml'" in line


def test_a_file_is_installed_shown_and_removed(work):
    crontab = work / "crontab"
    crontab.write_text(FOREIGN)
    text = datasync("schedule", "install", "nightly", "--file", "crontab", cwd=work).stdout
    assert "next run" in text
    first = crontab.read_text()
    datasync("schedule", "install", "nightly", "--file", "crontab", cwd=work)
    assert crontab.read_text() == first
    assert datasync("schedule", "show", "nightly", "--as", "cron", cwd=work).stdout in first
    datasync("schedule", "remove", "nightly", "--file", "crontab", cwd=work)
    assert crontab.read_text() == FOREIGN
    assert (
        "was not installed" in datasync("schedule", "remove", "nightly", "--file", "crontab", cwd=work).stdout
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(work, tmp_path):
    datasync("schedule", "install", "nightly", "--as", "systemd", "--file", "units", cwd=work)
    units = sorted(str(path) for path in (work / "units").iterdir())
    assert len(units) == 2
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "datasync" in line]
    assert complaints == []
    datasync("schedule", "remove", "nightly", "--as", "systemd", "--file", "units", cwd=work)
    assert list((work / "units").iterdir()) == []


@pytest.mark.parametrize("present", [True, False])
def test_without_a_user_bus_no_unit_is_left_and_an_older_one_stays(work, present):
    tools = work / "tools"
    tools.mkdir()
    (tools / "systemctl").write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    (tools / "systemctl").chmod(0o755)
    units = work / "home" / "systemd" / "user"
    units.mkdir(parents=True)
    if present:
        (units / "datasync-nightly.timer").write_text("older")
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_CONFIG_HOME": str(work / "home")}
    done = datasync("schedule", "install", "nightly", "--as", "systemd", cwd=work, check=1, env=env)
    assert "Failed to connect to bus; nothing was installed" in done.stderr
    assert "enable-linger" in done.stderr
    left = {path.name: path.read_text() for path in units.iterdir()}
    assert left == ({"datasync-nightly.timer": "older"} if present else {})


def test_percent_and_spaces_are_safe_in_a_unit():
    service = systemd_units(JOB)["datasync-nightly.service"]
    assert '"/srv/my 100%%/datasync.toml"' in service
    assert "RandomizedDelaySec=300" in systemd_units(JOB)["datasync-nightly.timer"]


def test_a_cronjob_is_yaml_that_says_what_it_should():
    yaml = pytest.importorskip("yaml")
    with pytest.raises(UsageError, match="image"):
        k8s_cronjob(JOB)
    found = yaml.safe_load(k8s_cronjob(replace(JOB, image="registry/datasync:1", max_runtime=3600)))
    assert found["kind"] == "CronJob"
    assert found["spec"]["schedule"] == "30 2 * * *"
    assert found["spec"]["concurrencyPolicy"] == "Forbid"
    pod = found["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][-3:] == ["schedule", "run", "nightly"]
    assert found["spec"]["jobTemplate"]["spec"]["activeDeadlineSeconds"] == 3900


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule", "run", "nightl"], "did you mean 'nightly'"),
        (["schedule", "install", "nightly", "--as", "windows"], "cron, systemd or k8s"),
        (["schedule", "install", "nightly", "--as", "k8s"], "image"),
    ],
)
def test_bad_input_is_one_clear_error(work, arguments, message):
    assert message in datasync(*arguments, cwd=work, check=2).stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("cron") and os.geteuid() == 0), reason="Debian's cron, and root to start it"
)
def test_debians_cron_fires_at_a_minute_and_an_overlapping_run_is_busy(work, request):
    """The real daemon: installed, fired, receipt seen; a second run meanwhile finds the lease held."""
    folder = Path("/etc/cron.d")
    name = f"datasync-test-{os.getpid()}"
    request.addfinalizer(lambda: (folder / name).unlink(missing_ok=True))
    configure(work, limit='rate_limit = "20 KiB/s"')
    text = (work / "datasync.toml").read_text().replace("30 2 * * *", "* * * * *")
    (work / "datasync.toml").write_text(text)
    root = Path(__file__).resolve().parents[2]
    path = folder / name
    path.write_text(f'XDG_STATE_HOME={work / "state"}\nPYTHONPATH={root}\nMAILTO=""\n')
    datasync("schedule", "install", "nightly", "--file", str(path), "--user", "root", cwd=work)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)
    daemon = subprocess.Popen(["cron", "-f"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        lease = work / "b" / "emoji" / "_datasync" / "lease.json"
        until = time.monotonic() + 100
        while not lease.exists() and time.monotonic() < until:
            time.sleep(0.2)
        assert lease.exists(), "cron did not start the run"
        second = start(
            "schedule",
            "run",
            "nightly",
            "--no-jitter",
            cwd=work,
            env={"XDG_STATE_HOME": str(work / "state2")},
        )
        out, err = second.communicate(timeout=60)
        assert second.returncode == 75, out + err
        while receipts.read(LocalStore(work / "b" / "emoji")) is None and time.monotonic() < until + 60:
            time.sleep(0.5)
        assert receipts.read(LocalStore(work / "b" / "emoji")).whole
    finally:
        daemon.terminate()
        daemon.wait(timeout=10)


def test_units_have_names_of_their_own_that_kubernetes_takes():
    names = ["nightly", "Nightly", "\u00fcn\u00ef x", "un x", "un-x", "a.b", "a_b"]
    units = [Job(name=name, config=Path("/x.toml"), cron=Cron.parse("@daily")).unit for name in names]
    assert units[0] == "datasync-nightly"
    assert len(set(units)) == len(names)
    for unit in units:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", unit)
