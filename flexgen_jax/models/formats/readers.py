"""Readers of the formats of few bits in safetensors. Each is one class, which finds its stored
arrays, checks their shapes, and returns leaves of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from flexgen_jax.models.formats.expected import of_group
from flexgen_jax.models.formats.format import Factor, Format
from flexgen_jax.models.formats.packed import FLOATS, PackedTensor, Parts, StoredArrays, factor_rows
from flexgen_jax.models.formats.packing import (
    order_of,
    packed_parts,
    unpack_nibbles,
    unpack_words,
)

ALWAYS_BESIDE = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".qscale_act",
    ".weight_shape",
    ".bias_scale",
    ".weight_format",
)
"""Ends of names of arrays that belong to a tensor in few bits and are not needed: activations are
not rounded here."""


def packed_tensors(
    arrays: StoredArrays, names: list[str], options: Mapping[str, Any]
) -> dict[str, PackedTensor]:
    """Returns the tensors in few bits among stored ones, by the names that they would have in 16
    bits. options: the config's "quantization_config". Raises `CheckpointError` for one that cannot
    be read."""
    method = str(options.get("quant_method", "")).lower()
    packed: dict[str, PackedTensor] = {}
    for name in names:
        base, _, end = name.rpartition(".")
        reader = None
        if end == "weight_packed":
            reader = _of_packed(arrays, base)
        elif end == "qweight":
            reader = Awq if _is_awq(arrays, base, method) else Gptq
        elif end == "weight":
            reader = _of_weight(arrays, base)
        elif name.endswith("_blocks"):
            base, reader = name.removesuffix("_blocks"), MxfpBlocks
        if reader is None:
            continue
        plain = base if reader is MxfpBlocks else f"{base}.weight"
        packed[plain] = reader(Parts(arrays, base, reader.METHOD, options))
    return packed


def _of_packed(arrays: StoredArrays, base: str) -> Any:
    """The reader of compressed-tensors' `weight_packed`."""
    if arrays.dtype(f"{base}.weight_packed") == "I32":
        return PackQuantized
    return Nvfp4 if f"{base}.weight_global_scale" in arrays else Mxfp4


def _is_awq(arrays: StoredArrays, base: str, method: str) -> bool:
    """Returns whether `qweight` is AWQ's, whose columns are packed, and not GPTQ's, whose rows
    are."""
    scales = f"{base}.scales"
    if method in ("awq", "gptq") or scales not in arrays:
        return method == "awq"
    return arrays.shape(f"{base}.qweight")[1] < arrays.shape(scales)[1]


def _of_weight(arrays: StoredArrays, base: str) -> Any:
    dtype = arrays.dtype(f"{base}.weight")
    if dtype.startswith("F8"):
        return Float8
    if dtype == "I8":
        return Integers8
    if dtype == "U8":
        return Nvfp4 if f"{base}.weight_scale_2" in arrays else NormalFloat
    return None


class Float8:
    """FP8: E4M3 or E5M2 with a scale for each block, each row, or all."""

    METHOD = "FP8"
    SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")

    def __init__(self, parts: Parts) -> None:
        scale = parts.need(*self.SCALES)
        self.shape = parts.shape(".weight")
        if len(self.shape) != 2:
            raise parts.refused(".weight", f"has shape {self.shape}; FP8 is read of matrices")
        rows, columns = self.shape
        block = _block_of(parts.options)
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


class Integers8:
    """8-bit integers with a scale a row, or one for all: of compressed-tensors, and LLM.int8() of
    bitsandbytes, whose scale is the row's largest magnitude."""

    METHOD = "INT8"

    def __init__(self, parts: Parts) -> None:
        scale = parts.need(".weight_scale", ".SCB")
        self.shape = parts.shape(".weight")
        rows, columns = self.shape
        self._is_largest = scale == ".SCB"
        group = columns
        if len(parts.shape(scale)) == 2 and parts.shape(scale)[1] > 1:
            group = columns // parts.shape(scale)[1]
        factor = parts.factor(scale, rows, columns, (1, group))
        zero, self._zero = None, None
        self.names: tuple[str, ...] = (f"{parts.base}.weight", parts.base + scale)
        if parts.has(".weight_zero_point"):
            parts.check(".weight_zero_point", parts.shape(scale), "I8")
            zero = Factor("uint8", factor.group, factor.rows)
            self._zero = parts.array(".weight_zero_point")
            self.names += (f"{parts.base}.weight_zero_point",)
        self.format = Format(8, factor, zero=zero, center=0 if zero else 128)
        self._codes, self._scale = parts.array(".weight"), parts.array(scale)

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        scale = factor_rows(self._scale, self.format.scale, start, stop)
        if self._is_largest:
            scale = scale / np.float32(127)
        leaves = [_unsigned(self._codes[start:stop]), scale]
        if self._zero is not None and self.format.zero is not None:
            zero = factor_rows(self._zero, self.format.zero, start, stop)
            leaves.append(_unsigned(zero))
        return leaves


