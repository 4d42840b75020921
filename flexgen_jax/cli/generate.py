"""`flexgen-jax generate`: prompts in, texts out."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flexgen_jax.cli.batch import run_here, tell
from flexgen_jax.cli.commands import Command, end, now_option
from flexgen_jax.cli.engine_flags import engine_options, open_llm
from flexgen_jax.cli.flags import (
    SAMPLING,
    model_options,
    policy_options,
    sampling_options,
    sampling_params,
)
from flexgen_jax.cli.json_files import check_json, json_option, write_json
from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.errors import PromptError, UserError
from flexgen_jax.progress import logger

if TYPE_CHECKING:
    from flexgen_jax.engine.llm import LLM
    from flexgen_jax.requests.files import Prompt
    from flexgen_jax.requests.outputs import RequestOutput
    from flexgen_jax.requests.sampling import SamplingParams

MAX_TOKENS = 64
"""New tokens where neither the command nor the model's folder says how many."""

TOY = (
    "flexgen-jax: this model is a toy of 5 million parameters, which comes with the package to try "
    "it; its texts make little sense. A small real model: --model "
    "HuggingFaceTB/SmolLM2-135M-Instruct, downloaded from the Hub (0.3 GB)"
)
"""What to know about the shipped model."""

DEMO_PROMPT = "The people of the United States"


@click.command(cls=Command)
@click.argument("prompts", nargs=-1)
@click.option(
    "--prompts-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help='File with one prompt per line, or FILE.jsonl with "prompt" in each line; "-": standard '
    "input.",
    metavar="FILE",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write each result to FILE as JSON, as `batch` does, instead of printing it. If FILE "
    "exists, the run resumes.",
    metavar="FILE",
)
@click.option(
    "--prefix",
    "prefix_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File with a text to put before every prompt, e.g. instructions; it is computed once.",
)
@click.option(
    "--chat",
    "is_chat",
    is_flag=True,
    help="Treat each prompt as a user's message, and apply the model's chat template.",
)
@click.option(
    "--chat-option",
    "chat_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="With --chat, a variable for the template, e.g. enable_thinking=false; VALUE is JSON or "
    "text. May be repeated.",
)
@now_option
@click.option(
    "--max-tokens",
    type=int,
    help="New tokens per prompt. Default: the model's default, or 64.",
)
@sampling_options
@click.option("--stop", multiple=True, help="Stop at this string; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Continue after the end token.")
@click.option(
    "--echo/--no-echo",
    "echoes",
    default=None,
    help="Print the prompt before the completion; default: without --chat.",
)
@json_option
@model_options
@policy_options
def generate(
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    prefix_file: Path | None,
    output: Path | None,
    is_chat: bool,
    chat_options: tuple[str, ...],
    now: datetime | None,
    max_tokens: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    echoes: bool | None,
    json_file: Path | None,
    **flags: Any,
) -> None:
    """Generate a completion for each of PROMPTS, or for a built-in prompt.

    Without --model, a toy model of 5 million parameters is used. Long runs should set --output;
    the same command then resumes an interrupted run.
    """
    from flexgen_jax.requests.files import Prompt, read_prompts, read_text

    all_prompts = [Prompt(text, f"PROMPTS, number {n}") for n, text in enumerate(prompts, 1)]
    if prompts_file is not None:
        all_prompts += read_prompts(prompts_file)
    elif not all_prompts:
        all_prompts = [Prompt(DEMO_PROMPT, "")]
        click.echo(f'flexgen-jax: using a built-in prompt: "{DEMO_PROMPT}"', err=True)
    prefix = "" if prefix_file is None else read_text(prefix_file, "--prefix")
    all_prompts = [Prompt(prefix + prompt.text, prompt.where) for prompt in all_prompts]
    params = sampling_params(
        flags, max_tokens=max_tokens, stop=stop, seed=flags["seed"], ignore_eos=ignore_eos
    )
    check_json(json_file, results=output)
    chat = Chat(parse_variables(chat_options), now) if is_chat else None
    if chat is None and (chat_options or now is not None):
        raise UserError("--chat-option and --now need --chat")
    echoes = not is_chat if echoes is None else echoes
    streams = output is None and len(all_prompts) == 1 and sys.stdout.isatty()
    options = engine_options(flags, default_batches=len(all_prompts), shows_tokens=streams)
    if output is not None:
        run_job(all_prompts, params, output, options, chat, json_file)
    else:
        shows = echoes if streams else None
        results, report = run_prompts(all_prompts, prefix, params, options, chat, shows)
        print_results(all_prompts, results, report, json_file, None if streams else echoes)
    if flags["model"] is None:
        logger().info(TOY)


def print_results(
    prompts: Sequence[Prompt],
    results: Sequence[Mapping[str, Any]],
    report: Mapping[str, Any],
    json_file: Path | None,
    echoes: bool | None,
) -> None:
    """Prints completions and throughput, and writes the JSON file. echoes: whether to print the
    prompts; None prints no completions, since they were streamed. Raises `UserError` for prompts
    that could not run."""
    from flexgen_jax.requests.requests import impossible

    errors = {r["index"]: r["error"] for r in results if "error" in r}
    try:  # a full disk must not suppress the output
        write_json(json_file, {"results": results, "report": report})
    finally:
        good = [result for result in results if "error" not in result]
        for result in good if echoes is not None else ():
            text = result.get("content", result["text"])
            click.echo(f"{result['prompt']}{result['text']}" if echoes else text)
            if len(results) > 1:
                click.echo("---")
    if report:
        programs_s = report.get("compile_in_run_s", 0.0)
        seconds = max(report["total_s"] - programs_s, 1e-9)
        before = f" after {programs_s:.1f} s of compiling" if programs_s >= 0.1 else ""
        cut = sum(result["finish_reason"] == "length" for result in good)
        limits = f"; {cut} of {len(good)} reached --max-tokens" if cut else ""
        logger().info(
            f"{report['num_tokens']} tokens in {seconds:.2f} s{before}, "
            f"{report['num_tokens'] / seconds:.1f} token/s{limits}"
        )
    if errors:
        raise _impossible(prompts, impossible(errors))


