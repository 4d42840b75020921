"""A small typed language that emits LLVM functions.

A kernel is a Python function of a `Function`. Python runs once, while the kernel is emitted, so
constants, variants and unrolled loops are plain Python, and helpers are plain Python functions:

    def scale(k: Function, x: Array, out: Array, count: Value, factor: Value) -> None:
        with k.loop(count // 16) as n:
            out.store(16 * n, x.load(16 * n, 16) * factor)

Integers are signed where they are compared or converted; `//`, `%` and `>>` take them as unsigned.
A scalar next to a vector is spread over its lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from llvmlite import ir

from flexgen_jax.cpu.processor import Processor

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER, VOID = ir.PointerType(), ir.VoidType()

ITEM_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "float": 4}
"""Bytes of a scalar, by LLVM's name of its type."""

FIRST_CACHE, SECOND_CACHE = 3, 2
"""Locality levels of LLVM's prefetch instruction for a core's first and second cache."""

LINE_BYTES = 64

APART_LINES = 21
"""Cache lines between the arrays of a workspace, so that arrays of whole pages do not share their
sets of the first cache."""

Scalar: TypeAlias = ir.Type
Number = int | float


def vector_type(scalar: Scalar, lanes: int) -> ir.Type:
    return ir.VectorType(scalar, lanes) if lanes > 1 else scalar


def _constant(kind: ir.Type, value: Number | Sequence[Number]) -> ir.Constant:
    if isinstance(value, Sequence):
        return ir.Constant(kind, list(value))
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


