"""`datasync shard`, `merge` and `inspect` by their real entry point: folders, S3, recipes, errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
import zstandard

from shards.index import Index
from tests.servers import S3Server
from tests.shards.corpus import image_bytes, jsonl, rows, run, start, tree


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.png").write_bytes(image_bytes(number))
        (folder / f"{number:02}.txt").write_text(f"number {number}")
    return folder


def _config(folder: Path, server: S3Server) -> dict[str, str]:
    """Two clusters in one `datasync.toml`, a recipe, and the environment with the keys."""
    keys = 'access_key = "env:SHARD_KEY"\nsecret_key = "env:SHARD_SECRET"\n'
    access = f'endpoint = "{server.endpoint}"\n{keys}'
    (folder / "datasync.toml").write_text(
        f'[clusters.cluster-a]\nurl = "s3://{server.bucket()}/datasets"\n{access}'
        f'[clusters.corpora]\nurl = "s3://{server.bucket()}/raw"\n{access}'
        '[datasets.pictures]\nsource = "pictures"\nhome = "cluster-a"\n'
        'shard.size-limit = "4kb"\nshard.rename = { caption = "text" }\n'
    )
    return {"SHARD_KEY": server.access_key, "SHARD_SECRET": server.secret_key}


def test_a_recipe_goes_to_its_home_on_a_real_store_and_back(
    tmp_path: Path, pictures: Path, s3_a: S3Server
) -> None:
    environment = _config(tmp_path, s3_a)
    first = run("shard", "pictures", cwd=tmp_path, env=environment)
    assert first.returncode == 0, first.stderr
    assert "rows     30" in first.stdout
    again = run("shard", "pictures", cwd=tmp_path, env=environment)
    assert "nothing to do" in again.stdout
    shown = run("inspect", "pictures", "--json", "-n", "30", cwd=tmp_path, env=environment)
    document = json.loads(shown.stdout)
    assert document["samples"] == 30
    assert {column["name"]: column["encoding"] for column in document["columns"]} == {
        "file_name": "str",
        "image": "png",
        "text": "str",
    }
    assert document["rows"][7]["values"] == {
        "file_name": "07.png",
        "image": "PNG 24x16 RGB",
        "text": "number 7",
    }
    local = run(
        "shard", pictures, tmp_path / "local", "--size-limit", "4kb", "--rename", "caption=text", cwd=tmp_path
    )
    assert local.returncode == 0, local.stderr
    shards = Index.parse((tmp_path / "local" / "index.json").read_bytes(), where="local")
    assert document["version"] == shards.extra["version"]
    for text in (first.stdout, first.stderr, shown.stdout):
        assert s3_a.secret_key not in text


def test_a_corpus_on_a_store_is_read_there(tmp_path: Path, pictures: Path, s3_a: S3Server) -> None:
    environment = _config(tmp_path, s3_a)
    bucket = (tmp_path / "datasync.toml").read_text().split('corpora]\nurl = "s3://')[1].split("/")[0]
    for path in sorted(pictures.iterdir()):
        s3_a.client().put_object(Bucket=bucket, Key=f"raw/pics/{path.name}", Body=path.read_bytes())
    made = jsonl(tmp_path / "a.jsonl", 200)
    s3_a.client().put_object(Bucket=bucket, Key="raw/a.jsonl", Body=(tmp_path / "a.jsonl").read_bytes())
    result = run("shard", "corpora:pics", "out", "--size-limit", "4kb", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    local = run("shard", pictures, tmp_path / "local", "--size-limit", "4kb", cwd=tmp_path)
    assert local.returncode == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "local")
    result = run("shard", "corpora:a.jsonl", "rows", "--size-limit", "4kb", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert rows(tmp_path / "rows") == made


def test_shares_and_merge_on_a_store(tmp_path: Path, s3_a: S3Server) -> None:
    environment = _config(tmp_path, s3_a)
    jsonl(tmp_path / "a.jsonl", 200)
    options = ["a.jsonl", "cluster-a:rows", "--size-limit", "4kb"]
    for share in ("0/2", "1/2"):
        assert run("shard", *options, "--task", share, cwd=tmp_path, env=environment).returncode == 0
    merged = run("merge", "cluster-a:rows", "--json", cwd=tmp_path, env=environment)
    assert json.loads(merged.stdout)["rows"] == 200, merged.stderr
    assert "nothing to do" in run("shard", *options, cwd=tmp_path, env=environment).stdout


def test_missing_credentials_are_one_clear_error(tmp_path: Path, pictures: Path, s3_a: S3Server) -> None:
    _config(tmp_path, s3_a)
    result = run("shard", "pictures", cwd=tmp_path)
    assert result.returncode == 1
    assert "SHARD_KEY" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bucket_that_does_not_exist_is_one_clear_error(
    tmp_path: Path, pictures: Path, s3_a: S3Server
) -> None:
    environment = _config(tmp_path, s3_a)
    text = (tmp_path / "datasync.toml").read_text()
    (tmp_path / "datasync.toml").write_text(
        text + f'[clusters.gone]\nurl = "s3://no-such-bucket-here"\nendpoint = "{s3_a.endpoint}"\n'
        'access_key = "env:SHARD_KEY"\nsecret_key = "env:SHARD_SECRET"\n'
    )
    result = run("shard", "gone:corpus", "out", cwd=tmp_path, env=environment)
    assert result.returncode in (1, 2), result.stderr
    assert result.stderr.startswith("error: "), result.stderr
    assert "no-such-bucket-here" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "out"], 2, "there is no nowhere"),
        (["empty", "out"], 2, "holds no files"),
        (["blank.jsonl", "out"], 1, "has no rows"),
        (["pictures", "out", "--columns", "imge:jpeg"], 2, "did you mean 'image'?"),
        (["pictures", "out", "--columns", "image:jpg"], 2, "did you mean"),
        (["pictures", "out", "--format", "imges"], 2, "did you mean 'images'?"),
        (["pictures", "blank.jsonl"], 2, "blank.jsonl"),
        (["pictures", "weird://x/y"], 2, "weird"),
        (["weird://x/y", "out"], 2, "weird"),
        (["pictures", "nocluster:x"], 2, "nocluster"),
        (["pictures"], 2, "no dataset of the configuration"),
        (["bad.png", "out"], 1, "bad.png"),
        (["foreign.bin", "out"], 2, "no kind of corpus"),
        (["pictures", "out", "--task", "3/2"], 2, "--task"),
        (["pictures", "out", "--workers", "0"], 2, "--workers"),
        (["pictures", "out", "--split", "a=x"], 2, "--split"),
        (["pictures", "out", "--transform", "nomodule:f"], 2, "nomodule"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, pictures: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n")
    (tmp_path / "bad.png").write_bytes(image_bytes(1)[:60])
    (tmp_path / "foreign.bin").write_bytes(b"\0" * 100)
    result = run("shard", *arguments, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("error: "), result.stderr
    assert message in result.stderr
    assert "mend: " in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_typo_in_a_recipe_names_the_nearest_option(tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "datasync.toml").write_text(
        '[clusters.here]\nurl = "clusters/here"\n'
        '[datasets.pictures]\nsource = "pictures"\nhome = "here"\nshard.compresion = "zstd:9"\n'
    )
    result = run("shard", "pictures", cwd=tmp_path)
    assert result.returncode == 2
    assert "[datasets.pictures] shard has no option 'compresion'" in result.stderr
    assert "did you mean 'compression'?" in result.stderr


def test_a_dry_run_shows_columns_and_writes_nothing(tmp_path: Path, pictures: Path) -> None:
    result = run("shard", pictures, "out", "--dry-run", cwd=tmp_path)
    assert result.returncode == 0
    for line in ("caption    str", "file_name  str", "image      png"):
        assert (
            line in " ".join(result.stdout.split("\n")).replace("    ", "    ")
            or line.split()[0] in result.stdout
        )
    assert not (tmp_path / "out").exists()
    document = json.loads(run("shard", pictures, "out", "--dry-run", "--json", cwd=tmp_path).stdout)
    assert document["columns"] == {"caption": "str", "file_name": "str", "image": "png"}
    assert document["files"] == 60


def test_skipped_rows_are_counted_in_summary_json_and_exit_code(tmp_path: Path, pictures: Path) -> None:
    (pictures / "05.png").write_bytes(b"<html>not found</html>")
    failed = run("shard", pictures, "out", cwd=tmp_path)
    assert failed.returncode == 1
    assert "05.png: no image but an HTML or XML page" in failed.stderr
    skipped = run("shard", pictures, "out", "--on-error", "skip", cwd=tmp_path)
    assert skipped.returncode == 3
    assert "1 row was skipped" in skipped.stdout
    assert "05.png: no image but an HTML or XML page" in skipped.stdout
    document = json.loads(run("shard", pictures, "out2", "--on-error", "skip", "--json", cwd=tmp_path).stdout)
    assert (document["rows"], document["skipped"]) == (29, 1)
    (bad,) = rows(document["quarantine"])
    assert bad["where"] == "05.png"


def test_progress_goes_to_standard_error_and_results_to_standard_output(
    tmp_path: Path, pictures: Path
) -> None:
    result = run("shard", pictures, "out", "--json", cwd=tmp_path)
    document = json.loads(result.stdout)
    assert document["published"][0]["url"] == os.fspath(tmp_path / "out")
    assert result.stderr == ""


def test_a_page_with_thumbnails_escapes_what_it_shows(tmp_path: Path, pictures: Path) -> None:
    (pictures / "00.txt").write_text("<script>alert(1)</script>")
    assert run("shard", pictures, "out", cwd=tmp_path).returncode == 0
    result = run("inspect", "out", "-n", "3", "--html", "page.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_inspect_without_a_dataset_says_so(tmp_path: Path) -> None:
    result = run("inspect", "nothing/here", cwd=tmp_path)
    assert result.returncode == 1
    assert "there is no dataset" in result.stderr


def test_inspect_measures_columns_on_every_shard(tmp_path: Path) -> None:
    made = jsonl(tmp_path / "a.jsonl", 100)
    assert run("shard", "a.jsonl", "out", "--size-limit", "4kb", cwd=tmp_path).returncode == 0
    document = json.loads(run("inspect", "out", "--all", "--json", cwd=tmp_path).stdout)
    sizes = {column["name"]: column for column in document["columns"]}
    assert document["measured_samples"] == 100
    assert sizes["text"]["bytes"] == sum(len(row["text"]) for row in made)
    assert sizes["id"]["bytes"] == 800


def test_the_examples_of_the_help_work_when_pasted(tmp_path: Path, pictures: Path) -> None:
    pictures.rename(tmp_path / "photos")
    jsonl(tmp_path / "crawl" / "a.jsonl", 20)
    lines = (tmp_path / "crawl" / "a.jsonl").read_bytes()
    (tmp_path / "crawl" / "a.jsonl").unlink()
    (tmp_path / "crawl" / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("words " * 2000)
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(f"{n},x\n" for n in range(200)) + "broken\n")
    (tmp_path / "datasync.toml").write_text(
        '[clusters.cluster-a]\nurl = "a"\n[datasets.photos]\nsource = "photos"\nhome = "cluster-a"\n'
    )
    shown = run("shard", "--help", cwd=tmp_path).stdout
    examples = [line.strip() for line in shown.splitlines() if line.strip().startswith("datasync shard ")]
    assert len(examples) == 7
    assert max(map(len, shown.splitlines())) <= 80
    for number, example in enumerate(examples):
        if "--append" in example:
            (tmp_path / "photos" / "new.png").write_bytes(image_bytes(99))
            (tmp_path / "photos" / "new.txt").write_text("new")
        typed = re.split(r"\s{2,}", example)[0].removeprefix("datasync ")
        result = run(*shlex.split(typed), cwd=tmp_path)
        assert result.returncode == (3 if "--on-error" in typed else 0), (number, example, result.stderr)
    assert len(rows(tmp_path / "datasets" / "photos")) == 31
    assert len(rows(tmp_path / "a" / "crawl")) == 20
    assert len(rows(tmp_path / "datasets" / "books")) == 6
    assert len(rows(tmp_path / "a" / "photos")) == 31
    assert sum(len(rows(tmp_path / "datasets" / "t" / split)) for split in ("train", "val")) == 200


def test_what_to_do_next_is_said_and_works(tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "datasync.toml").write_text(
        '[clusters.a]\nurl = "a"\n[clusters.b]\nurl = "b"\n'
        '[datasets.pictures]\nsource = "pictures"\nhome = "a"\n'
    )
    for arguments in (
        ("pictures",),
        ("pictures", "a:other name"),
        ("pictures", "out put"),
        ("pictures", "parts", "--split", "train=0.5,val=0.5"),
        ("pictures", "a:parts", "--split", "train=0.5,val=0.5"),
    ):
        done = run("shard", *arguments, cwd=tmp_path)
        (said,) = [line for line in done.stdout.splitlines() if line.startswith("next ")]
        words = shlex.split(said)
        assert words[1] == "datasync"
        assert run(*words[2:], cwd=tmp_path).returncode == 0, said
    assert {
        path.parent.relative_to(tmp_path / "b").as_posix() for path in tmp_path.glob("b/**/index.json")
    } == {
        "pictures",
        "other name",
        "parts/train",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("empty.jsonl", "out"), "empty.jsonl has no rows"),
        (("noise.jsonl.zst", "out"), "not compressed with zst, nor is it text"),
        (("pictures", "http://host/"), "nothing can be written there"),
        (("pictures", "out", "--encoding", "utf-99"), "no character set 'utf-99'"),
        (("pictures", "out", "--delimiter", ";;"), "one character"),
        (("misplaced",), "write shard.size_limit = …"),
        (("@empty.jsonl", "out"), "@empty.jsonl holds no files"),
        (("odd.xyz", "out"), "no kind of corpus is known in {}/odd.xyz"),
        (("chunks", "out"), "no kind of corpus is known in {}/chunks"),
        (("pictures", "a:"), "give it a name: a:NAME"),
    ],
)
def test_small_mistakes_are_answered_with_their_mend(
    tmp_path: Path, pictures: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "noise.jsonl.zst").write_bytes(bytes(range(256)))
    (tmp_path / "odd.xyz").touch()
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "index.json").write_text('{"chunks": [], "config": {}}')
    (tmp_path / "datasync.toml").write_text('[clusters.a]\nurl = "a"\n')
    if arguments == ("misplaced",):
        (tmp_path / "datasync.toml").write_text('[datasets.misplaced]\nsize_limit = "1mb"\n')
    result = run("shard", *arguments, cwd=tmp_path)
    assert result.returncode in (1, 2)
    assert said.format(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_of_many_skipped_rows_some_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + "bad\n" * 9)
    done = run("shard", "a.jsonl", "out", "--on-error", "skip", cwd=tmp_path)
    assert "9 rows were skipped, see " in done.stdout
    assert done.stdout.count("not JSON") == 3
    assert "  and 6 more\n" in done.stdout


def test_a_job_that_is_told_to_stop_says_so_and_goes_on_when_run_again(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", 3000)
    (tmp_path / "slow.py").write_text("import time\ndef same(row):\n    time.sleep(0.01)\n    return row\n")
    arguments = ["shard", "a.jsonl", "out", "-q", "--size-limit", "64kb", "--workers", "2"]
    process = start(*arguments, "--transform", "slow:same", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/_datasync/jobs/*/job.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (-signal.SIGTERM, "")
    assert err == "stopped; run the same command again to continue\n"


def test_a_page_that_cannot_be_written_is_one_clear_error(tmp_path: Path, pictures: Path) -> None:
    assert run("shard", pictures, "out", "-q", cwd=tmp_path).returncode == 0
    result = run("inspect", "out", "--html", "no/such/page.html", cwd=tmp_path)
    assert result.returncode == 2
    assert "no/such/page.html cannot be written: No such file or directory" in result.stderr


def test_a_dry_run_of_appending_shows_what_is_new(tmp_path: Path, pictures: Path) -> None:
    assert run("shard", pictures, "out", "-q", cwd=tmp_path).returncode == 0
    again = run("shard", pictures, "out", "--append", "--dry-run", cwd=tmp_path)
    assert again.stdout == f"out has all files of {pictures} already\n"
    (pictures / "new.png").write_bytes(image_bytes(99))
    (pictures / "new.txt").write_text("new")
    shown = json.loads(run("shard", pictures, "out", "--append", "--dry-run", "--json", cwd=tmp_path).stdout)
    assert (shown["files"], shown["notes"]) == (2, ["60 files that the dataset has already left out"])


def test_quiet_is_one_line(tmp_path: Path, pictures: Path) -> None:
    done = run("shard", pictures, "out", "-q", cwd=tmp_path)
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)
    assert done.stdout.startswith(f"{tmp_path / 'out'}: 30 rows · 1 shard · ")
