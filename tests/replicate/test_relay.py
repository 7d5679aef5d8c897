"""Relay: a destination that is whole feeds the next, along the cheapest way."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from datasync.config import Config
from datasync.errors import TransientError
from datasync.ops.targets import targets
from datasync.replicate import Stop, relay, replicate
from datasync.replicate.relay import Hop, plan_relay
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, data_of, datasync, make_dataset


def test_the_cheapest_way_is_taken():
    price = {("home", "b"): 0.09, ("home", "c"): 0.09, ("b", "c"): 0.0, ("c", "b"): 0.02}
    hops = plan_relay("home", ["c", "b"], lambda a, b: (price[a, b], 0.0))
    assert hops == [Hop("home", "c"), Hop("c", "b")]
    price["home", "b"] = 0.05
    assert plan_relay("home", ["c", "b"], lambda a, b: (price[a, b], 0.0)) == [
        Hop("home", "b"),
        Hop("b", "c"),
    ]


def test_among_equal_prices_the_faster_goes_first():
    seconds = {"b": 10.0, "c": 2.0, "d": 5.0}
    hops = plan_relay("home", ["b", "c", "d"], lambda a, b: (0.0, seconds[b]))
    assert [hop.to for hop in hops] == ["c", "d", "b"]


def test_the_home_is_read_once_where_reading_it_costs(tmp_path):
    (tmp_path / "datasync.toml").write_text(
        '[clusters.home]\nurl = "home"\negress_per_gib = 0.09\n'
        '[clusters.b]\nurl = "b"\n[clusters.c]\nurl = "c"\n[datasets.emoji]\nhome = "home"\n'
    )
    make_dataset(LocalStore(tmp_path / "home" / "emoji"))
    shown = datasync("replicate", "--to", "b,c", "--relay", "--dry-run", cwd=tmp_path).stdout
    assert "by relay: home → b, b → c" in shown
    plan = json.loads(
        datasync("replicate", "--to", "b,c", "--relay", "--dry-run", "--json", cwd=tmp_path).stdout
    )
    size = sum(20_000 + n for n in range(6))
    assert [(place["destination"], place["relay_from"]) for place in plan["replications"]] == [
        ("b", "home"),
        ("c", "b"),
    ]
    assert [place["cost"] for place in plan["replications"]] == [pytest.approx(0.09 * size / 2**30), 0.0]
    assert "home → b   0.09 a GiB · not measured yet" in shown
    assert "b → c   free to read · not measured yet" in shown
    done = datasync("replicate", "--to", "b,c", "--relay", "-q", cwd=tmp_path)
    assert len(done.stdout.splitlines()) == 2
    for place in ("b", "c"):
        assert data_of(LocalStore(tmp_path / place / "emoji")) == data_of(
            LocalStore(tmp_path / "home" / "emoji")
        )
    receipt = (tmp_path / "c" / "emoji" / "_datasync" / "receipt.json").read_text()
    assert str(tmp_path / "b" / "emoji") in receipt  # fed by b, not by the home
    # The next plan knows how fast each of these ways was.
    make_dataset(LocalStore(tmp_path / "home" / "emoji"), seed="new")
    plan = json.loads(
        datasync("replicate", "--to", "b,c", "--relay", "--dry-run", "--json", cwd=tmp_path).stdout
    )
    for place in plan["replications"]:
        receipt = json.loads((tmp_path / place["destination"] / "emoji/_datasync/receipt.json").read_text())
        took = datetime.fromisoformat(receipt["finished"]) - datetime.fromisoformat(receipt["started"])
        rate = receipt["copied"]["bytes"] / took.total_seconds()
        assert place["relay"]["bytes_per_second"] == pytest.approx(rate)


def test_a_dead_destination_does_not_end_the_relay(tmp_path):
    (tmp_path / "datasync.toml").write_text(
        '[clusters.home]\nurl = "home"\n[clusters.b]\nurl = "b"\n[datasets.emoji]\nhome = "home"\n'
        '[clusters.dead]\nurl = "s3://bucket"\nendpoint = "http://127.0.0.1:1"\nanonymous = true\n'
    )
    make_dataset(LocalStore(tmp_path / "home" / "emoji"))
    relay = ("replicate", "emoji", "--to", "dead,b", "--relay", "--retry-for", "1s")
    assert "by relay: home → dead, home → b" in datasync(*relay, "--dry-run", cwd=tmp_path, check=1).stdout
    done = datasync(*relay, "-q", cwd=tmp_path, check=1)
    assert "nothing listens at" in done.stderr
    assert data_of(LocalStore(tmp_path / "b" / "emoji")) == data_of(LocalStore(tmp_path / "home" / "emoji"))


def test_a_feeder_that_dies_is_replaced_by_the_source(tmp_path, monkeypatch):
    (tmp_path / "datasync.toml").write_text(
        '[clusters.home]\nurl = "home"\negress_per_gib = 0.09\n'
        '[clusters.b]\nurl = "b"\n[clusters.c]\nurl = "c"\n[datasets.emoji]\nhome = "home"\n'
    )
    make_dataset(LocalStore(tmp_path / "home" / "emoji"))
    asked = []

    def dying(source, to, **more):
        asked.append(source.url)
        if source.url.endswith("/b/emoji"):
            raise TransientError("nothing listens any more")
        return replicate(source, to, **more)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relay, "replicate", dying)
    config = Config.load(None)
    (target,) = targets(config, ["emoji"], to=["b", "c"])
    outcomes = list(relay.replicate_all(target, QUICK, Stop(), relay=True, config=config))
    assert [outcome.state for outcome in outcomes] == ["published", "published"]
    assert [url.rpartition("/emoji")[0].rpartition("/")[2] for url in asked] == ["home", "b", "home"]
    assert data_of(LocalStore(tmp_path / "c" / "emoji")) == data_of(LocalStore(tmp_path / "home" / "emoji"))
