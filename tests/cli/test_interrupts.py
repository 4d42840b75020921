"""Ctrl-C, wherever the main thread is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from flexgen_jax.cli.interrupts import INTERRUPTED, MESSAGE, TERMINATED

IN_PYTHON = "while True: pass"
IN_A_CALLBACK = """
import gc
def callback(phase, info):
    end = time.monotonic() + 0.5
    while time.monotonic() < end: pass
gc.callbacks.append(callback)
while True: gc.collect()
"""
IN_NATIVE_CODE = "import ctypes; ctypes.CDLL('libc.so.6').sleep(30)"
AT_EXIT = "import atexit; atexit.register(time.sleep, 30)"
BY_CLICK = """
import click
@click.command()
def main():
    while True: pass
main([])
"""


@pytest.mark.parametrize("code", [IN_PYTHON, IN_A_CALLBACK, IN_NATIVE_CODE, AT_EXIT, BY_CLICK])
def test_ctrl_c_ends_the_process_with_its_status_and_one_line(code: str) -> None:
    """Also where a library ignores it, as JAX's callback of the garbage collector does, and where
    native code keeps Python from seeing it."""
    body = "\n".join(f"    {line}" for line in code.strip().splitlines())
    script = (
        "import sys, time\nfrom flexgen_jax.cli.interrupts import Interrupts\n"
        f"with Interrupts():\n    print('ready', flush=True)\n{body}\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.7)
        process.send_signal(signal.SIGINT)
        try:
            _, messages = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == INTERRUPTED
    assert messages.replace("Aborted!", "").strip() == MESSAGE


@pytest.mark.parametrize("status", [0, 1, TERMINATED])
def test_other_ends_of_a_command_keep_their_status(status: int) -> None:
    script = (
        "import sys\nfrom flexgen_jax.cli.interrupts import Interrupts\n"
        f"with Interrupts():\n    print('text', end='')\n    sys.exit({status})"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "text", "")
