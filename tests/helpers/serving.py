"""A server of a tiny model, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from flexgen_jax import LLM, Policy
from flexgen_jax.server.app import Server, ServerOptions
from flexgen_jax.server.incoming import PatientProtocol

POLICY = Policy(batch_size=4, num_batches=2)


@contextmanager
def serving(
    model: Path, policy: Policy = POLICY, offload_dir: Path | None = None, **options: Any
) -> Iterator[tuple[str, Server]]:
    """A server of a model in fp32; see `served`."""
    with (
        LLM(model, dtype="float32", policy=policy, offload_dir=offload_dir) as llm,
        served(llm, **options) as at,
    ):
        yield at


@contextmanager
def served(llm: LLM, **options: Any) -> Iterator[tuple[str, Server]]:
    """A server in a thread; yields its address."""
    server = Server(llm, ServerOptions(name="tiny", **options))
    config = uvicorn.Config(server.app(), port=0, log_level="error", http=PatientProtocol)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        port = running.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", server
    finally:
        running.should_exit = True
        thread.join()
