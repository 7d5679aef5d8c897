"""`datasync.toml`: what it may say, and how it refuses the rest."""

from __future__ import annotations

import os
import pickle
from datetime import datetime
from pathlib import Path

import pytest

from datasync import config_values
from datasync.config import Config, find_file
from datasync.errors import StoreError, UsageError

FULL = """
[clusters.a]
url = "stores/a"
egress_per_gib = 0.05

[clusters.b]
url = "s3://bucket/datasets"
endpoint = "https://s3.example.org"
profile = "b"
region = "eu-1"
addressing = "path"
ca_bundle = "ca.pem"
access_key = "env:B_ACCESS"
secret_key = "file:secrets/b"

[clusters.b.rate_limit]
"08:00-20:00" = "200 MiB/s"
default = "unlimited"

[datasets.emoji]
source = "corpora/emoji"
home = "a"
[datasets.emoji.shard]
size-limit = "64mb"

[datasets.far]
source = "s3://elsewhere/x"

[replication.nightly]
datasets = ["emoji"]
from = "a"
to = "b"
schedule = "0 3 * * *"
jitter = "10m"
verify = "full"
max_runtime = "1h30m"
max_delete = "5%"
"""


def _parse(content: str, tmp_path: Path) -> Config:
    return Config.parse(content, path=tmp_path / "datasync.toml")


def test_everything_that_a_file_says_is_read(tmp_path: Path) -> None:
    config = _parse(FULL, tmp_path)
    a, b = config.clusters["a"], config.clusters["b"]
    assert (a.url, a.egress_per_gib) == (str(tmp_path / "stores/a"), 0.05)
    assert (b.url, b.endpoint, b.profile) == ("s3://bucket/datasets", "https://s3.example.org", "b")
    assert (b.ca_bundle, b.access_key, b.secret_key) == (
        str(tmp_path / "ca.pem"),
        "env:B_ACCESS",
        f"file:{tmp_path / 'secrets/b'}",
    )
    assert b.rate_limit is not None
    assert b.rate_limit.rate(datetime(2030, 1, 1, 12)) == 200 * 2**20
    assert b.rate_limit.rate(datetime(2030, 1, 1, 22)) is None
    assert config.datasets["emoji"].source == str(tmp_path / "corpora/emoji")
    assert config.datasets["emoji"].shard == {"size_limit": "64mb"}
    assert config.datasets["far"].source == "s3://elsewhere/x"
    nightly = config.replication["nightly"]
    assert (nightly.source, nightly.to, nightly.datasets) == ("a", ("b",), ("emoji",))
    assert (nightly.jitter, nightly.max_runtime, nightly.max_delete) == (600.0, 5400.0, 0.05)


