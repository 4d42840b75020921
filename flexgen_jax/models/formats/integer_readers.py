"""Readers of integers in safetensors: compressed-tensors, GPTQ, AWQ, MLX and bitsandbytes' 8
bits.

Each is one class, which finds its stored arrays, checks their shapes, and returns leaves of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flexgen_jax.models.formats.expected import of_group
from flexgen_jax.models.formats.format import WIDTHS, Factor, Format
from flexgen_jax.models.formats.packed import FLOATS, PackedTensor, Parts, factor_rows
from flexgen_jax.models.formats.packing import order_of, packed_parts, unpack_bits


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
    """Integers of 2 to 8 bits of compressed-tensors, packed along the input."""

    METHOD = "compressed-tensors pack-quantized"

    def __init__(self, parts: Parts) -> None:
        rows, words = parts.shape(".weight_packed")
        scale = parts.need(".weight_scale")
        columns = words * 8
        self._bits = 4
        if parts.has(".weight_shape"):
            rows, columns = map(int, parts.array(".weight_shape"))
            parts.check(".weight_packed", (rows, words), "I32")
            fitting = [bits for bits in WIDTHS if -(-columns * bits // 32) == words]
            if not fitting:
                raise parts.refused(".weight_packed", f"has {words} words for {columns} columns")
            named = of_group(parts.options).get("num_bits")
            self._bits = named if named in fitting else 4 if 4 in fitting else fitting[0]
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
            end = ".weight_zero_point"
            self._zero = self._zeros(parts, end, groups)
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

    def _zeros(self, parts: Parts, end: str, groups: int) -> np.ndarray:
        """Returns zeros, uint8 [row, group], which are packed along the rows or signed integers."""
        rows, bits = self.shape[0], self._bits
        if parts.dtype(end) == "I8":
            parts.check(end, (rows, groups), "I8")
            return (parts.array(end).astype(np.int16) + (1 << bits - 1)).astype(np.uint8)
        parts.check(end, (-(-rows * bits // 32), groups), "I32")
        return unpack_bits(parts.array(end).T, bits).T[:rows]

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = unpack_bits(self._words[start:stop], self._bits)[:, : self.shape[1]]
        scale = factor_rows(self._scale, self.format.scale, start, stop)
        zero = None if self._zero is None else self._zero[start:stop]
        return leaves_of(self.format, codes, scale, zero, self._order)


def _order(parts: Parts, end: str, group: int) -> np.ndarray | None:
    try:
        return order_of(np.asarray(parts.array(end)), group or parts.shape(end)[0])
    except ValueError as error:
        raise parts.refused(end, str(error)) from None


def leaves_of(
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
    """What GPTQ and AWQ share: arrays [input, output] with scales [group, output]."""

    METHOD = ""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        for end in (".qzeros", ".scales"):
            parts.need(end)
        # The bits of this matrix, which may differ from those in the config.
        rows, words = parts.shape(".scales")[1], parts.shape(".qzeros")[1]
        self._bits = 32 * words // max(1, rows)
        self.names = tuple(f"{parts.base}{end}" for end in (".qweight", ".qzeros", ".scales"))
        self._words, self._scale = parts.array(".qweight"), parts.array(".scales")
        if self._bits not in (2, 3, 4, 8):
            raise parts.refused(".qweight", f"has {self._bits} bits; 2, 3, 4 and 8 are read")

    def _check(self, columns: int, rows: int) -> int:
        """Checks scales and zeros; returns the number of elements of a group."""
        arrays = self._parts
        groups = arrays.shape(".scales")[0]
        dtype = arrays.dtype(".scales")
        if not groups or columns % groups:
            raise arrays.refused(".scales", f"has {groups} groups of {columns} columns")
        arrays.check(".scales", (groups, rows), *FLOATS)
        arrays.check(".qzeros", (groups, rows * self._bits // 32), "I32")
        self._dtype = FLOATS[dtype]
        return columns // groups

    def _set(self, zeros: np.ndarray, group: int, has_order: bool) -> None:
        """Sets the format, without zeros where all are in the middle. zeros: uint8 [row, group]."""
        middle = 1 << (self._bits - 1)
        is_even = bool((zeros == middle).all())
        self._zeros = None if is_even else zeros
        has_groups = zeros.shape[1] > 1 and self._bits == 4
        zero = Factor("codes", group, bits=4) if has_groups else Factor("uint8", group)
        self.format = Format(
            self._bits,
            Factor(self._dtype, group),
            zero=None if is_even else zero,
            center=middle if is_even else 0,
            has_order=has_order,
        )


class Gptq(_Transposed):
    """GPTQ, with or without the order of activations ("act-order"). Bits and groups may differ by
    matrix."""

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
        zeros = unpack_bits(parts.array(".qzeros"), self._bits).T
        self._set(self._counted(zeros), group, self._order is not None)

    def _counted(self, zeros: np.ndarray) -> np.ndarray:
        """Returns the zeros to subtract. The first version of the format stores one less,
        and checkpoints do not always say which they are: zeros in the middle do."""
        middle, max_code = 1 << (self._bits - 1), (1 << self._bits) - 1
        if (zeros == middle).all():
            return zeros
        options = self._parts.options
        method = str(options.get("quant_method", "")).lower().replace("_", "-")
        if method == "auto-round" and "gptq" not in str(options.get("packing_format", "")):
            return zeros
        version = str(options.get("checkpoint_format", "gptq")).lower()
        if version not in ("gptq", "gptq_v2", ""):
            raise self._parts.refused(".qzeros", f"is of the unknown format {version!r}")
        if version == "gptq_v2" and not (zeros == middle - 1).all():
            return zeros
        return (zeros + 1) & max_code

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = unpack_bits(self._words[:, start:stop].T, self._bits)
        zeros = None if self._zeros is None else self._zeros[start:stop]
        return leaves_of(self.format, codes, self._scale[:, start:stop].T, zeros, self._order)


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
        codes = unpack_bits(words, 4).reshape(words.shape[0], -1, 8)
        return codes[:, :, AWQ_ORDER].reshape(words.shape[0], -1)

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        first, last = start // 8, -(-stop // 8)
        inside = slice(start - 8 * first, stop - 8 * first)
        codes = self._columns(self._words[:, first:last])[:, inside].T
        zeros = None if self._zeros is None else self._zeros[start:stop]
        return leaves_of(self.format, codes, self._scale[:, start:stop].T, zeros, None)


MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Mixtral's names of matrices by MLX's."""


