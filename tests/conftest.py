"""Fixtures that every test may use."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.servers import azure, google, s3_a, s3_b, s3_other, s3_servers  # noqa: F401  (fixtures)

# A test run in the background of a shell ignores Ctrl-C, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora beside the checkout; skips where it is absent."""
    folder = SHARED / "corpora"
    if not folder.is_dir():
        pytest.skip("the real corpora (../shared/corpora) are not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def cases() -> Path:
    """The folder of nasty inputs beside the checkout; skips where it is absent."""
    folder = SHARED / "cases"
    if not folder.is_dir():
        pytest.skip("the nasty inputs (../shared/cases) are not beside this checkout")
    return folder
