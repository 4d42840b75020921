"""Messages between the process that a user starts and its stages: JSON, and arrays.

    length of the JSON, 8 bytes | JSON: [kind, content, arrays] | the arrays' bytes

In the content, {"array": 3} stands for the array of that number; `arrays` has their dtypes and
shapes. Nothing that comes is run or unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from math import prod
from typing import Any

import numpy as np

from flexgen_jax.models.weight_source import numpy_dtype

MAX_MESSAGE_BYTES = 1 << 32
"""Bytes of a message's JSON, and of its arrays, at most."""

LENGTH = struct.Struct("!Q")


class ClosedError(ConnectionError):
    """The connection is lost."""


class Wire:
    """One end of a connection. Any thread may send, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._sending = connected, threading.Lock()
        if connected.family in (socket.AF_INET, socket.AF_INET6):  # messages are small
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: str, **content: Any) -> None:
        """Sends a message; raises `ClosedError` if nobody will get it."""
        arrays: list[np.ndarray] = []
        plain = _without_arrays(content, arrays)
        about = [[array.dtype.name, array.shape] for array in arrays]
        text = json.dumps([kind, plain, about]).encode()
        pieces = [LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays)]
        try:
            with self._sending:
                self._socket.sendall(b"".join(pieces))
        except OSError as error:
            raise ClosedError(str(error)) from None

    def receive(self, max_bytes: int = MAX_MESSAGE_BYTES) -> tuple[str, dict[str, Any]]:
        """Returns the next message's kind and content; raises `ClosedError` if none will come.

        max_bytes: bytes that it may have; a stranger's message may be anything.
        """
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        if length > max_bytes:
            raise ClosedError(f"received an invalid message of {length} bytes")
        message_kind, plain, about = json.loads(self._read(length))
        if sum(prod(shape) * numpy_dtype(name).itemsize for name, shape in about) > max_bytes:
            raise ClosedError("received a message with invalid arrays")
        arrays = []
        for name, shape in about:
            dtype = numpy_dtype(name)
            content_bytes = self._read(prod(shape) * dtype.itemsize)
            arrays.append(np.frombuffer(content_bytes, dtype).reshape(shape))
        return message_kind, _with_arrays(plain, arrays)

    def _read(self, length: int) -> bytearray:
        received = bytearray(length)
        view, offset = memoryview(received), 0
        while offset < length:
            try:
                count = self._socket.recv_into(view[offset:])
            except OSError as error:
                raise ClosedError(str(error)) from None
            if not count:
                raise ClosedError("the connection was closed")
            offset += count
        return received

    def close(self) -> None:
        self._socket.close()


def _without_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        return {key: _without_arrays(entry, arrays) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(entry, arrays) for entry in value]
    return value


def _with_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"array"}:
            return arrays[value["array"]]
        return {key: _with_arrays(entry, arrays) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_arrays(entry, arrays) for entry in value]
    return value
