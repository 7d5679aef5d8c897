"""Column encodings: how one value becomes bytes in a shard and comes back.

Every encoding of MDS is here under its MDS name, byte for byte:

    bytes str json pkl                     as they are, UTF-8, JSON text, pickle
    int uint8 … uint64 int8 … int64        little-endian scalars of fixed size
    float16 float32 float64
    str_int str_float str_decimal          numbers of any precision, as digits
    ndarray[:dtype[:d0,d1,…]]              arrays; what the name does not fix is stored before the values
    pil jpeg png                           images
    list[pil] list[jpeg] list[png]         several images; jpeg_array (jpegarray): several JPEG files

A value that is already `bytes` is stored as it is, so that an image file goes in and comes out unchanged.
Others are added with `register`. An encoding that can run code when it is read (`pkl`) is marked unsafe, and
readers refuse it unless asked (invariant 10).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from shards.arrays import NDArray
from shards.errors import UsageError
from shards.values import (
    Buffer,
    Bytes,
    Encoding,
    EncodingError,
    Int,
    Json,
    Pickle,
    Scalar,
    Str,
    StrDecimal,
    StrFloat,
    StrInt,
)

__all__ = [
    "Buffer",
    "Encoding",
    "EncodingError",
    "ForeignEncoding",
    "get",
    "is_safe",
    "known",
    "names",
    "register",
]


@runtime_checkable
class ForeignEncoding(Protocol):
    """An encoding class written for MosaicML Streaming: the same methods, `from_str` in place of `parse`."""

    size: int | None

    def encode(self, obj: Any) -> bytes: ...

    def decode(self, data: bytes) -> Any: ...


class _Adapted(Encoding):
    """A foreign encoding behind our interface."""

    passes_bytes = True

    def __init__(self, inner: ForeignEncoding, *, safe: bool) -> None:
        self._inner = inner
        self.size = inner.size
        self.safe = safe

    def encode(self, value: Any) -> bytes:
        return value if isinstance(value, bytes) else self._inner.encode(value)

    def decode(self, data: Buffer) -> Any:
        return self._inner.decode(bytes(data))


def _image(name: str) -> Callable[[], Encoding]:
    """Images need Pillow: imported when a column uses them."""

    def make() -> Encoding:
        from shards import images

        found = getattr(images, name)()
        assert isinstance(found, Encoding)
        return found

    return make


def _scalar(dtype: str) -> Callable[[], Encoding]:
    return lambda: Scalar(dtype)


_FACTORIES: dict[str, Callable[[], Encoding] | type[Encoding]] = {
    "bytes": Bytes,
    "str": Str,
    "int": Int,
    **{name: _scalar(name) for name in NDArray.DTYPES},
    "str_int": StrInt,
    "str_float": StrFloat,
    "str_decimal": StrDecimal,
    "ndarray": NDArray,
    "json": Json,
    "pkl": Pickle,
    "pil": _image("Pil"),
    "jpeg": _image("Jpeg"),
    "png": _image("Png"),
    "list[pil]": _image("PilList"),
    "list[jpeg]": _image("JpegList"),
    "list[png]": _image("PngList"),
    "jpeg_array": _image("JpegArray"),
    "jpegarray": _image("JpegArray"),
}
_FOREIGN: dict[str, tuple[Any, bool]] = {}


def names() -> list[str]:
    """Every encoding's name, without arguments."""
    return sorted({*_FACTORIES, *_FOREIGN})


def register(name: str, encoding: type[Encoding] | type[ForeignEncoding], *, safe: bool = True) -> None:
    """Add an encoding under `name`, or replace one that was added before.

    Args:
        name (str): What columns call it; it may not contain a colon, nor be one of MDS's own names.
        encoding (type): A subclass of `Encoding`, or an encoding class written for MosaicML Streaming.
        safe (bool): False where decoding bytes of an attacker could run code. Default: ``True``.
    """
    if ":" in name or not name:
        raise UsageError(f"an encoding cannot be called {name!r}", mend="leave out the colon")
    if name in _FACTORIES:
        raise UsageError(f"the encoding {name!r} is one of MDS's own", mend="give yours another name")
    if not isinstance(encoding, type) or not hasattr(encoding, "encode") or not hasattr(encoding, "decode"):
        raise UsageError(
            f"the encoding {name!r} is no class with encode and decode", mend="pass the class itself"
        )
    _FOREIGN[name] = (encoding, safe)
    get.cache_clear()


@lru_cache(maxsize=4096)
def get(name: str) -> Encoding:
    """The encoding called `name`, arguments included (`ndarray:uint16:512`).

    Raises:
        UsageError: No such encoding, or arguments that it does not take.
    """
    base, colon, arguments = name.partition(":")
    try:
        if base in _FACTORIES:
            factory = _FACTORIES[base]
            if not colon or not arguments:
                return factory()
            maker: type[Encoding] = factory if isinstance(factory, type) else Encoding
            return maker.parse(arguments)
        if base in _FOREIGN:
            return _make_foreign(*_FOREIGN[base], arguments if colon else None)
    except EncodingError as error:
        raise UsageError(
            f"the encoding {name!r} is wrong: {error}", mend=f"see the list: {', '.join(names())}"
        ) from error
    raise UsageError(
        f"unknown encoding {name!r}",
        mend=f"use one of {', '.join(names())}, or register your own (shards.encodings.register)",
    )


def _make_foreign(encoding: Any, safe: bool, arguments: str | None) -> Encoding:
    parse = getattr(encoding, "parse", None) or getattr(encoding, "from_str", None)
    made = encoding() if arguments is None or parse is None else parse(arguments)
    if isinstance(made, Encoding):
        if not safe:
            made.safe = False
        return made
    return _Adapted(made, safe=safe)


def known(name: str) -> bool:
    """Whether `get` would find this encoding."""
    try:
        get(name)
    except UsageError:
        return False
    return True


def is_safe(name: str) -> bool:
    """Whether decoding a column of this encoding cannot run code; an unknown encoding decodes nothing."""
    return get(name).safe if known(name) else True
