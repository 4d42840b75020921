"""The examples of docs/library.md give what the same computation gives with all in memory."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")

from flexgen_jax.offloading import Placement, TieredArrays, TieredParams

DISK, MIXED = Placement(0.0, 0.0), Placement(0.3, 0.3)
FOLDER = Path(__file__).parents[2] / "scripts" / "examples"


@pytest.fixture(autouse=True)
def from_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where they are run: one takes the layers of another."""
    monkeypatch.syspath_prepend(str(FOLDER))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def norm(tree: Any) -> float:
    return float(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)) ** 0.5)


@pytest.mark.few(2)
@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("where", [DISK, MIXED])
def test_streamed_layers(api: str, where: Placement, tmp_path: Path) -> None:
    """To the bit: the operations are the same."""
    script = example("stream_layers")
    layers, apply = getattr(script, f"{api}_layers")(4, 256)
    x = resident = jax.random.normal(jax.random.key(1), (2, 9, 256))
    kept = dict(layers)
    for layer in kept.values():
        resident = apply(layer, resident)
    with TieredParams(kept, where, folder=tmp_path) as params:
        assert params.nbytes["disk"] > 0
        np.testing.assert_array_equal(script.run(params, apply, x), resident)


@pytest.mark.slow
@pytest.mark.parametrize("where", [DISK, MIXED])
def test_training_layer_by_layer(where: Placement, tmp_path: Path) -> None:
    """Against gradients of the whole model at once, and one Adam for all of it."""
    script, count, width = example("train_offloaded"), 2, 128
    layers = dict(script.linen_layers(count, width)[0])
    table = script.first_table(width).table

    def loss_of(weights: Any, ids: jax.Array) -> jax.Array:
        x = weights["table"][ids]
        for name in layers:
            x = script.APPLY(weights[name], x)
        loss: jax.Array = script.loss_of(weights["table"], x, ids)
        return loss

    weights: Any = {"table": table, **layers}
    state, wanted = script.ADAM.init(weights), []
    batches = [script.texts(2, 24, number) for number in range(3)]
    for ids in batches:
        loss, gradient = jax.value_and_grad(loss_of)(weights, ids)
        changes, state = script.ADAM.update(gradient, state)
        weights = jax.tree.map(jnp.add, weights, changes)
        wanted.append(float(loss))
    with (
        TieredParams(layers, where, folder=tmp_path) as params,
        TieredParams(script.first_moments(count, width), where, folder=tmp_path) as moments,
        TieredArrays(where, folder=tmp_path) as inputs,
    ):
        own, losses = script.first_table(width), []
        for ids in batches:
            loss, own = script.step(params, moments, inputs, own, ids)
            losses.append(loss)
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
        for name, layer in params.stream():
            # Adam turns gradients that are zero but for rounding, as of keys' biases, into steps.
            off = jax.tree.map(jnp.subtract, layer, weights[name])
            moved = jax.tree.map(jnp.subtract, weights[name], layers[name])
            assert norm(off) < 0.02 * norm(moved)


def test_embedding_all_lines_layer_by_layer(tmp_path: Path) -> None:
    script = example("embed_corpus")
    lines = ["one line", "another, longer line", "", "x" * 50, "last"]
    given = [*script.batches(lines, 2, 24)]
    layers = dict(script.layers(3, 128))
    table = jax.random.normal(jax.random.key(99), (256, 128))
    with (
        TieredParams(layers, DISK, folder=tmp_path) as params,
        TieredArrays(MIXED, folder=tmp_path) as hidden,
    ):
        vectors = script.embed(params, hidden, table, given)
    for number, line in enumerate(lines):
        (ids,) = script.batches([line], 1, 24)
        x = table[np.maximum(ids, 0)]
        for layer in layers.values():
            x = script.APPLY(layer, x, ids >= 0)
        count = min(len(line), 24)
        alone = np.asarray(x)[0, :count].sum(0) / max(count, 1)
        np.testing.assert_allclose(vectors[number], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_model_that_was_just_trained_generates() -> None:
    script = example("serve_from_memory")
    params, loss = script.trained(128, 2, 150)
    assert loss < 0.05
    text = script.continued(params, script.config_of(128, 2), script.TEXT[:12], bits=4)
    assert text == script.TEXT