class Chat(NamedTuple):
    """Variables and date for the chat template."""

    variables: Mapping[str, Any]
    now: datetime | None = None


def parse_variables(texts: Sequence[str]) -> dict[str, Any]:
    """Parses "NAME=VALUE"; raises `UserError` for other forms."""
    variables = {}
    for text in texts:
        name, is_there, value = text.partition("=")
        if not name.isidentifier() or not is_there:
            raise UserError(f"--chat-option {text}: for example enable_thinking=false")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables


def run_prompts(
    prompts: Sequence[Prompt],
    prefix: str,
    params: SamplingParams,
    options: EngineOptions,
    chat: Chat | None = None,
    shows: bool | None = None,
) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """Returns the results of all prompts, after a common `prefix`, and the report of the run. The
    result of a prompt that cannot run has "error" and "index".

    shows: None collects the results; otherwise a single completion is printed token by token, after
    its prompt if True. Raises `UserError` if no prompt can run.
    """
    from flexgen_jax.requests.files import as_json

    texts = [prompt.text for prompt in prompts]
    with open_llm(options) as llm:
        params = _with_limit(params, llm)
        try:
            results = _continued(llm, texts, prefix, params, chat, shows)
        except PromptError as error:
            raise _impossible(prompts, error) from None
        failed = [{**as_json(r), "index": int(r.id)} for r in results if r.error is not None]
        good = [_with_reasoning(llm, r, chat) for r in results if r.error is None]
        return [*good, *failed], llm.report() if good else {}


def run_job(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    output: Path,
    options: EngineOptions,
    chat: Chat | None,
    json_file: Path | None,
) -> None:
    """Runs the prompts as a job with records in `output`, sorts them at the end, and prints a
    summary."""
    from flexgen_jax.jobs.options import JobOptions

    signal.signal(signal.SIGTERM, end)
    with open_llm(options) as llm:
        params = _with_limit(params, llm)
        job = JobOptions(
            source=request_lines([prompt.text for prompt in prompts], params, chat),
            results=output,
            seed=params.seed,
            is_ordered=True,
            retries_errors=True,
            now=None if chat is None else chat.now,
        )
        summary, report = run_here(llm, job)
    tell(summary, report, output, json_file)


def request_lines(texts: Sequence[str], params: SamplingParams, chat: Chat | None) -> bytes:
    """Returns the lines of a job that asks for the prompts' texts, or for answers to them: the
    plain form of docs/batch.md, with the prompts' numbers from 1 as ids."""
    names = ("max_tokens", *(entry.name for entry in SAMPLING))
    set_fields = {
        name: getattr(params, name) for name in names if getattr(params, name) is not None
    }
    body = {**set_fields, "stop": list(params.stop), "ignore_eos": params.ignore_eos}
    if chat is not None:
        body["chat_template_kwargs"] = dict(chat.variables)
    lines = []
    for number, text in enumerate(texts, 1):
        message = {"messages": [{"role": "user", "content": text}]}
        prompt_field = {"prompt": text} if chat is None else message
        lines.append(json.dumps({"id": str(number), **prompt_field, **body}))
    return "\n".join(lines).encode() + b"\n"


def _with_limit(params: SamplingParams, llm: LLM) -> SamplingParams:
    """Returns the parameters with a number of new tokens where nobody says one."""
    if params.max_tokens is None and llm.sampling_defaults.max_tokens is None:
        return replace(params, max_tokens=MAX_TOKENS)
    return params


def _with_reasoning(llm: LLM, result: RequestOutput, chat: Chat | None) -> dict[str, Any]:
    """Returns a result as JSON; of a conversation, with the answer apart from its reasoning."""
    from flexgen_jax.requests.files import as_json

    reasoned = None if chat is None else llm.answer(result)
    if reasoned is None:
        return as_json(result)
    content = {"reasoning_content": reasoned.reasoning, "content": reasoned.content or ""}
    return {**as_json(result), **content}


def _continued(
    llm: LLM,
    texts: Sequence[str],
    prefix: str,
    params: SamplingParams,
    chat: Chat | None,
    shows: bool | None,
) -> list[RequestOutput]:
    """Continues the texts, or answers them."""
    if shows is not None:
        return [_shown(llm, texts[0], params, chat, shows)]
    if chat is None:
        return llm.generate(texts, params, prefix=prefix or None)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return llm.chat(conversations, params, chat_template_kwargs=chat.variables, now=chat.now)


def _shown(
    llm: LLM, text: str, params: SamplingParams, chat: Chat | None, echoes: bool
) -> RequestOutput:
    """Continues or answers one text, which is shown as its tokens come."""
    from flexgen_jax.cli.showing import show_text
    from flexgen_jax.models.chat import ChatOptions

    if chat is None:
        ids = llm.encode(text)
    else:
        options = ChatOptions(variables=chat.variables, now=chat.now or datetime.now())
        text, ids = llm.chat_prompt([{"role": "user", "content": text}], options)
    _, result = show_text(llm, ids, params, chat is not None, begin=text if echoes else "")
    return replace(result, prompt=text)


def _impossible(prompts: Sequence[Prompt], error: PromptError) -> UserError:
    """Returns the error of prompts that cannot be continued, with their places."""
    places = "; ".join(prompts[index].where for index in error.indices[:5])
    etc = ", ..." if len(error.indices) > 5 else ""
    return UserError(f"{error} ({places}{etc})")
