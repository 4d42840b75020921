"""`flexgen-jax eval`: how good a model is, by perplexity or by tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flexgen_jax.cli.commands import Command
from flexgen_jax.cli.engine_flags import engine_options, open_llm
from flexgen_jax.cli.flags import model_options, policy_options
from flexgen_jax.cli.json_files import check_json, json_option, write_json
from flexgen_jax.errors import UserError


@click.group("eval")
def evaluate() -> None:
    """Measure a model's quality, with any placement and precision."""


@evaluate.command(cls=Command)
@click.option(
    "--file",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Text file.",
)
@click.option(
    "--window",
    type=int,
    metavar="TOKENS",
    help="Tokens per window. Default: the model's context and one more, which is only scored.",
)
@click.option(
    "--stride",
    type=int,
    metavar="TOKENS",
    help="Distance between windows; each token has at least WINDOW - STRIDE tokens of context. "
    "Default: half a window.",
)
@json_option
@model_options
@policy_options
def perplexity(
    source: Path, window: int | None, stride: int | None, json_file: Path | None, **flags: Any
) -> None:
    """Measure the perplexity of a text in sliding windows."""
    from flexgen_jax.evaluation.perplexity import perplexity
    from flexgen_jax.requests.files import read_text

    check_json(json_file)
    text = read_text(source, "--file")
    with open_llm(engine_options(flags, default_batches=64)) as llm:
        measured = perplexity(llm, llm.encode(text), window, stride)
        report = llm.report()
    click.echo(f"perplexity {measured.value:.4f} over {measured.tokens} tokens")
    write_json(
        json_file,
        {"perplexity": measured.value, "tokens": measured.tokens, "report": report},
    )


@evaluate.command("lm-eval", cls=Command)
@click.option("--tasks", required=True, help="Names of tasks, separated by commas.")
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder with more tasks.",
)
@click.option(
    "--num-fewshot", type=int, metavar="N", help="Number of examples before each question."
)
@click.option("--limit", type=float, metavar="N", help="Use only N documents of each task.")
@click.option(
    "--use-cache",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Cache answers here; an interrupted evaluation resumes from them.",
)
@click.option("--chat", is_flag=True, help="Apply the model's chat template.")
@json_option
@model_options
@policy_options
def lm_eval(
    tasks: str,
    include_path: Path | None,
    num_fewshot: int | None,
    limit: float | None,
    use_cache: Path | None,
    chat: bool,
    json_file: Path | None,
    **flags: Any,
) -> None:
    """Run tasks of EleutherAI's lm-evaluation-harness (pip install lm-eval)."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.utils import make_table

        from flexgen_jax.evaluation.harness import CheckedTasks, FlexGenLM
    except ImportError as error:
        raise UserError(f"this needs lm-evaluation-harness: {error}; pip install lm-eval") from None
    check_json(json_file)
    with open_llm(engine_options(flags, default_batches=64)) as llm:
        evaluated = simple_evaluate(
            model=FlexGenLM(llm),
            tasks=[name.strip() for name in tasks.split(",")],
            task_manager=CheckedTasks(include_path=str(include_path) if include_path else None),
            num_fewshot=num_fewshot,
            limit=limit,
            use_cache=str(use_cache) if use_cache else None,
            apply_chat_template=chat,
        )
    click.echo(make_table(evaluated))
    write_json(json_file, {"results": evaluated["results"]})
