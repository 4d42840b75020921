"""`flexgen-jax serve` as a process: where it listens, who may ask, and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import httpx

from flexgen_jax.models.loading import shipped_model
from tests.helpers.command_line import run


def test_it_serves_until_it_is_asked_to_end(tmp_path: Path) -> None:
    flags = ["--model", str(shipped_model()), "--port", "0", "--dtype", "float32", "--no-progress"]
    command = [sys.executable, "-m", "flexgen_jax", "serve", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if place := re.search(r"http://[0-9.]+:[0-9]+", line):
                    break
            assert place is not None
            body = {"prompt": "The people", "max_tokens": 3, "temperature": 0}
            answer = httpx.post(f"{place[0]}/v1/completions", json=body, timeout=120)
            assert answer.json()["usage"]["completion_tokens"] == 3
            assert answer.json()["model"] == shipped_model().name
            hot = httpx.post(f"{place[0]}/v1/completions", json={**body, "temperature": 9})
            assert hot.status_code == 400 and "at most 2" in hot.text
            port = place[0].rpartition(":")[2]
            taken = run("serve", "--model", shipped_model(), "--port", port)
            assert taken.exit_code == 2 and "--port 0 for any" in taken.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (143, -signal.SIGTERM)
        finally:
            process.kill()


def test_others_may_ask_only_where_that_is_wanted() -> None:
    result = run("serve", "--host", "192.0.2.1", "--port", 0)
    assert result.exit_code == 2
    assert "--api-key" in result.stderr
