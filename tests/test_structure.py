"""Imports go one way, policies need no JAX, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flexgen_jax"

# Each room may import from those before it.
ORDER = [
    {"models", "units", "progress"},
    {"layers", "policy"},
    {"cpu"},
    {"offload", "machine"},
    {"engine"},
    {"cli"},
]


def room(module: str) -> int:
    name = module.split(".")[1] if "." in module else module
    return next(i for i, rooms in enumerate(ORDER) if name in rooms)


def imports(path: Path) -> list[str]:
    """The package's modules that a file imports anywhere, type checking aside."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flexgen_jax."):
            found.append(str(node.module))
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    own = room(".".join(["flexgen_jax", *path.relative_to(PACKAGE).with_suffix("").parts]))
    for module in imports(path):
        assert room(module) <= own, f"{path.name} imports {module}"
        if "layers" in path.parts:
            assert not module.startswith("flexgen_jax.policy")
            assert not module.startswith("flexgen_jax.offload")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_policy_needs_no_jax() -> None:
    modules = [f"flexgen_jax.policy.{p.stem}" for p in (PACKAGE / "policy").glob("[a-z]*.py")]
    code = f"import sys, {', '.join(modules)}; assert not {{'jax', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
