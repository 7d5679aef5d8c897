"""The plan: digests decide, and nothing is copied that is proven to be there."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.replicate.journal import Done
from datasync.replicate.plan import Plan, compare, conflicts, empty, in_place, items, schema


def table(rows: dict[str, tuple[int, str | None, str | None]]) -> pa.Table:
    """key -> (bytes, content or None, tag)."""
    keys = sorted(rows, key=str.encode)
    return pa.table(
        [
            keys,
            [rows[key][0] for key in keys],
            [None] * len(keys),
            [
                None if rows[key][1] is None else hashlib.sha256(rows[key][1].encode()).digest()
                for key in keys
            ],
            [None] * len(keys),
            [rows[key][2] for key in keys],
        ],
        schema=schema(),
    )


def keys(plan: Plan, places) -> set[str]:
    return {item.key for item in items(plan.table, places)}


def test_same_size_and_other_content_is_copied():
    source, there = table({"a": (3, "new", None)}), table({"a": (3, "old", None)})
    plan = compare(source.to_batches(), there.to_batches(), {})
    assert keys(plan, plan.last) == {"a"}
    assert plan.objects == 1


def test_same_content_is_not_copied_whatever_its_tag():
    source, there = table({"a": (3, "one", "tag-2")}), table({"a": (3, "one", None)})
    assert compare(source.to_batches(), there.to_batches(), {}).objects == 0


def test_what_replaces_an_object_comes_after_what_is_new_and_markers_come_last():
    source = table({"a": (1, "new", None), "b": (1, "b", None), "ckpt/.metadata": (1, "m", None)})
    there = table({"a": (1, "old", None)})
    plan = compare(source.to_batches(), there.to_batches(), {})
    assert keys(plan, plan.first) == {"b"}
    assert keys(plan, plan.last) == {"a"}
    assert keys(plan, plan.marks) == {"ckpt/.metadata"}


def test_an_unknown_digest_is_never_taken_for_the_same():
    source, there = table({"a": (3, None, "t")}), table({"a": (3, "one", None)})
    plan = compare(source.to_batches(), there.to_batches(), {})
    assert plan.objects == 1
    assert keys(plan, plan.unproven) == {"a"}


def test_the_journal_stands_above_the_last_manifest():
    source = table({"a": (1, "new", None), "b": (1, "old", None)})
    there = table({"a": (1, "old", None), "b": (1, "old", None)})
    new = hashlib.sha256(b"new").hexdigest()
    plan = compare(
        source.to_batches(),
        there.to_batches(),
        {"a": Done(bytes=1, sha256=new, crc32c=None), "b": Done(bytes=1, sha256=new, crc32c=None)},
    )
    assert keys(plan, plan.last) == {"b"}  # the killed run had overwritten b


def test_a_journalled_object_of_a_tree_counts_only_with_its_tag():
    source = table({"a": (1, None, "t1"), "b": (1, None, "t2")})
    done = {key: Done(bytes=1, sha256="00" * 32, crc32c=None, tag="t1") for key in "ab"}
    plan = compare(source.to_batches(), None, done)
    assert keys(plan, plan.last) == {"b"}


def test_gone_is_what_the_last_manifest_has_and_the_source_lacks():
    source, there = table({"a": (1, "a", None)}), table({"a": (1, "a", None), "z": (1, "z", None)})
    assert compare(source.to_batches(), there.to_batches(), {}).gone == ["z"]


def test_an_empty_destination_needs_everything():
    source = table({"a": (5, "a", None), "b": (6, "b", None)})
    for there in (None, empty().to_batches()):
        plan = compare(source.to_batches(), there, {})
        assert (plan.objects, plan.bytes, plan.have) == (2, 11, 0)


contents = st.dictionaries(
    st.text("ab/é0", min_size=1, max_size=6),
    st.tuples(st.integers(0, 3), st.sampled_from("xyz")),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(contents, contents, contents)
def test_the_plan_agrees_with_a_plain_comparison(source, there, journal):
    left = table({key: (size, content, None) for key, (size, content) in source.items()})
    right = table({key: (size, content, None) for key, (size, content) in there.items()})
    done = {
        key: Done(bytes=size, sha256=hashlib.sha256(content.encode()).hexdigest(), crc32c=None)
        for key, (size, content) in journal.items()
    }
    plan = compare(left.to_batches(max_chunksize=3), right.to_batches(max_chunksize=2), done)
    known = {**there, **journal}
    wanted = {key for key, value in source.items() if known.get(key) != value}
    assert keys(plan, plan.first) | keys(plan, plan.last) | keys(plan, plan.marks) == wanted
    assert plan.bytes == sum(source[key][0] for key in wanted)
    assert plan.have + plan.objects == len(source)
    assert set(plan.gone) == there.keys() - source.keys()
    assert keys(plan, plan.last) <= known.keys()
    assert left["key"].take(pa.array(plan.rows)).to_pylist() == plan.table["key"].to_pylist()


@settings(max_examples=60, deadline=None)
@given(contents, contents)
def test_what_is_in_place_is_found_by_walking_two_sorted_lists(source, listed):
    left = table({key: (size, content, None) for key, (size, content) in source.items()})
    plan = compare(left.to_batches(), None, {})
    listing = [(key, listed[key][0]) for key in sorted(listed, key=str.encode)]
    expected = {key: listed[key][0] == size for key, (size, _) in source.items() if key in listed}
    assert in_place(plan, listing) == expected


@pytest.mark.parametrize(
    ("names", "folds", "found"),
    [
        (["a", "b/c"], False, []),
        (["a", "a/b"], False, [("a", "a/b")]),
        (["a", "a!", "a/b/c", "a0"], False, [("a", "a/b/c")]),
        (["Shard", "shard"], False, []),
        (["Shard", "shard"], True, [("Shard", "shard")]),
        (["A/x", "a/x"], True, [("A/x", "a/x")]),
    ],
)
def test_keys_that_cannot_both_be_files_are_found(names, folds, found):
    assert conflicts(names, folds_case=folds) == found
