"""Notices when work that was started in the background is done, for the counters."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax

from flexgen_jax.offload.metrics import Content, Metrics, Operation, Resource

LOOK_S = 0.0002
"""Seconds between two looks at an array that must not be kept."""


class Watcher:
    """Records the start and the end of the device's operations.

    Each resource's operations are followed in the order in which they were enqueued: one starts
    when the one before has ended and its source is computed, and ends when its result is ready. The
    watcher only observes: an error in a computation reaches the thread that uses its result. It
    does nothing unless `metrics.is_timed`, because its threads would disturb the one that
    dispatches.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._queues: dict[Resource, queue.SimpleQueue[tuple[Operation, Any, Any] | None]] = {}
        self._threads: list[threading.Thread] = []

    def follow(self, operation: Operation, source: Any, result: Any) -> None:
        """Follows an enqueued operation, which computes or copies `result` from `source`.

        Both are kept from being freed until they are there, unless they are `weakly` given. A
        result may be a function that waits for it.
        """
        if not self.metrics.is_timed:
            return
        if operation.resource not in self._queues:
            found = self._queues[operation.resource] = queue.SimpleQueue()
            name = f"flexgen-watch-{operation.resource}"
            thread = threading.Thread(target=self._run, args=(found,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queues[operation.resource].put((operation, source, result))

    def close(self) -> None:
        for found in self._queues.values():
            found.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()

    def _run(self, waiting: queue.SimpleQueue[tuple[Operation, Any, Any] | None]) -> None:
        while (item := waiting.get()) is not None:
            operation, source, result = item
            wait_for(source)
            self.metrics.start(operation)
            result() if callable(result) else wait_for(result)
            self.metrics.end(operation)
            del item, source, result  # do not hold memory until the next item comes


def weakly(tree: Any) -> list[weakref.ref[Any]]:
    """Returns a tree's arrays for `wait_for`, which will not keep them from being freed."""
    return [weakref.ref(leaf) for leaf in jax.tree.leaves(tree)]


def wait_for(tree: Any) -> None:
    """Waits until a tree is computed, or its computation has failed; of arrays that are `weakly`
    given, until they are computed or freed."""
    with suppress(Exception):  # raised again wherever the result is used
        for leaf in jax.tree.leaves(tree):
            if not isinstance(leaf, weakref.ref):
                jax.block_until_ready(leaf)
                continue
            while (array := leaf()) is not None and not array.is_ready():
                del array
                time.sleep(LOOK_S)


def counted(
    metrics: Metrics,
    resource: Resource,
    content: Content,
    what: str,
    nbytes: int,
    futures: Sequence[Any],
) -> None:
    """Counts a disk transfer that has just begun, until all of its futures are done."""
    operation = metrics.begin(resource, content, what, nbytes)
    left, lock = len(futures), threading.Lock()

    def done(_: Any) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            metrics.end(operation)

    for future in futures:
        future.add_done_callback(done)
