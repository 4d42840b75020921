"""`flexgen-jax convert`: a .bin checkpoint to safetensors, or one in safetensors to fewer bits."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--weight-bits",
    type=click.Choice(["8", "4"]),
    help="Quantize the weights, once for all later runs.",
)
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="TEXT",
    help="With 4 bits: a sample text. Errors are weighted by the size of each weight's input.",
)
@click.option("--progress/--no-progress", default=None, help="Show a progress bar.")
def convert(
    source: Path,
    destination: Path,
    weight_bits: str | None,
    calibrate: Path | None,
    progress: bool | None,
) -> None:
    """Convert a checkpoint from folder SOURCE to folder DESTINATION.

    Without --weight-bits, .bin files become safetensors. This needs PyTorch, whose restricted
    loader runs no code. With --weight-bits, safetensors are quantized.
    """
    if weight_bits is None:
        if calibrate is not None:
            raise click.UsageError("--calibrate needs --weight-bits 4")
        from flexgen_jax.models.convert import convert_folder

        written = convert_folder(source, destination)
        click.echo(f"wrote {len(written)} file(s) to {destination}")
        return
    from flexgen_jax.drafting.quantized_copy import quantize_folder
    from flexgen_jax.progress import Progress

    if calibrate is not None and weight_bits != "4":
        raise click.UsageError("--calibrate needs --weight-bits 4; 8 bits lose almost nothing")
    is_shown = sys.stderr.isatty() if progress is None else progress
    text = None if calibrate is None else calibrate.read_text(encoding="utf-8")
    bits_each = quantize_folder(
        source, destination, bits=int(weight_bits), text=text, progress=Progress(is_shown)
    )
    click.echo(f"wrote {destination}: {bits_each:.2f} bits per weight")
