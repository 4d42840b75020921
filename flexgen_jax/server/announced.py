"""A server that says where it listens."""

from __future__ import annotations

from typing import Any

import uvicorn

from flexgen_jax.progress import logger


class Announced(uvicorn.Server):
    """A server of a model, which says where once it listens."""

    def __init__(self, config: uvicorn.Config, model: str) -> None:
        super().__init__(config)
        self._model = model

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for server in self.servers if self.started else ():
            for socket in server.sockets:
                host, port, *_ = socket.getsockname()
                address = f"[{host}]" if ":" in host else host
                logger().info(
                    "flexgen-jax: %s is served at http://%s:%s/v1", self._model, address, port
                )
