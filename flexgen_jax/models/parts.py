"""The parts of a decoder layer, as data: attention, feed-forward block or experts, norms.

A family chooses parts; modules, shapes, bytes and FLOPs follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, Protocol

from flexgen_jax.errors import UserError

ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu")

ROTARY_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
"""Kinds of `Rotary`, in Hugging Face's words. Dynamic scaling (NTK) begins beyond the context that
a config names, which no request exceeds, so that within it it is the default."""

MAX_EXPERT_TOKENS = 256
"""The most tokens that an expert computes at once."""

Pooling = Literal["last", "mean", "cls"]
"""The vector of a prompt: the hidden states of its last token, their mean, or those of its first
token."""

NormPlace = Literal["before", "after", "around", "result"]
"""Where a layer's norms are: before each block (OPT, LLaMA), after each residual sum (OPT-350m),
before each block and on its result (Gemma 2), or on the result alone (OLMo 2)."""


class ConfigError(UserError):
    """A model description that this package cannot run; the message names the field."""


def check_positive(name: str, value: object) -> None:
    """Raises `ConfigError` unless a value is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, not {value!r}")


@dataclass(frozen=True)
class StateLeaf:
    """One array that a layer keeps of a sequence from token to token.

    shape: of one sequence's array. If it `grows`, there is such an array for every token, never
    changed once it is written; with batch and tokens it is [batch, ..., token, element], such as
    the keys of a layer, [batch, head, token, head_dim]. Otherwise there is one, [batch, ...], which
    is replaced with every token. dtype: of an array with its own dtype, independent of the run's.
    """

    name: str
    shape: tuple[int, ...]
    grows: bool = True
    dtype: str | None = None

    @property
    def size(self) -> int:
        """Elements of a sequence, if it grows of one of its tokens."""
        return prod(self.shape)

    def array_shape(self, rows: int, tokens: int = 1) -> tuple[int, ...]:
        """Returns the shape of the array of some sequences, if it grows of some of their tokens."""
        if not self.grows:
            return (rows, *self.shape)
        return (rows, *self.shape[:-1], tokens, self.shape[-1])


