"""ShardWriter and ShardReader on a real S3 server, by fsspec."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shards import ShardReader, ShardWriter
from shards.errors import DatasyncError, UsageError
from tests.servers import S3Server

COLUMNS = {"n": "int", "text": "str"}


def _write(url: str, count: int, **options: bool) -> None:
    with ShardWriter(columns=COLUMNS, out=url, compression="zstd:3", size_limit=2000, **options) as writer:
        for i in range(count):
            writer.write({"n": i, "text": f"row {i}"})


@pytest.fixture
def url(s3_a: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    for name, value in s3_a.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_a.endpoint)
    yield s3_a.url("made")
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_dataset_is_written_read_verified_and_replaced(url: str) -> None:
    _write(url, 300)
    reader = ShardReader(url)
    assert [row["n"] for row in reader] == list(range(300))
    assert reader.batch([299, 4], ["text"])["text"] == ["row 299", "row 4"]
    assert reader.verify() == []
    with pytest.raises(UsageError, match="holds a dataset"):
        _write(url, 10)
    _write(url, 200, exist_ok=True)
    assert len(ShardReader(url)) == 200
    assert ShardReader(url).verify() == []


def test_a_store_that_refuses_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DatasyncError, match=r"s3://.*index\.json cannot be read"):
        ShardReader(url)
