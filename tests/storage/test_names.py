"""Schemes of other tools, and clients that take no options of fsspec's."""

from __future__ import annotations

import pytest

from datasync.errors import UsageError
from datasync.storage import open_store


def test_mosaicmls_name_of_a_scheme_leads_to_ours():
    with pytest.raises(UsageError, match="'azure'") as refused:
        open_store("azure://container/path")
    assert "write az://CONTAINER/PATH" in refused.value.mend


def test_options_of_fsspec_are_kept_from_clients_that_refuse_them():
    pytest.importorskip("paramiko", reason="paramiko is not installed")
    with pytest.raises(Exception, match=r"(?i)unable to connect"):
        open_store("sftp://127.0.0.1:9/x").read("index.json")
