"""`--json FILE`: what every command can write for machines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flexgen_jax.errors import UserError


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--json",
        "json_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the results to FILE as JSON.",
        metavar="FILE",
    )(command)


def check_json(path: Path | None, flag: str = "--json", results: Path | None = None) -> None:
    """Raises `UserError` for a file that cannot be written, or is that of the results, before the
    work is done."""
    if path is not None and results is not None and path.resolve() == results.resolve():
        raise UserError(f"--output and {flag} are the same file, {path}; choose different files")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {flag} {path}; choose another file")


def write_json(path: Path | None, content: Any) -> None:
    if path is None:
        return
    path = path.resolve() if path.is_file() else path  # a symbolic link stays one
    # Written whole or not at all, unless it is a pipe, a device, or in a folder of somebody else's.
    is_whole = (path.is_file() or not path.exists()) and os.access(path.parent, os.W_OK)
    partial = path.with_name(path.name + ".part") if is_whole else path
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n")
        if is_whole:
            partial.replace(path)
    except OSError as error:
        if is_whole:
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write --json {path}: {error.strerror or error}") from None
