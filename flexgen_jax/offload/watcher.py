"""Detects the end of background work, for the metrics."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax

from flexgen_jax.offload.metrics import Content, Metrics, Operation, Resource

Item = tuple[Operation, Any, Any, threading.Event]
"""An operation, its source and result, and the callback at its end."""


class Watcher:
    """Records the start and the end of the device's operations.

    Each resource's operations are followed in order of enqueueing: an operation starts when its
    predecessor has ended and its source is computed, and ends when its result is ready. The watcher
    only observes: an error in a computation reaches the thread that uses its result. It does
    nothing unless `metrics.is_timed`, because its threads would slow the dispatching thread.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._queues: dict[Resource, queue.SimpleQueue[Item | None]] = {}
        self._last: dict[Resource, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def follow(self, operation: Operation, source: Any, result: Any) -> None:
        """Follows an enqueued operation, which computes or copies `result` from `source`.

        References keep both alive until they are ready. A source may be the ends (`last`) of
        other operations, which keep nothing; a result may be a function that waits for it.
        """
        if not self.metrics.is_timed:
            return
        if operation.resource not in self._queues:
            waiting = self._queues[operation.resource] = queue.SimpleQueue()
            name = f"flexgen-watch-{operation.resource}"
            thread = threading.Thread(target=self._run, args=(waiting,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        ended = self._last[operation.resource] = threading.Event()
        self._queues[operation.resource].put((operation, source, result, ended))

    def last(self, resource: Resource) -> threading.Event | None:
        """Returns the end of the last operation of a resource, None if there is none yet."""
        return self._last.get(resource)

    def close(self) -> None:
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()

    def _run(self, waiting: queue.SimpleQueue[Item | None]) -> None:
        while (item := waiting.get()) is not None:
            operation, source, result, ended = item
            wait_for(source)
            self.metrics.start(operation)
            wait_for(result)
            self.metrics.end(operation)
            ended.set()
            del item, source, result  # do not hold memory until the next item comes


def wait_for(tree: Any) -> None:
    """Waits until a tree is computed, or its computation has failed; leaves may be events, or
    functions that wait."""
    for leaf in jax.tree.leaves(tree):
        with suppress(Exception):  # raised again wherever the result is used
            if isinstance(leaf, threading.Event):
                leaf.wait()
            elif callable(leaf):
                leaf()
            else:
                jax.block_until_ready(leaf)


def counted(
    metrics: Metrics,
    resource: Resource,
    content: Content,
    name: str,
    nbytes: int,
    futures: Sequence[Any],
) -> None:
    """Counts a started disk transfer until all of its futures are done."""
    operation = metrics.begin(resource, content, name, nbytes)
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
