"""Robot episodes as LeRobot 2.x lays them out: one row an episode.

    meta/info.json        features, paths                columns of a row
    meta/episodes.jsonl   tasks of each episode          episode_index  length  tasks
    data/…/*.parquet      numbers, a row a frame    ──►  each feature: all its frames, an array
    videos/…/*.mp4        a file an episode              each camera: the MP4 as it is

A feature of one number a frame is an array of [frames], one of a vector an array of [frames, size]. An
episode whose Parquet file or video is missing or damaged is refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shards import media
from shards.errors import FormatError, UsageError
from shards.sources.base import Bad, Item, Row, Source, SourceOptions, Task, content_error, reason
from shards.sources.files import FileList

_INFO = "meta/info.json"
_ROW_KEYS = frozenset({"episode_index", "index", "length", "tasks"})


class Episode(NamedTuple):
    """One episode in a task: numbers of its files, -1 for one that is missing."""

    number: int
    tasks: list[str]
    data: int
    videos: dict[str, int]
    names: tuple[str, ...]


class LeRobot(Source):
    """A LeRobot 2.x dataset. A payload is (files, episodes)."""

    name = "lerobot"
    summary = "LeRobot 2.x datasets: Parquet with MP4 (a folder with meta/info.json)"
    marked = True
    checks = True

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        super().__init__(files, options)
        self._index = files.index()

    @classmethod
    def claims(cls, files: FileList) -> bool:
        return any(name == _INFO or name.endswith("/" + _INFO) for name in files.names)

    def _info(self) -> tuple[str, dict[str, Any]]:
        """The folder of the dataset, and what `info.json` says."""
        name = next((name for name in self.files.names if name.endswith(_INFO)), None)
        if name is None:
            raise UsageError(f"{self.files.root} has no {_INFO}", mend="name the folder of the dataset")
        try:
            info = json.loads(self.files.read(self._index[name]))
            version = str(info["codebase_version"])
        except (ValueError, KeyError) as error:
            raise FormatError(f"{name} is damaged: {error}", mend="copy the dataset again") from error
        if not version.removeprefix("v").startswith("2."):
            raise UsageError(
                f"{name}: version {version} of LeRobot", mend="convert it to 2.1 with LeRobot's own tool"
            )
        return name.removesuffix(_INFO), info

    def _lines(self, name: str) -> list[dict[str, Any]]:
        number = self._index.get(name)
        if number is None:
            raise FormatError(f"there is no {name}", mend="copy the dataset again")
        return [json.loads(line) for line in self.files.read(number).splitlines() if line.strip()]

    def tasks(self) -> Iterator[Task]:
        folder, info = self._info()
        cameras = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
        held: list[tuple[int, list[str], str, dict[str, str]]] = []
        size = 0
        for episode in self._lines(f"{folder}meta/episodes.jsonl"):
            number = int(episode["episode_index"])
            place = {"episode_index": number, "episode_chunk": number // int(info.get("chunks_size", 1000))}
            data = folder + info["data_path"].format(**place)
            videos = {name: folder + info["video_path"].format(**place, video_key=name) for name in cameras}
            weight = sum(self._size(name) for name in (data, *videos.values()))
            if held and size + weight > self.options.target_bytes:
                yield self._task(held, size)
                held, size = [], 0
            held.append((number, list(episode.get("tasks", [])), data, videos))
            size += weight
        if held:
            yield self._task(held, size)

    def _size(self, name: str) -> int:
        number = self._index.get(name)
        return max(int(self.files.sizes[number]), 0) if number is not None else 0

    def _task(self, held: list[tuple[int, list[str], str, dict[str, str]]], size: int) -> Task:
        wanted = [
            name for _, _, data, videos in held for name in (data, *videos.values()) if name in self._index
        ]
        files = self.files.select([self._index[name] for name in wanted])
        places = files.index()
        episodes = [
            Episode(
                number,
                tasks,
                places.get(data, -1),
                {camera: places.get(name, -1) for camera, name in videos.items()},
                (data, *videos.values()),
            )
            for number, tasks, data, videos in held
        ]
        return Task(payload=(files, episodes), bytes=size)

    def read(self, payload: tuple[FileList, list[Episode]]) -> Iterator[Item]:
        files, episodes = payload
        for episode in episodes:
            places = (episode.data, *episode.videos.values())
            missing = [name for name, place in zip(episode.names, places, strict=True) if place < 0]
            if missing:
                yield Bad(f"no such file: {missing[0]}", _INFO, f"episode {episode.number}")
                continue
            try:
                yield self._row(files, episode)
            except Exception as error:
                if not content_error(error):
                    raise
                yield Bad(reason(error), episode.names[0], f"episode {episode.number}")

    def _row(self, files: FileList, episode: Episode) -> Row:
        import pyarrow.parquet as pq

        table = pq.read_table(io.BytesIO(files.read(episode.data)))
        values: dict[str, Any] = {
            "episode_index": episode.number,
            "length": table.num_rows,
            "tasks": episode.tasks,
        }
        for name in table.column_names:
            if name not in _ROW_KEYS:
                values[name] = _frames(table.column(name))
        for camera, place in episode.videos.items():
            data = files.read(place)
            media.check(data, "video", level=self.options.check)
            values[camera] = data
        return Row(values, episode.names[0], f"episode {episode.number}", f"episode {episode.number}")


def _frames(column: Any) -> Any:
    """A column of frames as an array; as a list where frames differ in length or are text."""
    import pyarrow as pa

    column = column.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        flat = column.flatten().to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(flat).reshape(len(column), column.type.list_size)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()
