"""`flexgen-jax convert`: a .bin checkpoint to safetensors."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
def convert(source: Path, destination: Path) -> None:
    """Convert the .bin checkpoint in folder SOURCE to safetensors in folder DESTINATION.

    Needs PyTorch, whose restricted loader refuses anything but tensors.
    """
    from flexgen_jax.models.convert import convert_folder

    written = convert_folder(source, destination)
    click.echo(f"wrote {len(written)} file(s) to {destination}")
