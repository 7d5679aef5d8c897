"""The lease: one holder at a time, whoever dies, whatever the clocks say."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from datasync.errors import BusyError, ConflictError, StoreError, TransientError
from datasync.ops import receipts
from datasync.replicate import lease as leases
from datasync.replicate.lease import Holder, Lease, Record, held, may_take, successor
from datasync.storage.base import Abilities
from datasync.storage.local import LocalStore
from tests.replicate.kit import Spy


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path):
    return (
        LocalStore(tmp_path) if request.param == "local" else request.getfixturevalue("s3_a").store("leased")
    )


def elsewhere() -> Holder:
    return replace(Holder.here("other"), host="elsewhere", boot="other-boot")


def test_the_second_is_busy_and_is_told_who_holds_it(store):
    with held(store, "replicate emoji"):
        with pytest.raises(BusyError, match="replicate emoji") as caught:
            Lease(store, "another").acquire()
        assert caught.value.exit_code == 75


def test_tokens_grow_also_over_a_release(store):
    tokens = []
    for _ in range(3):
        with held(store, "run") as lease:
            tokens.append(lease.token)
    assert tokens == [1, 2, 3]


def test_of_many_contenders_one_wins(store):
    won, lost = [], []

    def contend() -> None:
        lease = Lease(store, "contender")
        try:
            lease.acquire()
            won.append(lease)
        except BusyError:
            lost.append(lease)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].release()


def test_a_holder_on_this_host_that_died_is_replaced_at_once(tmp_path):
    code = (
        "import os; from datasync.replicate.lease import Lease\n"
        "from datasync.storage.local import LocalStore\n"
        f"Lease(LocalStore({str(tmp_path)!r}), 'killed').acquire(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    began = time.monotonic()
    with held(LocalStore(tmp_path), "next") as lease:
        assert lease.token == 2
    assert time.monotonic() - began < 5


def test_a_silent_holder_elsewhere_is_replaced_after_its_time_and_not_before(store):
    quick = successor(None, elsewhere(), ttl=2.0)
    store.write("_datasync/lease.json", quick.dumps())
    with pytest.raises(BusyError, match="elsewhere"):
        Lease(store, "eager").acquire()
    time.sleep(3.2)
    with held(store, "patient") as lease:
        assert lease.token == 2


def test_a_wrong_clock_takes_nothing_from_a_holder(tmp_path):
    store = LocalStore(tmp_path)
    slow_clock = replace(successor(None, elsewhere(), ttl=60), renewed=time.time() - 7200)
    store.write("_datasync/lease.json", slow_clock.dumps())
    with pytest.raises(BusyError):
        Lease(store, "eager").acquire()


def test_renewal_keeps_it(store):
    lease = Lease(store, "long", ttl=1.0)
    lease.acquire()
    try:
        time.sleep(2.5)
        with pytest.raises(BusyError):
            Lease(store, "eager", ttl=1.0).acquire()
        lease.check()
    finally:
        lease.release()


def test_a_holder_that_was_overtaken_notices_and_stops(store):
    lease = Lease(store, "suspended", ttl=60)
    lease.acquire()
    record = successor(Record.parse(store.read("_datasync/lease.json"), where="x"), elsewhere(), ttl=60)
    store.write("_datasync/lease.json", record.dumps())
    with pytest.raises(BusyError, match="taken over"):
        lease.check()
    lease.release()
    assert Record.parse(store.read("_datasync/lease.json"), where="x").token == 2  # not overwritten


def test_the_loss_is_told_while_the_run_is_under_way(tmp_path):
    store = LocalStore(tmp_path)
    lease = Lease(store, "suspended", ttl=1.0)
    lease.acquire()
    told = threading.Event()
    lease.when_lost(told.set)
    store.write("_datasync/lease.json", successor(None, elsewhere(), ttl=60).dumps())
    assert told.wait(5)
    lease.release()


def test_a_receipt_of_an_overtaken_run_is_refused(tmp_path):
    store = LocalStore(tmp_path)
    one = receipts.Receipt(
        name="x", kind="tree", version="0" * 64, state="whole", objects=0, bytes=0, samples=None,
        source={"url": "u", "endpoint": "e", "index": None}, destination="d", index=None, checked={},
        copied={"objects": 0, "bytes": 0}, adopted=0, started="", finished="", tool="", host="", token=5,
    )  # fmt: skip
    receipts.write(store, one)
    with pytest.raises(ConflictError, match="overtaken"):
        receipts.write(store, replace(one, token=4))
    receipts.write(store, replace(one, token=6))


def test_without_conditional_writes_one_still_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "_SETTLE_SECONDS", 0.5)

    class Sloppy(Spy):
        def abilities(self) -> Abilities:
            return replace(self.inner.abilities(), if_absent=False, if_match=False)

        def write(self, key, data, **options):
            assert not options.get("if_absent")
            assert not options.get("if_match")
            return super().write(key, data)

    won = []

    def contend() -> None:
        lease = Lease(Sloppy(LocalStore(tmp_path)), "sloppy")
        try:
            lease.acquire()
            won.append(lease)
        except BusyError:
            pass

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    won[0].check()
    won[0].release()


def test_when_a_lease_may_be_taken(monkeypatch):
    here, other = successor(None, Holder.here("x"), ttl=60), successor(None, elsewhere(), ttl=60)
    assert may_take(None, idle=0)
    assert may_take(replace(other, holder=None), idle=0)
    assert may_take(here, idle=0)  # a run of this process that ended without giving it back
    monkeypatch.setattr(leases, "_held", {here.holder.run})
    assert not may_take(here, idle=59)
    assert may_take(other, idle=61)
    dead = replace(here, holder=replace(Holder.here("x"), born="1"))
    assert may_take(dead, idle=0)


def test_a_lease_that_a_silent_place_did_not_renew_is_not_said_to_be_taken(tmp_path):
    def silent(operation: str, key: str) -> None:
        if operation == "write":
            raise TransientError("the place is silent", mend="check the network to it")

    spy = Spy(LocalStore(tmp_path))
    lease, told = Lease(spy, "replicate emoji", ttl=0.4), threading.Event()
    lease.acquire()
    lease.when_lost(told.set)
    spy.before = silent
    assert told.wait(10)
    error = lease.lost_error()
    assert not isinstance(error, BusyError)
    assert "could not be renewed in time" in error.message
    assert "the place is silent" in error.message
    assert error.mend == "check the network to it"
    with pytest.raises(StoreError, match="could not be renewed"):
        lease.check()
    lease.release()
