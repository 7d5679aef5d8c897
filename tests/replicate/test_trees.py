"""Trees as they are in use: names that change their kind, markers of folders, sources of one name."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from datasync.errors import DeniedError
from datasync.ops import receipts
from datasync.ops.status import is_here
from datasync.replicate import Outcome, replicate, report
from datasync.storage.base import Store
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, Spy, data_of, datasync, make_dataset, write_tree

MIRROR = replace(QUICK, delete=True, max_delete=1.0)


def one(source: Store, to: Store, **more) -> Outcome:
    options = more.pop("options", QUICK)
    (outcome,) = replicate(source, {"b": to}, name="tree", options=options, **more)
    return outcome


@pytest.fixture(params=["local", "s3"])
def there(request, tmp_path):
    if request.param == "local":
        return LocalStore(tmp_path / "b")
    return request.getfixturevalue("s3_b").store("tree")


def rewrite(folder, files):
    """Make a folder hold exactly these files."""
    shutil.rmtree(folder, ignore_errors=True)
    write_tree(folder, files)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"x": b"1", "z": b"z"}, {"x/y": b"2", "z": b"z"}),
        ({"x/y": b"1", "x/a/b": b"3", "z": b"z"}, {"x": b"2", "z": b"z"}),
    ],
)
def test_a_file_that_became_a_folder_and_the_reverse_are_mirrored(there, tmp_path, before, after):
    source = LocalStore(tmp_path / "a")
    rewrite(tmp_path / "a", before)
    assert one(source, there).error is None
    rewrite(tmp_path / "a", after)
    outcome = one(source, there, options=MIRROR)
    assert outcome.error is None
    assert outcome.deleted == len(before) - 1
    assert data_of(there) == after
    assert is_here(there, "tree", None)[0] is not None


def test_without_delete_it_is_said_what_is_in_the_way_and_what_helps(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    rewrite(tmp_path / "a", {"x": b"1"})
    one(source, b)
    rewrite(tmp_path / "a", {"x/y": b"2"})
    outcome = one(source, b)
    assert "'x'" in outcome.error.message
    assert "--delete" in outcome.error.mend
    assert data_of(b) == {"x": b"1"}


def test_what_others_put_in_the_way_is_left_and_named(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    rewrite(tmp_path / "a", {"x/y": b"2"})
    write_tree(tmp_path / "b", {"x": b"a person's"})
    outcome = one(source, b, options=MIRROR)
    assert f"{tmp_path / 'b' / 'x'} is a file" in str(outcome.error)
    assert "rename or remove it" in str(outcome.error)
    assert data_of(b) == {"x": b"a person's"}


def test_a_place_that_is_a_file_is_named(tmp_path):
    write_tree(tmp_path / "a", {"x": b"1"})
    (tmp_path / "b").write_text("in the way")
    outcome = one(LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b"))
    assert f"{tmp_path / 'b'} is a file" in outcome.error.message
    assert "another place" in outcome.error.mend


def test_a_run_that_ends_after_the_old_made_way_is_mended_even_if_the_source_goes_back(tmp_path):
    source, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    rewrite(tmp_path / "a", {"x": b"1", "z": b"z"})
    one(source, b)

    def refuse(operation, key):
        if operation == "write" and key == "x/y":
            raise DeniedError("not now")

    rewrite(tmp_path / "a", {"x/y": b"2", "z": b"z"})
    assert one(source, Spy(b, refuse), options=MIRROR).error is not None
    assert "x" not in data_of(b)
    assert receipts.read(b).state == receipts.DAMAGED
    rewrite(tmp_path / "a", {"x": b"1", "z": b"z"})
    assert one(source, b).error is None
    assert data_of(b) == {"x": b"1", "z": b"z"}


def test_markers_of_folders_are_left_out_and_counted(request, tmp_path):
    a = request.getfixturevalue("s3_a")
    source = a.store("marked")
    source.write("dir/x", b"1")
    a.client().put_object(Bucket=source.bucket, Key=f"{source.prefix}/dir/", Body=b"")
    a.client().put_object(Bucket=source.bucket, Key=f"{source.prefix}/empty/", Body=b"")
    for there in (LocalStore(tmp_path / "b"), request.getfixturevalue("s3_b").store("marked")):
        outcome = one(source, there)
        assert outcome.error is None
        assert list(outcome.left_out) == ["dir/", "empty/"]
        assert data_of(there) == {"dir/x": b"1"}
        assert "1 file · 1 B · 2 markers of folders left out" in report.line(outcome)
        assert report.as_dict(outcome)["left_out"] == ["dir/", "empty/"]


def test_another_tree_of_the_same_last_name_is_not_copied_over_the_first(tmp_path):
    write_tree(tmp_path / "u1" / "same", {"x": b"1", "z": b"z"})
    write_tree(tmp_path / "u2" / "same", {"x": b"other"})
    datasync("replicate", "u1/same", "--to", "./b", cwd=tmp_path)
    for more in ([], ["--dry-run"]):
        done = datasync("replicate", "u2/same", "--to", "./b", *more, cwd=tmp_path, check=2)
        assert f"same on ./b is a copy of the tree at {tmp_path}/u1/same" in done.stderr
        assert "--as same" in done.stderr
    assert data_of(LocalStore(tmp_path / "b" / "same")) == {"x": b"1", "z": b"z"}
    datasync("replicate", "u2/same", "--to", "./b", "--as", "same", cwd=tmp_path)
    assert data_of(LocalStore(tmp_path / "b" / "same"))["x"] == b"other"


def test_a_tree_and_a_dataset_are_never_copied_over_each_other(tmp_path):
    make_dataset(LocalStore(tmp_path / "a" / "shapes"), count=2)
    write_tree(tmp_path / "dr", {"x": b"1"})
    datasync("replicate", "a/shapes", "--to", "./b", cwd=tmp_path)
    before = data_of(LocalStore(tmp_path / "b" / "shapes"))
    done = datasync("replicate", "./dr", "--to", "./b", "--as", "shapes", cwd=tmp_path, check=2)
    assert "shapes on ./b is a copy of the dataset" in done.stderr
    assert data_of(LocalStore(tmp_path / "b" / "shapes")) == before
    datasync("replicate", "./dr", "--to", "./b", "--as", "tree", cwd=tmp_path)
    done = datasync("replicate", "a/shapes", "--to", "./b", "--as", "tree", cwd=tmp_path, check=2)
    assert "is a copy of the tree" in done.stderr


def test_two_names_of_one_place_are_refused_before_they_wait_for_each_other(tmp_path):
    (tmp_path / "datasync.toml").write_text('[clusters.b]\nurl = "B"\n[clusters.bb]\nurl = "./B/"\n')
    write_tree(tmp_path / "dr", {"x": b"1"})
    done = datasync("replicate", "./dr", "--to", "b,bb", cwd=tmp_path, check=2)
    assert "b and bb are one place" in done.stderr
    assert not (tmp_path / "B").exists()


def test_a_dry_run_says_at_most_where_it_cannot_know(there, tmp_path):
    files = {f"f{n}": b"%d" % n * 10 for n in range(8)}
    rewrite(tmp_path / "a", files)
    source = LocalStore(tmp_path / "a")
    for key in ("f0", "f1", "f2"):  # in place without a receipt: one of them with other bytes
        there.write(key, files[key] if key != "f2" else b"?" * 10)
    plan = one(source, there, options=replace(QUICK, dry_run=True))
    assert (plan.to_copy, plan.to_compare) == (8, 3)
    assert "at most 8 to copy (80 B), 0 already there, 3 to be compared" in report.line(plan)
    assert report.as_dict(plan)["to_compare"] == 3
    done = one(source, there)
    assert (done.tally.copied, len(done.tally.adopted)) == (6, 2)
    (tmp_path / "a" / "f4").write_bytes(files["f4"])  # the same again
    (tmp_path / "a" / "f5").write_bytes(b"x" * 10)
    (tmp_path / "a" / "f6").write_bytes(b"longer than before")
    plan = one(source, there, options=replace(QUICK, dry_run=True))
    assert (plan.to_copy, plan.to_compare) == (3, 2)
    assert one(source, there).tally.copied == 2
    write_tree(tmp_path / "a", {"new": b"1"})
    plan = one(source, there, options=replace(QUICK, dry_run=True))
    assert (plan.to_copy, plan.to_copy_bytes, plan.to_compare) == (1, 1, 0)
    assert "· 1 to copy (1 B), 8 already there" in report.line(plan)


def test_a_dry_run_that_deleting_too_much_would_stop_says_so(tmp_path):
    write_tree(tmp_path / "g", {f"f{n}": b"1" for n in range(4)})
    datasync("replicate", "./g", "--to", "./b", cwd=tmp_path)
    for n in range(3):
        (tmp_path / "g" / f"f{n}").unlink()
    done = datasync("replicate", "./g", "--to", "./b", "--delete", "--dry-run", cwd=tmp_path, check=1)
    assert "1 file · 1 B · it would fail" in done.stdout
    assert "may remove 10%" in done.stderr


def test_of_several_copies_an_error_says_which_one_it_is_about(tmp_path):
    (tmp_path / "datasync.toml").write_text("".join(f'[clusters.{n}]\nurl = "{n}"\n' for n in "bcd"))
    write_tree(tmp_path / "x", {"f": b"1"})
    for name in "bc":
        (tmp_path / name).write_text("in the way")
    done = datasync("replicate", "./x", "./gone", "--to", "b,c,d", cwd=tmp_path, check=1)
    assert [line.split(": ")[:2] for line in done.stderr.splitlines() if line.startswith("error")] == [
        ["error", "x → b"],
        ["error", "x → c"],
        ["error", "gone → b, c, d"],
    ]


def test_what_was_fed_by_another_destination_is_the_same_tree(tmp_path):
    (tmp_path / "datasync.toml").write_text("".join(f'[clusters.{n}]\nurl = "{n}"\n' for n in "bc"))
    write_tree(tmp_path / "x", {"f": b"1"})
    datasync("replicate", "./x", "--to", "b", cwd=tmp_path)
    datasync("replicate", "b:x", "--to", "c", cwd=tmp_path)
    assert receipts.read(LocalStore(tmp_path / "c" / "x")).source["url"] == str(tmp_path / "b" / "x")
    write_tree(tmp_path / "x", {"g": b"2"})
    datasync("replicate", "./x", "--to", "c", cwd=tmp_path)
    assert data_of(LocalStore(tmp_path / "c" / "x")) == {"f": b"1", "g": b"2"}
