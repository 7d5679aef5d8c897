"""Schemes that there are not, and clients that take no options of fsspec's."""

from __future__ import annotations

import pytest

from datasync.errors import UsageError
from datasync.storage import open_store


def test_a_scheme_that_nothing_reaches_is_named():
    with pytest.raises(UsageError, match="no store has the scheme 'foo'") as refused:
        open_store("foo://container/path")
    assert "az://" in refused.value.mend


def test_options_of_fsspec_are_kept_from_clients_that_refuse_them():
    pytest.importorskip("paramiko", reason="paramiko is not installed")
    with pytest.raises(Exception, match=r"(?i)unable to connect"):
        open_store("sftp://127.0.0.1:9/x").read("index.json")
