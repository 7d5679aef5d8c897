"""The few XML documents that S3 and we exchange."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from datasync.errors import StoreError, TransientError


class Node:
    """An element, looked into by local names: servers differ in the namespace."""

    def __init__(self, element: ElementTree.Element) -> None:
        self._element = element

    @property
    def tag(self) -> str:
        return self._element.tag.rpartition("}")[2]

    def text(self, name: str, default: str = "") -> str:
        """The text of the first child with that name."""
        for child in self._element:
            if child.tag.rpartition("}")[2] == name:
                return child.text or ""
        return default

    def all(self, name: str) -> Iterator[Node]:
        """The children with that name."""
        for child in self._element:
            if child.tag.rpartition("}")[2] == name:
                yield Node(child)


def parse(body: bytes, tag: str, *, where: str) -> Node:
    """The document's root, which must be a `tag`.

    Raises:
        StoreError: It is something else.
    """
    try:
        root = Node(ElementTree.fromstring(body.strip()))
    except ElementTree.ParseError as error:
        raise StoreError(f"{where} answered with broken XML: {error}", mend="check the endpoint") from None
    if root.tag == "Error":
        code = root.text("Code")
        kind = TransientError if code in ("InternalError", "SlowDown", "ServiceUnavailable") else StoreError
        raise kind(f"{where} failed after all: {code} {root.text('Message')}", mend="run again")
    if root.tag != tag:
        raise StoreError(f"{where} answered with <{root.tag}>, not <{tag}>", mend="check the endpoint")
    return root


def delete_request(keys: Sequence[str]) -> bytes:
    """The body of DeleteObjects; the answer then lists failures only."""
    objects = "".join(f"<Object><Key>{_text(key)}</Key></Object>" for key in keys)
    return _document(f'<Delete xmlns="{_XMLNS}"><Quiet>true</Quiet>{objects}</Delete>')


def delete_failures(body: bytes) -> list[tuple[str, str]]:
    """Keys that could not be deleted, with the reason."""
    if not body.strip():
        return []
    root = parse(body, "DeleteResult", where="a deletion")
    failures = [(e.text("Key"), f"{e.text('Code')} {e.text('Message')}".strip()) for e in root.all("Error")]
    return [failure for failure in failures if not failure[1].startswith("NoSuchKey")]


def complete_request(parts: list[tuple[int, str, str | None]]) -> bytes:
    """The body of CompleteMultipartUpload from (number, ETag, CRC-32C in base64 or None)."""
    lines = []
    for number, etag, crc in parts:
        check = f"<ChecksumCRC32C>{_text(crc)}</ChecksumCRC32C>" if crc else ""
        lines.append(
            f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{_text(etag)}&quot;</ETag>{check}</Part>"
        )
    return _document(f'<CompleteMultipartUpload xmlns="{_XMLNS}">{"".join(lines)}</CompleteMultipartUpload>')


_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"


def _document(inner: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>{inner}'.encode()


def _text(value: str) -> str:
    """Text in XML; a carriage return would be read back as a line feed if it were not spelt out."""
    return escape(value, {"\r": "&#13;", "\n": "&#10;"})
