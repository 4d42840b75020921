"""`flexgen-jax batch`: a file of requests in, a file of results out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from flexgen_jax.cli.commands import Command, end, now_option, without_extra
from flexgen_jax.cli.engine_flags import engine_options, open_llm
from flexgen_jax.cli.flags import model_options, policy_options
from flexgen_jax.cli.json_files import check_json, json_option, write_json
from flexgen_jax.engine.options import EngineOptions

if TYPE_CHECKING:
    from flexgen_jax.engine.llm import LLM
    from flexgen_jax.jobs.job import Job
    from flexgen_jax.jobs.options import JobOptions, Summary


@click.command(cls=Command)
@click.option(
    "-i",
    "--input",
    "source",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    required=True,
    metavar="FILE",
    help='Requests, one JSON object per line, in OpenAI\'s batch format or as {"id": "1", "prompt":'
    ' "..."}. "-": standard input.',
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Results, one per line, in the order of completion. If FILE exists, the job resumes.",
)
@click.option("--ordered", is_flag=True, help="Sort the results into the input's order at the end.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Run at most N requests.")
@click.option(
    "--journal-interval",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to checkpoint unfinished requests; a killed job loses at most this much work.",
)
@click.option(
    "--retry-errors",
    is_flag=True,
    help="Run failed requests again.",
)
@click.option(
    "--max-tokens",
    "--chat-tokens",
    "chat_tokens",
    type=click.IntRange(1),
    help="New tokens of chat requests without a limit. Default: the model's default, or 512.",
)
@now_option
@click.option(
    "--ray",
    "ray_address",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Run copies of the model on a Ray cluster, one per GPU. ADDRESS as in ray.init; default: "
    "this machine's cluster.",
)
@click.option(
    "--progress-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the progress to FILE as JSON, every two seconds.",
)
@click.option(
    "--watch",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve a page with the progress to this machine; 0: any free port.",
)
@json_option
@model_options
@policy_options
def batch(
    source: Path,
    output: Path,
    ordered: bool,
    limit: int | None,
    journal_interval: float,
    retry_errors: bool,
    chat_tokens: int | None,
    now: datetime | None,
    ray_address: str | None,
    progress_file: Path | None,
    watch: int | None,
    json_file: Path | None,
    **flags: Any,
) -> None:
    """Run a file of requests.

    Every request gets one record, with an error if it cannot run. An interrupted job resumes with
    the same command. The exit status is 1 if every request failed.
    """
    from flexgen_jax.jobs.options import JobOptions

    check_json(json_file, results=output)
    check_json(progress_file, "--progress-file", output)
    options = JobOptions(
        source=source,
        results=output,
        seed=flags["seed"],
        chat_tokens=chat_tokens,
        limit=limit,
        journal_s=journal_interval,
        is_ordered=ordered,
        progress_file=progress_file,
        retries_errors=retry_errors,
        now=now,
    )
    signal.signal(signal.SIGTERM, end)
    engine = engine_options(flags, default_batches=64)
    if ray_address is None:
        with open_llm(engine) as llm:
            summary, report = run_here(llm, options, watch)
    else:
        summary, report = run_on_ray(ray_address, engine, options, watch), {}
    tell(summary, report, options.results, json_file)


def tell(
    summary: Summary, report: Mapping[str, Any], results: Path, json_file: Path | None
) -> None:
    """Prints a job's summary and writes it as JSON. Exits with status 1 if every request failed."""
    write_json(json_file, {"summary": vars(summary), "report": report})
    errors = f" ({summary.errors} error{'s' * (summary.errors > 1)})" if summary.errors else ""
    click.echo(
        f"{summary.finished} of {summary.total} requests written to {results}{errors}; "
        f"{summary.tokens} tokens in {summary.seconds:.1f} s, "
        f"{summary.tokens / max(summary.seconds, 1e-9):.1f} token/s",
        err=True,
    )
    if report:
        click.echo(f"flexgen-jax: {account(report)}", err=True)
    if summary.commonest is not None:
        error_text, count = summary.commonest
        click.echo(
            f"flexgen-jax: {count} of {summary.errors} errors: {error_text}. Use --retry-errors to "
            "run failed requests again, or append corrected requests to the input",
            err=True,
        )
    if summary.errors and summary.errors == summary.total:
        sys.exit(1)


def run_here(
    llm: LLM, options: JobOptions, watch: int | None = None
) -> tuple[Summary, Mapping[str, Any]]:
    """Runs a job in this process; returns its summary, and the engine's report on its last run.
    watch: the port of a page that shows it, None for no page."""
    from flexgen_jax.jobs.job import Job

    job = Job(llm, options)
    page = Page(watch, llm.name, lambda: llm.policy.in_words if llm.policy else None)
    with watching(job, options, page):
        summary = replace(job.run(), notes=llm.notes)
    return summary, llm.report() if summary.tokens else {}


def run_on_ray(
    address: str, engine: EngineOptions, options: JobOptions, watch: int | None
) -> Summary:
    """Runs a job on the machines of a Ray cluster; watch: as for `run_here`."""
    from flexgen_jax.jobs.fleet import Fleet
    from flexgen_jax.jobs.job import Job
    from flexgen_jax.jobs.ray_crew import RayCrew
    from flexgen_jax.models.loading import resolve_dtype, shape_of

    crew = RayCrew(address, lambda message: click.echo(message, err=True))
    name = None if engine.model is None else str(engine.model)
    dtype = resolve_dtype(engine.dtype, shape_of(name), on_cpu=not crew.has_gpus)
    engine = replace(engine, dtype=dtype, progress=False)
    crew.options = engine.arguments
    with open_llm(replace(engine, stages=1, coordinator=None)) as llm:  # it computes nothing
        job = Job(llm, options, Fleet(crew))
        with watching(job, options, Page(watch, llm.name, lambda: None)):
            return replace(job.run(), notes=llm.notes)


class Page(NamedTuple):
    """A page with a job's progress: its port (None: no page), and the model's name and policy."""

    port: int | None
    model: str
    policy: Callable[[], str | None]


def watching(job: Job, options: JobOptions, page: Page) -> AbstractContextManager[object]:
    """Serves a page that shows a job, if there is to be one."""
    if page.port is None:
        return nullcontext()
    try:
        from flexgen_jax.server.watch import Watch, watched
    except ImportError as error:
        raise without_extra(error, "serve") from None
    watch = Watch(page.model, str(options.results), job.progress, page.policy)
    return watched(watch.app(), page.port)


def account(report: Mapping[str, Any]) -> str:
    """Returns a line on what the engine's last run did, from `LLM.report`."""
    share = report["prompt_tokens"] / max(report["padded_prompt_tokens"], 1)
    moved = ", ".join(
        f"{name.replace('_', ' ')} {count / 1e9:.2f} GB"
        for name, count in report["bytes"].items()
        if count >= 1e7
    )
    predicted = report["predicted"]
    times = f"{report['total_s']:.1f} s"
    if predicted is not None:
        times += f", predicted {predicted['total_s']:.1f} s"
    return f"{times}; padding: {1 - share:.0%} of prompt tokens; moved: {moved or 'nothing'}"
