"""Tests the GPU's kernels against formulas in NumPy: on a GPU, or interpreted by JAX without
one."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.errors import UserError
from flexgen_jax.gpu import (
    DeviceKernels,
    GpuKernels,
    decode_attention,
    head_product,
    kernels_of_gpu,
    lone_norm,
    packed_product,
    packed_tiles,
)
from flexgen_jax.gpu.backend import KERNELS_VARIABLE
from flexgen_jax.layers.encoding import encoded
from flexgen_jax.layers.quantization import QuantizedArray
from flexgen_jax.models.formats.decoding import decoded
from flexgen_jax.models.formats.format import Factor, Format, Leaf
from flexgen_jax.models.formats.known import own, paper
from flexgen_jax.models.formats.storage import Storage, kv_storage
from flexgen_jax.models.parts import AttentionSpec, NormSpec
from flexgen_jax.policy.hardware import KernelSizes
from tests.helpers.as_on_gpu import has_gpu
from tests.helpers.attention import numpy_attention
from tests.helpers.cases import examples

KERNELS = GpuKernels(KernelSizes.of_gpu(), interprets=not has_gpu())
DTYPES = st.sampled_from(("float16", "bfloat16"))
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance of a dtype's numbers from 1."""


def wide(array: jax.Array) -> np.ndarray:
    return np.asarray(array, np.float32).astype(np.float64)


HEADS = st.sampled_from(((16, 1), (40, 3), (64, 8), (64, 17), (80, 70), (96, 2), (576, 20)))
"""Elements of a head, and query heads that share one of keys and values."""

Kept = jax.Array | QuantizedArray


def held_to_the_formula(
    rng: np.random.Generator,
    dtype: str,
    group: int,
    blocks: tuple[tuple[Kept, Kept], ...],
    softcap: float | None,
) -> None:
    """Attends to blocks of two sequences from random tokens on, up to a random one."""
    batch, kv_heads, _, head_dim = blocks[0][0].shape
    lengths, heads = [key.shape[2] for key, _ in blocks], kv_heads * group
    query = jnp.asarray(rng.standard_normal((batch, heads, 1, head_dim)).astype(dtype))
    position = int(rng.integers(1, sum(lengths) + 1))
    first = rng.integers(0, position, batch).astype(np.int32)
    assert decode_attention.can_attend(query, blocks)
    out, lse = KERNELS.decode_attention(
        query=query,
        blocks=blocks,
        starts=jnp.asarray(np.cumsum([0, *lengths])[:-1], jnp.int32),
        position=jnp.int32(position),
        first_valid=jnp.asarray(first),
        spec=AttentionSpec(heads, kv_heads, head_dim, softcap=softcap),
    )
    keys, values = (
        np.concatenate([numbers_of(side) for side in sides], 2)
        for sides in zip(*blocks, strict=True)
    )
    at = np.arange(sum(lengths))
    valid = (at >= first[:, None]) & (at < position)
    expected, expected_lse = numpy_attention(wide(query), keys, values, valid, softcap)
    # Weights are rounded to the dtype before they multiply the values.
    np.testing.assert_allclose(out, expected, atol=16 * EPSILON[dtype])
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4, rtol=1e-5)


def numbers_of(kept: Kept) -> np.ndarray:
    """The numbers of keys or values, those of packed ones rounded to their dtype."""
    if not isinstance(kept, QuantizedArray):
        return wide(kept)
    storage = kept.storage
    mask = (1 << storage.bits) - 1
    planes = [(np.asarray(kept.packed) >> (storage.bits * n)) & mask for n in range(storage.planes)]
    codes = np.concatenate(planes, 3)[..., : storage.length].astype(np.float32)
    scale, minimum = (
        np.repeat(np.asarray(leaf, np.float32), storage.group_size, 3)
        for leaf in (kept.scale, kept.minimum)
    )
    return wide(jnp.asarray(codes * scale + minimum, kept.dtype))


