"""Files of a model's folder that appear whole or not at all."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}
"""Bytes of an element, by safetensors' names of dtypes."""


class Entry(NamedTuple):
    """A tensor in the header of a safetensors file; dtype: as safetensors names it."""

    name: str
    dtype: str
    shape: Sequence[int]


def write_safetensors(path: Path, entries: Iterable[Entry], content: Iterable[Any]) -> int:
    """Writes a safetensors file; returns its tensors' bytes.

    content: the bytes of the tensors, in the order of the entries, in pieces of any size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in entries:
        end = offset + prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    partial = path.with_suffix(".part")
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for piece in content:
            file.write(piece)
    partial.replace(path)
    return offset


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(content, indent=2))
    partial.replace(path)
