"""How hidden states get from stage to stage: processes that shift arrays along, all at once.

A shift is one compiled program that runs in all processes (`lax.ppermute`): gloo carries it between
CPUs, NCCL between GPUs. All stages shift arrays of one length, that of the largest. A thread shifts
while the next slot is computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flexgen_jax.schedule.stages import Slots

MIN_PADDED_ELEMENTS = 1 << 10
"""Arrays are padded to powers of two, with at least this number of elements, so that few programs
are compiled."""

AXIS = "stage"


PROBES = (MIN_PADDED_ELEMENTS, 1 << 20)
"""Elements of the arrays, fp32, that measure a link."""

TIMES = 8
"""Number of shifts per array."""


class StageRing:
    """The devices of all stages, each that of a process of `jax.distributed`."""

    def __init__(self) -> None:
        self.stage, self.stages = jax.process_index(), jax.process_count()
        device_of_process = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([device_of_process[n] for n in range(self.stages)]), (AXIS,))
        self.sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        self.device = device_of_process[self.stage]

    def shifted(self, array: jax.Array) -> jax.Array:
        """Shifts each stage's array, [1, length], to the stage after it; returns the previous
        stage's array, [length]."""
        shape = (self.stages, array.shape[1])
        arrays = jax.make_array_from_single_device_arrays(shape, self.sharding, [array])
        moved = _shifting(self.sharding, self.stages)(arrays)
        shard: jax.Array = moved.addressable_data(0)
        return shard


def measured_link() -> tuple[float, float]:
    """Returns the seconds that it takes to shift next to nothing, and the bytes per second beyond
    that; all stages measure at once."""
    ring, best = StageRing(), []
    for length in PROBES:
        sent_array = _zeros(length, "float32", ring.device)
        seconds = []
        for _ in range(TIMES):
            started = time.perf_counter()
            ring.shifted(sent_array).block_until_ready()
            seconds.append(time.perf_counter() - started)
        best.append(sorted(seconds)[TIMES // 2])
    nbytes = 4 * (PROBES[1] - PROBES[0])
    return best[0], nbytes / max(best[1] - best[0], 1e-6)


class Chain:
    """This process's place among the stages, which are all processes of `jax.distributed`.

    failed: told what ends the shifting too early. waited_s: seconds that `receive` waited.
    """

    def __init__(
        self,
        slots: Slots,
        hidden_size: int,
        dtype: str,
        failed: Callable[[BaseException], object],
    ) -> None:
        self._slots, self._hidden_size, self._dtype = slots, hidden_size, dtype
        self._failed = failed
        self._ring = StageRing()
        self._changed = threading.Condition()
        self._leaving: dict[int, dict[int, jax.Array]] = {}
        self._arrived: dict[int, jax.Array] = {}
        self._error: BaseException | None = None
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._run, name="flexgen-chain", daemon=True)
        self._thread.start()

    def send(self, number: int, batch: int, hidden: jax.Array) -> None:
        """Sends this stage's result for a batch of a slot."""
        with self._changed:
            self._leaving.setdefault(number, {})[batch] = hidden
            self._changed.notify_all()

    def receive(self, number: int, batch: int, rows: int, tokens: int) -> jax.Array:
        """Returns the previous stage's result for a batch of a slot, [rows, tokens, hidden];
        waits for it."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: number in self._arrived or self._error)
            if number not in self._arrived:
                assert self._error is not None
                raise self._error
            arrived = self._arrived[number]
        steps = self._slots.steps_of(number)
        if batch == steps[-1].batch:
            del self._arrived[number]
        arrived.block_until_ready()
        self.waited_s += time.perf_counter() - started
        before = 0
        for step in steps:
            if step.batch == batch:
                break
            before += step.size
        shape = (rows, tokens, self._hidden_size)
        hidden: jax.Array = _cut(arrived, np.int32(before * self._hidden_size), shape)
        return hidden

    def close(self) -> None:
        """Waits for the last shift, after the slots have ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for shift in count():
                size = self._slots.sent(shift, self._ring.stages)
                if size is None:
                    return
                if size:
                    self._shift(shift, size)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._failed(error)

    def _shift(self, shift: int, size: int) -> None:
        length = max(MIN_PADDED_ELEMENTS, 1 << (size * self._hidden_size - 1).bit_length())
        stage = self._ring.stage
        arrived = self._ring.shifted(self._packed(shift - stage, length))
        number = shift - stage + 1
        if stage and number >= 0 and self._slots.steps_of(number):
            with self._changed:
                self._arrived[number] = arrived
                self._changed.notify_all()

    def _packed(self, number: int, length: int) -> jax.Array:
        """Returns this stage's results of a slot, [1, length]; waits until it is enqueued."""
        is_last = self._ring.stage == self._ring.stages - 1
        steps = () if number < 0 or is_last else self._slots.steps_of(number)
        if not steps:
            return _zeros(length, self._dtype, self._ring.device)
        with self._changed:
            self._changed.wait_for(lambda: len(self._leaving.get(number, ())) == len(steps))
            leaving = self._leaving.pop(number)
        packed: jax.Array = _packed([leaving[step.batch] for step in steps], length)
        return packed


@lru_cache
def _shifting(sharding: NamedSharding, stages: int) -> Callable[[jax.Array], jax.Array]:
    def shift(own: jax.Array) -> jax.Array:
        moved: jax.Array = jax.lax.ppermute(own, AXIS, [(n, n + 1) for n in range(stages - 1)])
        return moved

    spec = sharding.spec
    sharded = jax.shard_map(shift, mesh=sharding.mesh, in_specs=spec, out_specs=spec)
    shifting: Callable[[jax.Array], jax.Array] = jax.jit(sharded)
    return shifting


@lru_cache(maxsize=16)
def _zeros(length: int, dtype: str, device: Any) -> jax.Array:
    zeros: jax.Array = jax.device_put(jnp.zeros((1, length), dtype), device)
    return zeros


@partial(jax.jit, static_argnums=1)
def _packed(made: list[jax.Array], length: int) -> jax.Array:
    flat = jnp.concatenate([hidden.reshape(-1) for hidden in made])
    return jnp.pad(flat, (0, length - flat.size))[None]


@partial(jax.jit, static_argnums=2)
def _cut(packed: jax.Array, start: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    size = shape[0] * shape[1] * shape[2]
    return jax.lax.dynamic_slice(packed[0], (start,), (size,)).reshape(shape)
