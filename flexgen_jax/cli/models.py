"""`flexgen-jax models`: the families and known shapes."""

from __future__ import annotations

from pathlib import Path

import click

from flexgen_jax.cli.json_files import check_json, json_option, write_json
from flexgen_jax.units import scaled


@click.command()
@json_option
def models(json_file: Path | None) -> None:
    """List the model families, and the shapes known to `plan` and --dummy-weights."""
    from flexgen_jax.models.config import ModelConfig
    from flexgen_jax.models.families import FAMILIES, read_config
    from flexgen_jax.models.shapes import SHAPES, raw_shape
    from flexgen_jax.models.spec_of_config import model_spec

    check_json(json_file)
    of_family: dict[str, list[tuple[str, ModelConfig]]] = {family: [] for family in FAMILIES}
    for name in SHAPES:
        config = read_config(raw_shape(name))
        of_family[config.model_type].append((name, config))
    rows = []
    click.echo("Families (model_type in config.json), and known shapes:\n")
    for family, members in of_family.items():
        click.echo(family if members else f"{family} (no shape is known by name)")
        for name, config in members:
            spec = model_spec(config)
            active = sum(layer.active_size for layer in spec.decoders) + spec.head.large_size
            active_note = f", {_count(active)} per token" if config.has_experts else ""
            click.echo(
                f"  {name:38} {_count(spec.num_parameters):>6}{active_note}, "
                f"{config.num_layers} layers, "
                f"context {config.max_positions}"
            )
            rows.append(
                {
                    "name": name,
                    "family": family,
                    "parameters": spec.num_parameters,
                    "layers": config.num_layers,
                    "context": config.max_positions,
                }
            )
    write_json(json_file, {"families": list(FAMILIES), "shapes": rows})


def _count(parameters: float) -> str:
    """Returns a number of parameters as the field writes it, such as 6.7B."""
    return scaled(parameters).replace(" ", "").replace("G", "B")
