"""A folder behind SSH, on loopback: an SFTP server in a thread, for one user with one password.

with sftp_server(folder) as port: ...
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
from paramiko.sftp import SFTP_OK

USER, PASSWORD = "tests", "secret-of-tests"


class _Login(paramiko.ServerInterface):
    def check_auth_password(self, username: str, password: str) -> int:
        good = (username, password) == (USER, PASSWORD)
        return paramiko.AUTH_SUCCESSFUL if good else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def get_allowed_auths(self, username: str) -> str:
        return "password"


def _files(root: Path) -> type[paramiko.SFTPServerInterface]:
    """What clients may do below `root`, which they see as ``/``."""

    def answer(action: Any) -> Any:
        try:
            found = action()
        except OSError as error:
            return paramiko.SFTPServer.convert_errno(error.errno or 0)
        return SFTP_OK if found is None else found

    def place(path: str) -> str:
        return str(root / path.lstrip("/"))

    def described(path: str) -> Any:
        name = os.path.basename(path)
        return paramiko.SFTPAttributes.from_stat(os.stat(path), name)

    class Files(paramiko.SFTPServerInterface):
        def list_folder(self, path: str) -> Any:
            return answer(lambda: [described(entry.path) for entry in os.scandir(place(path))])

        def stat(self, path: str) -> Any:
            return answer(lambda: described(place(path)))

        lstat = stat

        def open(self, path: str, flags: int, attr: Any) -> Any:
            def opened() -> paramiko.SFTPHandle:
                mode = "r+b" if flags & (os.O_WRONLY | os.O_RDWR) else "rb"
                fd = os.open(place(path), flags, 0o644)
                handle = paramiko.SFTPHandle(flags)
                handle.readfile = handle.writefile = os.fdopen(fd, mode)
                handle.stat = lambda: described(place(path))
                return handle

            return answer(opened)

        def remove(self, path: str) -> Any:
            return answer(lambda: os.remove(place(path)))

        def rename(self, old: str, new: str) -> Any:
            return answer(lambda: os.rename(place(old), place(new)))

        posix_rename = rename

        def mkdir(self, path: str, attr: Any) -> Any:
            return answer(lambda: os.mkdir(place(path)))

        def rmdir(self, path: str) -> Any:
            return answer(lambda: os.rmdir(place(path)))

    return Files


@contextlib.contextmanager
def sftp_server(root: Path) -> Iterator[int]:
    """Serve `root`; gives the port."""
    key = paramiko.RSAKey.generate(2048)
    listener = socket.create_server(("127.0.0.1", 0))
    transports: list[paramiko.Transport] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport = paramiko.Transport(connection)
            transport.add_server_key(key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _files(root))
            transports.append(transport)
            transport.start_server(event=threading.Event(), server=_Login())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for transport in transports:
            transport.close()
