"""The commands as a user runs them, on folders and on two S3 servers."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from datasync.ops import receipts
from datasync.storage import open_store
from datasync.storage.local import LocalStore
from tests.replicate.kit import data_of, datasync, make_dataset, publish_dataset, shard_bytes, write_tree

CONFIG = """
[clusters.cluster-a]
url = "a"
egress_per_gib = 0.05
[clusters.cluster-b]
url = "b"
[clusters.cluster-c]
url = "c"
[datasets.emoji]
home = "cluster-a"
"""


@pytest.fixture
def work(tmp_path):
    (tmp_path / "datasync.toml").write_text(CONFIG)
    make_dataset(LocalStore(tmp_path / "a" / "emoji"), count=6)
    return tmp_path


def test_every_configured_dataset_goes_to_every_named_cluster(work):
    done = datasync("replicate", "--to", "cluster-b,cluster-c", cwd=work)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("emoji ")
    assert "→ cluster-b" in lines[0]
    assert "6 shards" in lines[0]
    assert "6 copied" in lines[0]
    assert "verified, published" in lines[0]
    assert data_of(LocalStore(work / "c" / "emoji")) == data_of(LocalStore(work / "a" / "emoji"))
    again = datasync("replicate", "emoji", "--to", "cluster-b", cwd=work)
    assert "nothing to copy, whole since" in again.stdout


def test_a_cluster_that_cannot_be_opened_does_not_stop_the_others(work):
    config = work / "datasync.toml"
    config.write_text(config.read_text() + '[clusters.far]\nurl = "s3://bucket"\nprofile = "nosuchprofile"\n')
    done = datasync("replicate", "emoji", "--to", "cluster-b", cwd=work)
    assert "verified, published" in done.stdout
    failed = datasync("replicate", "emjoi", "--to", "cluster-b", cwd=work, check=None)
    assert failed.returncode == 2
    assert "emjoi was not found, and far could not be asked" in failed.stderr
    assert "did you mean 'emoji'?" in failed.stderr


def test_a_destination_that_was_never_compared_claims_nothing(work):
    (work / "b").write_text("in the way")
    done = datasync("replicate", "emoji", "--to", "cluster-b", cwd=work, check=None)
    assert done.returncode == 1
    assert done.stdout.endswith("· failed, not published\n")
    assert "already there" not in done.stdout


def test_counts_of_one_are_singular(work):
    make_dataset(LocalStore(work / "a" / "single"), count=1)
    assert "1 shard ·" in datasync("replicate", "single", "--to", "cluster-b", cwd=work).stdout
    assert "1 object ·" in datasync("verify", "single", "--cluster", "cluster-b", cwd=work).stdout


def test_json_says_everything_exactly(work):
    document = json.loads(datasync("replicate", "--to", "cluster-b", "--json", cwd=work).stdout)
    (found,) = document["replications"]
    assert (found["state"], found["copied"]["objects"], found["failed"]) == ("published", 6, 0)
    assert found["copied"]["bytes"] == found["bytes"] == sum(20_000 + n for n in range(6))


def test_a_dry_run_tells_objects_bytes_and_cost(work):
    done = datasync("replicate", "--to", "cluster-b", "--dry-run", cwd=work)
    assert "6 to copy (117.2 KiB), 0 already there" in done.stdout
    assert "costs 0.00" in done.stdout
    assert not (work / "b").exists()
    document = json.loads(datasync("replicate", "--to", "cluster-b", "--dry-run", "--json", cwd=work).stdout)
    assert document["replications"][0]["cost"] == pytest.approx(
        0.05 * sum(20_000 + n for n in range(6)) / 2**30
    )


def test_what_several_destinations_need_is_paid_once(tmp_path):
    (tmp_path / "datasync.toml").write_text(
        '[clusters.a]\nurl = "a"\negress_per_gib = 1000\n[clusters.b]\nurl = "b"\n'
        '[clusters.c]\nurl = "c"\negress_per_gib = 10\n[clusters.d]\nurl = "d"\n'
        '[datasets.emoji]\nhome = "a"\n'
    )
    size, half = 1 << 20, 1 << 19
    source = LocalStore(tmp_path / "a" / "emoji")
    shards = {f"shards/{n}.mds": shard_bytes(n, size) for n in range(2)}
    publish_dataset(source, {"shards/0.mds": shards["shards/0.mds"]})
    datasync("replicate", "--to", "b,c", "-q", cwd=tmp_path)
    publish_dataset(source, shards)
    datasync("replicate", "--to", "b", "-q", cwd=tmp_path)
    # Of three objects b has two, c has one, d has none.
    publish_dataset(source, shards | {"shards/2.mds": shard_bytes(2, half)})

    plan = ("replicate", "--to", "b,c,d", "--dry-run")
    document = json.loads(datasync(*plan, "--json", cwd=tmp_path).stdout)
    need = [place["to_copy"]["bytes"] for place in document["replications"]]
    assert need == [half, half + size, half + 2 * size]
    costs = [place["cost"] for place in document["replications"]]
    assert costs == [1000 * half / 2**30, 1000 * size / 2**30, 1000 * size / 2**30]
    assert document["cost"] == sum(costs) == 1000 * (half + 2 * size) / 2**30
    shown = datasync(*plan, cwd=tmp_path).stdout
    assert "costs 0.49\n" in shown
    assert "costs 0.98, the rest is read for others" in shown
    assert "in all   costs 2.44" in shown

    # By relay each way is paid at the place that feeds it.
    document = json.loads(datasync(*plan, "--relay", "--json", cwd=tmp_path).stdout)
    ways = {place["destination"]: (place["relay_from"], place["cost"]) for place in document["replications"]}
    assert ways == {"b": ("a", 1000 * half / 2**30), "c": ("b", 0.0), "d": ("b", 0.0)}
    assert document["cost"] == 1000 * half / 2**30

    # The run itself says the same, and has read no more than that.
    document = json.loads(datasync("replicate", "--to", "b,c,d", "--json", cwd=tmp_path).stdout)
    assert document["cost"] == 1000 * (half + 2 * size) / 2**30
    assert document["replications"][0]["source_bytes_read"] == half + 2 * size


def test_a_dry_run_tells_the_time_at_the_rate_of_the_last_run(work):
    datasync("replicate", "--to", "cluster-b", "-q", cwd=work)
    make_dataset(LocalStore(work / "a" / "emoji"), count=9, seed="new")
    done = datasync("replicate", "--to", "cluster-b", "--dry-run", cwd=work)
    assert "9 to copy" in done.stdout
    assert " · about 0." in done.stdout
    document = json.loads(datasync("replicate", "--to", "cluster-b", "--dry-run", "--json", cwd=work).stdout)
    (found,) = document["replications"]
    receipt = json.loads((work / "b" / "emoji" / "_datasync" / "receipt.json").read_text())
    took = datetime.fromisoformat(receipt["finished"]) - datetime.fromisoformat(receipt["started"])
    rate = receipt["copied"]["bytes"] / took.total_seconds()
    assert found["estimate_seconds"] == pytest.approx(found["to_copy"]["bytes"] / rate)


def test_a_folder_goes_under_its_name_and_another_under_a_given_one(work):
    write_tree(work / "runs" / "step-10", {"model.pt": b"m" * 1000, ".metadata": b"x"})
    datasync("replicate", "runs/step-10", "--to", "cluster-b", cwd=work)
    datasync("replicate", "./runs/step-10", "--to", "cluster-b:ckpt/best", cwd=work)
    datasync("replicate", "./runs/step-10", "--to", "./elsewhere", "--as", "final", cwd=work)
    for place in ("b/step-10", "b/ckpt/best", "elsewhere/final"):
        assert (work / place / "model.pt").read_bytes() == b"m" * 1000
        assert receipts.read(LocalStore(work / place)).kind == "tree"


def test_a_dataset_that_nobody_lists_is_found_where_it_is(work):
    make_dataset(LocalStore(work / "c" / "flags"), count=2)
    datasync("replicate", "flags", "--to", "cluster-b", cwd=work)
    assert data_of(LocalStore(work / "b" / "flags")) == data_of(LocalStore(work / "c" / "flags"))
    assert json.loads(
        datasync("replicate", "flags", "--to", "cluster-a", "--from", "cluster-b", "--json", cwd=work).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["replicate", "emoji"], 2, "--to"),
        (["replicate", "emoji", "--to", "cluster-d"], 2, "did you mean"),
        (["replicate", "emojy", "--to", "cluster-b"], 1, "no dataset 'emojy'"),
        (["replicate", "emoji", "--to", "cluster-b", "--from", "cluster-d"], 2, "no cluster is called"),
        (["replicate", "./nowhere", "--to", "cluster-b"], 1, "nowhere"),
        (["replicate", "emoji", "--to", "cluster-a"], 2, "source itself"),
        (["replicate", "emoji", "--to", "cluster-b", "--verify", "never"], 2, "stored or full"),
        (["replicate", "emoji", "--to", "cluster-b", "--max-delete", "200%"], 2, "share"),
        (["replicate", "emoji", "--to", "cluster-b", "--max-runtime", "soon"], 2, "duration"),
        (["replicate", "emoji", "--to", "cluster-b", "--engine", "slurm"], 2, "local or ray"),
        (["replicate", "s3://bucket/x", "--from", "cluster-a", "--to", "cluster-b"], 2, "says itself"),
        (["replicate", "gopher://x/y", "--to", "cluster-b"], 2, "gopher"),
        (["verify", "emoji"], 2, "--cluster"),
        (["verify", "emoji", "--cluster", "cluster-a", "--quick", "--full"], 2, "exclude"),
        (["verify", "emoji", "--cluster", "cluster-a", "--sample", "0"], 2, "between"),
        (["wait", "emoji", "--cluster", "cluster-b", "--version", "xyz"], 2, "no version"),
        (["wait", "emoji", "--cluster", "cluster-b", "--timeout", "0.2s"], 1, "nothing is whole"),
        (["repair", "emoji", "--cluster", "cluster-b"], 1, "no receipt"),
        (["status", "--cluster", "cluster-x"], 2, "cluster-x"),
    ],
)
def test_bad_input_is_one_clear_error(work, arguments, code, message):
    done = datasync(*arguments, cwd=work, check=code)
    assert message in done.stderr
    assert "mend:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (work / "b").exists() or "repair" in arguments


def test_verify_repair_status_and_wait_tell_one_story(work):
    datasync("replicate", "--to", "cluster-b", cwd=work)
    assert "all good" in datasync("verify", "emoji", "--cluster", "cluster-b", "-q", cwd=work).stdout
    shard = next((work / "b" / "emoji" / "shards").iterdir())
    shard.write_bytes(b"?" * shard.stat().st_size)
    bad = datasync("verify", "emoji", "--cluster", "cluster-b", "-q", cwd=work, check=3)
    assert "1 bad or missing" in bad.stdout
    assert "datasync repair emoji --cluster cluster-b" in bad.stderr
    states = {
        row.split()[1]: row.split()[2]
        for row in datasync("status", cwd=work, check=3).stdout.splitlines()[1:]
    }
    assert states == {"cluster-a": "home", "cluster-b": "damaged", "cluster-c": "absent"}
    datasync("wait", "emoji", "--cluster", "cluster-b", "--timeout", "0.1s", cwd=work, check=1)
    assert "1 repaired" in datasync("repair", "emoji", "--cluster", "cluster-b", "-q", cwd=work).stdout
    places = json.loads(datasync("status", "emoji", "--json", cwd=work).stdout)["places"]
    by = {place["cluster"]: place for place in places}
    assert by["cluster-b"]["state"] == "whole"
    assert by["cluster-b"]["verified"]["mode"] == "full"
    version = by["cluster-b"]["version"]
    assert version == by["cluster-a"]["version"]
    receipt = json.loads(
        datasync(
            "wait", "emoji", "--cluster", "cluster-b", "--version", version[:8], "--json", cwd=work
        ).stdout
    )
    assert receipt["version"] == version
    make_dataset(LocalStore(work / "a" / "emoji"), count=7)
    places = json.loads(datasync("status", "emoji", "--cluster", "cluster-b", "--json", cwd=work).stdout)[
        "places"
    ]
    assert places[0]["state"] == "outdated"
    assert places[0]["missing_bytes"] == 20_006


def test_deleting_from_the_command_line_has_its_guards(work):
    tree = work / "tree"
    write_tree(tree, {f"f{n:02d}": bytes([n]) * 100 for n in range(20)})
    copy = work / "b" / "tree"
    copy.mkdir(parents=True)
    (copy / "by-hand").write_bytes(b"not ours")

    def run(*options, code=0):
        return datasync("replicate", "./tree", "--to", "cluster-b", *options, cwd=work, check=code)

    run()
    (tree / "f00").unlink()
    assert "removed" not in run().stdout  # not asked to
    assert (copy / "f00").exists()
    shown = run("--delete", "--dry-run").stdout
    assert "1 to remove" in shown
    assert (copy / "f00").exists()
    assert "1 removed" in run("--delete").stdout
    assert not (copy / "f00").exists()
    for n in range(1, 11):
        (tree / f"f{n:02d}").unlink()
    refused = run("--delete", code=1)
    assert "may remove 10%; nothing was removed" in refused.stderr
    assert "--max-delete" in refused.stderr
    assert len(list(copy.glob("f*"))) == 19
    for path in tree.iterdir():
        path.unlink()
    assert "an empty source is never copied" in run("--delete", "--max-delete", "100%", code=1).stderr
    tree.rmdir()
    run("--delete", "--max-delete", "100%", code=1)
    assert len(list(copy.glob("f*"))) == 19
    assert (copy / "by-hand").exists()
    write_tree(tree, {"f19": b"19"})
    assert "18 removed" in run("--delete", "--max-delete", "100%").stdout
    assert {path.name for path in copy.iterdir()} == {"f19", "by-hand", "_datasync"}


def test_status_names_a_cluster_that_is_silent_once_and_does_not_call_that_success(work):
    for name in ("flags", "maps"):
        make_dataset(LocalStore(work / "a" / name), count=1)
    with open(work / "datasync.toml", "a") as file:
        file.write(
            '[clusters.far]\nurl = "s3://bucket"\nendpoint = "http://127.0.0.1:9"\n'
            'region = "us-east-1"\nanonymous = true\n'
        )
    done = datasync("status", cwd=work, check=1)
    assert done.stderr.count("far") == 1
    assert "error: far could not be asked: nothing listens at http://127.0.0.1:9" in done.stderr
    assert done.stdout.count("unreachable") == 3
    assert "6 objects · 117.2 KiB" in done.stdout
    assert "1 object · 19.5 KiB" in done.stdout
    document = json.loads(datasync("status", "--json", cwd=work, check=1).stdout)
    assert list(document["unreachable"]) == ["far"]
    assert datasync("status", "--cluster", "cluster-a", cwd=work).stderr == ""
    # Nor is a run bothered by a cluster that it does not need.
    assert datasync("replicate", "flags", "--to", "cluster-b", "-q", cwd=work).stderr == ""


def test_neither_a_lost_index_nor_a_damaged_receipt_is_taken_for_whole(work):
    datasync("replicate", "--to", "cluster-b", "-q", cwd=work)
    there = work / "b" / "emoji"
    index, receipt = (there / "index.json").read_bytes(), (there / "_datasync" / "receipt.json").read_bytes()

    def state(code: int) -> str:
        done = datasync("status", "emoji", "--cluster", "cluster-b", "--json", cwd=work, check=code)
        return json.loads(done.stdout)["places"][0]["state"]

    def wait(code: int) -> str:
        done = datasync("wait", "emoji", "--cluster", "cluster-b", "--timeout", "0.1s", cwd=work, check=code)
        return done.stdout + done.stderr

    (there / "index.json").unlink()
    assert state(3) == "damaged"
    assert "nothing is whole at cluster-b" in wait(1)
    (there / "index.json").write_bytes(index.replace(b'"samples": 10', b'"samples": 11', 1))
    wait(1)
    (there / "index.json").write_bytes(index)  # another inode, the same bytes
    assert "is whole at cluster-b" in wait(0)
    (there / "_datasync" / "receipt.json").write_text("garbage")
    assert state(3) == "damaged"
    assert "is not a receipt" in wait(1)
    (there / "_datasync" / "receipt.json").unlink()
    assert state(0) == "unproven"  # an index that nobody vouches for
    wait(1)
    (there / "_datasync" / "receipt.json").write_bytes(receipt)
    assert state(0) == "whole"


def test_the_home_is_whole_when_it_is_published(work):
    (work / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    datasync("shard", "rows.jsonl", "cluster-c:rows", "-q", cwd=work)
    place = json.loads(datasync("status", "rows", "--cluster", "cluster-c", "--json", cwd=work).stdout)
    assert place["places"][0]["state"] == "home"
    version = place["places"][0]["version"]
    for extra in ([], ["--version", version[:8]], ["--version", version]):
        done = datasync("wait", "rows", "--cluster", "cluster-c", "--timeout", "0.1s", *extra, cwd=work)
        assert "is whole at cluster-c" in done.stdout
    datasync(
        "wait", "rows", "--cluster", "cluster-c", "--version", "0000", "--timeout", "0s", cwd=work, check=1
    )


def test_damage_at_the_home_is_mended_from_a_copy_and_told_once(work):
    (work / "rows.jsonl").write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(2000)))
    datasync("shard", "rows.jsonl", "cluster-c:rows", "--size-limit", "16kb", "-q", cwd=work)
    datasync("replicate", "rows", "--from", "cluster-c", "--to", "cluster-b", "-q", cwd=work)
    shard = sorted((work / "c" / "rows" / "shards").iterdir())[1]
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    alone = datasync("replicate", "cluster-c:rows", "--to", "./d", "-q", cwd=work)  # taken from cluster-b
    assert alone.stderr.count("does not match its digest") == 1
    assert "taken from" in alone.stderr
    assert (
        "1 bad or missing"
        in datasync("verify", "rows", "--cluster", "cluster-c", "-q", cwd=work, check=3).stdout
    )
    assert "1 repaired" in datasync("repair", "rows", "--cluster", "cluster-c", "-q", cwd=work).stdout
    assert shard.read_bytes() == good
    assert "all good" in datasync("verify", "rows", "--cluster", "cluster-c", "-q", cwd=work).stdout
    assert not (work / "c" / "rows" / "_datasync" / "receipt.json").exists()


def test_what_is_not_there_cannot_be_verified(work):
    done = datasync("verify", "emoji", "--cluster", "cluster-b", cwd=work, check=1)
    assert "there is no copy of emoji to verify" in done.stderr
    assert "replicate it there first" in done.stderr


def test_a_folder_beside_a_silent_cluster_is_pointed_at(work):
    with open(work / "datasync.toml", "a") as file:
        file.write(
            '[clusters.far]\nurl = "s3://b"\nendpoint = "http://127.0.0.1:9"\n'
            'region = "x"\nanonymous = true\n'
        )
    write_tree(work / "tree", {"x": b"1"})
    done = datasync("replicate", "tree", "--to", "cluster-b", cwd=work, check=1)
    assert "write ./tree" in done.stderr


def test_two_servers_by_their_configuration(tmp_path, s3_a, s3_b):
    url_a, url_b = s3_a.url(), s3_b.url()
    keys = 'access_key = "env:TEST_KEY"\nsecret_key = "env:TEST_SECRET"\nregion = "us-east-1"\n'
    (tmp_path / "datasync.toml").write_text(
        f'[clusters.cluster-a]\nurl = "{url_a}"\nendpoint = "{s3_a.endpoint}"\n{keys}'
        f'[clusters.cluster-b]\nurl = "{url_b}"\nendpoint = "{s3_b.endpoint}"\n{keys}'
        '[datasets.emoji]\nhome = "cluster-a"\n'
    )
    source = open_store(f"{url_a}/emoji", **s3_a.options)
    make_dataset(source, count=5)
    env = {"TEST_KEY": s3_a.access_key, "TEST_SECRET": s3_a.secret_key}
    assert "5 copied" in datasync("replicate", "--to", "cluster-b", cwd=tmp_path, env=env).stdout
    b = open_store(f"{url_b}/emoji", **s3_b.options)
    assert data_of(b) == data_of(source)
    receipt = b.read("_datasync/receipt.json").decode()
    assert s3_a.secret_key not in receipt
    assert "nothing to copy" in datasync("replicate", "--to", "cluster-b", cwd=tmp_path, env=env).stdout
    assert (
        "all good"
        in datasync("verify", "emoji", "--cluster", "cluster-b", "-q", cwd=tmp_path, env=env).stdout
    )
    wrong = datasync(
        "replicate", "--to", "cluster-b", cwd=tmp_path, env=env | {"TEST_SECRET": "wrong"}, check=1
    )
    assert "secret key" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_one_that_cannot_be_found_does_not_keep_the_others(work):
    with open(work / "datasync.toml", "a") as file:
        file.write('[datasets.gone]\nhome = "cluster-c"\n')
    done = datasync("replicate", "--to", "cluster-b", cwd=work, check=1)
    assert "gone" in done.stderr
    assert "6 copied" in done.stdout
    assert receipts.read(LocalStore(work / "b" / "emoji")).whole


def test_two_sources_never_become_one_copy(work):
    for place in ("one", "two"):
        write_tree(work / place / "x", {place: b"1"})
    done = datasync("replicate", "one/x", "two/x", "--to", "cluster-b", cwd=work, check=2)
    assert "would both become x" in done.stderr
    assert not (work / "b" / "x").exists()
    done = datasync("replicate", "one/x", "./one/x", "emoji", "emoji", "--to", "cluster-b", cwd=work)
    assert len(done.stdout.splitlines()) == 2


def test_a_file_is_no_tree(work):
    done = datasync("replicate", "./datasync.toml", "--to", "cluster-b", cwd=work, check=2)
    assert "./datasync.toml is a file" in done.stderr
