"""The shapes of the model that a config describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.formats.published import Published
from flexgen_jax.models.parts import (
    AttentionSpec,
    ExpertsSpec,
    LayerParts,
    Mixer,
    MLPSpec,
    NormSpec,
    linear,
)
from flexgen_jax.models.spec import LayerSpec, ModelSpec
from flexgen_jax.models.tensor_spec import Role, TensorSpec, of_expert

Shapes = list[tuple[str, tuple[int, ...]]]
"""Paths of a layer's tensors and their shapes."""


def _norm(path: str, norm: NormSpec, size: int) -> Shapes:
    if not norm.is_affine:
        return []
    bias: Shapes = [] if norm.is_rms else [(f"{path}.bias", (size,))]
    return [(f"{path}.scale", (size,)), *bias]


_ROLES: dict[str, Role] = {
    "attention.q.kernel": "query",
    "attention.k.kernel": "key",
    "attention.v.kernel": "value",
    "attention.q_down.kernel": "query",
    "attention.q_up.kernel": "query",
    "attention.kv_down.kernel": "key",
    "attention.write.kernel": "state",
    "attention.fade.kernel": "state",
    "attention.weights": "state",
    "router.kernel": "router",
    "shared_gate.kernel": "router",
}


_STATE_DTYPES = {"attention.fade_log": "float32", "attention.fade_bias": "float32"}
"""The dtypes of tensors that update a state: errors would add up."""


def _mixer(hidden: int, mixer: AttentionSpec | Mixer, norm: NormSpec) -> Shapes:
    shapes = [(f"attention.{path}", shape) for path, shape in mixer.tensors(hidden)]
    if isinstance(mixer, AttentionSpec) and mixer.qk_norm is not None:
        is_each = mixer.qk_norm == "head"
        for name, size in (("q_norm", mixer.query_size), ("k_norm", mixer.kv_size)):
            shapes += _norm(f"attention.{name}", norm, mixer.head_dim if is_each else size)
    return shapes


def _mlp(prefix: str, hidden: int, mlp: MLPSpec) -> Shapes:
    """A feed-forward block; prefix: what its paths begin with."""
    shapes: Shapes = []
    for name in ("gate", "up") if mlp.is_gated else ("up",):
        shapes += linear(f"{prefix}{name}", mlp.width, hidden, mlp.bias)
    return shapes + linear(f"{prefix}down", hidden, mlp.width, mlp.bias)


def _experts(hidden: int, experts: ExpertsSpec, norm: NormSpec) -> Shapes:
    shapes = linear("router", experts.count, hidden, experts.routing.has_bias)
    if experts.routing.is_beside:
        shapes += [("router_scale", (hidden,)), ("router_expert_scale", (experts.count,))]
        for name in ("experts_norm", "experts_result_norm", "shared_result_norm"):
            shapes += _norm(name, norm, hidden)
    if experts.routing.has_correction:
        shapes.append(("router_correction", (experts.count,)))
    if experts.shared is not None:
        shapes += _mlp("shared.", hidden, experts.shared)
        if experts.is_shared_gated:
            shapes += linear("shared_gate", 1, hidden, False)
    return shapes


def _decoder(config: ModelConfig, parts: LayerParts) -> Shapes:
    hidden, norm = config.hidden_size, config.norm
    before, after = config.norm_place != "result", config.norm_place in ("around", "result")
    shapes = _mixer(hidden, parts.mixer, norm)
    mlp = parts.mlp
    if isinstance(mlp, ExpertsSpec):
        shapes += _experts(hidden, mlp, norm)
    else:
        shapes += _mlp("mlp.", hidden, mlp)
    shapes += [("layer_scale", (1,))] if config.has_layer_scale else []
    for block in ("attention", "mlp"):
        shapes += _norm(f"{block}_norm", norm, hidden) if before else []
        shapes += _norm(f"{block}_result_norm", norm, hidden) if after else []
    return shapes


def _tensors(
    prefix: str, shapes: Shapes, dtypes: Mapping[str, str] | None = None
) -> tuple[TensorSpec, ...]:
    """The tensors of some paths. dtypes: of those that have their own, by path."""
    own_dtypes = dtypes or {}
    return tuple(
        TensorSpec(
            path=path,
            shape=shape,
            key=f"{prefix}.{path}",
            role=_ROLES.get(path, "other"),
            dtype=own_dtypes.get(path),
        )
        for path, shape in shapes
    )