@pytest.mark.parametrize(
    ("content", "key", "mend"),
    [
        ('[cluster.a]\nurl="x"', "cluster", "clusters"),
        ('[clusters.a]\nurl="x"\nendpiont="https://x"', "clusters.a", "endpoint"),
        ('[datasets.a]\nsuorce="x"', "datasets.a", "source"),
        ('[clusters.b]\nurl="x"\n[replication.n]\nto=["b"]\nschedul="x"', "replication.n", "schedule"),
        ('[clusters.cluster-b]\nurl="x"\n[replication.n]\nto=["clusterb"]', "replication.n.to", "cluster-b"),
        ('[clusters.b]\nurl="x"\n[datasets.d]\nhome="bb"', "datasets.d.home", "'b'"),
        ("[clusters.a]\n", "clusters.a", "url"),
        ("[clusters.a]\nurl=3", "clusters.a.url", "url ="),
        ('[clusters.a]\nurl="x"\nendpoint="s3.example.org"', "clusters.a.endpoint", "https://"),
        ('[clusters.a]\nurl="x"\naddressing="paths"', "clusters.a.addressing", "path"),
        ('[clusters.a]\nurl="s3://"', "clusters.a.url", "bucket"),
        ('[clusters.a]\nurl="gs:///"', "clusters.a.url", "bucket"),
        (
            '[clusters.b]\nurl="x"\n[replication.n]\nto=["b"]\nschedule="99 * * * *"',
            "replication.n.schedule",
            "",
        ),
        (
            '[clusters.b]\nurl="x"\n[replication.n]\nto=["b"]\nheartbeat="not a url"',
            "n.heartbeat",
            "https://",
        ),
        ('[clusters.b]\nurl="x"\n[replication.n]\nto=["b"]\nkeep=0', "replication.n.keep", "1 or more"),
        ('[clusters.b]\nurl="x"\n[replication.n]\nto=["b", "b"]', "replication.n.to", "once"),
        ('[clusters.b]\nurl="x"\n[clusters.c]\nurl="./x/"\n[replication.n]\nto=["b", "c"]', "n.to", "once"),
        (
            '[clusters.b]\nurl="x"\n[clusters.c]\nurl="./x/"\n[replication.n]\nfrom="c"\nto=["b"]',
            "n.to",
            "one of",
        ),
        (
            '[clusters.b]\nurl="x"\n[replication.n]\nto=["b"]\ndatasets=[]',
            "replication.n.datasets",
            "for all",
        ),
        ('[clusters.a]\nurl="x"\nrate_limit="fast"', "clusters.a.rate_limit", "MiB/s"),
        ('[clusters.a.rate_limit]\n"8-20"="1 MiB/s"', "clusters.a.rate_limit", "08:00"),
        ('[clusters.a]\nurl="x"\negress_per_gib="5c"', "clusters.a.egress_per_gib", "number"),
        ('[clusters."a:b"]\nurl="x"', "clusters.a:b", "letters"),
        ('[datasets."../up"]\n', "datasets.../up", "folder"),
        ('[clusters.b]\nurl="x"\n[replication.n]\nto=[]', "replication.n", "to ="),
        ('[clusters.b]\nurl="x"\n[replication.n]\nfrom="b"\nto=["b"]', "replication.n.to", "take it out"),
        ('[clusters.b]\nurl="x"\n[replication.n]\nto=["b"]\njitter="soon"', "replication.n.jitter", "1h30m"),
        ("clusters = 3", "clusters", "[clusters]"),
        ("[clusters", "datasync.toml", "line"),
    ],
)
def test_a_mistake_names_file_key_and_mend(tmp_path: Path, content: str, key: str, mend: str) -> None:
    with pytest.raises(UsageError) as caught:
        _parse(content, tmp_path)
    assert str(tmp_path / "datasync.toml") in caught.value.message
    assert key in caught.value.message
    assert mend in caught.value.mend
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "line",
    [
        'access_key="env:A"\nsecret_key="hunter2hunter2"',
        'endpoint="https://me:hunter2hunter2@host"',
    ],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        _parse(f'[clusters.a]\nurl="s3://x"\n{line}', tmp_path)
    assert "hunter2" not in str(caught.value)
    assert "env:NAME" in caught.value.mend


def test_the_file_is_searched_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below, home, named = tmp_path / "work/deep", tmp_path / "home/datasync", tmp_path / "named.toml"
    below.mkdir(parents=True)
    home.mkdir(parents=True)
    monkeypatch.chdir(below)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DATASYNC_CONFIG", raising=False)
    assert find_file() is None
    assert Config.load().clusters == {}
    (home / "datasync.toml").touch()
    assert find_file() == home / "datasync.toml"
    (tmp_path / "work/datasync.toml").touch()
    assert find_file() == tmp_path / "work/datasync.toml"
    named.write_text('[clusters.a]\nurl="x"')
    monkeypatch.setenv("DATASYNC_CONFIG", str(named))
    assert list(Config.load().clusters) == ["a"]
    with pytest.raises(UsageError, match=r"gone\.toml"):
        Config.load(tmp_path / "gone.toml")