@examples(3)
@given(
    dtype=DTYPES,
    lengths=st.lists(st.sampled_from((1, 37, 64, 530)), min_size=1, max_size=2),
    kv_heads=st.integers(1, 3),
    head=HEADS,
    are_values_keys=st.booleans(),
    softcap=st.sampled_from((None, 2.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_to_blocks(
    dtype: str,
    lengths: list[int],
    kv_heads: int,
    head: tuple[int, int],
    are_values_keys: bool,
    softcap: float | None,
    seed: int,
) -> None:
    """Of any lengths, with padding before the tokens and room after them."""
    rng = np.random.default_rng(seed)

    def side(length: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((2, kv_heads, length, head[0])).astype(dtype))

    keys = [side(length) for length in lengths]
    values = keys if are_values_keys else [side(length) for length in lengths]
    held_to_the_formula(rng, dtype, head[1], tuple(zip(keys, values, strict=True)), softcap)


@examples(3)
@given(
    dtype=DTYPES,
    bits=st.sampled_from((4, 8)),
    lengths=st.lists(st.sampled_from((1, 37, 64, 530)), min_size=1, max_size=2),
    tail=st.sampled_from((0, 40)),
    head=HEADS,
    are_values_keys=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_to_packed_blocks(
    dtype: str,
    bits: int,
    lengths: list[int],
    tail: int,
    head: tuple[int, int],
    are_values_keys: bool,
    seed: int,
) -> None:
    """The open block after them is plain."""
    rng = np.random.default_rng(seed)

    def side(length: int, bits: int) -> Kept:
        array = jnp.asarray(rng.standard_normal((2, 2, length, head[0])).astype(dtype))
        return encoded(array, kv_storage(array.shape, dtype, bits)) if bits < 16 else array

    sizes = [*((length, bits) for length in lengths), *([(tail, 16)] if tail else [])]
    keys = [side(*size) for size in sizes]
    values = keys if are_values_keys else [side(*size) for size in sizes]
    held_to_the_formula(rng, dtype, head[1], tuple(zip(keys, values, strict=True)), None)


@examples(3)
@given(
    dtype=DTYPES,
    tokens=st.sampled_from((1, 37, 128)),
    asked=st.sampled_from((1, 20, 70)),
    lead=st.integers(0, 250),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from((1, 3)),
    dims=st.sampled_from(((16, 16), (40, 40), (48, 32))),
    window=st.sampled_from((None, 5, 70)),
    softcap=st.sampled_from((None, 2.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_of_many_tokens(
    dtype: str,
    tokens: int,
    asked: int,
    lead: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    """Of a chunk to itself and to earlier blocks; a token without one that it sees has numbers that
    the merge leaves out."""
    rng, batch = np.random.default_rng(seed), 2
    shapes = ((kv_heads * group, asked, dims[0]), (kv_heads, tokens, dims[0]))
    query, key, value = (
        jnp.asarray(rng.standard_normal((batch, *shape)).astype(dtype))
        for shape in (*shapes, (kv_heads, tokens, dims[1]))
    )
    first = rng.integers(0, tokens, batch).astype(np.int32)
    out, lse = KERNELS.chunk_attention(
        query=query,
        key=key,
        value=value,
        first_valid=jnp.asarray(first),
        lead=jnp.int32(lead),
        spec=AttentionSpec(kv_heads * group, kv_heads, dims[0], window=window, softcap=softcap),
    )
    at, last = np.arange(tokens), lead + np.arange(asked)[:, None]
    seen = (at <= last) & (at > last - (window or 10**6))
    for row in range(batch):
        for number in range(asked):
            valid = seen[number] & (at >= first[row])
            if not valid.any():
                assert np.isfinite(out[row, :, number]).all()
                assert (np.asarray(lse[row, :, number]) < -1e29).all()
                continue
            one = wide(query[row : row + 1, :, number : number + 1])
            sides = wide(key[row : row + 1]), wide(value[row : row + 1])
            expected, score = numpy_attention(one, *sides, valid[None], softcap)
            tolerance = 16 * EPSILON[dtype]
            np.testing.assert_allclose(out[row, :, number], expected[0, :, 0], atol=tolerance)
            np.testing.assert_allclose(lse[row, :, number], score[0, :, 0], atol=1e-4, rtol=1e-5)


def test_a_prompts_attention_is_that_of_a_chunk() -> None:
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, 66, heads, 16)), "float16") for heads in (6, 2, 2)
    )
    first, spec = jnp.asarray([0, 9], jnp.int32), AttentionSpec(6, 2, 16)
    out, kept = KERNELS.prefill_attention(query, key, value, first, spec)
    expected, _ = DeviceKernels(KernelSizes.of_gpu()).prefill_attention(
        query, key, value, first, spec
    )
    seen = np.arange(66)[None, :] >= np.asarray(first)[:, None]
    np.testing.assert_allclose(wide(out)[seen], wide(expected)[seen], atol=4e-3)
    np.testing.assert_array_equal(kept[0], key.swapaxes(1, 2))
    np.testing.assert_array_equal(kept[1], value.swapaxes(1, 2))


GPTQ = Format(4, Factor("float16", 64), zero=Factor("uint8", 64))
"""The format of GPTQ folders that have zeros."""

FLOATS = (
    Format(4, Factor("e8m0", 32), levels="e2m1"),  # MXFP4
    Format(4, Factor("e4m3", 16, of=Factor("float32", 0, rows=0)), levels="e2m1"),  # NVFP4
    Format(8, Factor("float32", 128, rows=128), levels="e4m3"),  # FP8 in blocks
    Format(8, Factor("float32", 0), levels="e4m3"),  # FP8 by rows
    Format(8, Factor("float32", 0, rows=0), levels="e5m2"),  # FP8 with one scale
)


def random_leaf(rng: np.random.Generator, leaf: Leaf, packing: Format) -> np.ndarray:
    """Random codes or factors, without infinities and NaN of floats of few bits."""
    if not np.issubdtype(np.dtype(leaf.kind), np.integer):
        return rng.uniform(0.001, 0.01, leaf.shape).astype(leaf.kind)
    if leaf.dtype == "e8m0":
        return rng.integers(110, 130, leaf.shape, np.uint8)
    if leaf.dtype == "e4m3":
        return rng.integers(1, 0x7E, leaf.shape, np.uint8)
    if packing.levels in ("e4m3", "e5m2"):
        signs = rng.integers(0, 2, leaf.shape, np.uint8) << 7
        return np.asarray(rng.integers(0, 0x7C, leaf.shape, np.uint8) | signs)
    limits = np.iinfo(leaf.kind)
    return rng.integers(limits.min, limits.max, leaf.shape, leaf.kind, endpoint=True)


def random_kernel(rng: np.random.Generator, storage: Storage) -> tuple[QuantizedArray, np.ndarray]:
    """A kernel of random integers and factors, and the numbers that it stands for, fp64."""
    packing = storage.packing
    named = {leaf.name: random_leaf(rng, leaf, packing) for leaf in storage.leaves}

    def of_elements(name: str) -> np.ndarray:
        each = np.repeat(named[name].astype(np.float64), packing.group, 1)
        return each * named.get(f"{name}_of", np.ones(1)).astype(np.float64)

    mask = (1 << packing.bits) - 1
    planes = [(named["packed"] >> (packing.bits * n)) & mask for n in range(packing.planes)]
    numbers = np.concatenate(planes, 1).astype(np.float64) - packing.center
    if packing.zero is not None:
        numbers -= of_elements("zero")
    numbers *= of_elements("scale")
    if packing.minimum is not None:
        numbers += of_elements("minimum")
    return QuantizedArray(storage, tuple(map(jnp.asarray, named.values()))), numbers


CASES = {
    "product": st.sampled_from((packed_product, packed_tiles)),
    "dtype": DTYPES,
    "rows": st.sampled_from((1, 2, 3, 9, 20, 40, 64)),
    "outputs": st.sampled_from((16, 96, 384)),  # whose places differ in size
    "seed": st.integers(0, 2**32 - 1),
}
"""Products with packed weights."""


def held_to_numbers(
    rng: np.random.Generator,
    product: ModuleType,
    dtype: str,
    rows: int,
    kernel: QuantizedArray,
    numbers: np.ndarray,
) -> None:
    """Multiplies random rows by a kernel that stands for these numbers. Matrix units round them to
    the dtype; either neighbor is right for a number within 2^-20 of the middle of two, since the
    kernel decodes in fp32."""
    x = jnp.asarray(rng.standard_normal((min(rows, product.MAX_ROWS), numbers.shape[1])), dtype)
    assert product.can_multiply(x, kernel)
    spread = np.zeros_like(numbers)
    if product is packed_tiles:
        numbers, low, high = (
            wide(jnp.asarray((numbers * (1 + share)).astype(np.float32), dtype))
            for share in (0, -(2.0**-20), 2.0**-20)
        )
        spread = np.abs(high - low)
        assert (spread > 0).mean() < 0.2, "few numbers are so close to the middle"
    out = product.multiply(x, kernel, interprets=not has_gpu())
    error = np.abs(np.asarray(out) - wide(x) @ numbers.T)
    assert (error <= np.abs(wide(x)) @ (1e-4 * np.abs(numbers) + spread).T).all()


@examples(6)
@given(
    **CASES,
    length=st.sampled_from((128, 384, 960)),
    packing=st.sampled_from((own(4), own(8), GPTQ)),
)
def test_products_with_packed_weights(
    product: ModuleType,
    dtype: str,
    rows: int,
    outputs: int,
    length: int,
    packing: Format,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    kernel, numbers = random_kernel(rng, Storage((outputs, length), dtype, packing))
    held_to_numbers(rng, product, dtype, rows, kernel, numbers)


@examples(6)
@given(**CASES, length=st.sampled_from((256, 768, 1280)), packing=st.sampled_from(FLOATS))
def test_products_with_floats_of_few_bits(
    product: ModuleType,
    dtype: str,
    rows: int,
    outputs: int,
    length: int,
    packing: Format,
    seed: int,
) -> None:
    """Held to NumPy's decoder of published files."""
    rng = np.random.default_rng(seed)
    storage = Storage((outputs, length), dtype, packing)
    leaves = [random_leaf(rng, leaf, packing) for leaf in storage.leaves]
    kernel = QuantizedArray(storage, tuple(map(jnp.asarray, leaves)))
    numbers = decoded(leaves, storage).astype(np.float64)
    held_to_numbers(rng, product, dtype, rows, kernel, numbers)


@examples(8)
@given(
    dtype=DTYPES,
    rows=st.sampled_from((1, 5, 16, 64)),
    features=st.sampled_from(((0, 16), (16, 16), (0, 128), (256, 128))),
    rank=st.sampled_from((128, 512)),
    is_inverse=st.booleans(),
    packing=st.sampled_from((None, own(4), own(8), *FLOATS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_by_heads(
    dtype: str,
    rows: int,
    features: tuple[int, int],
    rank: int,
    is_inverse: bool,
    packing: Format | None,
    seed: int,
) -> None:
    """Of three heads whose kernels have three parts, of which one is multiplied."""
    rng, (first, count) = np.random.default_rng(seed), features
    storage = Storage((9 * count, rank), dtype, packing)
    kernel: Kept = jnp.asarray(rng.standard_normal(storage.shape).astype(dtype))
    numbers = wide(kernel)
    if packing is not None:
        leaves = [random_leaf(rng, leaf, packing) for leaf in storage.leaves]
        kernel = QuantizedArray(storage, tuple(map(jnp.asarray, leaves)))
        numbers = wide(jnp.asarray(decoded(leaves, storage), dtype))
    x = jnp.asarray(rng.standard_normal((rows, 3, count if is_inverse else rank)).astype(dtype))
    assert head_product.can_multiply(x, kernel, features)
    out = KERNELS.matmul_by_heads(x, kernel, features, is_inverse)
    part = numbers.reshape(3, -1, rank)[:, first : first + count]
    equation = "shf,hfr->shr" if is_inverse else "shr,hfr->shf"
    bound = np.einsum(equation, np.abs(wide(x)), np.abs(part))
    error = np.abs(wide(out) - np.einsum(equation, wide(x), part))
    assert out.dtype == x.dtype
    assert (error <= 1e-4 * bound + EPSILON[dtype] * np.abs(wide(out))).all()


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_a_product_is_chosen_by_its_rows(rows: int) -> None:
    """With a bias, and in the dtype of the rows."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 128)), "bfloat16")
    kernel, numbers = random_kernel(rng, Storage((48, 128), "bfloat16", own(4)))
    bias = jnp.asarray(rng.standard_normal(48), "bfloat16")
    assert packed_product.can_multiply(x, kernel) == (rows == 1)
    assert packed_tiles.can_multiply(x, kernel) == (rows <= 64)
    out = KERNELS.matmul(x, kernel, bias)
    assert out.dtype == x.dtype
    expected = wide(x) @ numbers.T + wide(bias)
    bound = np.abs(wide(x)) @ np.abs(numbers).T + np.abs(expected)
    assert (np.abs(wide(out) - expected) <= EPSILON["bfloat16"] * bound).all()


def test_other_formats_are_left_to_xla() -> None:
    x = jnp.zeros((1, 128), "float16")
    for packing in (paper(4), Format(4, Factor("float32", 32), levels="nf4")):
        storage = Storage((16, 128), "float16", packing)
        leaves = tuple(jnp.zeros(leaf.shape, leaf.kind) for leaf in storage.leaves)
        for product in (packed_product, packed_tiles):
            assert not product.can_multiply(x, QuantizedArray(storage, leaves))
    own_bits = encoded(jnp.ones((16, 128), "float16"), Storage((16, 128), "float16", own(4)))
    assert packed_product.can_multiply(x, own_bits)
    few = encoded(jnp.ones((8, 128), "float16"), Storage((8, 128), "float16", own(4)))
    assert not packed_product.can_multiply(x, few)
    many = packed_product.MAX_ROWS + 1
    assert not packed_product.can_multiply(jnp.zeros((many, 128), "float16"), own_bits)
    assert not packed_product.can_multiply(jnp.zeros((1, 128), "float32"), own_bits)


def test_other_blocks_are_left_to_xla() -> None:
    """Of wide numbers, in another format, of larger heads, or packed in two ways."""

    def packed(bits: int, dtype: str = "float16") -> QuantizedArray:
        array = jnp.ones((1, 2, 32, 64), dtype)
        return encoded(array, kv_storage(array.shape, dtype, bits))

    query = jnp.zeros((1, 2, 1, 64), "float16")
    assert decode_attention.can_attend(query, [(packed(4), packed(4))])
    assert not decode_attention.can_attend(query, [(packed(4), packed(8))])
    assert not decode_attention.can_attend(query, [(packed(4, "bfloat16"), packed(4))])
    assert not decode_attention.can_attend(query.astype("float32"), [(packed(4), packed(4))])
    wide_head = jnp.zeros((1, 2, 1, 1024), "float16")
    assert not decode_attention.can_attend(wide_head, [(wide_head, wide_head)])


@pytest.mark.parametrize(
    ("kind", "capability", "kernels"),
    [
        ("NVIDIA H200", "9.0", GpuKernels),
        ("NVIDIA A100-SXM4-80GB", "8.0", GpuKernels),
        ("NVIDIA L4", "8.9", GpuKernels),
        ("Tesla T4", "7.5", DeviceKernels),
        ("gfx942", "", DeviceKernels),
    ],
)
def test_kernels_by_the_card(kind: str, capability: str, kernels: type) -> None:
    device = SimpleNamespace(device_kind=kind, compute_capability=capability)
    chosen = kernels_of_gpu(device, {})
    assert type(chosen) is kernels
    if isinstance(chosen, GpuKernels):
        assert chosen.has_large_tiles == (capability != "8.9")
    assert chosen.in_words == ("triton" if kernels is GpuKernels else "xla")
    assert type(kernels_of_gpu(device, {KERNELS_VARIABLE: "xla"})) is DeviceKernels
    with pytest.raises(UserError, match="set it to xla"):
        kernels_of_gpu(device, {KERNELS_VARIABLE: "triton"})


@examples(8)
@given(
    dtype=DTYPES,
    size=st.sampled_from((64, 96, 1000, 4096)),
    is_rms=st.booleans(),
    is_affine=st.booleans(),
    offset=st.sampled_from((0.0, 1.0)),
    shift=st.sampled_from((0.0, 3.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_lone_row_is_normalized(
    dtype: str,
    size: int,
    is_rms: bool,
    is_affine: bool,
    offset: float,
    shift: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((1, 1, size)) + shift, dtype)
    scale, bias = (jnp.asarray(rng.standard_normal(size).astype(dtype)) for _ in range(2))
    spec = NormSpec(is_rms=is_rms, eps=1e-5, offset=offset, is_affine=is_affine)
    has_bias = is_affine and not is_rms
    assert lone_norm.can_normalize(x)
    out = KERNELS.normalize(x, spec, scale if is_affine else None, bias if has_bias else None)
    wanted = wide(x) if is_rms else wide(x) - wide(x).mean()
    wanted = wanted / np.sqrt((wanted**2).mean() + 1e-5)
    wanted = wanted * (wide(scale) + offset) if is_affine else wanted
    wanted = wanted + wide(bias) if has_bias else wanted
    assert out.dtype == x.dtype and out.shape == x.shape
    np.testing.assert_allclose(wide(out), wanted, rtol=2 * EPSILON[dtype], atol=1e-5)


def test_several_rows_and_wide_numbers_are_left_to_xla() -> None:
    assert not lone_norm.can_normalize(jnp.zeros((2, 64), jnp.float16))
    assert not lone_norm.can_normalize(jnp.zeros((1, 64), jnp.float32))
