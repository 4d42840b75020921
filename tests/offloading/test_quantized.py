"""Trees in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax.errors import UserError
from flexgen_jax.offloading import (
    Placement,
    QuantizedKernel,
    TieredParams,
    dequantize_tree,
    matmul,
    quantize_tree,
)


def params(dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "embed": jnp.asarray(rng.normal(size=(100, 96)).astype(dtype)),
        "heads": {"kernel": jnp.asarray(rng.normal(size=(96, 4, 40)).astype(dtype))},
        "out": {
            "kernel": jnp.asarray(rng.normal(size=(160, 96)).astype(dtype)),
            "bias": jnp.zeros(96),
        },
        "small": jnp.ones((3, 5)),
        "steps": 7,
    }


@pytest.mark.parametrize(("bits", "error"), [(4, 0.1), (8, 0.007)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_become_smaller_and_stay_near(bits: int, error: float, dtype: Any) -> None:
    plain = params(dtype)
    packed = quantize_tree(plain, bits)
    assert isinstance(packed["heads"]["kernel"], QuantizedKernel)
    assert packed["embed"] is plain["embed"] and packed["steps"] == 7
    kernel = packed["out"]["kernel"]
    assert kernel.shape == (160, 96) and kernel.dtype == dtype
    assert kernel.nbytes < (bits + 1.5) / 8 * 160 * 96
    back = dequantize_tree(packed)
    assert jax.tree.structure(back) == jax.tree.structure(plain)
    for name in ("heads", "out"):
        off = np.asarray(back[name]["kernel"], np.float32) - np.asarray(
            plain[name]["kernel"], np.float32
        )
        assert off.shape == plain[name]["kernel"].shape
        assert 0 < np.sqrt(np.mean(off**2)) < error


@pytest.mark.parametrize("rows", [(), (1,), (5,), (3, 11)])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_unpacked_kernels(rows: tuple[int, ...], bits: int) -> None:
    packed = quantize_tree(params(), bits)

    @jax.jit
    def layer(tree: Any, x: jax.Array) -> jax.Array:
        heads = matmul(x, tree["heads"]["kernel"])
        return matmul(heads.reshape(*heads.shape[:-2], -1), tree["out"]["kernel"])

    x = jnp.asarray(np.random.default_rng(1).normal(size=(*rows, 96)), jnp.float32)
    tree, plain = packed, dequantize_tree(packed)
    wanted = np.einsum("...i,ihd->...hd", x, plain["heads"]["kernel"])
    wanted = wanted.reshape(*rows, -1) @ np.asarray(plain["out"]["kernel"])
    np.testing.assert_allclose(layer(tree, x), wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(layer(plain, x), wanted, rtol=1e-3, atol=1e-3)


def test_packed_layers_are_streamed_from_disk(tmp_path: Path) -> None:
    packed = quantize_tree(params(), 4, where=lambda path, leaf: path.endswith("['kernel']"))
    layers = {str(n): packed for n in range(4)}
    with TieredParams(layers, Placement(0.0, 0.0), folder=tmp_path) as tiered:
        for _, tree in tiered.stream():
            same = jax.tree.map(lambda a, b: bool((a == b).all()), tree["out"], packed["out"])
            assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("share", [0.5, 0.05, 0.01])
@pytest.mark.parametrize("scale", [1e-4, 0.02, 30.0])
@pytest.mark.parametrize("bits", [4, 8])
def test_kernels_with_many_zeros_stay_near(share: float, scale: float, bits: int) -> None:
    """Whatever the size of their numbers: groups of equal elements must not spoil the others."""
    rng = np.random.default_rng(2)
    kernel = rng.normal(size=(512, 64)) * (rng.random((512, 64)) < share) * scale
    back = dequantize_tree(quantize_tree({"kernel": kernel.astype(np.float32)}, bits))["kernel"]
    assert np.linalg.norm(back - kernel) < 0.1 * np.linalg.norm(kernel)


def test_what_cannot_be_quantized_is_named() -> None:
    with pytest.raises(UserError, match="bits must be 4 or 8, not 3"):
        quantize_tree(params(), 3)
    with pytest.raises(UserError, match=r"\['out'\]\['bias'\] \(float32\) cannot be quantized"):
        quantize_tree(params(), 4, where=lambda path, leaf: "bias" in path)
    kernel = quantize_tree(params(), 4)["out"]["kernel"]
    for x in (jnp.ones((2, 161)), jnp.ones((2, 160), int)):
        with pytest.raises(
            UserError, match=r"x must have floating-point numbers and shape \[..., 160\]"
        ):
            matmul(x, kernel)
    assert not isinstance(quantize_tree({"a": jnp.ones((8, 64, 512))})["a"], QuantizedKernel)
