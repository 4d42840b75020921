"""Programs: compiled functions, one per kind of layer and shape, with the weights as an argument.

They are compiled ahead of time from abstract shapes, so compilation can be timed, done before the
first weight is loaded, and asked how much temporary memory it will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from inspect import signature
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from flexgen_jax.layers.decoder import DecoderLayer
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import ADAPTERS
from flexgen_jax.layers.quantization import Kept, assemble
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.spec import LayerSpec, ModelSpec
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats

P = ParamSpec("P")

Weights = Mapping[str, Kept]
"""A layer's tensors by path, e.g. "attention.q.kernel"."""

MAX_PROGRAMS = 256
"""Programs that are kept, those used last. On a CPU each takes about a hundred mappings of memory,
at most 250, and Linux gives a process 65,530: one that has used them up crashes."""


CACHED_PROGRAM_S = 0.5
"""A program that takes fewer seconds to make was found in JAX's cache, or is not worth telling."""


class Traced(NamedTuple):
    """A function, its abstract arguments, and the indices of those that it may overwrite."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    donated: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Program(Generic[P]):
    """A kind of program: makes the function for one shape. Its docstring lists the function's
    arguments and results."""

    build: Callable[Concatenate[Traceable, P], Traced]
    # Whether it decodes, as a rule one token of each sequence: of a lone sequence, its products
    # have one row.
    is_decoding: bool = False

    @property
    def name(self) -> str:
        return self.build.__name__

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The parts of a shape in their order, with their defaults."""
        _, *parts = signature(self.build).parameters.values()
        return {part.name: part.default for part in parts if part.name != "layer"}


def program(build: Callable[Concatenate[Traceable, P], Traced]) -> Program[P]:
    """Makes a kind of program of a function of a model and a shape."""
    return Program(build)


def decoding_program(build: Callable[Concatenate[Traceable, P], Traced]) -> Program[P]:
    """Makes a kind of program that decodes: it computes `tokens` tokens, by default one, of each of
    `rows` sequences."""
    return Program(build, is_decoding=True)


