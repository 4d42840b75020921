"""What a GPU's runs are made of, with `unified=False` on the CPU: copies of weights, uploads and
downloads of little, pinned buffers, and layers that are unpacked once."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.engine import starting
from flexgen_jax.gpu import DeviceKernels
from flexgen_jax.layers.programs import Program, table
from flexgen_jax.offload import device, watcher
from flexgen_jax.offload.disk.direct_reads import PAGE
from flexgen_jax.offload.executor import BlockRun
from flexgen_jax.offload.kv_cache import KVCache
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.tiers import Memories, at_page, writable_view
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.parts import Layout
from flexgen_jax.policy.policy import generated_blocks
from flexgen_jax.schedule.waves import Step
from tests.helpers.models import prompts

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def tokens(llm: LLM, count: int = 6) -> list[list[int]]:
    ids = (prompts() * 3)[:count]
    return [r.token_ids for r in llm.generate(prompt_token_ids=ids, sampling_params=GREEDY)]


TEXTS = ["The people of the", "In the beginning", "We hold these truths", "Once", "It was", "A"]


def texts(llm: LLM) -> list[str]:
    return [result.text for result in llm.generate(TEXTS, SamplingParams(max_tokens=16))]


@pytest.mark.parametrize(("num_batches", "breakdown"), [(1, True), (3, False)])
def test_two_layers_weights_are_on_the_device_at_most(
    checkpoint: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    num_batches: int,
    breakdown: bool,
) -> None:
    """Whenever a copy begins, also while a watcher measures how long the computations take."""
    alive: list[weakref.ref[jax.Array]] = []
    counts: list[int] = []
    real, wait = Memories._put, watcher.wait_for

    def count() -> int:
        return sum(ref() is not None for ref in alive)

    def slowly(tree: Any) -> None:
        wait(tree)
        if getattr(tree, "shape", None) == (2,):  # the checks of a step
            time.sleep(0.01)

    def put(self: Memories, tree: Any, link: str, content: str, what: str) -> Any:
        moved = real(self, tree, link, content, what)  # type: ignore[arg-type]
        if content == "weights" and "decoder layer" in what:
            alive.extend(map(weakref.ref, moved))
            if count() > 2 * 6:
                time.sleep(0.003)  # the watcher may be looking at one
            counts.append(count())
        return moved

    monkeypatch.setattr(Memories, "_put", put)
    monkeypatch.setattr(watcher, "wait_for", slowly)
    policy = Policy.from_percent(0, 100, 0, 100, 0, 100, batch_size=2, num_batches=num_batches)
    options = {"dtype": "float32", "unified": False, "breakdown": breakdown}
    with LLM(checkpoint(), policy=policy, **options) as llm:
        tokens(llm, 2 * num_batches)
    assert len(counts) > 100
    assert max(counts) == 2 * 6  # six tensors of a layer


class Counted:
    """Counts programs by kind, and the arguments that come from the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.uploads = 0
        kinds: dict[int, str] = {}
        compiled, call = table.compiled, jax.stages.Compiled.__call__

        def compile_(model: Any, kind: Program[Any], *shape: Any) -> Any:
            found = compiled(model, kind, *shape)
            kinds[id(found)] = kind.name
            return found

        compile_.cache_info = compiled.cache_info  # type: ignore[attr-defined]

        def counted(found: jax.stages.Compiled, *args: Any) -> Any:
            self.calls[kinds[id(found)]] += 1
            leaves = jax.tree.leaves(args)
            self.uploads += sum(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
            return call(found, *args)

        monkeypatch.setattr(table, "compiled", compile_)
        monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)


@pytest.mark.parametrize(("unified", "sparsity"), [(True, 1.0), (False, 0.5)])
def test_a_decode_step_is_one_program_without_uploads(
    checkpoint: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    unified: bool,
    sparsity: float,
) -> None:
    counted = Counted(monkeypatch)
    policy = Policy(batch_size=2, num_batches=2, attention_sparsity=sparsity)
    with LLM(checkpoint(), policy=policy, dtype="float32", unified=unified) as llm:
        tokens(llm, 4)
        layers = llm.config.num_layers
    decoded = 2 * (GREEDY.max_tokens - 1)  # batches, tokens
    expected = {"prefill": 2 * layers, "decode": decoded * layers}
    expected |= dict.fromkeys(("embed", "head"), 2 + decoded)
    assert counted.calls == expected
    assert counted.uploads == 2  # the prompts


