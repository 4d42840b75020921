"""Rooms import one way, without cycles; `models/` needs no JAX, plans not even NumPy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flexgen_jax"
NAME = PACKAGE.name

BELOW_ALL = {"caches", "errors", "units", "progress", "version"}
"""Modules at the top of the package that every room may import."""

BELOW_ENGINE = {
    *("models", "layers", "policy", "schedule", "search"),
    *("cpu", "offload", "machine", "requests", "drafting"),
}

MAY_IMPORT = {
    "models": set(),
    "layers": {"models"},
    "policy": {"models"},
    "schedule": {"models", "policy"},
    "search": {"models", "policy", "schedule"},
    "gpu": {"models", "layers", "policy"},
    "cpu": {"models", "layers", "policy", "gpu"},
    "offload": {"models", "layers", "policy", "schedule", "cpu"},
    "machine": {"models", "layers", "policy", "schedule", "search", "cpu", "offload"},
    "offloading": {"models", "layers", "policy", "schedule", "cpu", "offload", "machine"},
    "requests": {"models", "layers", "policy", "schedule", "offload"},
    "drafting": {"models", "layers", "policy", "schedule", "cpu", "offload"},
    "engine": BELOW_ENGINE,
    "jobs": {"models", "machine", "requests", "engine"},
    "server": {"models", "requests", "engine", "jobs"},
    "evaluation": {"models", "policy", "requests", "engine"},
    "cli": {
        *BELOW_ENGINE,
        "engine",
        "jobs",
        "server",
        "evaluation",
    },
}
PUBLIC = {"__init__", "__main__"}
"""These two hand on the public names and the command line, and nothing imports them."""

FILES = {
    ".".join([NAME, *path.relative_to(PACKAGE).with_suffix("").parts]): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(source: str, own: str) -> Iterator[str]:
    """The package's modules that a module named `own` imports anywhere, in whatever form."""
    parent = own.removesuffix(".__init__") if own.endswith(".__init__") else own.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (_module(alias.name) for alias in node.names if _is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = parent.split(".")[: len(parent.split(".")) - node.level + 1]
                base = ".".join([*up, *([base] if base else [])])
            if _is_ours(base):
                # "from room import file" names the file, "from room.file import name" the name.
                yield from {_module(f"{base}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Constant) and node.value in FILES:  # for importlib
            yield str(node.value)


def _is_ours(name: str) -> bool:
    return name == NAME or name.startswith(f"{NAME}.")


def _module(name: str) -> str:
    """The file that an import of `name` loads."""
    while name not in FILES:
        if f"{name}.__init__" in FILES:
            return f"{name}.__init__"
        name = name.rpartition(".")[0]
    return name


def room(module: str) -> str:
    return module.split(".")[1]


GRAPH = {name: set(imported(path.read_text(), name)) for name, path in FILES.items()}


@pytest.mark.parametrize(
    "source",
    [
        "import flexgen_jax.cpu.backend",
        "import flexgen_jax.cpu.backend as b",
        "from flexgen_jax.cpu.backend import anything",
        "from flexgen_jax.cpu import backend",
        "from ..cpu import backend",
        "from ..cpu.backend import anything",
        "def f():\n    from flexgen_jax.cpu import backend",
        "import importlib\nimportlib.import_module('flexgen_jax.cpu.backend')",
    ],
)
def test_every_form_of_import_is_seen(source: str) -> None:
    assert "flexgen_jax.cpu.backend" in set(imported(source, "flexgen_jax.layers.attention"))


def test_every_file_is_in_a_room() -> None:
    assert {room(module) for module in FILES} == {*MAY_IMPORT, *BELOW_ALL, *PUBLIC}


@pytest.mark.parametrize("module", [m for m in FILES if room(m) not in PUBLIC])
def test_imports_go_one_way(module: str) -> None:
    allowed = {room(module), *MAY_IMPORT.get(room(module), ()), *BELOW_ALL}
    assert {room(other) for other in GRAPH[module]} <= allowed


def test_no_import_cycle() -> None:
    tuple(TopologicalSorter(GRAPH).static_order())  # raises CycleError with the cycle


@pytest.mark.parametrize(
    ("name", "unwanted"),
    [
        ("models", {"jax"}),
        ("policy", {"jax", "numpy"}),
        ("schedule", {"jax", "numpy"}),
        ("search", {"jax", "numpy"}),
    ],
)
def test_rooms_without_jax(name: str, unwanted: set[str]) -> None:
    modules = [module for module in FILES if room(module) == name]
    code = f"import sys, {', '.join(modules)}; print({unwanted} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert found.stdout.strip() == "set()"


def test_a_plan_for_another_machine_loads_no_jax() -> None:
    """Which would take longer than many a plan."""
    code = """
import sys
from flexgen_jax.cli.main import main
asked = ["plan", "--model", "facebook/opt-125m", "--hardware", "t4-16gb", "--gen-len", "2"]
main(asked, standalone_mode=False)
print({"jax"} & set(sys.modules))
"""
    planned = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True
    )
    assert planned.stdout.splitlines()[-1] == "set()"


def test_kernels_have_one_door() -> None:
    """Other rooms import the package `cpu`, none of its files."""
    door = f"{NAME}.cpu.__init__"
    for module, others in GRAPH.items():
        if room(module) != "cpu":
            assert {other for other in others if room(other) == "cpu"} <= {door}, module


def test_processor_units_are_named_in_one_room() -> None:
    """Instruction sets and compilers are `cpu`'s business, and versions in a profile's key."""
    unit = re.compile("amx|avx|vnni|llvm|numba", re.IGNORECASE)
    found = {m for m, path in FILES.items() if room(m) != "cpu" and unit.search(path.read_text())}
    assert found == {f"{NAME}.machine.profiler"}


def test_test_modules_do_not_import_from_another() -> None:
    """What several tests need is in `tests/helpers`."""
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not any(".test_" in name for name in names), path


def test_an_uninstalled_checkout_runs() -> None:
    """Nothing asks for the version of the installed package."""
    code = """
from importlib import metadata
real = metadata.version
def version(name):
    if name == "flexgen-jax":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
from flexgen_jax import LLM, SamplingParams, __version__
from flexgen_jax.machine.profiler import machine_key
with LLM() as llm:
    llm.generate("A", SamplingParams(max_tokens=2))
    assert llm.report()["num_tokens"] == 2
assert machine_key("float32") and __version__
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
