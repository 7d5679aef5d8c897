"""Signals: noted once, echoes ignored, a second one obeyed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from train.signals import KINDS, StopRequest, agreed


def test_the_first_signal_is_noted_and_its_echo_ignored() -> None:
    stop = StopRequest()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert agreed(stop.votes) is signal.SIGUSR1
        assert sum(stop.votes) == 1
    finally:
        stop.restore()


def test_nothing_received_is_nothing_agreed() -> None:
    assert agreed([0] * len(KINDS)) is None
    assert agreed([0, 3, 0]) is KINDS[1]


def test_a_second_signal_is_obeyed_at_once() -> None:
    code = (
        "import time, train.signals as s\n"
        "s.ECHO_S = 0.2\n"
        "s.StopRequest()\n"
        "print('ready', flush=True)\n"
        "time.sleep(30)\n"
        "time.sleep(30)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