class Mlx:
    """MLX's affine formats: integers with a scale and a minimum a group, packed along the input
    into words as one row of bits, the lowest first."""

    METHOD = "MLX"

    def __init__(self, parts: Parts, expert: int | None = None) -> None:
        """expert: which one of a layer's stacked experts it is, None for a matrix."""
        for end in (".scales", ".biases"):
            parts.need(end)
        own_options = parts.options.get(parts.base)
        options = own_options if isinstance(own_options, Mapping) else parts.options
        mode = options.get("mode", parts.options.get("mode", "affine"))
        bits, group = (int(options.get(name, 0)) for name in ("bits", "group_size"))
        *stacked, rows, words = parts.shape(".weight")
        if mode != "affine" or bits not in WIDTHS or group < 1:
            raise parts.refused(".weight", f"has mode {mode}, {bits} bits and groups of {group}")
        columns = words * 32 // bits
        for end in (".scales", ".biases"):
            parts.check(end, (*stacked, rows, -(-columns // group)), *FLOATS)
        self.shape: tuple[int, ...] = (rows, columns)
        self._bits = bits
        self.names: tuple[str, ...] = tuple(
            f"{parts.base}{end}" for end in (".weight", ".scales", ".biases")
        )
        factors = [Factor(FLOATS[parts.dtype(end)], group) for end in (".scales", ".biases")]
        self.format = Format(bits, factors[0], minimum=factors[1])
        self._words, self._scale, self._minimum = (
            parts.array(end) if expert is None else parts.array(end)[expert]
            for end in (".weight", ".scales", ".biases")
        )

    @classmethod
    def tensors(cls, parts: Parts) -> dict[str, PackedTensor]:
        """Returns a matrix, or a layer's experts, by the names that they have elsewhere."""
        shape = parts.shape(".weight")
        if len(shape) == 2:
            return {f"{parts.base}.weight": cls(parts)}
        layer, _, matrix = parts.base.rpartition(".switch_mlp.")
        if len(shape) != 3 or not layer:
            raise parts.refused(".weight", f"has shape {shape}")
        if layer.endswith(".block_sparse_moe"):
            matrix = MIXTRAL.get(matrix, matrix)
        numbers = range(shape[0])
        return {f"{layer}.experts.{n}.{matrix}.weight": cls(parts, n) for n in numbers}

    def read(self, start: int, stop: int, expert: int | None = None) -> list[np.ndarray]:
        assert expert is None
        codes = unpack_bits(self._words[start:stop], self._bits)
        factors = (self._scale[start:stop], self._minimum[start:stop])
        return [*packed_parts(codes, self.format), *map(np.ascontiguousarray, factors)]