@pytest.mark.slow
def test_tokens_appended_by_the_program_are_those_of_attention_elsewhere() -> None:
    """Over several KV blocks, whatever reads them, in a model whose text depends on all of them."""
    found = []
    for percent, attention in (((100, 0), "device"), ((50, 50), "host"), ((50, 50), "device")):
        policy = Policy.from_percent(
            *(100, 0, *percent, 100, 0),
            batch_size=3,
            num_batches=2,
            attention=attention,
            kv_block_tokens=4,
        )
        with LLM(policy=policy, dtype="float32", unified=False) as llm:
            found.append(texts(llm))
    with LLM(policy=Policy(batch_size=6), dtype="float32") as llm:
        assert found == [texts(llm)] * 3


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's own code, with the sizes that a GPU has."""
    kernels = DeviceKernels(KernelSizes.of_gpu())
    for module in (device, starting):
        monkeypatch.setattr(module, "kernels_of_device", lambda: kernels)


def test_a_gpu_unpacks_a_layer_once_a_visit(
    checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, gpu_kernels: None
) -> None:
    """For all batches; a single batch's products unpack their own kernels."""
    found, calls = [], []
    counted = Counted(monkeypatch)
    for size, count in ((6, 1), (2, 3)):
        policy = Policy.from_percent(
            *(0, 100, 100, 0, 100, 0),
            batch_size=size,
            num_batches=count,
            weight_bits=4,
            schedule="zigzag",
        )
        with LLM(checkpoint(), policy=policy, dtype="float32", unified=False) as llm:
            found.append(tokens(llm))
            report, layers = llm.report(), llm.config.num_layers
        calls.append((counted.calls["unpack"], counted.calls["prefill"]))
        counted.calls.clear()
        assert report["peak_bytes"] == report["computed_peak_bytes"]
    assert found[0] == found[1]
    assert calls == [(0, layers), (layers * GREEDY.max_tokens, 3 * layers)]


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        pytest.param(
            {"batch_size": 2, "num_batches": 2, "schedule": "zigzag"},
            (6, 6, 6, 6),
            marks=pytest.mark.slow,
        ),
        pytest.param({"batch_size": 3, "cache_bits": 4}, (6, 6, 6), marks=pytest.mark.slow),
        ({"batch_size": 6, "overlap": False}, (3, 7, 3, 3, 3, 7)),
        pytest.param({"batch_size": 1, "weight_bits": 4}, (6,), marks=pytest.mark.slow),
    ],
    ids=["two batches", "packed cache", "fewer rows later", "packed weights"],
)
def test_resident_layers_are_decoded_by_one_program(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """And give the tokens that they give one by one."""
    found, calls, counted = [], [], Counted(monkeypatch)
    policy = Policy(kv_block_tokens=4, **changes)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    for joined in (3, 1):
        kernels = DeviceKernels(replace(KernelSizes.of_gpu(), joined_layers=joined))
        for module in (device, starting):
            monkeypatch.setattr(module, "kernels_of_device", lambda kernels=kernels: kernels)
        with LLM(policy=policy, dtype="float32", unified=False) as llm:
            results = llm.generate(TEXTS[: len(lengths)], params)
            layers = llm.config.num_layers
        found.append([result.token_ids for result in results])
        calls.append((counted.calls["decode_joined"], counted.calls["decode"]))
        counted.calls.clear()
    assert found[0] == found[1]
    (joined_calls, left), (none, single) = calls
    assert (none, single % layers) == (0, 0)
    assert layers == 5
    tokens, shrunk = single // layers, left // layers
    assert joined_calls == 2 * (tokens - shrunk)  # three layers, then two
    # A layer's cache loses rows in its own step.
    assert shrunk == (min(lengths) < max(lengths))


@pytest.mark.parametrize("size", [32, 4])
def test_pinned_open_blocks_are_made_when_a_batch_enters(
    checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """And later batches take them over, those too that had become sealed blocks."""
    made: list[int] = []
    begun: list[int] = []
    real, compute = Memories.buffer, BlockRun.compute

    def buffer(self: Memories, layout: Layout) -> Any:
        made.append(len(begun))
        return real(self, layout)

    def computing(self: BlockRun, step: Step, inputs: Any) -> Any:
        begun.extend([1] * (step.layer > 0))
        return compute(self, step, inputs)

    monkeypatch.setattr(Memories, "buffer", buffer)
    monkeypatch.setattr(BlockRun, "compute", computing)
    policy = Policy.from_percent(
        *(100, 0, 0, 100, 100, 0),
        batch_size=1,
        num_batches=2,
        kv_block_tokens=size,
        schedule="zigzag",
    )
    with LLM(checkpoint(), policy=policy, unified=False, dtype="float32") as llm:
        tokens(llm, 6)  # three blocks of equal length
        report, open_blocks = llm.report(), 2 * llm.config.num_layers
    assert made[:open_blocks] == [0] * open_blocks
    later = len(generated_blocks(GREEDY.max_tokens, size)) - 1  # each made when one is full
    assert len(made) <= open_blocks * (1 + 3 * later) and (later or len(made) == open_blocks)
    assert report["peak_bytes"] == report["computed_peak_bytes"]


def test_a_shorter_block_after_a_longer_one_has_no_more_than_its_plan(
    checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept for blocks like the longer one is given up before others are made."""
    alive: list[weakref.ref[jax.Array]] = []
    most = [0]
    real = Memories.buffer

    def buffer(self: Memories, layout: Layout) -> Any:
        found = real(self, layout)
        alive.extend(map(weakref.ref, found.arrays))
        arrays = [array for ref in alive if (array := ref()) is not None]
        most[0] = max(most[0], sum(array.nbytes for array in arrays))
        return found

    monkeypatch.setattr(Memories, "buffer", buffer)
    policy = Policy.from_percent(100, 0, 0, 100, 100, 0, batch_size=4, num_batches=2)
    with LLM(checkpoint(), policy=policy, unified=False, dtype="float32") as llm:
        tokens(llm, 8)
        whole = most[0]
        tokens(llm, 14)  # a block of 8, and one of 6
    assert most[0] == whole > 0


class Best:
    """An allocator that takes the start of the smallest free piece, as XLA's does."""

    def __init__(self, *free: tuple[int, int]) -> None:
        self.free = list(free)

    def make(self, size: int) -> Any:
        size = -(-size // 256) * 256
        start, end = min((p for p in self.free if p[1] - p[0] >= size), key=lambda p: p[1] - p[0])
        self.free.remove((start, end))
        self.free.append((start + size, end))
        return _Piece(self, start, size)


class _Piece:
    def __init__(self, allocator: Best, start: int, size: int) -> None:
        self.allocator, self.start, self.end = allocator, start, start + size

    def unsafe_buffer_pointer(self) -> int:
        return self.start

    def __del__(self) -> None:  # joins what is free on both sides
        start, end, free = self.start, self.end, self.allocator.free
        for piece in list(free):
            if piece[1] == start or piece[0] == end:
                free.remove(piece)
                start, end = min(start, piece[0]), max(end, piece[1])
        free.append((start, end))


@pytest.mark.parametrize("begin", [0, 256, 5 * 256, PAGE - 256])
def test_pinned_arrays_begin_at_pages(begin: int) -> None:
    """Also where an array of another size lies before them, or a small piece is free."""
    allocator = Best((begin, 1 << 30), (7 << 30, (7 << 30) + 512))
    sizes = (PAGE, 3 * PAGE, 999)
    kept = [at_page(partial(allocator.make, size), allocator.make) for size in sizes]
    assert not any(piece.start % PAGE for piece in kept)


def test_a_pinned_array_can_be_written_to() -> None:
    memories = Memories(Watcher(Metrics()), unified=False)
    array = memories.pinned_array((3, 5), np.dtype(np.float32))
    assert array.sharding.memory_kind == "pinned_host"
    assert not np.asarray(array).any()
    writable_view(array)[:] = 7
    assert (np.asarray(memories.to_device(array, "cache", "x")) == 7).all()


@pytest.mark.parametrize("unified", [True, False])
def test_a_batch_leaves_nothing_behind(
    checkpoint: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, unified: bool
) -> None:
    """Its KV cache is freed when it ends, not when Python collects garbage."""
    made: list[weakref.ref[jax.Array]] = []
    left: list[int] = []
    keep, compute = KVCache.keep, BlockRun.compute

    def keeping(self: KVCache, key: Any, arrays: Any) -> None:
        made.extend(map(weakref.ref, jax.tree.leaves(arrays)))
        keep(self, key, arrays)

    def computing(self: BlockRun, step: Step, inputs: Any) -> Any:
        if (
            step[:2] == (0, 1) and step.batch.number % 2 == 0
        ):  # the first of two that enter together
            left.append(sum(ref() is not None for ref in made))
        return compute(self, step, inputs)

    monkeypatch.setattr(KVCache, "keep", keeping)
    monkeypatch.setattr(BlockRun, "compute", computing)
    policy = Policy.from_percent(100, 0, 50, 50, 100, 0, batch_size=1, num_batches=2, cache_bits=4)
    with LLM(checkpoint(), policy=policy, dtype="float32", unified=unified) as llm:
        gc.disable()
        try:
            tokens(llm, 6)
        finally:
            gc.enable()
    assert made and left == [0, 0, 0]
