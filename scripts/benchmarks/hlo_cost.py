"""Counts the kernels of a program that XLA has compiled for a GPU, and the bytes that they move.

A kernel reads its operands and writes its results once: counted are the instructions of the
scheduled module that launch a kernel, in a loop once per iteration. If only a slice of an operand
is used, the slice counts. If a result is updated in place, the update counts.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

VIEWS = {
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"),
    *("opt-barrier", "partition-id", "iota"),
}
"""Instructions of a schedule that launch nothing."""

SLICES = {"dynamic-slice", "gather", "slice"}
"""Instructions that read a part of their first operand."""

ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e8m0fnu"), 1),
    **dict.fromkeys(("s4", "u4"), 0.5),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}

_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-#]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\("
)
_LEAF = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-#]+) \(.*\) -> .*\{$")


@dataclass
class Instruction:
    """One instruction: bytes of its results, and the names of its operands and called
    computations."""

    name: str
    opcode: str
    leaves: tuple[float, ...]
    operands: tuple[str, ...]
    calls: tuple[str, ...] = ()
    trips: int = 1
    number: int = 0

    @property
    def nbytes(self) -> float:
        return sum(self.leaves)


@dataclass
class Computation:
    """Instructions by name, in their order; the last instruction is the root."""

    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return list(self.instructions.values())[-1]


class Cost(NamedTuple):
    """Kernels, the bytes that they read and write, and the kernels by their opcode."""

    kernels: int
    nbytes: float
    opcodes: Counter[str]


def cost(text: str) -> Cost:
    """Returns the cost of a scheduled module, from its text."""
    computations, entry = _parsed(text)
    return _cost(computations[entry], computations)


def _parsed(text: str) -> tuple[dict[str, Computation], str]:
    computations, entry = dict[str, Computation](), ""
    current = Computation()
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            current = computations.setdefault(header["name"], Computation())
            entry = header["name"] if header["entry"] else entry
            continue
        match = _INSTRUCTION.match(line)
        if match is not None:
            made = _instruction(match, line)
            current.instructions[made.name] = made
    return computations, entry


def _instruction(match: re.Match[str], line: str) -> Instruction:
    inside, depth, at = "", 1, match.end()
    while depth and at < len(line):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        inside += line[at]
        at += 1
    attributes = line[at:]
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', attributes)
    number = re.match(r"(\d+)\)", inside)
    leaves = [_leaf_bytes(kind, sizes) for kind, sizes in _LEAF.findall(match["shape"])]
    if 'custom_call_target="__cublas' in attributes:
        leaves = leaves[:1]  # the second result is the library's workspace
    return Instruction(
        name=match["name"],
        opcode=match["opcode"],
        leaves=tuple(leaves),
        operands=tuple(re.findall(r"%([\w.\-#]+)", inside)),
        calls=tuple(re.findall(r"(?:calls|body|to_apply)=%?([\w.\-#]+)", attributes)),
        trips=int(trips[1]) if trips else 1,
        number=int(number[1]) if number and match["opcode"] == "parameter" else 0,
    )


def _leaf_bytes(kind: str, sizes: str) -> float:
    return ITEM_BYTES.get(kind, 0) * prod(int(size) for size in sizes.split(",") if size)


def _cost(computation: Computation, computations: dict[str, Computation]) -> Cost:
    kernels, nbytes, opcodes = 0, 0.0, Counter[str]()
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode in VIEWS or opcode.endswith("-done"):
            continue
        if opcode in ("while", "call", "conditional"):
            for name in instruction.calls:
                inner = _cost(computations[name], computations)
                kernels += instruction.trips * inner.kernels
                nbytes += instruction.trips * inner.nbytes
                for kind, count in inner.opcodes.items():
                    opcodes[kind] += instruction.trips * count
            continue
        kernels += 1
        opcodes[opcode.removesuffix("-start")] += 1
        nbytes += _moved(instruction, computation, computations)
    return Cost(kernels, nbytes, opcodes)


def _moved(
    instruction: Instruction, computation: Computation, computations: dict[str, Computation]
) -> float:
    """Returns the bytes read and written by a kernel."""
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode != "fusion":
        if instruction.opcode in SLICES:
            return 2 * instruction.nbytes
        if instruction.opcode == "dynamic-update-slice":
            return 2 * operands[1].nbytes
        return instruction.nbytes + sum(operand.nbytes for operand in operands)
    fused = computations[instruction.calls[0]]
    sizes = [operand.nbytes for operand in operands]
    return _written(fused) + sum(_read(fused, number, size) for number, size in enumerate(sizes))


def _read(fused: Computation, number: int, nbytes: float) -> float:
    """Returns the bytes that a fusion reads of an operand."""
    for parameter in fused.instructions.values():
        if parameter.opcode == "parameter" and parameter.number == number:
            users = _users(fused, parameter.name)
            kinds = {user.opcode for user, _ in users}
            if not users or not all(is_first for _, is_first in users):
                return nbytes
            if kinds <= SLICES:
                return min(nbytes, sum(user.nbytes for user, _ in users))
            if kinds == {"dynamic-update-slice"}:
                return 0
    return nbytes


def _users(fused: Computation, name: str) -> list[tuple[Instruction, bool]]:
    """Returns the consumers of an instruction's result (without views), and whether as the first
    operand."""
    users = []
    for user in fused.instructions.values():
        if name in user.operands:
            if user.opcode == "bitcast":
                users += _users(fused, user.name)
            else:
                users.append((user, user.operands[0] == name))
    return users


def _written(fused: Computation) -> float:
    """Returns the bytes that a fusion writes."""
    root = fused.root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    total = 0.0
    for name in names:
        made = fused.instructions[name]
        while made.opcode == "bitcast":
            made = fused.instructions[made.operands[0]]
        if made.opcode == "dynamic-update-slice":
            total += fused.instructions[made.operands[1]].nbytes
        else:
            total += made.nbytes
    return total
