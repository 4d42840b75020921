"""`flexgen-jax serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

import click

from flexgen_jax.cli.commands import Command, Terminated, end, without_extra
from flexgen_jax.cli.engine_flags import engine_options, open_llm
from flexgen_jax.cli.flags import model_options, policy_options
from flexgen_jax.errors import UserError

DRAIN_S = 30
"""Seconds that texts under way may take when the server is asked to end."""


@click.command(cls=Command)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    help="Port to listen on; 0: any free port.",
)
@click.option(
    "--api-key",
    help="Key that clients must send; required unless the address is a loopback address.",
)
@click.option(
    "--open-to-all",
    is_flag=True,
    help="Listen on other addresses without a key: anyone who can reach them can use the server.",
)
@click.option("--served-model-name", help="Additional name of the model.")
@click.option(
    "--max-waiting",
    type=click.IntRange(1),
    default=1024,
    help="Maximum number of running and waiting requests; more are rejected with status 429.",
)
@click.option(
    "--files-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("~/.local/share/flexgen_jax/server"),
    help="Folder for clients' files and batches; a restarted server resumes unfinished batches.",
)
@click.option(
    "--prompt-len",
    type=click.IntRange(1),
    default=1024,
    help="Plan for prompts of this length. Longer requests wait for the running ones, then the "
    "server plans again.",
)
@click.option(
    "--gen-len", type=click.IntRange(1), default=512, help="Plan for this number of new tokens."
)
@click.option(
    "--keep-alive",
    type=click.IntRange(1),
    default=75,
    metavar="SECONDS",
    help="Keep idle connections open for this time.",
)
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="URL",
    help="Origin of a web app that may use the server, e.g. http://localhost:3000, or *; may be "
    "repeated.",
)
@click.option(
    "--strict-fields",
    is_flag=True,
    help="Reject requests with unknown fields, which are ignored by default.",
)
@model_options
@policy_options
def serve(
    host: str,
    port: int,
    api_key: str | None,
    open_to_all: bool,
    served_model_name: str | None,
    max_waiting: int,
    files_dir: Path,
    prompt_len: int,
    gen_len: int,
    keep_alive: int,
    allow_origin: tuple[str, ...],
    strict_fields: bool,
    **flags: Any,
) -> None:
    """Serve a model with OpenAI's API at http://HOST:PORT/v1.

    The page at http://HOST:PORT has a chat and the server's numbers.
    """
    try:
        import uvicorn

        from flexgen_jax.server.announced import Announced
        from flexgen_jax.server.app import Server, ServerOptions
        from flexgen_jax.server.incoming import PatientProtocol, is_loopback
    except ImportError as error:
        raise without_extra(error, "serve") from None
    if api_key == "":
        raise UserError("--api-key must not be empty")
    if api_key is None and not open_to_all and not is_loopback(host):
        raise UserError(
            f"--host {host} is reachable by other machines: set --api-key, or --open-to-all for "
            "access without a key"
        )
    options = engine_options(flags, default_batches=1, shows_tokens=True)
    with _bound(host, port) as listening, open_llm(options) as llm:
        if llm.tokenizer is None:
            raise UserError("a model without a tokenizer cannot be served; remove --dummy-weights")
        served = ServerOptions(
            name=served_model_name,
            api_key=api_key,
            most=max_waiting,
            folder=files_dir.expanduser(),
            lengths=(prompt_len, gen_len),
            is_local=api_key is None and is_loopback(host),
            allowed_origins=allow_origin,
            is_strict=strict_fields,
        )
        server = Server(llm, served)
        config = uvicorn.Config(
            server.app(),
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=keep_alive,
            http=PatientProtocol,
            h11_max_incomplete_event_size=64 << 10,
        )
        running = Announced(config, server.names[0])
        server.engine.on_broken = lambda: setattr(running, "should_exit", True)
        before = signal.signal(signal.SIGTERM, end)
        try:
            running.run(sockets=[listening])
        except KeyboardInterrupt as error:  # the server has stopped already
            sys.exit(143 if isinstance(error, Terminated) else 130)
        finally:
            signal.signal(signal.SIGTERM, before)
            server.engine.stop()
        if not running.started or server.engine.is_broken:
            sys.exit(1)  # such as for systemd, which restarts it


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket that has the address, before the model is opened."""
    try:
        family, socket_kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket_kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another "
            "port, or --port 0 for any free one"
        ) from None
    return listening