class Mixer(Protocol):
    """What a decoder layer mixes a sequence's tokens by: attention, or another kind of layer."""

    @property
    def leaves(self) -> tuple[StateLeaf, ...]:
        """Its state between tokens."""

    @property
    def inner_size(self) -> int:
        """Elements of a token between its products."""

    def tensors(self, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the paths and shapes of its tensors, for hidden states of `hidden` elements."""

    def prefill_flops(self, batch: int, tokens: int, before: int = 0) -> float:
        """Returns the FLOPs of mixing prompts' tokens, and `before` earlier ones, besides those of
        the products with weights."""


@dataclass(frozen=True)
class NormSpec:
    """A model's norms: layer norm, or RMS norm (Zhang and Sennrich 2019), which has no mean and no
    bias. is_affine: whether there are learned scales, and biases; offset: added to scales.
    """

    is_rms: bool = False
    eps: float = 1e-5
    is_affine: bool = True
    offset: float = 0.0


LAYER_NORM = NormSpec()


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings (Su et al. 2021, "RoFormer", section 3.2) and their scaling.

    size: elements of a head that are rotated, the first ones; theta: the base of the wavelengths;
    factor: by how much the context is longer than in training; original: the context of training;
    slow, fast: turns over the original context below which frequencies are divided by the factor,
    and above which they stay (llama3, yarn); truncates: whether yarn rounds the borders between
    these; scale: factor of the cosines and sines; short, long: divisors of each frequency for
    sequences of up to `original` tokens and for longer ones (longrope); turning: how many of the
    pairs turn, the first ones, None for all (proportional, Gemma 4); is_interleaved: whether the
    coordinates of a pair are neighbours, and not in the two halves of the rotated elements.
    """

    size: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    slow: float = 1.0
    fast: float = 4.0
    truncates: bool = True
    scale: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    turning: int | None = None
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ROTARY_KINDS:
            raise ConfigError(f"rope_type {self.kind!r} is not supported; choose {ROTARY_KINDS}")
        if self.size < 2 or self.size % 2:
            raise ConfigError(
                f"a head must have a positive even number of rotary dimensions, not {self.size}"
            )
        if self.theta <= 0 or self.factor <= 0:
            raise ConfigError("rope_theta and the factor of rope_parameters must be positive")
        if self.kind == "longrope":
            for name, divisors in (("short_factor", self.short), ("long_factor", self.long)):
                if len(divisors) != self.size // 2:
                    raise ConfigError(f"{name} must have {self.size // 2} numbers")
        needs = self.kind in ("llama3", "yarn", "longrope")
        if needs and self.original < 1:
            raise ConfigError(f"rope_type {self.kind!r} needs original_max_position_embeddings")


@dataclass(frozen=True)
class AttentionSpec:
    """A decoder layer's attention: numbers of heads, elements in a head, and its variants.

    Query heads share keys and values if there are fewer KV heads: consecutive ones form a group.
    scale: factor of the scores, by default one over the root of head_dim; qkv_bias, out_bias:
    whether the projections have biases; qk_norm: normalization of queries and keys: per head, or
    over all heads; rotary: position embeddings, None for learned ones; window: how many tokens a
    token sees, itself included, None for all; softcap: bound of the scores, which become cap *
    tanh(score / cap); has_sinks: whether each head has a learned score that takes part in the
    softmax and has no value (gpt-oss); is_gated: whether the heads' results are multiplied by the
    sigmoid of a product (Qwen3-Next); has_value_norm: whether values are normalised, without a
    scale; values_are_keys: whether they are made by the product that makes the keys (Gemma 4);
    position_scale: numbers b and n: the query at position p is multiplied by 1 + b log(1 + floor(p
    / n)); None: no scaling (Llama 4, Ministral 3).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float = 0.0
    qkv_bias: bool = True
    out_bias: bool = True
    qk_norm: Literal["head", "all"] | None = None
    rotary: Rotary | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_gated: bool = False
    has_value_norm: bool = False
    values_are_keys: bool = False
    position_scale: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.window is not None:
            check_positive("sliding_window", self.window)
        if self.rotary is not None and self.rotary.size > self.head_dim:
            raise ConfigError(f"{self.rotary.size} of {self.head_dim} elements cannot be rotated")
        if not self.scale:
            object.__setattr__(self, "scale", self.head_dim**-0.5)

    @property
    def group(self) -> int:
        """Number of query heads that share a head of keys and values."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        """Elements of a token's query, and of its attention result."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of a token's key, and of its value."""
        return self.num_kv_heads * self.head_dim

    @property
    def inner_size(self) -> int:
        """Elements of a token's query, key, value and result."""
        return 2 * self.query_size + 2 * self.kv_size

    @property
    def prompt_size(self) -> int:
        """Elements of a token's attention result within a prompt."""
        return self.query_size

    @cached_property
    def leaves(self) -> tuple[StateLeaf, ...]:
        """Keys and values."""
        heads = (self.num_kv_heads, self.head_dim)
        return StateLeaf("key", heads), StateLeaf("value", heads)

    def tensors(self, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the paths and shapes of the projections, and of the norms' scales if there are
        any."""
        shapes = linear("q", self.query_size, hidden, self.qkv_bias)
        shapes += linear("k", self.kv_size, hidden, self.qkv_bias)
        if not self.values_are_keys:
            shapes += linear("v", self.kv_size, hidden, self.qkv_bias)
        shapes += [("sinks", (self.num_heads,))] if self.has_sinks else []
        shapes += linear("gate", self.query_size, hidden, self.qkv_bias) if self.is_gated else []
        return shapes + linear("out", hidden, self.query_size, self.out_bias)

    def query_shape(self, batch: int, tokens: int = 1) -> tuple[int, int, int, int]:
        """Returns the shape of some tokens' queries: [batch, head, token, head_dim]."""
        return batch, self.num_heads, tokens, self.head_dim

    def seen(self, tokens: int) -> int:
        """Returns how many of `tokens` earlier tokens a token sees."""
        return tokens if self.window is None else min(tokens, self.window - 1)

    def prefill_flops(self, batch: int, tokens: int, before: int = 0) -> float:
        """Returns the FLOPs of prompts' attention to themselves, and to `before` earlier tokens.

        They are two products, with 2 FLOPs per element and pair of tokens. Earlier tokens count
        twice, because the formula counts all pairs of a chunk while kernels skip most of the masked
        half.
        """
        pairs = tokens + 2 * before if self.window is None else min(tokens, 2 * self.window)
        return 4.0 * batch * tokens * pairs * self.query_size


@dataclass(frozen=True)
class LatentAttentionSpec(AttentionSpec):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    A token's state is one array: a vector of `kv_rank` elements, which one matmul expands to every
    head's key and value, and `rotated` elements of a key shared by all heads. With that product
    moved to the queries and the results, a token attends to this array as to one head of keys,
    whose first `kv_rank` elements are the values, too; so `num_kv_heads` is 1 and `head_dim` is
    `kv_rank + rotated`. Within a prompt every head has its own keys and values.

    q_rank: elements of the vector that queries are made from, None if they are made at once;
    plain: elements of a head's key that are not rotated; value: elements of a head's value;
    rank_norm: of both vectors; qkv_bias: of the products that make these.
    """

    q_rank: int | None = None
    kv_rank: int = 0
    plain: int = 0
    rotated: int = 0
    value: int = 0
    rank_norm: NormSpec = NormSpec(is_rms=True, eps=1e-6)

    @property
    def key_size(self) -> int:
        """Elements of one head's key within a prompt."""
        return self.plain + self.rotated

    @property
    def wide(self) -> int:
        """Elements of one head within a prompt: keys and values are padded to the longer ones."""
        return max(self.key_size, self.value)

    @property
    def inner_size(self) -> int:
        """Elements of a token's query, key, value and result within a prompt, and of the vectors
        that these are made from."""
        return 4 * self.num_heads * self.wide + self.head_dim + (self.q_rank or 0)

    @property
    def prompt_size(self) -> int:
        return self.num_heads * self.wide

    @cached_property
    def leaves(self) -> tuple[StateLeaf, ...]:
        """The array that serves as key and value."""
        return (StateLeaf("latent", (1, self.head_dim)),)

    def tensors(self, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
        queries = self.num_heads * self.key_size
        if self.q_rank is None:
            shapes = linear("q", queries, hidden, False)
        else:
            shapes = linear("q_down", self.q_rank, hidden, self.qkv_bias)
            shapes += [("q_norm.scale", (self.q_rank,))]
            shapes += linear("q_up", queries, self.q_rank, False)
        shapes += linear("kv_down", self.head_dim, hidden, self.qkv_bias)
        shapes += [("kv_norm.scale", (self.kv_rank,))]
        expanded_size = self.num_heads * (self.plain + self.value)
        shapes += linear("kv_up", expanded_size, self.kv_rank, False)
        return shapes + linear("out", hidden, self.num_heads * self.value, self.out_bias)

    def prefill_flops(self, batch: int, tokens: int, before: int = 0) -> float:
        within = 2.0 * tokens * self.num_heads * (self.key_size + self.value)
        return batch * tokens * (within + 8.0 * before * self.query_size)


@dataclass(frozen=True)
class MLPSpec:
    """A feed-forward block: down(activation(up(x))), or with a gate down(activation(gate(x)) *
    up(x)).

    width: elements between the products; limit: with a gate, both products are clamped to it, and
    the input of the down projection is gate * sigmoid(swish * gate) * (up + 1), as in gpt-oss.
    """

    width: int
    activation: str = "relu"
    is_gated: bool = False
    bias: bool = True
    limit: float | None = None
    swish: float = 1.702

    def __post_init__(self) -> None:
        check_positive("the feed-forward width", self.width)
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"activation {self.activation!r} is not supported; choose one of {ACTIVATIONS}"
            )


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts and weighs their results (DeepSeek-AI 2024, "DeepSeek-V3",
    section 2.1.2).

    scores: the function of the router's products; has_bias: whether these have a bias;
    has_correction: whether a learned number is added to each expert's score, for choosing only;
    groups, top_groups: experts form `groups` groups of equal size, and only experts of the best
    groups are chosen, by the sum of a group's `group_best` largest scores; scale: a factor of the
    weights; least_sum: weights are divided by their sum, but at least by this (ERNIE 4.5);
    is_precise: whether the router's kernel is fp32, and multiplied in fp32, whatever the run's
    dtype; is_beside: whether experts run next to a dense block with separate norms, and the router
    has its own norm and scale (Gemma 4).
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    has_correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0
    least_sum: float = 0.0
    is_precise: bool = False
    is_beside: bool = False

    def __post_init__(self) -> None:
        for name, value in (("n_group", self.groups), ("topk_group", self.top_groups)):
            check_positive(name, value)
        if self.top_groups > self.groups:
            raise ConfigError(f"topk_group {self.top_groups} is more than n_group {self.groups}")


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts: a router chooses `top` of `count` feed-forward blocks for each token.

    expert: the blocks; is_normalised: whether the weights of the chosen ones are divided by their
    sum; shared: a block that all tokens go through, too, if there is one; is_shared_gated: whether
    its result is multiplied by the sigmoid of a learned product; routing: how they are chosen.
    """

    count: int
    top: int
    expert: MLPSpec
    is_normalised: bool
    shared: MLPSpec | None = None
    is_shared_gated: bool = False
    routing: Routing = Routing()

    def __post_init__(self) -> None:
        check_positive("num_experts", self.count)
        if self.count % self.routing.groups:
            raise ConfigError(
                f"n_group {self.routing.groups} does not divide the number of experts {self.count}"
            )
        check_positive("num_experts_per_tok", self.top)
        if self.top > self.count:
            raise ConfigError(f"{self.top} of {self.count} experts cannot be chosen")

    def rows_at_once(self, tokens: int, fewest: int) -> int:
        """Returns the number of tokens that an expert computes at once in a step with `tokens`
        tokens: about the expected number that choose it, but at least `fewest`."""
        expected = max(1, tokens * self.top // self.count)
        together = min(MAX_EXPERT_TOKENS, 1 << (expected - 1).bit_length())
        return min(tokens, max(fewest, together))


@dataclass(frozen=True)
class LayerParts:
    """The parts of one kind of decoder layer."""

    mixer: AttentionSpec | Mixer
    mlp: MLPSpec | ExpertsSpec

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec), "this kind of layer does not attend"
        return self.mixer


def linear(path: str, out: int, into: int, bias: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the paths and shapes of the tensors of a product."""
    kernel = (f"{path}.kernel", (out, into))
    return [kernel, (f"{path}.bias", (out,))] if bias else [kernel]
