"""Robot episodes as LeRobot 2.x and 3.x lay them out: one row an episode.

    2.x   meta/episodes.jsonl            data/…/episode_N.parquet    videos/…/episode_N.mp4, a file an episode
    3.x   meta/episodes/…/*.parquet      data/…/file-N.parquet       videos/…/file-N.mp4, many episodes a file

    a row:   episode_index  length  tasks
             each feature   all its frames, an array: [frames], or [frames, size] of a vector
             each camera    the episode's MP4: as it is in 2.x, its own frames out of the file in 3.x

Frames of a video go over as they were compressed, never encoded again. An episode whose Parquet file or video
is missing or damaged, or whose video has not as many frames as it should, is refused.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shards import media
from shards.errors import FormatError, UsageError
from shards.sources.base import Bad, Item, Row, Source, SourceOptions, Task, content_error, reason
from shards.sources.files import FileList

_INFO = "meta/info.json"
_ROW_KEYS = frozenset({"episode_index", "index", "length", "tasks"})


class Video(NamedTuple):
    """A file with frames of an episode: all of them, or those from one time to another, in seconds."""

    name: str
    begin: float = 0.0
    end: float | None = None


class Episode(NamedTuple):
    """One episode and the names of its files."""

    number: int
    length: int | None
    tasks: list[str]
    data: str
    videos: dict[str, Video]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.data, *(video.name for video in self.videos.values()))


class LeRobot(Source):
    """A LeRobot dataset. A payload is (files, episodes)."""

    name = "lerobot"
    summary = "LeRobot 2.x and 3.x: Parquet with MP4 (a folder with meta/info.json)"
    marked = True
    checks = True

    def __init__(self, files: FileList, options: SourceOptions) -> None:
        super().__init__(files, options)
        self._index = files.index()

    @classmethod
    def claims(cls, files: FileList) -> bool:
        return any(name == _INFO or name.endswith("/" + _INFO) for name in files.names)

    @classmethod
    def separable(cls, files: FileList) -> bool:
        return False

    def _episodes(self) -> Iterator[Episode]:
        name = next((name for name in self.files.names if name.endswith(_INFO)), None)
        if name is None:
            raise UsageError(f"{self.files.root} has no {_INFO}", mend="name the folder of the dataset")
        folder = name.removesuffix(_INFO)
        try:
            info = json.loads(self.files.read(self._index[name]))
            version = str(info["codebase_version"]).removeprefix("v")
            cameras = [camera for camera, item in info["features"].items() if item["dtype"] == "video"]
            if version.startswith("2."):
                yield from self._episodes_2(folder, info, cameras)
            elif version.startswith("3."):
                yield from self._episodes_3(folder, info, cameras)
            else:
                raise UsageError(
                    f"{name}: version {version} of LeRobot", mend="convert it to 3.0 with LeRobot's own tool"
                )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise FormatError(
                f"{folder}meta is damaged: {type(error).__name__}: {error}", mend="copy the dataset again"
            ) from error

    def _episodes_2(self, folder: str, info: dict[str, Any], cameras: list[str]) -> Iterator[Episode]:
        name = f"{folder}meta/episodes.jsonl"
        if name not in self._index:
            raise FormatError(f"there is no {name}", mend="copy the dataset again")
        for line in self.files.read(self._index[name]).splitlines():
            if line.strip():
                said = json.loads(line)
                number = int(said["episode_index"])
                place = {
                    "episode_index": number,
                    "episode_chunk": number // int(info.get("chunks_size", 1000)),
                }
                yield Episode(
                    number,
                    None,
                    list(said.get("tasks", [])),
                    folder + info["data_path"].format(**place),
                    {
                        camera: Video(folder + info["video_path"].format(**place, video_key=camera))
                        for camera in cameras
                    },
                )

    def _episodes_3(self, folder: str, info: dict[str, Any], cameras: list[str]) -> Iterator[Episode]:
        if cameras:
            _need_av()
        for said in self._episode_rows(f"{folder}meta/episodes/"):
            videos = {}
            for camera in cameras:
                of = f"videos/{camera}/"
                name = info["video_path"].format(
                    video_key=camera,
                    chunk_index=said[f"{of}chunk_index"],
                    file_index=said[f"{of}file_index"],
                )
                begin, end = said[f"{of}from_timestamp"], said[f"{of}to_timestamp"]
                videos[camera] = Video(folder + name, float(begin), float(end))
            data = info["data_path"].format(
                chunk_index=said["data/chunk_index"], file_index=said["data/file_index"]
            )
            yield Episode(
                int(said["episode_index"]),
                int(said["length"]),
                list(said.get("tasks") or []),
                folder + data,
                videos,
            )

    def _episode_rows(self, folder: str) -> Iterator[dict[str, Any]]:
        """What `meta/episodes` says of each episode, in order; the statistics beside it are not read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        numbers = [
            number
            for number, name in enumerate(self.files.names)
            if name.startswith(folder) and name.endswith(".parquet")
        ]
        if not numbers:
            raise FormatError(f"there is no Parquet file in {folder}", mend="copy the dataset again")
        for number in numbers:
            try:
                file = pq.ParquetFile(io.BytesIO(self.files.read(number)))
                names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
                yield from file.read(columns=names).to_pylist()
            except pa.ArrowException as error:
                raise FormatError(
                    f"{self.files.names[number]} is damaged: {reason(error)}", mend="copy the dataset again"
                ) from error

    def tasks(self) -> Iterator[Task]:
        episodes = list(self._episodes())
        sharing = Counter(name for episode in episodes for name in episode.names)
        held: list[Episode] = []
        size = 0
        for episode in episodes:
            weight = sum(self._size(name) // sharing[name] for name in episode.names)
            if held and size + weight > self.options.target_bytes:
                yield self._task(held, size)
                held, size = [], 0
            held.append(episode)
            size += weight
        if held:
            yield self._task(held, size)

    def _size(self, name: str) -> int:
        number = self._index.get(name)
        return max(int(self.files.sizes[number]), 0) if number is not None else 0

    def _task(self, held: list[Episode], size: int) -> Task:
        wanted = dict.fromkeys(name for episode in held for name in episode.names if name in self._index)
        return Task(payload=(self.files.select(self._index[name] for name in wanted), held), bytes=size)

    def read(self, payload: tuple[FileList, list[Episode]]) -> Iterator[Item]:
        files, episodes = payload
        frames = _Frames(files)
        for episode in episodes:
            missing = [name for name in episode.names if name not in frames.index]
            if missing:
                yield Bad(f"no such file: {missing[0]}", _INFO, f"episode {episode.number}")
                continue
            try:
                yield self._row(frames, episode)
            except Exception as error:
                if not content_error(error):
                    raise
                yield Bad(reason(error), episode.data, f"episode {episode.number}")

    def _row(self, frames: _Frames, episode: Episode) -> Row:
        table = frames.of(episode)
        values: dict[str, Any] = {
            "episode_index": episode.number,
            "length": table.num_rows,
            "tasks": episode.tasks,
        }
        for name in table.column_names:
            if name not in _ROW_KEYS:
                values[name] = _array(table.column(name))
        for camera, video in episode.videos.items():
            values[camera] = self._video(frames, video, table.num_rows)
        return Row(values, episode.data, f"episode {episode.number}", f"episode {episode.number}")

    def _video(self, frames: _Frames, video: Video, length: int) -> bytes:
        number = frames.index[video.name]
        if video.end is None:
            data = frames.files.read(number)
            media.check(data, "video", level=self.options.check)
            return data
        from shards.clip import cut

        with frames.files.open(number) as file:
            data, count = cut(file, video.begin, video.end)
        frames.files.check_unchanged(number)
        if count != length:
            raise media.MediaError(f"{video.name} has {count:,} frames of it, its data {length:,}")
        return data


class _Frames:
    """The numbers of frames of the episodes of a task; a file that many share is read once."""

    def __init__(self, files: FileList) -> None:
        self.files = files
        self.index = files.index()
        self._name = ""
        self._table: Any = None

    def of(self, episode: Episode) -> Any:
        """The rows of an episode."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        if self._name != episode.data:
            self._table = pq.read_table(io.BytesIO(self.files.read(self.index[episode.data])))
            self._name = episode.data
        if episode.length is None:
            return self._table
        own = self._table.filter(pc.equal(self._table.column("episode_index"), episode.number))
        if own.num_rows != episode.length:
            raise ValueError(f"{own.num_rows:,} frames, where meta/episodes says {episode.length:,}")
        return own


def _array(column: Any) -> Any:
    """A column of frames as an array; as a list where frames differ in length or are text."""
    import pyarrow as pa

    column = column.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        flat = column.flatten().to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(flat).reshape(len(column), column.type.list_size)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()


def _need_av() -> None:
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "cutting the videos of LeRobot 3.x needs PyAV", mend="pip install 'datasync[media]'"
        ) from error
