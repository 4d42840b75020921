"""Readers of floats of few bits in safetensors: FP8, MXFP4, NVFP4 and nf4. Each is one class, as in
`integer_readers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from flexgen_jax.models.formats.expected import of_group
from flexgen_jax.models.formats.format import Factor, Format
from flexgen_jax.models.formats.integer_readers import leaves_of
from flexgen_jax.models.formats.packed import Parts, factor_rows
from flexgen_jax.models.formats.packing import unpack_nibbles


class Float8:
    """FP8: E4M3 or E5M2 with a scale for each block, each row, or all. MXFP8 has blocks of 32
    elements of a row, whose scales are powers of two."""

    METHOD = "FP8"
    SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")

    def __init__(self, parts: Parts) -> None:
        scale = parts.need(*self.SCALES)
        self.shape = parts.shape(".weight")
        if len(self.shape) != 2:
            raise parts.refused(".weight", f"has shape {self.shape}; FP8 is read of matrices")
        rows, columns = self.shape
        block = _block_of(parts.options)
        if parts.dtype(scale) in ("U8", "F8_E8M0") and parts.shape(scale) == (rows, columns // 32):
            block = 1, 32
        factor = parts.factor(scale, rows, columns, block)
        levels = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}.get(parts.dtype(".weight"))
        if levels is None:
            raise parts.refused(".weight", f"is {parts.dtype('.weight')}, which is no weight's")
        self.format = Format(8, factor, levels=levels)  # type: ignore[arg-type]
        self.names = (f"{parts.base}.weight", parts.base + scale)
        self._codes, self._scale = parts.array(".weight"), parts.array(scale)

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = np.ascontiguousarray(self._codes[start:stop])
        return [codes, factor_rows(self._scale, self.format.scale, start, stop)]


def _block_of(options: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the rows and columns of a block, 128 each where the config does not say."""
    block = options.get("weight_block_size") or of_group(options).get("block_structure")
    block = block or (128, 128)
    return int(block[0]), int(block[1])


