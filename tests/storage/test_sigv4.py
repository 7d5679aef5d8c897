"""Our signatures are botocore's, for every request."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from unittest import mock

import botocore.auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from datasync.storage.sigv4 import UNSIGNED, Keys, Signer, encode_path, encode_query

_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_key = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
_header = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
_moments = st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1))


@settings(max_examples=200, deadline=None)
@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    key=_key,
    query=st.dictionaries(st.sampled_from(["uploads", "prefix", "start-after", "partNumber"]), _text),
    headers=st.dictionaries(
        st.sampled_from(["If-Match", "Range", "x-amz-copy-source", "Content-MD5"]), _header
    ),
    body=st.none() | st.binary(max_size=50),
    token=st.none() | st.just("session+token/="),
    moment=_moments,
)
def test_signatures_are_those_of_botocore(
    method: str,
    key: str,
    query: dict[str, str],
    headers: dict[str, str],
    body: bytes | None,
    token: str | None,
    moment: datetime,
) -> None:
    payload = UNSIGNED if body is None else hashlib.sha256(body).hexdigest()
    path, encoded = encode_path(f"/bucket/{key}"), encode_query(query)
    ours = Signer("eu-west-1").sign(
        Keys("AKIDEXAMPLE", "secret/key+", token),
        method,
        "host.example:8333",
        path,
        encoded,
        headers,
        payload,
        moment.replace(tzinfo=UTC),
    )
    url = f"https://host.example:8333{path}" + (f"?{encoded}" if encoded else "")
    request = AWSRequest(method=method, url=url, headers=headers, data=body)
    signer = botocore.auth.S3SigV4Auth(Credentials("AKIDEXAMPLE", "secret/key+", token), "s3", "eu-west-1")
    now = mock.patch("botocore.auth.get_current_datetime", return_value=moment.replace(tzinfo=UTC))
    with now, mock.patch.object(signer, "payload", return_value=payload):
        signer.add_auth(request)
    assert ours["Authorization"] == request.headers["Authorization"]
    assert ours["x-amz-date"] == request.headers["X-Amz-Date"]


def test_the_kept_key_follows_the_day_and_the_secret() -> None:
    signer = Signer("us-east-1")

    def sign(keys: Keys, day: int) -> str:
        moment = datetime(2030, 1, day, tzinfo=UTC)
        return signer.sign(keys, "GET", "h", "/b", "", {}, UNSIGNED, moment)["Authorization"]

    one, two = Keys("a", "one"), Keys("a", "two")
    assert len({sign(one, 1), sign(one, 2), sign(two, 1), sign(two, 2)}) == 4
    assert sign(one, 1) == sign(one, 1)


def test_keys_are_not_shown() -> None:
    assert "hunter2" not in repr(Keys("hunter2", "hunter2", "hunter2"))