class Value:
    """A scalar, or a vector of scalars, of the running kernel."""

    def __init__(self, k: Function, ir_value: ir.Value) -> None:
        self.k, self.ir, self.type = k, ir_value, ir_value.type
        is_vector = isinstance(ir_value.type, ir.VectorType)
        self.lanes: int = ir_value.type.count if is_vector else 1
        self.scalar: Scalar = ir_value.type.element if is_vector else ir_value.type
        self.is_float = isinstance(self.scalar, (ir.FloatType, ir.HalfType))

    def __bool__(self) -> bool:
        raise TypeError("a value is known only when the kernel runs: use `when` or `select`")

    def _pair(self, other: Value | Number) -> tuple[ir.Value, ir.Value]:
        if not isinstance(other, Value):
            return self.ir, _constant(self.type, other)
        lanes = max(self.lanes, other.lanes)
        return self.spread(lanes).ir, other.spread(lanes).ir

    def _arithmetic(self, name: str, other: Value | Number, is_swapped: bool = False) -> Value:
        first, second = self._pair(other)
        first, second = (second, first) if is_swapped else (first, second)
        if self.is_float:
            build = getattr(self.k.build, f"f{name}")
            return Value(self.k, build(first, second))
        return Value(self.k, getattr(self.k.build, name)(first, second))

    def __add__(self, other: Value | Number) -> Value:
        return self._arithmetic("add", other)

    def __sub__(self, other: Value | Number) -> Value:
        return self._arithmetic("sub", other)

    def __rsub__(self, other: Value | Number) -> Value:
        return self._arithmetic("sub", other, is_swapped=True)

    def __mul__(self, other: Value | Number) -> Value:
        return self._arithmetic("mul", other)

    def __truediv__(self, other: Value | Number) -> Value:
        return self._arithmetic("div", other)

    def __floordiv__(self, other: Value | Number) -> Value:
        return Value(self.k, self.k.build.udiv(*self._pair(other)))

    def __mod__(self, other: Value | Number) -> Value:
        return Value(self.k, self.k.build.urem(*self._pair(other)))

    def __and__(self, other: Value | Number) -> Value:
        return Value(self.k, self.k.build.and_(*self._pair(other)))

    def __or__(self, other: Value | Number) -> Value:
        return Value(self.k, self.k.build.or_(*self._pair(other)))

    def __xor__(self, other: Value | Number) -> Value:
        return Value(self.k, self.k.build.xor(*self._pair(other)))

    def __lshift__(self, other: Value | Number) -> Value:
        return Value(self.k, self.k.build.shl(*self._pair(other)))

    def __rshift__(self, other: Value | Number) -> Value:
        return Value(self.k, self.k.build.lshr(*self._pair(other)))

    __radd__, __rmul__ = __add__, __mul__

    def _compare(self, how: str, other: Value | Number) -> Value:
        build = self.k.build
        compare = build.fcmp_ordered if self.is_float else build.icmp_signed
        return Value(self.k, compare(how, *self._pair(other)))

    def __lt__(self, other: Value | Number) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | Number) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | Number) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | Number) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | Number) -> Value:
        return self._compare("==", other)

    def differs(self, other: Value | Number) -> Value:
        return self._compare("!=", other)

    def exceeds(self, other: Value | Number) -> Value:
        """Compares unsigned integers: whether these are larger."""
        return Value(self.k, self.k.build.icmp_unsigned(">", *self._pair(other)))

    def shifted_right(self, by: int) -> Value:
        """Shifts signed integers to the right, which divides by a power of two and rounds down."""
        return Value(self.k, self.k.build.ashr(self.ir, _constant(self.type, by)))

    def is_nan(self) -> Value:
        return Value(self.k, self.k.build.fcmp_unordered("uno", self.ir, self.ir))

    def select(self, if_true: Value, if_false: Value | Number) -> Value:
        """Chooses lane by lane; this value is the condition."""
        return Value(self.k, self.k.build.select(self.ir, *if_true._pair(if_false)))

    def minimum(self, other: Value | Number) -> Value:
        return (self < other).select(self, other)

    def maximum(self, other: Value | Number) -> Value:
        return (self > other).select(self, other)

    def round_up(self, multiple: int) -> Value:
        """Rounds an index up to a multiple of a constant."""
        return (self + (multiple - 1)) // multiple * multiple

    def spread(self, lanes: int) -> Value:
        """Returns a vector with this scalar in all lanes; a vector of that width as it is."""
        if self.lanes == lanes:
            return self
        empty = ir.Constant(vector_type(self.type, lanes), ir.Undefined)
        first = self.k.build.insert_element(empty, self.ir, ir.Constant(I32, 0))
        return Value(self.k, first).shuffle([0] * lanes)

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Returns a vector of these lanes; the other vector's are counted after this one's."""
        if len(lanes) == 1 and other is None:
            return self.lane(lanes[0])
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        second = self if other is None else other
        return Value(self.k, self.k.build.shuffle_vector(self.ir, second.ir, mask))

    def lane(self, number: int) -> Value:
        if self.lanes == 1:
            return self
        return Value(self.k, self.k.build.extract_element(self.ir, ir.Constant(I32, number)))

    def with_lane(self, number: int, scalar: Value) -> Value:
        """Returns the vector with another scalar in a lane."""
        lane = ir.Constant(I32, number)
        return Value(self.k, self.k.build.insert_element(self.ir, scalar.ir, lane))

    def halves(self) -> tuple[Value, Value]:
        """Returns the lower and the upper half of the lanes."""
        middle = self.lanes // 2
        return self.shuffle(range(middle)), self.shuffle(range(middle, self.lanes))

    def joined(self, other: Value) -> Value:
        """Returns this vector's lanes, followed by the other one's."""
        return self.shuffle(range(self.lanes + other.lanes), other)

    def to(self, scalar: Scalar, is_signed: bool = True) -> Value:
        """Converts numbers to another type."""
        build, kind = self.k.build, vector_type(scalar, self.lanes)
        if self.scalar == scalar:
            return self
        if isinstance(scalar, ir.IntType):
            if self.is_float:
                return Value(self.k, build.fptosi(self.ir, kind))
            widen = build.sext if is_signed else build.zext
            convert = widen if scalar.width > self.scalar.width else build.trunc
            return Value(self.k, convert(self.ir, kind))
        if self.is_float:
            return Value(self.k, (build.fpext if scalar == F32 else build.fptrunc)(self.ir, kind))
        return Value(self.k, (build.sitofp if is_signed else build.uitofp)(self.ir, kind))

    def bits(self, scalar: Scalar) -> Value:
        """Reads the same bits as scalars of another type, perhaps more or fewer of them."""
        lanes = self.lanes * ITEM_BYTES[str(self.scalar)] // ITEM_BYTES[str(scalar)]
        return Value(self.k, self.k.build.bitcast(self.ir, vector_type(scalar, lanes)))

    def reduce(self, how: str, flags: Sequence[str] = ()) -> Value:
        """Reduces the lanes by an LLVM reduction, such as "umax" or "add"."""
        name = {"half": "f16", "float": "f32"}.get(str(self.scalar), str(self.scalar))
        full_name = f"llvm.vector.reduce.{how}.v{self.lanes}{name}"
        reduced: Value = self.k.call(full_name, self.scalar, self, flags=flags)
        return reduced


class Array:
    """Memory that holds scalars of one type, from an address on."""

    def __init__(self, k: Function, address: ir.Value, scalar: Scalar) -> None:
        self.k, self.ir, self.scalar = k, address, scalar

    def at(self, index: Value | int) -> Array:
        """Returns the array that begins at an element of this one."""
        offset = index.ir if isinstance(index, Value) else ir.Constant(I64, index)
        place = self.k.build.gep(self.ir, [offset], source_etype=self.scalar)
        return Array(self.k, place, self.scalar)

    def of(self, scalar: Scalar) -> Array:
        """Returns the same memory as an array of another type."""
        return Array(self.k, self.ir, scalar)

    def load(self, index: Value | int, lanes: int = 1) -> Value:
        kind, align = vector_type(self.scalar, lanes), ITEM_BYTES[str(self.scalar)]
        return Value(self.k, self.k.build.load(self.at(index).ir, typ=kind, align=align))

    def store(self, index: Value | int, value: Value | Number, is_streamed: bool = False) -> None:
        """Stores a scalar or a vector. is_streamed: past the caches, to an aligned address."""
        stored = value if isinstance(value, Value) else self.k.number(self.scalar, value)
        align = LINE_BYTES if is_streamed else ITEM_BYTES[str(self.scalar)]
        instruction = self.k.build.store(stored.ir, self.at(index).ir, align=align)
        if is_streamed:
            metadata = self.k.build.module.add_metadata([ir.Constant(I32, 1)])
            instruction.set_metadata("nontemporal", metadata)

    def array(self, index: Value | int, scalar: Scalar) -> Array:
        """Returns the array whose address is stored at an index."""
        address = self.k.build.load(self.at(index).ir, typ=POINTER, align=8)
        return Array(self.k, address, scalar)

    def fill(self, count: Value, number: Number = 0) -> None:
        """Sets the first `count` elements to a number."""
        lanes = LINE_BYTES // ITEM_BYTES[str(self.scalar)]
        whole = count // lanes * lanes
        with self.k.loop(whole, step=lanes) as index:
            self.store(index, self.k.filled(self.scalar, lanes, number))
        with self.k.loop(count, begin=whole) as index:
            self.store(index, number)

    def prefetch(self, index: Value | int, cache: int) -> None:
        """Prefetches the cache line of an element; harmless if the address is not valid."""
        how = [self.k.number(I32, flag) for flag in (0, cache, 1)]  # for reading; data, not code
        self.k.call("llvm.prefetch.p0", VOID, self.at(index), *how)

    def fetch_add(self, index: int, value: Value | int) -> Value:
        """Adds to an element atomically; returns its old value."""
        added = value.ir if isinstance(value, Value) else _constant(self.scalar, value)
        old = self.k.build.atomic_rmw("add", self.at(index).ir, added, "seq_cst")
        return Value(self.k, old)

    def address(self) -> Value:
        return Value(self.k, self.k.build.ptrtoint(self.ir, I64))


class Variable:
    """A number that changes; LLVM keeps it in a register."""

    def __init__(self, k: Function, initial: Value) -> None:
        self.k, self.type = k, initial.type
        with k.build.goto_entry_block():
            self.place = k.build.alloca(initial.type)
        self.set(initial)

    def get(self) -> Value:
        return Value(self.k, self.k.build.load(self.place, typ=self.type))

    def set(self, value: Value) -> None:
        self.k.build.store(value.ir, self.place)

    def __iadd__(self, value: Value) -> Variable:
        self.set(self.get() + value)
        return self


class Function:
    """A function while it is emitted.

    parameters: types of its parameters; a tuple of one type is an array of it. Its floating-point
    instructions are exactly those that are emitted, in this order.
    """

    def __init__(
        self,
        module: ir.Module,
        name: str,
        parameters: Sequence[Scalar | tuple[Scalar]],
        result: ir.Type = VOID,
        *,
        processor: Processor,
    ) -> None:
        types = [POINTER if isinstance(kind, tuple) else kind for kind in parameters]
        self.ir = ir.Function(module, ir.FunctionType(result, types), name)
        self.ir.attributes.add("nounwind")
        self.build = ir.IRBuilder(self.ir.append_basic_block("entry"))
        self.processor, self.module = processor, module
        self.arguments: list[Any] = [
            Array(self, value, kind[0]) if isinstance(kind, tuple) else Value(self, value)
            for value, kind in zip(self.ir.args, parameters, strict=True)
        ]

    def address(self) -> Value:
        return Value(self, self.ir.ptrtoint(I64))

    def number(self, kind: ir.Type, value: Number | Sequence[Number]) -> Value:
        """Returns a constant: a scalar, or a vector with one number or one per lane."""
        return Value(self, _constant(kind, value))

    def filled(self, scalar: Scalar, lanes: int, value: Number = 0) -> Value:
        """Returns a vector with a constant in all lanes."""
        return self.number(vector_type(scalar, lanes), value)

    def table(self, scalar: Scalar, values: Sequence[Number]) -> Value:
        """Returns a vector of these constants."""
        return self.number(vector_type(scalar, len(values)), values)

    def variable(self, initial: Value) -> Variable:
        return Variable(self, initial)

    def index(self, value: Value | int) -> Value:
        return value if isinstance(value, Value) else self.number(I64, value)

    @contextmanager
    def loop(
        self, end: Value | int, begin: Value | int = 0, step: Value | int = 1
    ) -> Iterator[Value]:
        index, limit = self.variable(self.index(begin)), self.index(end)
        with self.while_(lambda: index.get() < limit):
            yield index.get()
            index += self.index(step)

    @contextmanager
    def while_(self, condition: Callable[[], Value]) -> Iterator[None]:
        names = ("condition", "body", "after")
        head, body, after = (self.ir.append_basic_block(name) for name in names)
        self.build.branch(head)
        self.build.position_at_end(head)
        self.build.cbranch(condition().ir, body, after)
        self.build.position_at_end(body)
        yield
        self.build.branch(head)
        self.build.position_at_end(after)

    def when(self, condition: Value) -> Any:
        """Context of instructions that run if a condition is true."""
        return self.build.if_then(condition.ir)

    def either(self, condition: Value) -> Any:
        """Context of two contexts: of instructions that run if a condition is true, and if not."""
        return self.build.if_else(condition.ir)

    def call(
        self,
        function: str | Value,
        result: ir.Type,
        *arguments: Value | Array,
        flags: Sequence[str] = (),
    ) -> Any:
        """Calls a function by name (an LLVM intrinsic, or one of the C library) or by address."""
        types = [POINTER if isinstance(x, Array) else x.type for x in arguments]
        kind, values = ir.FunctionType(result, types), [x.ir for x in arguments]
        if isinstance(function, Value):
            target = self.build.inttoptr(function.ir, kind.as_pointer())
        else:
            target = self.module.globals.get(function) or ir.Function(self.module, kind, function)
        called = self.build.call(target, values, fastmath=flags)
        return None if result == VOID else Value(self, called)

    def run(self, function: Function, *arguments: Value | Array) -> Any:
        """Calls another function of the module."""
        called = self.build.call(function.ir, [x.ir for x in arguments])
        return None if called.type == VOID else Value(self, called)

    def fma(self, one: Value, other: Value, total: Value) -> Value:
        """Returns one * other + total, rounded once."""
        lanes = max(x.lanes for x in (one, other, total))
        name = f"llvm.fma.v{lanes}f32" if lanes > 1 else "llvm.fma.f32"
        sides = [x.spread(lanes) for x in (one, other, total)]
        fused: Value = self.call(name, sides[0].type, *sides)
        return fused

    def stack(self, scalar: Scalar, count: int) -> Array:
        """Returns memory that lives until the function returns."""
        with self.build.goto_entry_block():
            place = self.build.alloca(scalar, count)
            place.align = LINE_BYTES
        place.type = POINTER  # llvmlite gives it a typed pointer
        return Array(self, place, scalar)

    def static(self, name: str, scalar: Scalar, numbers: Sequence[int]) -> Array:
        """Returns constants in the module's memory, which functions of one module share."""
        variable = self.module.globals.get(name)
        if variable is None:
            kind = ir.ArrayType(scalar, len(numbers))
            variable = ir.GlobalVariable(self.module, kind, name)
            variable.initializer = ir.Constant(kind, list(numbers))
            variable.linkage, variable.global_constant = "internal", True
        return Array(self, variable.bitcast(POINTER), scalar)

    @contextmanager
    def workspace(self, *arrays: tuple[Scalar, Value | int]) -> Iterator[list[Array]]:
        """Context with memory for arrays, each a type and a number of elements, in one allocation.
        Each begins with a cache line. If there is no memory, the function returns 0."""
        total, offsets = self.index(0), []
        for scalar, count in arrays:
            offsets.append(total)
            size = (self.index(count) * ITEM_BYTES[str(scalar)]).round_up(LINE_BYTES)
            total = total + size + APART_LINES * LINE_BYTES
        address = self.call("aligned_alloc", I64, self.index(LINE_BYTES), total + LINE_BYTES)
        with self.when(address.equals(0)):
            self.give(self.index(0))
        memory = Array(self, self.build.inttoptr(address.ir, POINTER), I8)
        yield [memory.at(offset).of(kind[0]) for offset, kind in zip(offsets, arrays, strict=True)]
        self.call("free", VOID, memory)

    def give(self, value: Value | None = None) -> None:
        """Returns from the function."""
        self.build.ret(value.ir) if value is not None else self.build.ret_void()