@dataclass(frozen=True, eq=False)  # compared in every step: `_traceable` makes one of a kind
class Traceable:
    """The context for tracing a model's programs: its modules, and the shapes of their
    arguments."""

    config: ModelConfig
    formats: Formats
    kernels: Kernels
    # That the programs run on; None for JAX's default.
    device: jax.Device | None = None

    @property
    def spec(self) -> ModelSpec:
        return model_spec(self.config)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.formats.dtype)

    def decoder(self, layer: LayerSpec) -> DecoderLayer:
        """The module of a decoder layer."""
        return DecoderLayer(
            config=self.config,
            parts=layer.decoder,
            kernels=self.kernels,
            dtype=self.dtype,
            matmul_bits=self.formats.matmul_bits,
        )

    def array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def hidden(self, rows: int, tokens: int) -> jax.ShapeDtypeStruct:
        """Hidden states."""
        return self.array(*self.spec.hidden_shape(rows, tokens))

    def weights(self, layer: LayerSpec, expert: int | None = None) -> dict[str, Any]:
        """The tensors of a layer, or of one of its experts, which are no part of the layer's."""
        tensors = [tensor for tensor in layer.tensors if tensor.expert == expert]
        return {tensor.own_path: abstract(self.formats.weight(tensor)) for tensor in tensors}

    def tail(self, layer: LayerSpec, rows: int, tokens: int) -> tuple[Any, ...]:
        """An open KV block, or some tokens for it, in full precision."""
        return tuple(self.array(*leaf.array_shape(rows, tokens)) for leaf in layer.growing)

    def block(self, layer: LayerSpec, rows: int, tokens: int) -> tuple[Any, ...]:
        """A sealed KV block."""
        return tuple(abstract(self.formats.sealed(leaf, rows, tokens)) for leaf in layer.growing)

    def blocks(
        self, layer: LayerSpec, rows: int, lengths: Sequence[int], tail: int = 0
    ) -> tuple[Any, ...]:
        """Sealed KV blocks, and an open one unless its length is 0."""
        sealed = tuple(self.block(layer, rows, tokens) for tokens in lengths)
        return (*sealed, self.tail(layer, rows, tail)) if tail else sealed

    def state(self, layer: LayerSpec, rows: int) -> tuple[Any, ...]:
        """What a layer replaces with every token."""
        return tuple(abstract(self.formats.plain(leaf, rows)) for leaf in layer.replaced)

    def rows(self, rows: int) -> Rows:
        """Where a batch's sequences are."""
        return Rows(ints(rows), ints(rows), ints(rows), *self.adapters(rows))

    def adapters(self, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The number of each row's adapter, if rows choose."""
        return (ints(rows),) if self.config.adapter_names else ()

    def query(self, layer: LayerSpec, rows: int, tokens: int = 1) -> jax.ShapeDtypeStruct:
        return self.array(*layer.attention.query_shape(rows, tokens))

    def partial(self, layer: LayerSpec, rows: int, tokens: int = 1) -> tuple[Any, Any]:
        """A partial result of attention."""
        shape = layer.attention.query_shape(rows, tokens)
        return floats(*shape), floats(*shape[:3])


_traceable = lru_cache(maxsize=64)(Traceable)


def abstract(storage: Storage) -> Any:
    """Returns an abstract array: the shapes and dtypes of stored tensors, without values."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.kind) for leaf in storage.leaves]
    return assemble(storage, leaves)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


CHECKS = ints(2)
"""How many layers a batch's tokens have gone through, and the number of the first of these, counted
from 1, whose results were not all finite, 0 if all were."""


def apply(
    module: Any, weights: Weights, *arrays: Any, adapters: Sequence[jax.Array] = (), **options: Any
) -> Any:
    """Calls a module with a layer's tensors as its parameters. adapters: the number of each row's
    adapter, int32 [batch], or nothing if rows do not choose."""
    variables = {"params": unflatten_dict(dict(weights), sep=".")}
    for numbers in adapters:
        paths = (path for path in weights if path.endswith(".lora_a"))
        rows = {f"{path.removesuffix('lora_a')}rows": numbers for path in paths}
        variables[ADAPTERS] = unflatten_dict(rows, sep=".")
    return module.apply(variables, *arrays, **options)


def checked(checks: jax.Array, is_finite: jax.Array) -> jax.Array:
    """Returns a batch's checks with one more layer; see `CHECKS`."""
    number, first = checks[0] + 1, checks[1]
    first = jnp.where((first == 0) & ~is_finite, number, first)
    return jnp.stack([number, first])


@lru_cache(maxsize=MAX_PROGRAMS)
def compiled(
    model: Traceable,
    kind: Program[Any],
    layer: int | None,
    shape: tuple[Any, ...],
) -> jax.stages.Compiled:
    """Compiles a program; layer: the index of the layer that it is for, if it is for one; shape:
    its parts, in the order of `Program.defaults`."""
    options = dict(zip(kind.defaults, shape, strict=True))
    if layer is not None:
        options["layer"] = model.spec.layers[layer]
    function, arguments, donated = kind.build(model, **options)
    with jax.default_device(model.device):
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    is_lone = kind.is_decoding and options["rows"] == options.get("tokens", 1) == 1
    return lowered.compile(compiler_options=model.kernels.compiler_options(model.formats, is_lone))


class Programs:
    """A model's programs by kind and shape, each compiled when it is first asked for.

    Decoder layers of equal shapes share their programs.
    """

    def __init__(
        self,
        config: ModelConfig,
        formats: Formats,
        kernels: Kernels,
        device: jax.Device | None = None,
    ) -> None:
        self.kernels = kernels
        self._model = _traceable(config, formats, kernels, device)
        self._alike = model_spec(config).alike
        self._needed: dict[Any, int] = {}
        self._compile_s = 0.0
        self._num_compiled = 0

    @property
    def traceable(self) -> Traceable:
        """The context for tracing the programs."""
        return self._model

    @cached_property
    def plain(self) -> Programs:
        """The programs for decoder layers whose weights `unpack` has unpacked; these, if none are
        packed."""
        model = self._model
        if model.formats.weight_bits == 16:
            return self
        formats = replace(model.formats, weight_bits=16)
        return Programs(model.config, formats, model.kernels, model.device)

    @property
    def compile_s(self) -> float:
        """Seconds of compiling so far, with `plain`."""
        return sum(programs._compile_s for programs in {self, self.plain})

    @property
    def num_compiled(self) -> int:
        """Programs that were not found in a cache, with `plain`."""
        return sum(programs._num_compiled for programs in {self, self.plain})

    def get(self, kind: Program[P], *positional: P.args, **shape: P.kwargs) -> jax.stages.Compiled:
        """Returns the program of a kind for a shape, whose parts are given by name."""
        assert not positional, "a program's shape is given by name"
        layer = shape.pop("layer", None)
        index = self._alike[layer.index] if isinstance(layer, LayerSpec) else None
        key = (self._model, kind, index, tuple({**kind.defaults, **shape}.values()))
        before, started = compiled.cache_info().misses, time.perf_counter()
        executable = compiled(*key)
        if compiled.cache_info().misses != before:
            seconds = time.perf_counter() - started
            self._compile_s += seconds
            self._num_compiled += seconds > CACHED_PROGRAM_S
        if key not in self._needed:
            self._needed[key] = _workspace_of(executable)
        return executable

    @property
    def workspace(self) -> int:
        """Bytes of temporaries and results of the program that needs most, of those compiled, with
        `plain`."""
        needed = [x for programs in {self, self.plain} for x in programs._needed.values()]
        return max(needed, default=0)


def _workspace_of(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes of a program's temporaries and results."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    return int(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