def _unsigned(integers: np.ndarray) -> np.ndarray:
    """Returns 8-bit integers with 128 added."""
    return np.ascontiguousarray(integers).view(np.uint8) ^ np.uint8(0x80)


class PackQuantized:
    """Integers of 4 or 8 bits of compressed-tensors, packed along the input."""

    METHOD = "compressed-tensors pack-quantized"

    def __init__(self, parts: Parts) -> None:
        rows, words = parts.shape(".weight_packed")
        scale = parts.need(".weight_scale")
        columns = words * 8
        self._bits = 4
        if parts.has(".weight_shape"):
            rows, columns = map(int, parts.array(".weight_shape"))
            self._bits = 32 * words // max(1, columns)
            parts.check(".weight_packed", (rows, words), "I32")
        if self._bits not in (4, 8) or -(-columns * self._bits // 32) != words:
            raise parts.refused(
                ".weight_packed", f"does not have 4 or 8 bits for {columns} columns"
            )
        self.shape = (rows, columns)
        groups = parts.shape(scale)[-1] if len(parts.shape(scale)) == 2 else 1
        group = columns // groups if groups > 1 else 0
        factor = parts.factor(scale, rows, columns, (1, group) if group else None)
        self.names: tuple[str, ...] = (f"{parts.base}.weight_packed", parts.base + scale)
        self._order = None
        if parts.has(".weight_g_idx"):
            self.names += (f"{parts.base}.weight_g_idx",)
            self._order = _order(parts, ".weight_g_idx", group)
        zero, self._zero = None, None
        if parts.has(".weight_zero_point"):
            end, each = ".weight_zero_point", 32 // self._bits
            parts.check(end, (-(-rows // each), groups), "I32")
            self._zero = unpack_words(parts.array(end), self._bits, axis=0)[:rows]
            zero = Factor("uint8", factor.group)
            if self._bits == 4 and groups > 1:
                zero = Factor("codes", factor.group, bits=4)
            self.names += (f"{parts.base}{end}",)
        self.format = Format(
            self._bits,
            factor,
            zero=zero,
            center=0 if zero else 1 << (self._bits - 1),
            has_order=self._order is not None,
        )
        self._words, self._scale = parts.array(".weight_packed"), parts.array(scale)

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = unpack_words(self._words[start:stop], self._bits, axis=1)[:, : self.shape[1]]
        scale = factor_rows(self._scale, self.format.scale, start, stop)
        zero = None if self._zero is None else self._zero[start:stop]
        return _leaves(self.format, codes, scale, zero, self._order)


def _order(parts: Parts, end: str, group: int) -> np.ndarray | None:
    try:
        return order_of(np.asarray(parts.array(end)), group or parts.shape(end)[0])
    except ValueError as error:
        raise parts.refused(end, str(error)) from None


def _leaves(
    packing: Format,
    codes: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None,
    order: np.ndarray | None,
) -> list[np.ndarray]:
    """Returns the leaves of codes, uint8 [row, element] in the order of the file."""
    if order is not None:
        codes = codes[:, order]
    leaves = [*packed_parts(codes, packing), np.ascontiguousarray(scale)]
    if packing.zero is not None and zero is not None:
        is_packed = packing.zero.dtype == "codes"
        leaves += packed_parts(zero, packing.zero) if is_packed else [np.ascontiguousarray(zero)]
    return leaves if order is None else [*leaves, order]


class _Transposed:
    """What GPTQ and AWQ share: arrays [input, output], of which scales are [group, output]."""

    METHOD = ""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        for end in (".qzeros", ".scales"):
            parts.need(end)
        self._bits = int(parts.options.get("bits", parts.options.get("w_bit", 4)))
        self.names = tuple(f"{parts.base}{end}" for end in (".qweight", ".qzeros", ".scales"))
        self._words, self._scale = parts.array(".qweight"), parts.array(".scales")
        if self._bits not in (2, 4, 8):
            raise parts.refused(".qweight", f"has {self._bits} bits; 2, 4 and 8 are read")

    def _check(self, columns: int, rows: int) -> int:
        """Checks scales and zeros; returns the number of elements of a group."""
        parts = self._parts
        groups = parts.shape(".scales")[0]
        dtype = parts.dtype(".scales")
        if not groups or columns % groups:
            raise parts.refused(".scales", f"has {groups} groups of {columns} columns")
        parts.check(".scales", (groups, rows), *FLOATS)
        parts.check(".qzeros", (groups, rows * self._bits // 32), "I32")
        self._dtype = FLOATS[dtype]
        return columns // groups

    def _set(self, zeros: np.ndarray, group: int, has_order: bool) -> None:
        """Sets the format, without zeros where all are in the middle. zeros: uint8 [row, group]."""
        middle = 1 << (self._bits - 1)
        is_even = bool((zeros == middle).all())
        self._zeros = None if is_even else zeros
        many = zeros.shape[1] > 1 and self._bits == 4
        zero = Factor("codes", group, bits=4) if many else Factor("uint8", group)
        self.format = Format(
            self._bits,
            Factor(self._dtype, group),
            zero=None if is_even else zero,
            center=middle if is_even else 0,
            has_order=has_order,
        )


class Gptq(_Transposed):
    """GPTQ, with or without the order of activations ("act-order")."""

    METHOD = "GPTQ"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        words, rows = parts.shape(".qweight")
        columns = words * 32 // self._bits
        self.shape = (rows, columns)
        group = self._check(columns, rows)
        self._order = None
        if parts.has(".g_idx"):
            self.names += (f"{parts.base}.g_idx",)
            parts.check(".g_idx", (columns,), "I32")
            self._order = _order(parts, ".g_idx", group)
        zeros = unpack_words(parts.array(".qzeros"), self._bits, axis=1).T
        self._set(self._counted(zeros), group, self._order is not None)

    def _counted(self, zeros: np.ndarray) -> np.ndarray:
        """Returns zeros as they are subtracted. The first version of the format stores one less,
        and checkpoints do not always say which they are: zeros in the middle do."""
        middle, most = 1 << (self._bits - 1), (1 << self._bits) - 1
        if (zeros == middle).all():
            return zeros
        version = str(self._parts.options.get("checkpoint_format", "gptq")).lower()
        if version not in ("gptq", "gptq_v2", ""):
            raise self._parts.refused(".qzeros", f"is of the unknown format {version!r}")
        if version == "gptq_v2" and not (zeros == middle - 1).all():
            return zeros
        return (zeros + 1) & most

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = unpack_words(self._words[:, start:stop], self._bits, axis=0).T
        zeros = None if self._zeros is None else self._zeros[start:stop]
        return _leaves(self.format, codes, self._scale[:, start:stop].T, zeros, self._order)


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from the lowest bits on, of each of eight columns."""


class Awq(_Transposed):
    """AWQ in the layout of its matrix products ("gemm")."""

    METHOD = "AWQ"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        version = str(parts.options.get("version", "gemm")).lower()
        if version != "gemm" or self._bits != 4:
            raise parts.refused(".qweight", f"is of version {version!r}; only 4 bits, gemm is read")
        columns, words = parts.shape(".qweight")
        self.shape = (words * 8, columns)
        group = self._check(columns, words * 8)
        self._set(self._columns(parts.array(".qzeros")).T, group, has_order=False)

    def _columns(self, words: np.ndarray) -> np.ndarray:
        """Returns the codes in words, uint8 [.., output]."""
        codes = unpack_words(words, 4, axis=1).reshape(words.shape[0], -1, 8)
        return codes[:, :, AWQ_ORDER].reshape(words.shape[0], -1)

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        first, last = start // 8, -(-stop // 8)
        inside = slice(start - 8 * first, stop - 8 * first)
        codes = self._columns(self._words[:, first:last])[:, inside].T
        zeros = None if self._zeros is None else self._zeros[start:stop]
        return _leaves(self.format, codes, self._scale[:, start:stop].T, zeros, None)


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
        return _leaves(self.format, codes, self._scale[start:stop], None, None)


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
        return _leaves(self.format, codes, self._scale[expert, start:stop], None, None)


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
        leaves = _leaves(self.format, codes, self._scale[start:stop], None, None)
        return [*leaves, self._overall]


class NormalFloat:
    """4-bit NormalFloat of bitsandbytes: flat blocks, whose largest magnitudes may be rounded to 8
    bits ("double quantization")."""

    METHOD = "bitsandbytes nf4"
    STATE = ".weight.quant_state.bitsandbytes__nf4"

    def __init__(self, parts: Parts) -> None:
        parts.need(self.STATE)
        for end in (".weight.absmax", ".weight.quant_map"):
            parts.need(end)
        state = json.loads(bytes(parts.array(self.STATE)))
        self.shape = tuple(state["shape"])
        rows, columns = self.shape
        block = int(state["blocksize"])
        parts.check(".weight", (rows * columns // 2, 1), "U8")
        if columns % block:
            raise parts.refused(".weight", f"has blocks of {block} that go over {columns} columns")
        self._per_row = columns // block
        self._codes = parts.array(".weight").reshape(rows, columns // 2)
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
        return _leaves(self.format, codes, self._largest[start:stop], None, None)
