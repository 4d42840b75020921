"""Instructions of some processors, by LLVM's intrinsics or else by their formulas."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack

from flexgen_jax.cpu.jit.emit import F32, I8, I16, I32, I64, VOID, Array, Function, Number, Value
from flexgen_jax.cpu.processor import FOR_INTEGERS, FOR_PAIRS

LANES = 16
"""Lanes of a vector of fp32; LLVM uses two or more registers where they are shorter."""

HIGH_HALF = 0xFFFF0000

TILE_BYTES, NUM_TILES = 1024, 8


def bfloat16_halves(words: Value) -> tuple[Value, Value]:
    """Returns as fp32 the even and the odd ones of bfloat16 elements, given two to a word."""
    return (words << 16).bits(F32), (words & HIGH_HALF).bits(F32)


def dot_pairs(total: Value, one: Value, other: Value) -> Value:
    """Adds to each lane, fp32, the two products of the bfloat16 pairs in that lane's words."""
    k = total.k
    if k.processor.native >= FOR_PAIRS:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        dot: Value = k.call(name, total.type, total, one, other)
        return dot
    for half, other_half in zip(bfloat16_halves(one), bfloat16_halves(other), strict=True):
        total = k.fma(half, other_half, total)
    return total


def dot_bytes(total: Value, unsigned: Value, signed: Value) -> Value:
    """Adds to each lane, int32, the products of that lane's four unsigned and four signed bytes."""
    k, needed = total.k, FOR_INTEGERS if total.lanes == LANES else {"avx512vnni", "avx512vl"}
    if k.processor.native >= needed:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * total.lanes}"
        dot: Value = k.call(name, total.type, total, unsigned.bits(I32), signed.bits(I32))
        return dot
    products = unsigned.bits(I8).to(I32, is_signed=False) * signed.bits(I8).to(I32)
    for byte in range(4):
        total = total + products.shuffle(range(byte, 4 * total.lanes, 4))
    return total