def test_names_urls_and_paths_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = _parse('[clusters.a]\nurl="stores/a"', tmp_path)
    assert config.resolve("a:emoji").url == str(tmp_path / "stores/a/emoji")
    assert config.resolve("a:").url == str(tmp_path / "stores/a")
    assert config.resolve("some/folder").url == str(tmp_path / "some/folder")
    assert config.resolve(f"file://{tmp_path}/x").url == str(tmp_path / "x")
    assert config.dataset_store("a", "emoji").url == config.resolve("a:emoji").url
    (tmp_path / "odd:name").mkdir()
    assert config.resolve("odd:name").url == str(tmp_path / "odd:name")
    with pytest.raises(UsageError, match="cluster") as caught:
        config.resolve("b:emoji")
    assert "'a'" in caught.value.mend or "known" in caught.value.mend
    with pytest.raises(UsageError):
        config.resolve("a:../other")


def test_a_dataset_is_found_where_it_is_published(tmp_path: Path) -> None:
    config = _parse('[clusters.a]\nurl="a"\n[clusters.b]\nurl="b"\n[clusters.c]\nurl="c"', tmp_path)
    config.dataset_store("b", "emoji").write("index.json", b"{}")
    config.dataset_store("a", "emoji").write("shards/x", b"unpublished")
    assert [cluster.name for cluster in config.find_dataset("emoji")] == ["b"]
    assert config.find_dataset("nothing") == ()


def test_looking_for_a_dataset_says_when_a_cluster_could_not_be_asked(tmp_path: Path) -> None:
    config = _parse('[clusters.a]\nurl="a"\n[clusters.b]\nurl="b"', tmp_path)
    (tmp_path / "a").write_text("in the way")
    with pytest.raises(StoreError, match="emoji was not found, and a could not be asked: "):
        config.find_dataset("emoji")
    config.dataset_store("b", "emoji").write("index.json", b"{}")
    assert [cluster.name for cluster in config.find_dataset("emoji")] == ["b"]


def test_looking_for_a_dataset_passes_over_a_cluster_whose_profile_does_not_exist(tmp_path: Path) -> None:
    config = _parse(
        '[clusters.a]\nurl="s3://bucket"\nprofile="nosuchprofile"\n[clusters.b]\nurl="b"\n'
        '[datasets.flags]\nhome="b"',
        tmp_path,
    )
    with pytest.raises(UsageError, match=r"a could not be asked: .*nosuchprofile") as caught:
        config.find_dataset("flgs")
    assert caught.value.mend == "did you mean 'flags'?"
    config.dataset_store("b", "emoji").write("index.json", b"{}")
    assert [cluster.name for cluster in config.find_dataset("emoji")] == ["b"]


def test_a_configuration_pickles(tmp_path: Path) -> None:
    config = _parse(FULL, tmp_path)
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert os.fspath(again.path) == str(tmp_path / "datasync.toml")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), (90, 90), ("90s", 90), ("1h30m", 5400), ("1 h 30 m", 5400), ("7d", 604_800)],
)
def test_durations(text: object, seconds: float) -> None:
    assert config_values.duration(text, config_values.Place("--timeout")) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "1x", "h", "5 5", True, -1, float("nan"), None])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(UsageError, match="no duration"):
        config_values.duration(text, config_values.Place("--timeout"))


@pytest.mark.parametrize("text", ["999999999d", "99999999999", float("inf"), 1e20])
def test_a_duration_that_no_clock_counts_is_refused(text: object) -> None:
    with pytest.raises(UsageError, match="longer than ten years"):
        config_values.duration(text, config_values.Place("--timeout"))


@pytest.mark.parametrize("name", ["a/b", "../x", "a\\nb", ".x", "", "a%b", "a'b"])
def test_a_policy_has_a_name_for_crontabs_and_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / "datasync.toml"
    file.write_text(f'[clusters.b]\nurl = "b"\n[replication."{name}"]\nto = ["b"]\n')
    with pytest.raises(UsageError, match="is no name for a schedule"):
        Config.load(file)


@pytest.mark.parametrize("added", [b"\xff\xfe", b"# caf\xe9\n"])
def test_a_file_that_is_not_utf8_is_one_clear_error(tmp_path: Path, added: bytes) -> None:
    file = tmp_path / "datasync.toml"
    file.write_bytes(b'[clusters.a]\nurl = "a"\n' + added)
    with pytest.raises(UsageError, match="is not UTF-8: byte") as caught:
        Config.load(file)
    assert "UTF-8" in caught.value.mend
