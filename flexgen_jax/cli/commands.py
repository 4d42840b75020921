"""How commands look and where their flags come from: headings in --help, a configuration file,
environment variables, and one line for wrong use."""

from __future__ import annotations

import logging
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from flexgen_jax.cli.interrupts import INTERRUPTED, MESSAGE, TERMINATED
from flexgen_jax.errors import StageError, UserError
from flexgen_jax.units import parse_bytes

CONFIG = "FLEXGEN_JAX_CONFIG"
"""The variable that names another configuration file."""


def without_extra(error: ImportError, extra: str) -> UserError:
    """Returns the error for a missing package, which names the extra that installs it."""
    return UserError(
        f"{error.name} is missing: pip install '.[{extra}]' in a checkout of flexgen_jax"
    )


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


def end(_number: int, _frame: object) -> NoReturn:
    """Handles SIGTERM: the command stops as on Ctrl-C, with its output saved."""
    raise Terminated


class Size(click.ParamType):  # type: ignore[type-arg]
    """A size in bytes, such as 16GB; it stays the text that it is."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | int:
        try:
            parse_bytes(value)
        except UserError as error:
            self.fail(str(error), param, ctx)
        number: str | int = value
        return number


class Command(click.Command):
    """A command whose --help has its flags under headings: those of `under` after its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None and isinstance(param, click.Option):
                rows.setdefault(getattr(param, "heading", "Options"), []).append(row)
        for heading, records in rows.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def now_option(command: Any) -> Any:
    """Adds the flag for the time that conversations depend on."""
    return click.option(
        "--now",
        type=click.DateTime(("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S")),
        metavar="TIME",
        help="Date for the chat template, e.g. 2026-01-31. Default: the start of the command; a "
        "resumed job keeps its date.",
    )(command)


def under(heading: str, command: Any) -> Any:
    """Puts the flag that was added to a command last under a heading."""
    command.__click_params__[-1].heading = heading
    return command


class Commands(click.Group):
    """The group of commands, which reports wrong use in one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            click.echo(f"flexgen-jax: {error.format_message()} (see --help)", err=True)
            sys.exit(2)
        except (UserError, OSError, MemoryError) as error:
            click.echo(f"flexgen-jax: {error or type(error).__name__}", err=True)
            sys.exit(2)
        except StageError as error:
            click.echo(f"flexgen-jax: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt as error:
            click.echo(MESSAGE, err=True)
            sys.exit(TERMINATED if isinstance(error, Terminated) else INTERRUPTED)


def set_loudness(is_quiet: bool, is_verbose: bool) -> None:
    """Sets the log level. Panics of Rust libraries print a backtrace only if verbose."""
    if not is_verbose:
        os.environ["RUST_BACKTRACE"] = "0"
    if is_quiet and is_verbose:
        raise UserError("--quiet and --verbose cannot be combined")
    if is_quiet or is_verbose:
        logging.getLogger("flexgen_jax").setLevel(logging.WARNING if is_quiet else logging.DEBUG)


def read_flag_defaults(group: click.Group) -> dict[str, Any]:
    """Returns defaults of flags by command, from ~/.config/flexgen_jax.toml or the file that
    `CONFIG` names; raises `UserError` that names what no command knows.

    Entries at the file's top are for all commands that have such a flag, those in a table such as
    [generate] or [eval.perplexity] for one command.
    """
    named = os.environ.get(CONFIG)
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = Path(named).expanduser() if named else folder / "flexgen_jax.toml"
    if not path.is_file():
        if named:
            raise UserError(f"the file {path} of {CONFIG} does not exist")
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for_all = {key: value for key, value in content.items() if key not in tables}
    try:
        known_flags = set(_all_flags(group))
        unknown = [key for key in for_all if _flag(key) not in known_flags]
        if unknown:
            raise UserError(
                f"{unknown[0]!r} is not a flag of any command; see `flexgen-jax COMMAND --help`"
            )
        return _defaults(group, tables, for_all)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _defaults(
    command: click.Command, entries: dict[str, Any], for_all: dict[str, Any]
) -> dict[str, Any]:
    """Returns the defaults of a command, or by name those of a group's commands."""
    if isinstance(command, click.Group):
        unknown = sorted(set(entries) - set(command.commands))
        if unknown:
            raise UserError(f"[{unknown[0]}] is not a command; see `flexgen-jax --help`")
        return {
            name: _defaults(child, entries.get(name, {}), for_all)
            for name, child in command.commands.items()
        }
    flags = _flags(command)
    unknown = [key for key in entries if _flag(key) not in flags]
    if unknown:
        raise UserError(f"[{command.name}] has {unknown[0]!r}, which is not a flag of that command")
    values = {**for_all, **entries}
    return {flags[_flag(key)]: value for key, value in values.items() if _flag(key) in flags}


def _flag(key: str) -> str:
    return key.replace("_", "-")


def _flags(command: click.Command) -> dict[str, str]:
    """Returns the names of a command's parameters by their flags, without dashes."""
    return {
        flag.lstrip("-"): str(param.name)
        for param in command.params
        if isinstance(param, click.Option)
        for flag in param.opts
        if flag.startswith("--")
    }


def _all_flags(command: click.Command) -> Iterator[str]:
    yield from _flags(command)
    for child in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _all_flags(child)
