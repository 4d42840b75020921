"""Changes one operator, constant or comparison at a time, and says which changes no test notices.

    python scripts/checks/mutate.py --json result.json
    python scripts/checks/mutate.py --only flexgen_jax/search/memory.py:240 --limit 600
    python scripts/checks/mutate.py --tests ../another_checkout

Draws mutants from each room in proportion to its mutable places. Runs the room's tests on each
mutant in a temporary copy, fastest first, as measured without a mutant. A mutant that survives for
--limit seconds counts as timed out: try it again with a longer one.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ("tests/contract", "tests/engine/test_generation.py")
PRODUCTS, SPARSE = "tests/cpu/test_matmul_int8.py", "tests/offload/test_sparse_attention.py"
ROOMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "policy": ("policy/*.py", ("tests/policy", "tests/schedule", "tests/search"), CONTRACT),
    "schedule": ("schedule/*.py", ("tests/schedule",), CONTRACT),
    "search": ("search/*.py", ("tests/search",), CONTRACT),
    "layers": ("layers/*.py", ("tests/layers", PRODUCTS, SPARSE), CONTRACT),
    "models": ("models/*.py", ("tests/models",), CONTRACT),
    "requests": ("requests/*.py", ("tests/requests", "tests/engine"), CONTRACT),
    "engine": ("engine/**/*.py", ("tests/engine",), CONTRACT),
    "offload": ("offload/**/*.py", ("tests/offload",), CONTRACT),
    "jobs": ("jobs/*.py", ("tests/jobs",), ()),
    "server": ("server/*.py", ("tests/server",), ("tests/jobs",)),
    "gpu": ("gpu/*.py", ("tests/gpu",), ()),
}
"""Files of the package, the tests that are about them, and others to run where these notice
nothing. Tests that a checkout lacks are left out."""

SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")},
    **{ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//")},
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not")},
    **{ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
}
EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
BETWEEN = re.compile(rb"(?:[\s()\\]|#[^\n]*)*")
"""What may stand between an operand and its operator."""


class Mutant(NamedTuple):
    """`old` at byte `start` of a file becomes `new`; line, column and text are for the reader."""

    path: str
    line: int
    column: int
    start: int
    old: str
    new: str
    text: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}:{self.column}"
        return f"{place}  {self.old} -> {self.new or 'nothing'}    {self.text}"

    def applied(self, raw: bytes) -> bytes:
        return raw[: self.start] + self.new.encode() + raw[self.start + len(self.old.encode()) :]


def _parts(node: ast.AST) -> list[ast.AST]:
    """Children without decorators, annotations, types, f-strings, version constants, `__all__`."""
    match node:
        case ast.FunctionDef(args=args, body=body):
            return [*args.defaults, *(given for given in args.kw_defaults if given), *body]
        case ast.ClassDef(body=body):
            return [*body]
        case ast.AnnAssign(value=value):
            return [value] if value else []
        case ast.arg() | ast.JoinedStr() | ast.Subscript(value=ast.Name(id="Literal")):
            return []
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
            return [*orelse]
        case ast.Assign(targets=[ast.Name(id=name)]) if name[:2] == "__" or "VERSION" in name:
            return []
    return list(ast.iter_child_nodes(node))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for part in _parts(node):
        yield from _nodes(part)


def mutants_of(path: str, raw: bytes) -> Iterator[Mutant]:
    """Every mutant of a file."""
    lines = raw.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def mutant(at: int, old: str, new: str) -> Mutant:
        line = raw.count(b"\n", 0, at) + 1
        assert raw[at:].startswith(old.encode()), (path, line, old)
        text = lines[line - 1].decode().strip()
        return Mutant(path, line, at - starts[line - 1] + 1, at, old, new, text)

    def begin(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        return starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    for node in _nodes(ast.parse(raw)):
        operators: list[tuple[ast.expr, Any]] = []
        match node:
            case ast.BinOp(left=left, op=op) | ast.AugAssign(target=left, op=op):
                operators = [(left, op)]
            case ast.Compare(left=left, ops=ops, comparators=right):
                operators = list(zip([left, *right[:-1]], ops, strict=True))
            case ast.BoolOp(op=op, values=values):
                operators = [(value, op) for value in values[:-1]]
            case ast.UnaryOp(op=ast.Not()):
                yield mutant(begin(node), "not ", "")
            case ast.Constant(value=bool() as flag):
                yield mutant(begin(node), str(flag), str(not flag))
            case ast.Constant(value=int() | float() as number):
                old = raw[begin(node) : end(node)].decode()
                new = number + 1 if isinstance(number, int) else number * 2
                if new != number:
                    yield mutant(begin(node), old, repr(new))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in EXTREMES:
                yield mutant(end(node.func) - len(name), name, EXTREMES[name])
        for before, op in operators:
            if type(op) in SWAPS:
                gap = BETWEEN.match(raw, end(before))
                yield mutant(gap.end() if gap else 0, *SWAPS[type(op)])


def draw(places: dict[str, list[Mutant]], count: int, seed: int) -> dict[str, list[Mutant]]:
    """Draws `count` mutants: at least one of each room, shared out by the numbers of places."""
    total = sum(map(len, places.values()))
    exact = {room: count * len(found) / total for room, found in places.items()}
    shares = {room: max(1, int(share)) for room, share in exact.items()}
    while sum(shares.values()) < count:
        shares[max(exact, key=lambda room: exact[room] - shares[room])] += 1
    source = random.Random(seed)  # noqa: S311
    return {room: sorted(source.sample(found, shares[room])) for room, found in places.items()}


def pytest(copy: Path, arguments: list[str], limit: float | None = None) -> dict[str, Any]:
    """Whether the tests fail, pass or take too long, their seconds, and the first that fails."""
    options = ["-p", "no:cacheprovider", "--no-loadscope-reorder", "--hypothesis-seed=0"]
    begun, said = time.monotonic(), copy / ".said"
    with said.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", f"--basetemp={copy}/.tmp", *options, *arguments],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its workers can be ended with it
        )
        try:
            outcome = "killed" if process.wait(limit) else "survived"
        except subprocess.TimeoutExpired:
            outcome = "timed out"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said.read_text(errors="replace"), re.MULTILINE)
    seconds = round(time.monotonic() - begun, 1)
    return {"outcome": outcome, "seconds": seconds, "by": failed[1] if failed else None}


def make_copy(copy: Path, checkout: Path) -> None:
    """Copies the files that tests need, and checks that they are used. checkout: where the tests
    are from."""
    for name in ("flexgen_jax", "docs", "scripts", "tests"):
        source = ROOT if name == "flexgen_jax" else checkout
        shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(checkout / name, copy)
    test = "import flexgen_jax\ndef test_it(): assert flexgen_jax.__file__.startswith({!r})\n"
    (copy / "test_copy.py").write_text(test.format(f"{copy}{os.sep}"))
    if pytest(copy, ["test_copy.py"])["outcome"] != "survived":
        sys.exit("the tests import another copy of the package")


def quickest_first(copy: Path, *places: str) -> list[str]:
    """The test functions there, fastest first; all must pass."""
    report = copy / ".report.xml"
    taken: defaultdict[str, float] = defaultdict(float)
    result = pytest(copy, [f"--junitxml={report}", *places])
    print(f"without a mutant: {' '.join(places)} {result['seconds']:.0f} s", flush=True)
    if result["outcome"] != "survived":
        sys.exit(f"fails without a mutant: {result['by']}")
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314
        path = case.attrib["classname"].replace(".", "/") + ".py"
        taken[f"{path}::{case.attrib['name'].partition('[')[0]}"] += float(case.attrib["time"])
    return sorted(taken, key=taken.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutants", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=90, help="seconds of tests for each mutant")
    parser.add_argument("--only", nargs="+", help="all mutants at these FILE:LINE[:COLUMN]")
    parser.add_argument("--tests", type=Path, default=ROOT, help="checkout with the tests")
    parser.add_argument("--json", type=Path, help="what became of each mutant")
    options = parser.parse_args()
    found = {
        room: [
            mutant
            for path in sorted((ROOT / "flexgen_jax").glob(pattern))
            for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())
        ]
        for room, (pattern, *_) in ROOMS.items()
    }
    drawn = draw(found, options.mutants, options.seed)
    if options.only:
        asked = tuple(f"{place}{end}" for place in options.only for end in (":", " "))
        drawn = {
            room: [m for m in all_ if str(m).startswith(asked)] for room, all_ in found.items()
        }
    results: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that child processes are stopped
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(folder).resolve()
        make_copy(copy, options.tests)
        for room, mutants in drawn.items():
            print(f"{room}: {len(mutants)} of {len(found[room])} places", flush=True)
            own, others = ([x for x in places if (copy / x).exists()] for places in ROOMS[room][1:])
            tests = [*quickest_first(copy, *own), *others] if mutants else []
            for mutant in mutants:
                path = copy / mutant.path
                raw = path.read_bytes()
                path.write_bytes(mutant.applied(raw))
                result = pytest(copy, tests, options.limit)
                path.write_bytes(raw)
                results.append({"room": room, "mutant": str(mutant), **result})
                print(f"{result['outcome']:9} {result['seconds']:5.1f} s  {mutant}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1) + "\n")
    for outcome in ("survived", "timed out"):
        print(f"\n{outcome}:")
        print(*(r["mutant"] for r in results if r["outcome"] == outcome), sep="\n")
    counts = Counter(result["outcome"] for result in results)
    print(f"\n{len(results)} mutants:", ", ".join(f"{n} {name}" for name, n in counts.items()))


if __name__ == "__main__":
    main()
