"""The command line: parses flags, calls the library and prints. Wrong use gives one line and exit
status 2."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexgen_jax import __version__
from flexgen_jax.cli.options import (
    model_options,
    open_llm,
    plan_options,
    plan_policy,
    policy_options,
)
from flexgen_jax.errors import (
    PromptError,
    UserError,
)
from flexgen_jax.machine.caches import keep_programs

if TYPE_CHECKING:
    from flexgen_jax.engine.files import Prompt
    from flexgen_jax.engine.sampling import SamplingParams

DEMO_PROMPT = "The people of the United States"


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
        except KeyboardInterrupt:
            click.echo(
                "flexgen-jax: interrupted; texts in --output are kept, weights too", err=True
            )
            sys.exit(130)


@click.group(cls=Commands)
@click.version_option(__version__)
def main() -> None:
    """Generate text with language models larger than your GPU's memory.

    Weights, KV cache and activations are kept on the device, in host memory and on disk, and
    moved to where they are needed while the device computes.
    """
    keep_programs(os.environ)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show every text


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--json",
        "json_file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the results to FILE as JSON.",
        metavar="FILE",
    )(command)


def check_json(path: Path | None, flag: str = "--json") -> None:
    """Raises `UserError` for a file that cannot be written, before the work is done."""
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {flag} {path}; choose another file")


def write_json(path: Path | None, content: Any) -> None:
    if path is None:
        return
    path = path.resolve() if path.is_file() else path  # a symbolic link stays one
    # Written whole or not at all, unless it is a pipe, a device, or in a folder of somebody else's.
    is_whole = (path.is_file() or not path.exists()) and os.access(path.parent, os.W_OK)
    part = path.with_name(path.name + ".part") if is_whole else path
    try:
        part.write_text(json.dumps(content, indent=2) + "\n")
        if is_whole:
            part.replace(path)
    except OSError as error:
        if is_whole:
            part.unlink(missing_ok=True)
        raise UserError(f"cannot write --json {path}: {error.strerror or error}") from None


@main.command()
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
@click.option("--max-tokens", default=64, show_default=True, help="New tokens a prompt.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", default=0, show_default=True, help="Sample from the K likeliest; 0: all.")
@click.option("--top-p", default=1.0, show_default=True, help="Sample from this much probability.")
@click.option("--stop", multiple=True, help="End a text at this string; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@json_option
@model_options
@policy_options
def generate(
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    output: Path | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stop: tuple[str, ...],
    ignore_eos: bool,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Continue each of PROMPTS and print the text.

    Without --model, a small OPT model that comes with this package is used. For long runs give
    --output: the same command goes on where it was broken off.
    """
    from flexgen_jax.engine.files import Prompt, read_prompts
    from flexgen_jax.engine.sampling import SamplingParams

    given = [Prompt(text, f"PROMPTS, number {n}") for n, text in enumerate(prompts, 1)]
    if prompts_file is not None:
        given += read_prompts(prompts_file)
    elif not given:
        given = [Prompt(DEMO_PROMPT, "")]
    try:
        params = SamplingParams(
            max_tokens, temperature, top_k, top_p, stop, options["seed"], ignore_eos
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    check_json(json_file)
    if output is not None and json_file is not None and output.resolve() == json_file.resolve():
        raise UserError(f"--output and --json are both {output}; choose another file for one")
    results, report = run_prompts(given, params, output, options)
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
    given: Sequence[Prompt], params: SamplingParams, output: Path | None, options: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the results of all prompts and the report of the run.

    Some prompts may be finished in `output` already; if all are, there is no run and the report is
    empty.
    """
    from flexgen_jax.engine.files import OutputFile, as_json
    from flexgen_jax.models.checkpoint import digest

    texts = [prompt.text for prompt in given]
    with ExitStack() as stack:
        llm = stack.enter_context(open_llm(default_batches=len(texts), **options))
        more: dict[str, Any] = {}
        if output is not None:
            run = digest(llm.fingerprint, params)
            file = stack.enter_context(closing(OutputFile(output, run, texts)))
            if file.finished:
                here = f"{len(file.finished)} of {len(texts)} texts"
                click.echo(f"flexgen-jax: {here} are in {output} already", err=True)
            if len(file.finished) == len(texts):
                return file.results(), {}
            more = {"skip": frozenset(file.finished), "on_output": file.write}
        try:
            results = llm.generate(texts, params, **more)
            made = [as_json(result) for result in results] if output is None else file.results()
            return made, llm.report()
        except PromptError as error:
            places = "; ".join(given[index].where for index in error.indices[:5])
            etc = ", ..." if len(error.indices) > 5 else ""
            raise UserError(f"{error} ({places}{etc})") from None


@main.command()
@click.option("--prompt-len", default=128, show_default=True, help="Tokens in each prompt.")
@click.option("--gen-len", default=32, show_default=True, help="Tokens generated for each.")
@click.option(
    "--num-sequences", type=click.IntRange(1), help="How many prompts; default: one block's."
)
@click.option(
    "--copies",
    is_flag=True,
    help="On a CPU, keep the device's and the host's memory apart and copy between them, as with a "
    "GPU.",
)
@click.option("--breakdown", is_flag=True, help="Print where the time went: computing and I/O.")
@click.option(
    "--warm-up",
    is_flag=True,
    help="Run twice and count the second time: the first touch of fresh memory can be slow.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every transfer and computation to FILE; open it at https://ui.perfetto.dev.",
    metavar="FILE",
)
@json_option
@model_options
@policy_options
def bench(
    prompt_len: int,
    gen_len: int,
    num_sequences: int | None,
    copies: bool,
    breakdown: bool,
    warm_up: bool,
    trace: Path | None,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Measure generation on random prompts: speed, bytes moved, peak memory.

    Compilation and the placing of the weights are done first and not counted.
    """
    from flexgen_jax.cli.bench import bench_summary, breakdown_table, run_bench

    check_json(json_file)
    options |= {"unified": False if copies else None, "trace": trace}
    with open_llm(default_batches=num_sequences or 1, **options) as llm:
        report = run_bench(llm, prompt_len, gen_len, num_sequences, options["seed"], warm_up)
        click.echo(bench_summary(report))
        if breakdown:
            click.echo("\n" + breakdown_table(report))
        write_json(json_file, report)


@main.command()
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="For models of this type; auto: bfloat16 on a CPU, float16 on a GPU.",
)
@click.option(
    "--offload-dir",
    type=click.Path(path_type=Path),
    help="Folder on the disk to measure; default: the one that runs use.",
)
@click.option("--progress/--no-progress", default=None, help="Show a progress bar.")
@json_option
def profile(
    dtype: str, offload_dir: Path | None, progress: bool | None, json_file: Path | None
) -> None:
    """Measure this machine: links, memory, products, attention, fixed costs.

    Takes one to three minutes. The result is kept and used by `plan` and by --policy auto,
    unless the machine was too busy for it to be trusted.
    """
    from flexgen_jax.cli.plan import profile_text
    from flexgen_jax.machine.profiles import measured_profile, set_up
    from flexgen_jax.progress import Progress

    check_json(json_file)
    unified, folder = set_up(offload_dir)
    shown = Progress(sys.stderr.isatty() if progress is None else progress)
    narrow = "bfloat16" if unified else "float16"  # the default dtype of computation
    kind = narrow if dtype == "auto" else dtype
    found = measured_profile(kind, folder, unified, shown)
    click.echo(profile_text(found))
    write_json(json_file, json.loads(found.to_json()))


