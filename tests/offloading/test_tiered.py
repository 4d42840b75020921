"""Pytrees in tiers give back what was put there, within the memory that they say."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexgen_jax.errors import UserError
from flexgen_jax.layers.quantization import dequantize, quantize
from flexgen_jax.offloading import (
    Placement,
    TieredArrays,
    TieredParams,
    checkpoint_layers,
    stream_memory,
)

PLACES = {
    "device": Placement(1.0, 0.0),
    "host": Placement(0.0, 1.0),
    "disk": Placement(0.0, 0.0),
    "mixed": Placement(0.3, 0.3),
}
SIZE = 160
"""Rows of kernels, so that they are not small."""


def layer(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "up": {"kernel": rng.normal(size=(SIZE, 2 * SIZE)).astype(np.float32)},
        "down": {"kernel": jnp.asarray(rng.normal(size=(2 * SIZE, SIZE)).astype(jnp.bfloat16))},
        "table": rng.integers(0, 9, (SIZE, SIZE)).astype(np.int32),
        "scale": np.float32(seed),
        "norm": None,
    }


def same(tree: Any, other: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("place", list(PLACES))
def test_a_stream_gives_what_was_put(place: str, unified: bool, tmp_path: Path) -> None:
    layers = {f"layer {n}": layer(n) for n in range(6)}
    with TieredParams(layers, PLACES[place], folder=tmp_path, unified=unified) as params:
        for ahead in (0, 1, 2, 9):
            names = []
            for name, tree in params.stream(ahead=ahead):
                same(tree, layers[name])
                names.append(name)
            assert names == list(layers)
        order = ["layer 4", "layer 1", "layer 4", "layer 4"]
        assert [name for name, _ in params.stream(order)] == order
        same(params["layer 2"], layers["layer 2"])
        params.put("layer 2", layer(9))
        same(params["layer 2"], layer(9))
        used, total = params.nbytes, sum(x.nbytes for x in jax.tree.leaves(layers))
        assert sum(used.values()) == total
        if place in used:
            assert used[place] > 0.99 * total  # type: ignore[index]
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("unified", [True, False])
def test_memory_in_use_by_a_computation_is_not_read_into(unified: bool, tmp_path: Path) -> None:
    """Computations are dispatched without waiting for any of them."""
    kernels = {str(n): np.full((600, 600), n + 1, np.float32) for n in range(12)}

    @jax.jit
    def slow(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 8, lambda _, y: y * 0.5 + (x @ x) * 0.5, x).sum()

    with TieredParams(kernels, PLACES["disk"], folder=tmp_path, unified=unified) as params:
        results = [slow(tree) for _, tree in params.stream(ahead=1)]
        wanted = [slow(jnp.asarray(x)) for x in kernels.values()]
    np.testing.assert_allclose(results, wanted, rtol=1e-5)


def test_what_is_kept_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {str(n): layer(n) for n in range(6)}
    monkeypatch.setattr(stream_memory, "HELD_S", 0.2)
    with TieredParams(layers, PLACES["disk"], folder=tmp_path, unified=True) as params:
        stream, kept = params.stream(ahead=1), []
        with pytest.raises(UserError, match="still in use"):
            for _, tree in stream:
                kept.append(tree)
        kept.clear()
        del tree
        gc.collect()
        copies = [jax.tree.map(lambda x: jnp.array(x, copy=True), t) for _, t in params.stream()]
        for number, copy in enumerate(copies):
            same(copy, layers[str(number)])


@pytest.mark.parametrize("unified", [True, False])
def test_streams_that_are_left_and_begun_again(unified: bool, tmp_path: Path) -> None:
    """Also two at a time, and with trees kept from before."""
    layers = {str(n): layer(n) for n in range(6)}
    with TieredParams(layers, PLACES["disk"], folder=tmp_path, unified=unified) as params:
        first, second = params["0"], params["1"]
        never = params.stream()
        for number in range(4):
            for name, tree in params.stream(ahead=1):
                last = tree
                if int(name) == number:
                    break
            same(last, layers[str(number)])
        pairs = zip(params.stream(), params.stream([*reversed(layers)]), strict=True)
        for (one, tree), (other, opposite) in pairs:
            same(tree, layers[one])
            same(opposite, layers[other])
        same(last, layers["3"])
        same((first, second), (layers["0"], layers["1"]))
        assert len([name for name, _ in never]) == 6
        stream = params.stream()
        next(stream)
    with pytest.raises(UserError, match="this object is closed"):
        next(stream)
    with pytest.raises(UserError, match="this object is closed"):
        params.put("0", layer(0))
    with pytest.raises(UserError, match="this object is closed"):
        params.stream()


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("place", ["disk", "host", "mixed"])
def test_what_is_put_meanwhile_is_what_comes(place: str, unified: bool, tmp_path: Path) -> None:
    """As in an optimizer that goes up and down; and arrays that change after they were put."""
    start = np.zeros((200, 200), np.float32)
    with TieredArrays(PLACES[place], folder=tmp_path, unified=unified) as arrays:
        for name in "ab":
            arrays.put(name, {"x": start, "y": start})
        start[:] = -5
        seen = []
        for name, tree in arrays.stream(["a", "b"] * 5, ahead=2):
            seen.append(float(tree["x"][0, 0]))
            assert (tree["x"] == seen[-1]).all() and (tree["y"] == seen[-1]).all()
            arrays.put(name, {"x": tree["x"] + 1, "y": tree["y"] + 1})
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_one_store_takes_what_another_streams(tmp_path: Path) -> None:
    """Its writer keeps layers for a while."""
    layers = {str(n): layer(n) for n in range(8)}
    with (
        TieredParams(layers, PLACES["disk"], folder=tmp_path) as params,
        TieredArrays(PLACES["disk"], folder=tmp_path) as copies,
    ):
        for name, tree in params.stream(ahead=1):
            copies.put(name, tree)
        for name, tree in copies.stream():
            same(tree, layers[name])


def test_no_memory_stays_behind(tmp_path: Path) -> None:
    """Of streams that were left, and of single trees."""
    layers = {str(n): {"x": np.ones((1000, 1000), np.float32)} for n in range(6)}
    held = []
    with TieredParams(layers, PLACES["disk"], folder=tmp_path) as params:
        for count in (8, 24):
            for turn in range(count):
                for _ in params.stream(ahead=1 + turn % 4):
                    break
                assert params["3"]["x"][0, 0] == 1
            gc.collect()
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert held[1] - held[0] < 8 * 4_000_000


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "stream", "remove", "get"]), st.integers(0, 4)), max_size=12
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    operations=OPERATIONS,
    place=st.sampled_from(list(PLACES.values())),
    unified=st.booleans(),
    ahead=st.integers(0, 3),
)
def test_the_latest_of_each_name_comes_back(
    operations: list[tuple[str, int]],
    place: Placement,
    unified: bool,
    ahead: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, held = tmp_path_factory.mktemp("arrays"), dict[str, Any]()
    with TieredArrays(place, folder=folder, unified=unified) as arrays:
        for seed, (what, number) in enumerate(operations):
            name = str(number)
            if what == "put":
                arrays.put(name, layer(seed))
                held[name] = layer(seed)
            elif what == "stream":
                for streamed, tree in arrays.stream(ahead=ahead):
                    same(tree, held[streamed])
                    arrays.put(streamed, tree)  # in place of itself
            elif name in held and what == "remove":
                arrays.remove(name)
                del held[name]
            elif name in held:
                same(arrays[name], held[name])
        assert list(arrays) and sorted(arrays) == sorted(held) if held else not len(arrays)


def test_quantized_leaves_stay_packed(tmp_path: Path) -> None:
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(512, 640)), jnp.float32)
    packed = quantize(kernel, 4)
    with TieredParams({"a": {"kernel": packed}}, PLACES["disk"], folder=tmp_path) as params:
        assert params.nbytes["disk"] == packed.nbytes
        same(dequantize(params["a"]["kernel"]), dequantize(packed))


def test_what_is_stored_is_found_again(tmp_path: Path) -> None:
    """By another process, which makes none of it; damage is found, and written again."""

    def made(seen: list[str], seed: int) -> Any:
        for number in range(3):
            seen.append(str(number))
            yield str(number), layer(number + seed)

    options: dict[str, Any] = {"folder": tmp_path, "stored_as": "my model/v1"}
    with TieredParams(made([], 0), PLACES["disk"], **options) as params:
        with pytest.raises(UserError, match="cannot be replaced"):
            params.put("1", layer(1))
        with pytest.raises(UserError, match="cannot be removed"):
            params.remove("1")
    with TieredParams(made([], 50), PLACES["disk"], **options) as params:
        same(params["1"]["up"], layer(1)["up"])
    chunk = next(path for path in sorted(tmp_path.rglob("c/0/0")) if "down" in str(path))
    content = bytearray(chunk.read_bytes())
    content[7] ^= 1
    chunk.write_bytes(content)
    with TieredParams(made([], 0), PLACES["disk"], **options) as params:
        for name, tree in params.stream():
            same(tree, layer(int(name)))


def test_limits_are_kept(tmp_path: Path) -> None:
    layers = {str(n): layer(n) for n in range(4)}
    total = sum(x.nbytes for x in jax.tree.leaves(layers))
    with pytest.raises(UserError, match="host_memory allows"):
        TieredParams(layers, PLACES["host"], folder=tmp_path, host_memory=total // 2)
    with pytest.raises(UserError, match="disk_space allows"):
        TieredParams(layers, PLACES["disk"], folder=tmp_path, disk_space=total // 2)
    with TieredParams(
        layers, PLACES["disk"], folder=tmp_path, host_memory=total // 4 * 3 + 65536
    ) as params:
        assert params.peak_bytes(1)["host"] <= total // 4 * 3 + 65536
        assert sum(1 for _ in params.stream(ahead=1)) == 4
        with pytest.raises(UserError, match=r"a stream needs .* lower `ahead`"):
            params.stream(ahead=2)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": "text"}, r"x\['a'\] is str"),
        ({"a": jax.random.key(0)}, r"x\['a'\] is PRNGKeyArray of dtype key"),
        ({"a": object()}, r"x\['a'\] is object"),
    ],
)
def test_what_cannot_be_kept_is_named(tree: Any, said: str, tmp_path: Path) -> None:
    with TieredArrays(PLACES["disk"], folder=tmp_path) as arrays:
        with pytest.raises(UserError, match=said):
            arrays.put("x", tree)
        arrays.put("y", {"a": np.zeros(3)})
        with pytest.raises(UserError, match="remove it first"):
            arrays.put("y", {"a": np.zeros(4)})
        with pytest.raises(UserError, match="nothing named 'z'; the closest of 1 names: y"):
            arrays.stream(["z"])


def test_a_full_disk_is_told_to_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flexgen_jax.offload.disk.folder import WeightFolder

    write = WeightFolder.write
    with TieredArrays(PLACES["disk"], folder=tmp_path) as arrays:
        arrays.put("x", layer(0))
        same(arrays["x"], layer(0))

        def full(self: WeightFolder, *given: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(WeightFolder, "write", full)
        arrays.put("x", layer(1))
        for _ in range(2):
            with pytest.raises(UserError, match=r"x could not be written: .*No space left"):
                arrays["x"]
        with pytest.raises(UserError, match="0 could not be written"):
            TieredParams({"0": layer(0)}, PLACES["disk"], folder=tmp_path)
        monkeypatch.setattr(WeightFolder, "write", write)
        arrays.put("x", layer(2))
        same(arrays["x"], layer(2))


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another with `folder`"):
        TieredParams({"0": layer(0)}, PLACES["disk"], folder=tmp_path / "file")
    with TieredParams({"0": layer(0)}, PLACES["disk"], folder=tmp_path / "x") as params:
        for path in (tmp_path / "x").rglob("c/0/*"):
            path.unlink()
        with pytest.raises(UserError, match=r"0: .*No such file"):
            params["0"]


def test_layers_of_a_checkpoint(checkpoint: Callable[[], Path], tmp_path: Path) -> None:
    def layer_of(name: str) -> str | None:
        parts = name.split(".")
        return parts[parts.index("layers") + 1] if "layers" in parts else None

    from safetensors.numpy import load_file

    wanted = load_file(checkpoint() / "model.safetensors")
    with TieredParams(
        checkpoint_layers(checkpoint(), layer_of), PLACES["disk"], folder=tmp_path
    ) as params:
        for name, tree in params.stream():
            assert tree
            for key, array in tree.items():
                assert layer_of(key) == name
                np.testing.assert_array_equal(array, wanted[key])
