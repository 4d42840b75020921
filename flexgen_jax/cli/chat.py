"""`flexgen-jax chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexgen_jax.cli.commands import Command, now_option
from flexgen_jax.cli.engine_flags import engine_options, open_llm
from flexgen_jax.cli.flags import model_options, policy_options, sampling_options, sampling_params
from flexgen_jax.cli.generate import parse_variables
from flexgen_jax.errors import PromptError, UserError

if TYPE_CHECKING:
    from flexgen_jax.engine.llm import LLM
    from flexgen_jax.requests.sampling import SamplingParams

MAX_TOKENS = 1024
"""New tokens of an answer where neither the command nor the model's folder says how many."""

ANSWER = "0"
"""The id of the running request."""

HELP = """\
/system TEXT   say what the model is to be; without TEXT, take that back
/reset         begin a new conversation
/save FILE     write the conversation to FILE, for --load
/help          this list
/exit          end, as Ctrl-D does
A line that ends with \\ goes on in the next one; lines between two of \"\"\" are one message.
Ctrl-C stops an answer."""


@dataclass
class Conversation:
    """The messages so far, and the settings for rendering and sampling."""

    llm: LLM
    params: SamplingParams
    variables: dict[str, Any]
    now: datetime | None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Prints the answer to a message. A message that fails is removed."""
        from flexgen_jax.cli.showing import interrupting, show_text
        from flexgen_jax.models.chat import ChatOptions

        conversation = [*self.messages, {"role": "user", "content": text}]
        options = ChatOptions(variables=self.variables, now=self.now or datetime.now())
        _, ids = self.llm.chat_prompt(conversation, options)
        began = time.perf_counter()
        with interrupting(lambda: self.llm.cancel(ANSWER)):
            try:
                shown, _ = show_text(self.llm, ids, self.params, has_reasoning=True)
            except PromptError:
                max_tokens = self.llm.config.max_positions - 1
                raise UserError(
                    f"the conversation has {len(ids)} tokens, but the model's context has room "
                    f"for only {max_tokens}; start a new one with /reset"
                ) from None
        if not shown.tokens:
            return
        answer = {"role": "assistant", "content": shown.content}
        if shown.reasoning:
            answer["reasoning_content"] = shown.reasoning
        self.messages = [*conversation, answer]
        if sys.stderr.isatty():
            seconds = time.perf_counter() - shown.first_at
            speed = f", {(shown.tokens - 1) / seconds:.1f} token/s" if shown.tokens > 1 else ""
            summary = (
                f"{shown.tokens} tokens, the first after {shown.first_at - began:.1f} s{speed}"
            )
            click.echo(click.style(summary, dim=True), err=True)

    def tell(self, system: str) -> None:
        """Sets the system message, or takes it back."""
        other_messages = [message for message in self.messages if message["role"] != "system"]
        self.messages = (
            [{"role": "system", "content": system}, *other_messages] if system else other_messages
        )

    def save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs a file name")
        path = Path(name).expanduser()
        path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        click.echo(f"flexgen-jax: {len(self.messages)} messages saved to {path}", err=True)

    def command(self, line: str) -> bool:
        """Runs a slash command; returns False to end the conversation."""
        name, _, argument = line[1:].partition(" ")
        match name:
            case "exit" | "quit" | "bye":
                return False
            case "system":
                self.tell(argument.strip())
            case "reset":
                self.messages = [m for m in self.messages if m["role"] == "system"]
            case "save":
                self.save(argument.strip())
            case _:
                if name != "help":
                    click.echo(f"flexgen-jax: unknown command /{name}", err=True)
                click.echo(HELP, err=True)
        return True


@click.command(cls=Command)
@click.option("--system", default="", help="System message of every conversation.")
@click.option(
    "--load",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Continue a conversation that was saved with /save.",
)
@click.option(
    "--chat-option",
    "chat_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable for the chat template, e.g. enable_thinking=false; VALUE is JSON or text. May "
    "be repeated.",
)
@now_option
@click.option(
    "--max-tokens",
    type=int,
    help=f"Maximum tokens per answer. Default: the model's default, or {MAX_TOKENS}.",
)
@sampling_options
@click.argument("model_name", metavar="[MODEL]", required=False)
@model_options
@policy_options
def chat(
    model_name: str | None,
    system: str,
    load: Path | None,
    chat_options: tuple[str, ...],
    now: datetime | None,
    max_tokens: int | None,
    **flags: Any,
) -> None:
    """Chat with a model in the terminal.

    The model needs a chat template, which the packaged toy model lacks: set --model, for example
    to HuggingFaceTB/SmolLM2-135M-Instruct. /help lists the commands.
    """

    if model_name is not None:
        if flags["model"] is not None:
            raise UserError("give the model either as MODEL or as --model, not both")
        flags["model"] = model_name
    variables = parse_variables(chat_options)
    messages = [] if load is None else _loaded(load)
    params = sampling_params(flags, max_tokens=max_tokens, seed=flags["seed"])
    options = engine_options(flags, default_batches=1, shows_tokens=True)
    with open_llm(options) as llm:
        try:
            llm.chat_prompt([{"role": "user", "content": "Hello"}])
        except UserError as error:
            raise UserError(f"{error}; choose another model with --model") from None
        if params.max_tokens is None and llm.sampling_defaults.max_tokens is None:
            params = replace(params, max_tokens=MAX_TOKENS)
        conversation = Conversation(llm, params, variables, now, messages)
        if system:
            conversation.tell(system)
        if sys.stdin.isatty():
            click.echo(f"{Path(llm.name).name}: /help lists commands, Ctrl-D quits", err=True)
        _talk(conversation)


def _talk(conversation: Conversation) -> None:
    """Reads messages and commands, and answers, until there are no more. At a terminal, Ctrl-C ends
    what was being typed or answered."""
    if sys.stdin.isatty():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            text = _read_message()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo(err=True)
            continue
        if text is None:
            return
        try:
            if text.startswith("/"):
                if not conversation.command(text):
                    return
            elif text.strip():
                conversation.ask(text)
        except (UserError, OSError) as error:
            click.echo(f"flexgen-jax: {error}", err=True)
        except KeyboardInterrupt:  # the message was removed
            click.echo(err=True)


def _read_message() -> str | None:
    """Reads a message, which may have several lines; None at the end of the input."""
    line = _read_line("> ")
    if line is None:
        return None
    if line.strip() == '"""':
        lines = list[str]()
        while (line := _read_line(". ")) is not None and line.strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        next_line = _read_line(". ")
        lines[-1] = lines[-1][:-1]
        if next_line is None:
            break
        lines.append(next_line)
    return "\n".join(lines)


def _read_line(mark: str) -> str | None:
    """Reads a line, with a mark before it in a terminal; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    import readline  # noqa: F401  (gives `input` a history, and keys to edit with)

    try:
        return input(mark)
    except EOFError:
        click.echo(err=True)
        return None


def _loaded(path: Path) -> list[dict[str, Any]]:
    """Reads a conversation's messages."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--load {path}: {error}") from None
    is_good = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not is_good:
        raise UserError(f'--load {path}: must be a list of messages with "role" and "content"')
    return list(messages)
