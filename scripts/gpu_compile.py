"""Compiles the programs of a model for GPUs that need not be there, and weighs them.

    python -m venv gpu && gpu/bin/pip install '.[gpu-compile]'
    gpu/bin/python scripts/gpu_compile.py --cards t4 h100 --models facebook/opt-6.7b

For each program: seconds of compiling, kernels that a call launches (a layer's, where one program
has several), temporaries, and the bytes that the kernels read and write, beside those of arguments
and results. After each model, the largest temporaries are compared with the plan's. Layers of equal
shapes are compiled once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # only the compiler runs here
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import hlo_cost
from flexgen_jax.layers import programs
from flexgen_jax.layers.programs import Program
from flexgen_jax.layers.programs.table import Traceable
from flexgen_jax.layers.sampling import Choice
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.memory import workspace_bytes
from gpu_targets import CARDS, Card, compile_for

JOINED = 8
UNPACKING = "unpacking"
"""The program that unpacks a layer for several batches. Its results are counted with the products
of weights that are not packed."""
TAIL = 32
"""Capacity of the open KV block in tokens."""


@dataclass(frozen=True)
class Weighed:
    """A compiled program: its identity and cost; bytes but for seconds and counts."""

    card: str
    model: str
    bits: int
    rows: int
    program: str
    seconds: float
    kernels: float
    temporaries: int
    moved: float
    least: float

    @property
    def ratio(self) -> float:
        """Bytes moved over the least."""
        return self.moved / self.least


@dataclass(frozen=True)
class Workload:
    """Sequences of a batch, tokens of their prompts, and tokens in the cache of a decode step."""

    rows: int
    prompt: int
    context: int


Asked = tuple[str, Program[Any], dict[str, Any], int]
"""A program's name, its kind and shape, and the layers that it computes."""


def asked(model: Traceable, work: Workload) -> Iterator[Asked]:
    """Yields the programs that a plan may need for a batch."""
    rows, blocks = {"rows": work.rows}, (work.context,)
    yield "head", programs.head, {**rows, "choice": Choice(is_greedy=True)}, 1
    for layer, count in model.spec.decoder_kinds:
        name, at = f"layer {layer.number}", {"layer": layer, **rows}
        if not layer.attends:
            yield f"{name}: prompt", programs.mix, _mixed_prompt(layer, at, work.prompt), 1
            yield f"{name}: token", programs.mix, _mixed(layer, at, blocks), 1
            continue
        yield f"{name}: prompt", programs.prefill, {**at, "cuts": (work.prompt,)}, 1
        decode = {**at, "blocks": blocks, "tail": TAIL}
        yield f"{name}: token", programs.decode, {**decode, "appends": True}, 1
        if layer.experts is None and count > 1:
            joined = min(count, JOINED)
            shape = {**rows, "layers": (layer.index,) * joined, "blocks": blocks, "tail": TAIL}
            yield f"{name}: token, {joined} layers", programs.decode_joined, shape, joined
        yield f"{name}: token before attention", programs.project, at, 1
        yield f"{name}: token after attention", programs.finish, {**at, "places": 1}, 1
        if layer.experts is not None:
            yield from _of_experts(layer, name, work)
        if model.formats.weight_bits < 16:
            yield f"{name}: {UNPACKING}", programs.unpack, {"layer": layer}, 1


def _mixed_prompt(layer: LayerSpec, at: dict[str, Any], tokens: int) -> dict[str, Any]:
    cuts = (tokens,) if layer.growing else ()
    return {**at, "blocks": (), "tail": 0, "tokens": tokens, "asked": tokens, "cuts": cuts}


def _mixed(layer: LayerSpec, at: dict[str, Any], blocks: tuple[int, ...]) -> dict[str, Any]:
    cache = {"blocks": blocks, "tail": TAIL} if layer.growing else {"blocks": (), "tail": 0}
    return {**at, **cache, "tokens": 1, "asked": 1, "cuts": ()}


def _of_experts(layer: LayerSpec, name: str, work: Workload) -> Iterator[Asked]:
    routed = {"layer": layer, "rows": work.rows, "tokens": 1}
    yield f"{name}: routing", programs.route, routed, 1
    yield f"{name}: an expert", programs.expert, {"layer": layer, "tokens": work.rows}, 1
    yield f"{name}: experts' sum", *programs.ending(layer, work.rows, 1), 1