def _of_experts(prefix: str, config: ModelConfig, parts: LayerParts) -> tuple[TensorSpec, ...]:
    """The tensors of a layer's experts, expert by expert."""
    if not isinstance(parts.mlp, ExpertsSpec):
        return ()
    shapes = _mlp("", config.hidden_size, parts.mlp.expert)
    return tuple(
        TensorSpec(
            path=f"{of_expert(number)}{path}",
            shape=shape,
            key=f"{prefix}.{of_expert(number)}{path}",
            role="expert",
            expert=number,
        )
        for number in range(parts.mlp.count)
        for path, shape in shapes
    )


def _of_decoder(prefix: str, config: ModelConfig, parts: LayerParts) -> tuple[TensorSpec, ...]:
    """The tensors of a decoder layer."""
    own_dtypes = {**_STATE_DTYPES, **_own_dtypes(parts.mlp)}
    tensors = _tensors(prefix, _decoder(config, parts), own_dtypes)
    return (*tensors, *_of_experts(prefix, config, parts))


def _own_dtypes(mlp: MLPSpec | ExpertsSpec) -> dict[str, str]:
    """Returns the dtypes of tensors that have their own: rounding them would change which experts
    are chosen."""
    if not isinstance(mlp, ExpertsSpec):
        return {}
    precise = {"router.kernel": "float32"} if mlp.routing.is_precise else {}
    return {"router_correction": "float32", **precise}


def _ends(config: ModelConfig) -> tuple[LayerSpec, LayerSpec]:
    """The embedding and the head; without tensors if another stage has them."""
    hidden, table = config.hidden_size, (config.vocab_size, config.embed_size)
    embedding: Shapes = [("tokens", table)]
    if config.position_offset is not None:
        rows = config.max_positions + config.position_offset
        embedding.append(("positions", (rows, hidden)))
    head: Shapes = []
    if config.final_norm:
        head += _norm("norm", config.norm, hidden)
    if config.projects_embeddings:
        embedding += linear("project_in", hidden, config.embed_size, False)
        head += linear("project_out", config.embed_size, hidden, False)
    output = TensorSpec("tokens", table, "embedding.tokens" if config.tied_head else "head.tokens")
    first = _tensors("embedding", embedding) if config.has_embedding else ()
    last = (*_tensors("head", head), output) if config.has_head else ()
    return (
        LayerSpec("embedding", 0, first, hidden),
        LayerSpec("head", config.num_layers + 1, last, hidden),
    )


@lru_cache(maxsize=16)  # a policy search asks for one model's spec hundreds of times
def model_spec(config: ModelConfig) -> ModelSpec:
    """Returns the shapes of the model that a config describes."""
    embedding, head = _ends(config)
    decoders = (
        LayerSpec(
            kind="decoder",
            index=i + 1,
            tensors=_of_decoder(
                f"decoder.{config.first_layer + i}", config, config.kinds[kind_index]
            ),
            hidden_size=config.hidden_size,
            parts=config.kinds[kind_index],
            number=config.first_layer + i,
        )
        for i, kind_index in enumerate(config.pattern)
    )
    layers = (embedding, *decoders, head)
    if config.published is not None:
        layers = tuple(_as_published(layer, config.published) for layer in layers)
    if config.adapters is not None:
        ranks, count = dict(config.adapters.ranks), config.adapters.count
        layers = tuple(_adapted(layer, ranks, count) for layer in layers)
    return ModelSpec(config.hidden_size, layers)


def _as_published(layer: LayerSpec, published: Published) -> LayerSpec:
    """Returns a layer with the formats of its tensors in the model's files."""
    tensors = tuple(
        replace(tensor, published=published.format_of(tensor.key), can_pack=False)
        for tensor in layer.tensors
    )
    return replace(layer, tensors=tensors)


def _adapted(layer: LayerSpec, ranks: Mapping[str, int], count: int) -> LayerSpec:
    """Returns a layer with the matrices of `count` adapters; ranks: see `AdapterShapes`."""
    tensors = list[TensorSpec]()
    for tensor in layer.tensors:
        tensors.append(tensor)
        if rank := ranks.get(tensor.key):
            rows, columns = tensor.shape
            shapes = {"lora_a": (count, rank, columns), "lora_b": (count, rank, rows)}
            tensors += [
                TensorSpec(
                    path=f"{tensor.path.removesuffix('kernel')}{name}",
                    shape=shape,
                    key=f"{tensor.key.removesuffix('kernel')}{name}",
                    role="adapter",
                    expert=tensor.expert,
                )
                for name, shape in shapes.items()
            ]
    return replace(layer, tensors=tuple(tensors))
