"""Resuming: a seek to any sample, into another world, any number of times; refused where it does not fit."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from datasync import Stream, StreamingDataLoader, StreamingDataset
from datasync.errors import DatasyncError, UsageError
from datasync.streaming.decode import Decoder
from datasync.streaming.state import State
from tests.streaming.order_helpers import as_rank, flat, ids, write_dataset


@pytest.fixture(scope="module")
def remotes(tmp_path_factory):
    return [
        str(write_dataset(tmp_path_factory.mktemp("first"), 500)),
        str(write_dataset(tmp_path_factory.mktemp("second"), 300, first=1000)),
    ]


@pytest.fixture
def build(remotes, tmp_path):
    def make(**options):
        streams = [Stream(remote=r, local=str(tmp_path / f"cache{i}")) for i, r in enumerate(remotes)]
        options = {"global_batch_size": 24, "shuffle": True, "tail": "drop", **options}
        return StreamingDataset(streams=streams, **options)

    return make


def run(build, monkeypatch, *, ranks, steps, state=None, workers=0, filter=None, **options):
    """Global batches of `steps` steps from a state on, and the state behind them (of rank 0, as is usual)."""
    by_rank, saved = [], None
    for rank in range(ranks):
        as_rank(monkeypatch, rank, ranks)
        loader = StreamingDataLoader(build(**options), num_workers=workers, filter=filter)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        got = []
        while len(got) < steps:
            for batch in loader:
                got.append(ids(batch) if batch else [])
                if len(got) == steps:
                    break
        by_rank.append(got)
        if rank == 0:
            saved = loader.state_dict()
    return [flat(step) for step in zip(*by_rank, strict=True)], saved


@pytest.mark.parametrize("method", ["random", "stratified", "per_stream"])
def test_any_sequence_of_worlds_sees_the_same_batches(build, monkeypatch, method):
    whole, _ = run(build, monkeypatch, ranks=1, steps=70, batching_method=method)
    got, state = [], None
    for ranks, workers, steps in ((2, 0, 7), (3, 2, 11), (1, 3, 1), (8, 0, 20), (4, 0, 5), (12, 0, 26)):
        part, state = run(
            build, monkeypatch, ranks=ranks, workers=workers, steps=steps, state=state, batching_method=method
        )
        got += part
    assert got == whole


def test_the_sequence_goes_on_with_another_batch_size(build, monkeypatch):
    whole = flat(run(build, monkeypatch, ranks=1, steps=33)[0])
    first, state = run(build, monkeypatch, ranks=2, steps=5)
    second, _ = run(build, monkeypatch, ranks=1, steps=6, state=state, global_batch_size=40)
    assert sorted(flat(first)) == sorted(whole[:120])
    assert sorted(flat(second)) == sorted(whole[120:360])


def test_a_world_that_cannot_carry_the_batch_can_have_uneven_pieces(build, monkeypatch):
    whole, _ = run(build, monkeypatch, ranks=1, steps=20)
    first, state = run(build, monkeypatch, ranks=5, steps=9, uneven=True)
    second, _ = run(build, monkeypatch, ranks=7, steps=11, state=state, uneven=True)
    assert first + second == whole


def test_saving_and_loading_over_and_over_moves_nothing(build):
    loader = StreamingDataLoader(build())
    for _, _batch in zip(range(5), loader, strict=False):
        pass
    state = loader.state_dict()
    for _ in range(10):
        loader = StreamingDataLoader(build())
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        state = loader.state_dict()
    assert state["sample_in_epoch"] == 120


def test_one_sample_at_a_time_with_a_resume_before_each(build, monkeypatch):
    whole, _ = run(build, monkeypatch, ranks=1, steps=40)
    state, got = None, []
    for _ in range(40):
        part, state = run(build, monkeypatch, ranks=1, steps=1, state=state)
        got += part
    assert got == whole


def test_the_position_counts_what_came_out_not_what_workers_prepared(build):
    loader = StreamingDataLoader(build(), num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.state_dict()["sample_in_epoch"] == 72


def only_even_packed(samples):
    """A filter and a packer: half of the samples are left out, the texts of the others are put together."""
    kept = [sample for sample in samples if sample["id"] % 2 == 0]
    return " ".join(sample["text"] for sample in kept)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_filter_and_a_packer_do_not_move_the_position(build, workers):
    def loader():
        return StreamingDataLoader(build(), collate_fn=only_even_packed, num_workers=workers)

    whole = list(loader())
    got, state = [], None
    while len(got) < len(whole):
        made = loader()
        if state is not None:
            made.load_state_dict(state)
        for _, packed in zip(range(5), made, strict=False):
            got.append(packed)
            state = made.state_dict()
    assert got == whole
    assert state["epoch"] == 1


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(build, monkeypatch):
    loader = StreamingDataLoader(build())
    epoch = [ids(batch) for batch in loader]
    state = loader.state_dict()
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 0)
    following = [ids(batch) for batch in loader]
    resumed = StreamingDataLoader(build())
    resumed.load_state_dict(state)
    assert [ids(batch) for batch in resumed] == following != epoch


@pytest.mark.parametrize("tail", ["pad", "mask", "uneven"])
def test_a_tail_is_resumed_into_and_past(build, tail):
    loader = StreamingDataLoader(build(tail=tail))
    whole = [ids(batch) for _ in range(2) for batch in loader]
    states, got = [], []
    loader = StreamingDataLoader(build(tail=tail))
    for batch in loader:
        got.append(ids(batch))
        states.append(loader.state_dict())
    for step in (len(states) - 2, len(states) - 1):
        resumed = StreamingDataLoader(build(tail=tail))
        resumed.load_state_dict(states[step])
        rest = [ids(batch) for batch in resumed]
        if step < len(states) - 1:
            rest += [ids(batch) for batch in resumed]
        assert got[: step + 1] + rest == whole


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    method=st.sampled_from(["random", "random", "stratified", "per_stream", "device_per_stream"]),
    tail=st.sampled_from(["pad", "pad", "mask", "drop"]),
)
def test_with_drop_last_no_epoch_of_a_resumed_run_is_empty(build, monkeypatch, data, method, tail):
    """Saved behind any of the last batches, in the loop and after it, with the same steps on every rank."""
    ranks = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(2, 8))
    samples = 8 * size * ranks + data.draw(st.integers(1, size * ranks - 1))

    def load(state=None):
        made = build(
            global_batch_size=size * ranks,
            epoch_size=samples,
            tail=tail,
            batching_method=method,
            num_canonical_nodes=data.draw(st.sampled_from([1, 4])) if state is None else None,
        )
        loader = StreamingDataLoader(made, drop_last=True)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        return loader

    steps = set()
    for rank in range(ranks):
        as_rank(monkeypatch, rank, ranks)
        loader, states, epochs = load(), [], []
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(ids(batch))
                states.append(loader.state_dict())
            assert (loader.state_dict()["epoch"], loader.state_dict()["sample_in_epoch"]) == (len(epochs), 0)
        steps |= {len(epoch) for epoch in epochs}
        count = len(epochs[0])
        for done in (count - 2, count):
            resumed = load(states[done - 1])
            first = [ids(batch) for batch in resumed]
            assert first == (epochs[0] + epochs[1])[done : count if done < count else None]
            if done < count:
                assert [ids(batch) for batch in resumed] == epochs[1]
    assert len(steps) == 1


def test_an_epoch_without_its_tail_ends_behind_whatever_batch_a_resume_left_it_at(build):
    """800 samples: from 72 on there are 9 batches of 80, whose end is no multiple of 80."""
    first = StreamingDataLoader(build(num_canonical_nodes=8))
    for _ in zip(range(3), first, strict=False):
        pass
    second = StreamingDataLoader(build(global_batch_size=80))
    second.load_state_dict(first.state_dict())
    for _ in second:
        state = second.state_dict()
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 0)


def test_what_would_drop_a_batch_on_some_ranks_only_is_refused(build, monkeypatch):
    as_rank(monkeypatch, 0, 5)
    for options in ({"tail": "uneven", "global_batch_size": 25}, {"tail": "pad", "uneven": True}):
        with pytest.raises(UsageError, match="tail='drop'"):
            iter(StreamingDataLoader(build(**options), drop_last=True)).__next__()


def test_a_dataset_counts_samples_for_loaders_that_are_not_ours(build):
    made = build(global_batch_size=None, batch_size=8)
    loader = DataLoader(made, batch_size=8, num_workers=2)
    whole = [ids(batch) for batch in loader]
    made = build(global_batch_size=None, batch_size=8)
    loader = DataLoader(made, batch_size=8, num_workers=2)
    for step, _ in enumerate(loader, start=1):
        if step == 10:
            break
    from_start, from_resume = made.state_dict(80, True), made.state_dict(80, False)
    assert from_start == from_resume
    made.load_state_dict(from_start)
    assert [ids(batch) for batch in loader] == whole[10:]
    # Counted since the resume, and counted from the beginning of the epoch.
    again = build(global_batch_size=None, batch_size=8)
    again.load_state_dict(from_start)
    next(iter(again))
    assert again.state_dict(8, False)["sample_in_epoch"] == 88
    assert again.state_dict(88, True)["sample_in_epoch"] == 88


def test_persistent_workers_follow_a_loaded_state(build):
    made = build()
    loader = StreamingDataLoader(made, num_workers=2, persistent_workers=True)
    first = [ids(batch) for batch in loader]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "sample_in_epoch": 240})
    assert [ids(batch) for batch in loader] == first[10:]


def test_lanes_are_those_of_the_state(build, monkeypatch):
    first, state = run(build, monkeypatch, ranks=1, steps=10, num_canonical_nodes=6)
    whole, _ = run(build, monkeypatch, ranks=1, steps=20, num_canonical_nodes=6)
    rest, _ = run(build, monkeypatch, ranks=2, steps=10, state=state)
    assert first + rest == whole


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"shuffle_seed": 1}, "shuffle_seed"),
        ({"shuffle": False}, "shuffle"),
        ({"epoch_size": 640}, "epoch_size"),
        ({"sampling_method": "fixed"}, "mixture"),
        ({"shuffle_block_size": 77}, "shuffle_block_size"),
        ({"batching_method": "per_stream"}, "batching_method"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(build, options, named):
    state = build().state_dict(48, True)
    other = build(**options)
    with pytest.raises(UsageError, match=rf"does not fit.*{named} was"):
        other.load_state_dict(state)
    other.load_state_dict(state, accept=[named, "mixture", "batch"])
    assert other.state_dict()["sample_in_epoch"] == 48


def test_a_state_of_another_dataset_is_refused(build, tmp_path):
    state = build().state_dict(48, True)
    remote = write_dataset(tmp_path / "third", 800)
    made = StreamingDataset(remote=str(remote), local=str(tmp_path / "c"), global_batch_size=24, shuffle=True)
    with pytest.raises(UsageError, match="dataset was"):
        made.load_state_dict(state)
    with pytest.raises(UsageError, match="accept names"):
        made.load_state_dict(state, accept=["weather"])


def test_batch_dependent_methods_refuse_another_batch_size(build):
    state = build(batching_method="stratified").state_dict(48, True)
    with pytest.raises(UsageError, match="batch was 24, is 40"):
        build(batching_method="stratified", global_batch_size=40).load_state_dict(state)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"epoch": 0},
        {"epoch": -1},
        {"epoch": "1"},
        {"sample_in_epoch": True},
        {"datasync": {"version": 99}},
        {"datasync": {"version": 1}},
    ],
)
def test_a_state_that_is_none_is_refused(build, broken):
    made = build()
    state = {**made.state_dict(), **broken} if broken else {}
    if broken == {"epoch": 0}:
        state = broken
    with pytest.raises(DatasyncError, match="state of a dataset"):
        made.load_state_dict(state)


def test_a_place_far_behind_the_epoch_is_refused(build):
    state = build().state_dict()
    with pytest.raises(UsageError, match=r"behind 1,000,000,000 samples of an epoch of 800"):
        build().load_state_dict({**state, "sample_in_epoch": 10**9})
    made = build()
    made.load_state_dict({**state, "sample_in_epoch": 816})
    assert made.next_epoch == 1, "its last batch had repeats, and who counted has counted them"


def test_a_state_is_small_and_plain(build):
    state = build().state_dict(24, True)
    assert len(json.dumps(state)) < 1000
    assert State.from_dict(state).to_dict() == state


def test_batches_of_a_rank_refuse_another_number_of_ranks(build, monkeypatch):
    """With `device_per_stream` batches depend on their size; the same size on more ranks goes on."""
    first = StreamingDataLoader(build(batching_method="device_per_stream"))
    next(iter(first))
    state = first.state_dict()
    as_rank(monkeypatch, 0, 2)
    with pytest.raises(UsageError, match="batch was 24, is 12"):
        build(batching_method="device_per_stream").load_state_dict(state)
    build(batching_method="device_per_stream", global_batch_size=48).load_state_dict(state)


class Thirds(StreamingDataset):
    """Gives a third of what it reads."""

    def __iter__(self):
        return (sample for sample in super().__iter__() if sample["id"] % 3 == 0)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0), (0, 3), (2, 2)])
def test_what_a_filter_left_out_was_consumed(remotes, tmp_path, before, after):
    """Nothing is lost, and what comes again are the batches in which the loader was stopped."""

    def make(workers):
        dataset = Thirds(remote=remotes[0], local=str(tmp_path / "cache"), batch_size=8, shuffle=True)
        return StreamingDataLoader(dataset, num_workers=workers)

    kept = set(range(0, 500, 3))
    first = make(before)
    batches = iter(first)
    seen = flat(ids(next(batches)) for _ in range(9))
    state = first.state_dict()
    assert state["sample_in_epoch"] > 2 * len(seen)
    second = make(after)
    second.load_state_dict(state)
    rest = flat(ids(batch) for batch in second)
    assert set(seen + rest) == kept
    assert len(seen + rest) - len(kept) <= 8 * max(1, before) * 2
    assert second.state_dict()["epoch"] == 1
    again = flat(ids(batch) for batch in second)
    assert set(again) == kept
    assert again != rest


def test_a_filter_in_the_collate_function_is_exact(build):
    def collate(samples):
        return [sample["id"] for sample in samples if sample["id"] % 3 == 0] or None

    def make():
        return StreamingDataLoader(build(), collate_fn=collate, num_workers=2)

    first = make()
    batches = iter(first)
    seen = [next(batches) for _ in range(9)]
    second = make()
    second.load_state_dict(first.state_dict())
    assert seen + list(second) == list(make())


def test_an_iterator_that_was_left_for_another_one_counts_no_more(build):
    loader = StreamingDataLoader(build())
    left = iter(loader)
    for _ in range(3):
        next(left)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    next(left)
    state = loader.state_dict()
    assert (state["epoch"], state["sample_in_epoch"]) == (1, 2 * 24)


def test_a_filter_that_lets_little_through_ends_its_epoch_with_its_last_batch(remotes, tmp_path):
    class Two(StreamingDataset):
        def __iter__(self):
            return (sample for sample in super().__iter__() if sample["id"] in (3, 400))

    dataset = Two(remote=remotes[0], local=str(tmp_path / "cache"), batch_size=8, shuffle=True)
    loader = StreamingDataLoader(dataset)
    assert sorted(ids(next(iter(loader)))) == [3, 400]
    assert loader.state_dict()["sample_in_epoch"] == 496  # of 500; the loader has not been asked for more


def keep_thirds(sample):
    return sample["id"] % 3 == 0


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), method=st.sampled_from(["random", "stratified", "per_stream"]))
def test_a_filter_is_exact_over_any_sequence_of_kills_and_worlds(build, monkeypatch, data, method):
    """The global batches, less what was left out, are those of a run of one rank that was never stopped."""
    options = {"batching_method": method, "filter": keep_thirds}
    whole, _ = run(build, monkeypatch, ranks=1, steps=70, **options)
    assert {number % 3 for number in flat(whole)} == {0}
    got, state = [], None
    while len(got) < len(whole):
        steps = min(data.draw(st.integers(1, 25), label="steps"), len(whole) - len(got))
        ranks = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), label="ranks")
        workers = data.draw(st.sampled_from([0, 0, 0, 1, 2]), label="workers")
        part, state = run(
            build, monkeypatch, ranks=ranks, workers=workers, steps=steps, state=state, **options
        )
        got += part
    assert got == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_filter_is_asked_before_a_decoder_and_its_transform_after(build, workers):
    def kept(sample):
        return None if sample["id"] % 2 else sample

    def make(**options):
        return StreamingDataLoader(build(), num_workers=workers, **options)

    decoder = Decoder({}, transform=kept, stack=True)
    got = [list(batch["id"]) if batch else [] for batch in make(filter=keep_thirds, collate_fn=decoder)]
    expected = [[i for i in ids(batch) if i % 6 == 0] for batch in make()]
    assert [[int(i) for i in batch] for batch in got] == expected


def test_a_batch_of_which_nothing_is_kept_is_an_empty_list(build):
    made = StreamingDataLoader(build(), filter=lambda sample: False)
    assert list(made) == [[]] * (800 // 24)
    assert made.state_dict()["epoch"] == 1
    with pytest.raises(UsageError, match="set batch_size"):
        StreamingDataLoader(build(), batch_size=None, filter=keep_thirds)


def test_what_a_filter_had_read_in_one_process_is_no_position_of_others(remotes, tmp_path):
    """A state also says how far an `__iter__` of one's own had read; workers begin at the position itself."""

    def make():
        return Thirds(remote=remotes[0], local=str(tmp_path / "cache"), batch_size=8, shuffle=True)

    alone = make()
    samples = iter(alone)
    seen = [next(samples)["id"] for _ in range(9)]
    state = alone.state_dict()
    assert state["sample_in_epoch"] == 0
    again = make()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert seen + [sample["id"] for sample in again] == [sample["id"] for sample in make()]
    workers = StreamingDataLoader(make(), num_workers=2)
    workers.load_state_dict(state)
    assert set(flat(ids(batch) for batch in workers)) == set(range(0, 500, 3))
    assert workers.state_dict()["epoch"] == 1