def weigh(card: Card, model: Traceable, kind: Program[Any], shape: dict[str, Any]) -> Any:
    """Compiles a program; returns seconds, kernels, temporaries, bytes moved, and the least."""
    function, arguments, donated = kind.build(model, **shape)
    started = time.perf_counter()
    options = card.kernels.compiler_options(model.formats)
    compiled = compile_for(card, function, arguments, donated, options)
    seconds = time.perf_counter() - started
    memory, cost = compiled.memory_analysis(), hlo_cost.cost(compiled.as_text())
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    least = memory.argument_size_in_bytes + made
    return seconds, cost.kernels, memory.temp_size_in_bytes + made, cost.nbytes, least


def weighed(card_name: str, name: str, formats: Formats, work: Workload) -> Iterator[Weighed | str]:
    """Yields a model's programs for a card, and errors where one cannot be compiled."""
    card, config, bits = CARDS[card_name], known_shape(name), formats.weight_bits
    model = Traceable(config, formats, card.kernels)
    for program, kind, shape, layers in asked(model, work):
        try:
            seconds, kernels, temporaries, moved, least = weigh(card, model, kind, shape)
        except Exception as error:
            yield f"{card_name}, {name}, {bits} bits, {program}: {str(error).splitlines()[0]}"
            continue
        yield Weighed(
            card=card_name,
            model=name,
            bits=bits,
            rows=work.rows,
            program=program,
            seconds=round(seconds, 2),
            kernels=kernels / layers,
            temporaries=temporaries,
            moved=moved,
            least=least,
        )


def planned(name: str, card: Card, formats: Formats, work: Workload) -> int:
    """Returns the bytes of temporaries that a plan counts for a batch."""
    config = known_shape(name)
    setting = Setting(config, formats.dtype, False, card.kernels.sizes)
    return workspace_bytes(setting, formats, work.rows, work.prompt)


def shown(item: Weighed) -> str:
    return (
        f"{item.card:8} {item.bits:2} bits {item.rows:3} rows  {item.program:36} "
        f"{item.seconds:5.1f} s {item.kernels:6.1f} kernels {item.temporaries / 1e6:9.2f} MB "
        f"{item.moved / 1e6:10.1f} MB moved, {item.ratio:5.2f} of the least"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", choices=CARDS, nargs="+", default=["t4", "h100"])
    parser.add_argument("--models", nargs="+", default=["facebook/opt-6.7b"])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--cache-bits", type=int, default=16, choices=[16, 8, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512, help="Tokens of a prompt.")
    parser.add_argument("--context", type=int, default=2048, help="Tokens in the cache.")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    _require_plugin()
    found, failed = list[Weighed](), False
    for name in args.models:
        print(f"{name}, {args.dtype}, prompts of {args.prompt}, a cache of {args.context}")
        for card, bits, rows in product(args.cards, args.bits, args.rows):
            work = Workload(rows, args.prompt, args.context)
            formats = Formats(args.dtype, weight_bits=bits, cache_bits=args.cache_bits)
            programs_of_batch = list(told(weighed(card, name, formats, work)))
            failed |= any(isinstance(item, str) for item in programs_of_batch)
            of_batch = [item for item in programs_of_batch if isinstance(item, Weighed)]
            found += of_batch
            counted = planned(name, CARDS[card], formats, work)
            print(f"{card:8} {bits:2} bits {rows:3} rows  {compared(of_batch, counted)}")
    if args.json:
        args.json.write_text(json.dumps([asdict(item) for item in found], indent=1) + "\n")
    sys.exit(failed)


def told(items: Iterator[Weighed | str]) -> Iterator[Weighed | str]:
    """Prints each program or error, and hands it on."""
    for item in items:
        print(f"FAILED {item}" if isinstance(item, str) else shown(item), flush=True)
        yield item


def compared(items: list[Weighed], counted: int) -> str:
    """Returns how the largest temporaries of a batch's programs compare with those of a plan."""
    sizes = [item.temporaries for item in items if not item.program.endswith(UNPACKING)]
    largest = max(sizes, default=0)
    over = "MORE than" if largest > counted else "within"
    return f"temporaries {largest / 1e6:.1f} MB, {over} the {counted / 1e6:.1f} MB of a plan"


def _require_plugin() -> None:
    """Exits with a hint where XLA cannot compile for a GPU."""
    try:
        from jax_plugins import xla_cuda12  # noqa: F401
    except ImportError:
        sys.exit("gpu_compile.py: JAX has no CUDA plugin here; pip install '.[gpu-compile]'")


if __name__ == "__main__":
    main()