@main.command()
@plan_options
@json_option
@model_options
@policy_options
def plan(
    model: str | None,
    hardware: str | None,
    prompt_len: int,
    gen_len: int,
    num_sequences: int | None,
    max_latency: float | None,
    min_throughput: float | None,
    allow_compression: bool,
    allow_sparsity: float | None,
    latency_curve: Path | None,
    json_file: Path | None,
    dtype: str,
    device_memory: str | None,
    host_memory: str | None,
    disk_space: str | None,
    offload_dir: Path | None,
    progress: bool | None,
    **options: Any,
) -> None:
    """Find the policy that generates fastest, and predict what it will do.

    Flags that place or shape something fix the policy, and only its prediction is made.
    """
    from flexgen_jax.cli import plan
    from flexgen_jax.policy.policy import Workload
    from flexgen_jax.progress import Progress

    check_json(json_file)
    check_json(latency_curve, "--latency-curve")
    base, given, choices = plan_policy(allow_compression, allow_sparsity, options)
    workload = Workload(prompt_len, gen_len, num_sequences or 0)
    problem = plan.make_problem(
        model,
        hardware,
        dtype,
        (device_memory, host_memory, disk_space),
        offload_dir,
        workload,
        base,
        choices,
        Progress(sys.stderr.isatty() if progress is None else progress),
    )
    problem = replace(problem, max_latency=max_latency, min_throughput=min_throughput)
    plans = plan.made_plans(problem, given)
    ideas = plan.hints(problem) if given is None else []
    click.echo(plan.plan_text(problem, plans, ideas))
    if latency_curve is not None:
        click.echo(plan.curve_text(plan.draw_curve(problem, latency_curve)))
    write_json(json_file, plan.plan_json(problem, plans, ideas))


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
def convert(source: Path, destination: Path) -> None:
    """Convert the .bin checkpoint in folder SOURCE to safetensors in folder DESTINATION.

    Needs PyTorch, whose restricted loader refuses anything but tensors.
    """
    from flexgen_jax.models.convert import convert_folder

    written = convert_folder(source, destination)
    click.echo(f"wrote {len(written)} file(s) to {destination}")