def add_products_of_bytes(unsigned: Value, signed: Value) -> Value:
    """Returns the sums, int16, of the products of two neighbouring bytes. They must not exceed 16
    bits."""
    k = unsigned.k
    if unsigned.lanes == 4 * LANES and not k.processor.native >= {"avx512bw"}:
        halves = zip(unsigned.halves(), signed.halves(), strict=True)
        low, high = (add_products_of_bytes(*half) for half in halves)
        return low.joined(high)
    if "avx2" in k.processor.native:
        is_wide = unsigned.lanes == 4 * LANES
        name = "llvm.x86.avx512.pmaddubs.w.512" if is_wide else "llvm.x86.avx2.pmadd.ub.sw"
        sums: Value = k.call(name, k.filled(I16, unsigned.lanes // 2).type, unsigned, signed)
        return sums
    products = unsigned.to(I16, is_signed=False) * signed.to(I16)
    even, odd = (products.shuffle(range(n, unsigned.lanes, 2)) for n in (0, 1))
    return even + odd


def add_pairs(shorts: Value) -> Value:
    """Returns the sums, int32, of two neighbouring lanes of int16."""
    k = shorts.k
    if shorts.lanes == 2 * LANES and not k.processor.native >= {"avx512bw"}:
        low, high = (add_pairs(half) for half in shorts.halves())
        return low.joined(high)
    if "avx2" in k.processor.native:
        is_wide = shorts.lanes == 2 * LANES
        name = "llvm.x86.avx512.pmaddw.d.512" if is_wide else "llvm.x86.avx2.pmadd.wd"
        ones, kind = k.filled(I16, shorts.lanes, 1), k.filled(I32, shorts.lanes // 2).type
        sums: Value = k.call(name, kind, shorts, ones)
        return sums
    even, odd = (shorts.shuffle(range(n, shorts.lanes, 2)).to(I32) for n in (0, 1))
    return even + odd


def with_sign_of(numbers: Value, signs: Value) -> Value:
    """Returns bytes, negated where the other byte is negative, and 0 where it is 0."""
    k = numbers.k
    if "avx2" in k.processor.native:
        signed: Value = k.call("llvm.x86.avx2.psign.b", numbers.type, numbers, signs)
        return signed
    negated = (signs < 0).select(k.filled(I8, numbers.lanes) - numbers, numbers)
    return signs.equals(0).select(k.filled(I8, numbers.lanes), negated)


def nearest_integers(floats: Value) -> Value:
    """Rounds fp32 to the nearest integers, ties to even."""
    k = floats.k
    name = f"llvm.lrint.v{floats.lanes}i32.v{floats.lanes}f32"
    rounded: Value = k.call(name, k.filled(I32, floats.lanes).type, floats)
    return rounded


def lookup_words(k: Function, table: Sequence[int], codes: Value) -> Value:
    """Returns the entries of a table of 32 words of 16 bits, by the low 5 bits of 32 words."""
    if k.processor.native >= {"avx512bw"}:
        entries: Value = k.call(
            "llvm.x86.avx512.permvar.hi.512", codes.type, k.table(I16, table), codes
        )
        return entries
    return _lookup(k, table, codes & 31).to(I16)


def lookup_bytes(k: Function, table: Sequence[int], codes: Value) -> Value:
    """Returns the entries of a table of 16 bytes, by 32 codes below 16."""
    if "avx2" in k.processor.native:
        halves = k.table(I8, [*table, *table])  # one for each half of a register
        entries: Value = k.call("llvm.x86.avx2.pshuf.b", codes.type, halves, codes)
        return entries
    return _lookup(k, table, codes).to(I8)


def lookup_floats(k: Function, table: Sequence[Number], codes: Value) -> Value:
    """Returns the entries of a table of 16 numbers, by `LANES` codes below 16.

    A register holds the table, or half of it: then the lowest three bits of a code choose in both
    halves, and the fourth one chooses between these.
    """
    numbers = [float(number) for number in table]
    if "avx512f" in k.processor.native:
        kind = k.filled(F32, LANES).type
        entries: Value = k.call(
            "llvm.x86.avx512.permvar.sf.512", kind, k.table(F32, numbers), codes
        )
        return entries
    if "avx2" not in k.processor.native:
        bits = [int.from_bytes(pack("<f", number), "little") for number in numbers]
        return _lookup(k, bits, codes).bits(F32)
    chosen = []
    for code in codes.halves():
        lower, upper = (
            k.call("llvm.x86.avx2.permps", k.filled(F32, 8).type, k.table(F32, half), code)
            for half in (numbers[:8], numbers[8:])
        )
        chosen.append((code & 8).equals(0).select(lower, upper))
    return chosen[0].joined(chosen[1])


def _lookup(k: Function, table: Sequence[int], codes: Value) -> Value:
    """Returns entries of a table as int32, one lane after the other."""
    static = k.static("table_" + "_".join(map(str, table)), I32, table)
    places, entries = k.stack(I32, codes.lanes), k.stack(I32, codes.lanes)
    places.store(0, codes.to(I32, is_signed=False))
    with k.loop(codes.lanes) as lane:
        entries.store(lane, static.load(places.load(lane).to(I64)))
    return entries.load(0, codes.lanes)


class TileRegisters:
    """AMX's eight registers of 16 rows of 64 bytes, from `__init__` until `release`."""

    def __init__(self, k: Function) -> None:
        self.k = k
        self._is_native = "amx-tile" in k.processor.native
        if self._is_native:
            palette = [1, 0] + 14 * [0] + 8 * [64, 0] + 16 * [0] + 8 * [16] + 8 * [0]
            k.call("llvm.x86.ldtilecfg", VOID, k.static("tile_palette", I8, palette))
        else:
            self._memory = k.stack(I8, NUM_TILES * TILE_BYTES)

    def zero(self, register: int) -> None:
        if self._is_native:
            self._do("tilezero", register)
        else:
            self._of(register).of(I8).fill(self.k.index(TILE_BYTES))

    def load(self, register: int, source: Array) -> None:
        """Loads a tile whose rows lie one after the other."""
        if self._is_native:
            self._do("tileloadd64", register, source, self.k.index(64))
        else:
            self._copy(source.of(I32), self._of(register))

    def store(self, register: int, target: Array) -> None:
        if self._is_native:
            self._do("tilestored64", register, target, self.k.index(64))
        else:
            self._copy(self._of(register), target.of(I32))

    def multiply(self, total: int, left: int, right: int, *, has_integers: bool) -> None:
        """Adds the product of two tiles of bfloat16, or of int8, to a third."""
        if self._is_native:
            self._do("tdpbssd" if has_integers else "tdpbf16ps", total, left, right)
            return
        k, kind = self.k, I32 if has_integers else F32
        with k.loop(LANES) as row, k.loop(LANES) as word:
            factor = self._of(left).load(LANES * row + word).spread(LANES)
            line = self._of(right).load(LANES * word, LANES)
            place = self._of(total).of(kind)
            before = place.load(LANES * row, LANES)
            if has_integers:
                products = factor.bits(I8).to(I32) * line.bits(I8).to(I32)
                for byte in range(4):
                    before = before + products.shuffle(range(byte, 4 * LANES, 4))
            else:
                before = dot_pairs(before, factor, line)
            place.store(LANES * row, before)

    def release(self) -> None:
        if self._is_native:
            self._do("tilerelease")

    def _do(self, name: str, *arguments: int | Value | Array) -> None:
        values = (self.k.number(I8, x) if isinstance(x, int) else x for x in arguments)
        self.k.call(f"llvm.x86.{name}", VOID, *values)

    def _of(self, register: int) -> Array:
        return self._memory.at(register * TILE_BYTES).of(I32)

    def _copy(self, source: Array, target: Array) -> None:
        for row in range(LANES):
            target.store(LANES * row, source.load(LANES * row, LANES))
