"""The configuration of a run: what a TOML file may say, each key with its type, default and meaning.

    file.toml  ──►  plain dict  ──►  --set a.b=c on top  ──►  Config (frozen, checked)
                                                         └─►  where each value came from (`--explain`)

Every section is a frozen dataclass with a docstring for each field; values that cannot be right are refused
here, before anything is loaded. An unknown key is an error that names the file and the nearest key that
exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shards.errors import UsageError
from train.settings import build, docs, leaves, merge, read_toml

SIZES: dict[str, dict[str, Any]] = {
    "0.2m": {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 192, "tied": True},
    "2m": {"dim": 192, "layers": 4, "heads": 6, "kv_heads": 2, "hidden": 512, "tied": True},
    "25m": {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "hidden": 1408, "tied": True},
    "125m": {"dim": 768, "layers": 12, "heads": 12, "kv_heads": 4, "hidden": 2304, "tied": True},
    "1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, "tied": True},
    "7b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "tied": False},
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run itself."""

    dir: str
    """Run folder: config, environment, metrics and, unless `checkpoint.url` says otherwise, checkpoints."""
    steps: int
    """Optimizer steps in the whole run."""
    seed: int = 1
    """Seed of weights, data order and dropout."""
    threads: int = 0
    """CPU threads of one rank. 0: all cores shared by the ranks of this machine, or 1 where deterministic =
    "elastic"."""
    deterministic: Literal["off", "on", "elastic"] = "on"
    """"on": the same bits after a restart on as many ranks. "elastic": also on any other number, and through
    changes between them. "off": fastest kernels, no promise."""
    timeout_s: float = 600.0
    """Seconds that ranks wait for each other before the missing one is named and the run stops."""

    def __post_init__(self) -> None:
        _at_least("run.steps", self.steps, 1)
        _at_least("run.threads", self.threads, 0)


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """How images enter the sequence: as patches, each one position."""

    encoder: Literal["patches", "vit"] = "patches"
    """"patches": a linear map of raw pixels. "vit": a small vision transformer, then a projector."""
    size: int = 32
    """Images are scaled to this many pixels, square. Divisible by `patch`."""
    patch: int = 8
    """Side of one patch in pixels."""
    dim: int = 128
    """Width of the vision transformer."""
    layers: int = 4
    """Blocks of the vision transformer."""
    heads: int = 4
    """Attention heads of the vision transformer."""

    def __post_init__(self) -> None:
        _at_least("model.image.patch", self.patch, 1)
        if self.size % self.patch:
            raise UsageError(
                f"model.image.size = {self.size} is not a multiple of model.image.patch = {self.patch}",
                mend=f"use {self.size // self.patch * self.patch or self.patch} or another patch",
            )

    @property
    def tokens(self) -> int:
        """Positions that one image takes."""
        return (self.size // self.patch) ** 2


@dataclass(frozen=True, kw_only=True)
class AudioConfig:
    """How audio enters the sequence: as log-mel patches, each some frames wide."""

    rate: int = 8000
    """Audio is resampled to this many samples a second."""
    mels: int = 40
    """Mel bands."""
    hop_ms: int = 20
    """Milliseconds from one frame to the next; a window is twice as long."""
    frames: int = 4
    """Frames in one position of the sequence."""
    max_s: float = 4.0
    """Audio is cut after this many seconds."""

    @property
    def tokens(self) -> int:
        """The most positions that one clip takes."""
        return int(self.max_s * 1000) // (self.hop_ms * self.frames)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder."""

    size: str = ""
    """A named size that sets the numbers below where the file does not: 0.2m, 2m, 25m, 125m, 1b, 7b. With
    `--set` it wins over the file."""
    dim: int = 192
    """Width."""
    layers: int = 4
    """Blocks."""
    heads: int = 6
    """Query heads; divides `dim`."""
    kv_heads: int = 2
    """Key and value heads; divides `heads`."""
    hidden: int = 512
    """Width inside the MLP."""
    vocab: int = 0
    """Tokens known. 0: as many as the tokenizer has."""
    context: int = 96
    """Positions in one sequence."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    qk_norm: bool = True
    """Normalise queries and keys in each head. Exports as Qwen3 layout; without it as Llama."""
    tied: bool = True
    """Share the embedding with the output head."""
    dropout: float = 0.0
    """Dropped share of each block's output while training."""
    weights: str = ""
    """Start from these weights: a folder with `config.json` and safetensors in Llama's or Qwen3's layout."""
    image: ImageConfig = field(default_factory=ImageConfig)
    """Images."""
    audio: AudioConfig = field(default_factory=AudioConfig)
    """Audio."""

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "hidden", "context"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise UsageError(
                f"model.dim = {self.dim} does not split into {self.heads} heads of even width",
                mend="make model.dim a multiple of 2 * model.heads",
            )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}",
                mend="make model.kv_heads a divisor of model.heads (the same number: no grouping)",
            )
        if not 0 <= self.dropout < 1:
            raise UsageError(
                f"model.dropout = {self.dropout} is not a share", mend="use a number from 0 to below 1"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """One source of samples in a mixture."""

    remote: str = ""
    """Where the dataset is: a folder, a URL, or `cluster:name`."""
    local: str = ""
    """Cache folder. Empty: under `data.cache`."""
    split: str = ""
    """Sub-folder of the dataset."""
    proportion: float = 0.0
    """Share of the samples from this stream. 0 for all streams: in proportion to their sizes."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how samples become sequences."""

    remote: str = ""
    """Where the dataset is: a folder, a URL, or `cluster:name`. For a mixture use [[data.streams]]
    instead."""
    split: str = ""
    """Sub-folder of the dataset."""
    streams: tuple[StreamConfig, ...] = ()
    """A mixture of datasets."""
    cache: str = ""
    """Folder for the shards that were fetched. Empty: `cache` in the run folder."""
    cache_limit: str = ""
    """Most bytes that the cache holds, as "20gb". Empty: no limit."""
    batch_size: int = 32
    """Samples in one step, over all ranks."""
    micro_batch: int = 0
    """Most samples that go through the model at once. 0: all that a rank has in a step."""
    text: str = "caption"
    """Column with text (str or bytes)."""
    tokens: str = ""
    """Column with ready token ids (an integer array); used in place of `text` where a sample has it."""
    image: str = "image"
    """Column with an image (bytes of a file, or a decoded one). Samples without it are text alone."""
    audio: str = ""
    """Column with audio (bytes of a file)."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a `tokenizer.json`."""
    pack: bool = False
    """Put several samples in one row, each attending to itself alone; for texts much shorter than the
    context."""
    shuffle: bool = True
    """Shuffle by the seed, anew in each epoch."""
    workers: int = 0
    """Processes that decode ahead on each rank. 0: a thread prepares the next batch while a step runs."""
    uneven: Literal["drop", "pad"] = "drop"
    """The last samples of an epoch that do not fill a batch: "drop" them, or "pad" with samples from its
    start."""

    def __post_init__(self) -> None:
        _at_least("data.batch_size", self.batch_size, 1)
        _at_least("data.micro_batch", self.micro_batch, 0)
        if bool(self.remote) == bool(self.streams):
            raise UsageError(
                "data.remote and data.streams are both set"
                if self.remote
                else "no data: data.remote is not set",
                mend='say where it is: --set data.remote=FOLDER, or "cluster:name", or [[data.streams]]',
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 3e-3
    """Peak learning rate."""
    warmup: int = 10
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up. "wsd": constant, then linear decay over the last fifth."""
    final: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay, of matrices only."""
    clip: float = 1.0
    """Largest norm of the gradient. 0: no limit."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise UsageError(f"optim.lr = {self.lr} is not above zero", mend="use something like 3e-4")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is spread and computed."""

    mode: Literal["auto", "ddp", "fsdp"] = "auto"
    """"ddp": every rank holds the model. "fsdp": ranks share it. "auto": fsdp on GPUs from 500 M
    parameters."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": CUDA where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward pass; weights and moments stay float32. "auto": bfloat16 on
    CUDA."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, a third more work."""
    compile: bool = False
    """Compile each block with torch.compile, once for each shape of a microbatch; rows are then as long as
    the context."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and where the complete state is kept."""

    url: str = ""
    """Any store. Empty: `checkpoints` in the run folder."""
    every: int = 100
    """Steps from one checkpoint to the next."""
    asynchronous: bool = True
    """Write in the background; a step waits only for the copy into memory."""
    keep_last: int = 3
    """Newest checkpoints to keep. 0: all."""
    keep_every: int = 0
    """Keep each checkpoint whose step is a multiple of this, for ever. 0: none."""
    keep_best: int = 0
    """Checkpoints with the lowest validation loss to keep."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 1)
        _at_least("checkpoint.keep_last", self.keep_last, 0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation on a fixed set of samples, each exactly once."""

    remote: str = ""
    """Dataset. Empty: that of `data`, where `eval.split` names another folder of it."""
    split: str = ""
    """Sub-folder of the dataset."""
    holdout: float = 0.0
    """Instead of both: about this share of `data` is never trained on and validates. Whole shards, chosen by
    their content."""
    every: int = 0
    """Steps between validations; one also follows the last step. 0: none."""
    samples: int = 0
    """So many samples, evenly spread over the set. 0: all."""

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise UsageError(f"eval.holdout = {self.holdout} is not a share", mend="for example 0.01")
        if self.holdout and (self.remote or self.split):
            raise UsageError(
                "eval.holdout is set, and eval.remote or eval.split too",
                mend="one of them says what validates",
            )


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What happens when a loss is not a number, or jumps."""

    policy: Literal["stop", "skip", "rewind"] = "stop"
    """"stop": end with an error. "skip": drop this step's update. "rewind": go back to the last checkpoint
    and leave the samples of this step out. Remembered across restarts."""
    spike: float = 0.0
    """A loss this many standard deviations above the recent mean is a spike. 0: only NaN and infinity
    count."""
    window: int = 50
    """Steps that make the recent mean."""
    limit: int = 10
    """Events after which the run stops whatever the policy."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written while it runs."""

    every: int = 1
    """Steps from one line to the next."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""

    def __post_init__(self) -> None:
        _at_least("log.every", self.every, 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run is made from."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.eval.every and not (self.eval.remote or self.eval.holdout or self.data.remote):
            raise UsageError(
                "eval.every is set, eval.remote is not",
                mend="say which dataset validates a mixture, or --set eval.holdout=0.01",
            )

    @classmethod
    def load(cls, path: Path, sets: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
        """Read a TOML file, put `--set` values on top.

        Returns:
            The config, and for each key that is not at its default where its value came from.

        Raises:
            UsageError: No such file, not TOML, an unknown key, a wrong type, a value that cannot be right.
        """
        return cls.from_tree(read_toml(path), sets, where=str(path))

    @classmethod
    def from_tree(
        cls, tree: Mapping[str, Any], sets: Sequence[str] = (), *, where: str
    ) -> tuple[Config, dict[str, str]]:
        """Like `load`, from a parsed file; `where` is what errors call it."""
        merged, sources = merge(tree, sets, where)
        model = merged.get("model")
        if isinstance(model, dict) and (size := model.get("size")):
            if size not in SIZES:
                raise UsageError(
                    f"model.size = {size!r} is not a known size", mend=f"one of {', '.join(SIZES)}"
                )
            by_hand = sources["model.size"].startswith("--set")  # then it wins over the file's own numbers
            for name, value in SIZES[size].items():
                source = sources.get(f"model.{name}", "")
                if not source or (by_hand and not source.startswith("--set")):
                    model[name] = value
                    sources[f"model.{name}"] = f"model.size = {size}"
        return build(cls, merged, where, sources), sources

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and TOML have them."""
        return dataclasses.asdict(self)


def flatten(config: Config) -> dict[str, Any]:
    """Every key with its value: ``{"run.steps": 100, …}``."""
    return dict(leaves(config.to_dict()))


def explain(config: Config, sources: Mapping[str, str]) -> Iterator[tuple[str, Any, str, str]]:
    """Every key: (key, value, where the value came from, what it means)."""
    meanings = dict(docs(Config))
    for key, value in flatten(config).items():
        yield key, value, sources.get(key, "default"), meanings.get(key, "")


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{key} = {value} is below {least}", mend=f"use {least} or more")
