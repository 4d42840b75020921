"""`flexgen-jax generate`: prompts in, texts out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexgen_jax.cli.flags import engine_options, model_options, open_llm, policy_options
from flexgen_jax.cli.json_files import check_json, json_option, write_json
from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.errors import PromptError, UserError

if TYPE_CHECKING:
    from flexgen_jax.engine.files import Prompt
    from flexgen_jax.engine.sampling import SamplingParams

DEMO_PROMPT = "The people of the United States"


@click.command()
@click.argument("prompts", nargs=-1)
@click.option(
    "--prompts-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Read prompts from FILE, one a line, or of FILE.jsonl the "prompt" of each line; "-" is '
    "standard input.",
    metavar="FILE",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write each text to FILE as soon as it is finished, a line of JSON each, and print none. "
    "If FILE is there already, go on with the prompts that are not in it.",
    metavar="FILE",
)
@click.option(
    "--prefix",
    "prefix_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Put the text of FILE before every prompt, e.g. instructions and examples; it is computed "
    "once for all.",
)
@click.option(
    "--chat",
    "is_chat",
    is_flag=True,
    help="Each prompt is a user's message; answer it, by the model's chat template.",
)
@click.option("--max-tokens", default=64, show_default=True, help="New tokens a prompt.")
@click.option(
    "--temperature",
    type=float,
    help="0 takes the likeliest token. Default: as the model's folder asks for, else 0.",
)
@click.option("--top-k", type=int, help="Sample from the K likeliest; 0: all. Default: likewise.")
@click.option("--top-p", type=float, help="Sample from this much probability. Default: likewise.")
@click.option("--stop", multiple=True, help="End a text at this string; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@json_option
@model_options
@policy_options
def generate(
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    prefix_file: Path | None,
    output: Path | None,
    is_chat: bool,
    max_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    json_file: Path | None,
    **flags: Any,
) -> None:
    """Continue each of PROMPTS and print the text.

    Without --model, a small OPT model that comes with this package is used. For long runs give
    --output: the same command goes on where it was broken off.
    """
    from flexgen_jax.engine.files import Prompt, read_prompts, read_text
    from flexgen_jax.engine.sampling import SamplingParams

    given = [Prompt(text, f"PROMPTS, number {n}") for n, text in enumerate(prompts, 1)]
    if prompts_file is not None:
        given += read_prompts(prompts_file)
    elif not given:
        given = [Prompt(DEMO_PROMPT, "")]
    prefix = "" if prefix_file is None else read_text(prefix_file, "--prefix")
    given = [Prompt(prefix + prompt.text, prompt.where) for prompt in given]
    try:
        params = SamplingParams(
            max_tokens, temperature, top_k, top_p, stop, flags["seed"], ignore_eos
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    check_json(json_file)
    if output is not None and json_file is not None and output.resolve() == json_file.resolve():
        raise UserError(f"--output and --json are both {output}; choose another file for one")
    options = engine_options(flags, default_batches=len(given))
    results, report = run_prompts(given, prefix, params, output, options, is_chat)
    try:  # neither a full disk nor a reader that goes away may cost the other
        write_json(json_file, {"results": results, "report": report})
    finally:
        for result in results if output is None else ():
            click.echo(f"{result['prompt']}{result['text']}")
            if len(results) > 1:
                click.echo("---")
    if report:
        click.echo(
            f"{report['num_tokens']} tokens in {report['total_s']:.2f} s, "
            f"{report['generation_throughput']:.1f} token/s",
            err=True,
        )


def run_prompts(
    given: Sequence[Prompt],
    prefix: str,
    params: SamplingParams,
    output: Path | None,
    options: EngineOptions,
    is_chat: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the results of all prompts, which begin with `prefix`, and the report of the run.

    Some prompts may be finished in `output` already; if all are, there is no run and the report is
    empty.
    """
    from flexgen_jax.engine.files import OutputFile, as_json
    from flexgen_jax.models.checkpoint import digest

    texts = [prompt.text for prompt in given]
    with ExitStack() as stack:
        llm = stack.enter_context(open_llm(options))
        more: dict[str, Any] = {}
        if output is not None:
            run = digest(llm.fingerprint, llm.resolved(params), *(["chat"] if is_chat else []))
            file = stack.enter_context(closing(OutputFile(output, run, texts)))
            if file.finished:
                here = f"{len(file.finished)} of {len(texts)} texts"
                click.echo(f"flexgen-jax: {here} are in {output} already", err=True)
            if len(file.finished) == len(texts):
                return file.results(), {}
            more = {"skip": frozenset(file.finished), "on_output": file.write}
        try:
            if is_chat:
                asked = [[{"role": "user", "content": text}] for text in texts]
                results = llm.chat(asked, params, **more)
            else:
                results = llm.generate(texts, params, prefix=prefix or None, **more)
            made = [as_json(result) for result in results] if output is None else file.results()
            return made, llm.report()
        except PromptError as error:
            places = "; ".join(given[index].where for index in error.indices[:5])
            etc = ", ..." if len(error.indices) > 5 else ""
            raise UserError(f"{error} ({places}{etc})") from None
