"""Copies of a model as Ray actors: one on each GPU of a cluster, or on each machine without any."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flexgen_jax.errors import UserError, first_line
from flexgen_jax.jobs.fleet import Copy, LostError, News, Replica

LOOK_S = 2.0
"""Seconds between two looks at which machines there are."""

NEWS_WAIT_S = 1.0
"""Seconds that a copy waits for something to tell."""

MAX_LOST_COPIES = 3
"""After this number of lost copies, a machine gets no further copy."""


class RayCopy:
    """A copy of the model in an actor; see `fleet.Copy`."""

    def __init__(self, actor: Any, node: str, name: str) -> None:
        self._actor, self.node, self.name = actor, node, name
        self._asked: Any = actor.news.remote(NEWS_WAIT_S)

    def give(self, requests: Sequence[Any]) -> None:
        self._actor.give.remote(requests)

    def news(self) -> News | None:
        import ray

        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        try:
            latest: News = ray.get(self._asked)
        except ray.exceptions.RayTaskError as error:
            raise LostError(first_line(error.cause or error)) from None
        except ray.exceptions.RayError as error:
            raise LostError(first_line(error)) from None
        self._asked = self._actor.news.remote(NEWS_WAIT_S)
        return latest

    def end(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            ray.kill(self._actor)


class RayCrew:
    """The copies on the machines of a Ray cluster, as they join and leave; see `fleet.Crew`.

    address: of the cluster; "auto" for the cluster of this machine, or a new local cluster; say:
    told which copies are lost. options: of the copies' `LLM`.
    """

    def __init__(self, address: str, say: Callable[[str], object]) -> None:
        self._say = say
        try:
            import ray
        except ImportError:
            raise UserError("--ray needs Ray: pip install 'ray[default]'") from None
        try:
            ray.init(
                None if address == "auto" else address,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"--ray {address}: {first_line(error)}") from None
        os.environ["JAX_PLATFORMS"] = "cpu"  # this process only leads: the GPU is for a copy
        self.has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.options: Mapping[str, Any] = {}
        self._copies: list[RayCopy] = []
        self._lost: Counter[str] = Counter()
        self._why = ""
        self._looked_at = -LOOK_S

    def copies(self) -> Sequence[Copy]:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look()
        return list(self._copies)

    def _look(self) -> None:
        """Starts copies on machines that have too few; raises if no machine can have one."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        usable = 0
        for node in ray.nodes():
            number = node["NodeID"]
            if not node["Alive"] or self._lost[number] >= MAX_LOST_COPIES:
                continue
            usable += 1
            gpus = int(node["Resources"].get("GPU", 0))
            num_copies = sum(copy.node == number for copy in self._copies)
            for _ in range(num_copies, gpus or 1):
                actor = ray.remote(Replica).options(
                    num_cpus=0,
                    num_gpus=1 if gpus else 0,
                    max_concurrency=4,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(number, soft=False),
                )
                name = node.get("NodeManagerHostname", number)
                self._copies.append(RayCopy(actor.remote(self.options), number, name))
        if not usable:
            raise UserError(
                f"no machine of the cluster can run the model: {self._why or 'it is empty'}"
            )

    def lost(self, copy: Copy, why: str) -> None:
        assert isinstance(copy, RayCopy)
        self._copies.remove(copy)
        self._lost[copy.node] += 1
        self._why = why
        self._looked_at = -LOOK_S
        self._say(f"flexgen-jax: lost the copy on {copy.name}: {why}")
        copy.end()

    def close(self) -> None:
        import ray

        for copy in self._copies:
            copy.end()
        self._copies.clear()
        ray.shutdown()