class Mxfp4:
    """MXFP4 of compressed-tensors: 4-bit floats, blocks of 32 with a power of two."""

    METHOD = "MXFP4"

    def __init__(self, parts: Parts) -> None:
        parts.need(".weight_scale")
        rows, halves = parts.shape(".weight_packed")
        self.shape = (rows, 2 * halves)
        parts.check(".weight_packed", (rows, halves), "U8")
        parts.check(".weight_scale", (rows, 2 * halves // 32), "U8", "F8_E8M0")
        self.format = Format(4, Factor("e8m0", 32), levels="e2m1")
        self.names = (f"{parts.base}.weight_packed", f"{parts.base}.weight_scale")
        self._codes, self._scale = parts.array(".weight_packed"), parts.array(".weight_scale")

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = unpack_nibbles(self._codes[start:stop])
        return leaves_of(self.format, codes, self._scale[start:stop], None, None)


class MxfpBlocks:
    """MXFP4 of gpt-oss, whose experts are together: blocks [expert, row, block, byte]."""

    METHOD = "MXFP4"

    def __init__(self, parts: Parts) -> None:
        parts.need("_scales")
        experts, rows, blocks, _ = parts.shape("_blocks")
        self.shape = (experts, rows, 32 * blocks)
        parts.check("_blocks", (experts, rows, blocks, 16), "U8")
        parts.check("_scales", (experts, rows, blocks), "U8", "F8_E8M0")
        self.format = Format(4, Factor("e8m0", 32), levels="e2m1")
        self.names = (f"{parts.base}_blocks", f"{parts.base}_scales")
        self._codes, self._scale = parts.array("_blocks"), parts.array("_scales")

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is not None
        bytes_ = self._codes[expert, start:stop]
        codes = unpack_nibbles(bytes_.reshape(bytes_.shape[0], -1))
        return leaves_of(self.format, codes, self._scale[expert, start:stop], None, None)


class Nvfp4:
    """NVFP4: 4-bit floats, blocks of 16 with an 8-bit float, and one number for all. ModelOpt
    multiplies by that number, compressed-tensors divides by it."""

    METHOD = "NVFP4"

    def __init__(self, parts: Parts) -> None:
        is_modelopt = parts.has(".weight_scale_2")
        codes = ".weight" if is_modelopt else ".weight_packed"
        overall = ".weight_scale_2" if is_modelopt else ".weight_global_scale"
        parts.need(".weight_scale")
        rows, halves = parts.shape(codes)
        self.shape = (rows, 2 * halves)
        parts.check(codes, (rows, halves), "U8")
        parts.check(".weight_scale", (rows, halves // 8), "F8_E4M3")
        number = np.asarray(parts.array(overall), np.float32).reshape(1, 1)
        self._overall = number if is_modelopt else np.float32(1) / number
        unit = Factor("float32", 0, rows=0)
        self.format = Format(4, Factor("e4m3", 16, of=unit), levels="e2m1")
        self.names = tuple(f"{parts.base}{end}" for end in (codes, ".weight_scale", overall))
        self._codes, self._scale = parts.array(codes), parts.array(".weight_scale")

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = unpack_nibbles(self._codes[start:stop])
        leaves = leaves_of(self.format, codes, self._scale[start:stop], None, None)
        return [*leaves, self._overall]


class NormalFloat:
    """4-bit NormalFloat of bitsandbytes: flat blocks, whose largest magnitudes may be rounded to 8
    bits ("double quantization")."""

    METHOD = "bitsandbytes nf4"
    STATE = ".weight.quant_state.bitsandbytes__nf4"

    def __init__(self, parts: Parts) -> None:
        if parts.has(self.STATE.replace("nf4", "fp4")):
            raise parts.refused(".weight", "is bitsandbytes' FP4, which is not supported; nf4 is")
        parts.need(self.STATE)
        for end in (".weight.absmax", ".weight.quant_map"):
            parts.need(end)
        state = json.loads(bytes(parts.array(self.STATE)))
        self.shape = tuple(state["shape"])
        rows, columns = self.shape
        block = int(state["blocksize"])
        # Of any dtype, as bnb_4bit_quant_storage says.
        codes = parts.array(".weight").reshape(-1).view(np.uint8)
        if codes.size != rows * columns // 2:
            raise parts.refused(".weight", f"has {codes.size} bytes for {self.shape} in 4 bits")
        if columns % block:
            raise parts.refused(".weight", f"has blocks of {block} that go over {columns} columns")
        self._per_row = columns // block
        self._codes = codes.reshape(rows, columns // 2)
        self.names = tuple(
            parts.base + end
            for end in (".weight", ".weight.absmax", ".weight.quant_map", self.STATE)
        )
        self._largest = np.asarray(parts.array(".weight.absmax")).reshape(rows, -1)
        scale = Factor("float32", block)
        if parts.has(".weight.nested_absmax"):
            self.names += (f"{parts.base}.weight.nested_absmax",)
            self.names += (f"{parts.base}.weight.nested_quant_map",)
            self._largest = self._nested(parts, state).reshape(rows, -1)
        self.format = Format(4, scale, levels="nf4")

    def _nested(self, parts: Parts, state: Mapping[str, Any]) -> np.ndarray:
        """Returns the blocks' largest magnitudes, which are rounded themselves."""
        table = np.asarray(parts.array(".weight.nested_quant_map"), np.float32)
        units = np.asarray(parts.array(".weight.nested_absmax"), np.float32)
        codes = np.asarray(parts.array(".weight.absmax")).reshape(-1)
        unit = np.repeat(units, int(state["nested_blocksize"]))[: codes.size]
        largest: np.ndarray = table[codes] * unit + np.float32(state["nested_offset"])
        return largest

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = unpack_nibbles(self._codes[start:stop], high_first=True)
        return leaves_of(self.format, codes, self._largest[start:stop], None, None)
