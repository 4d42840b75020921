"""Every script says how it is called, and what it imports is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent.parent.parent / "scripts").glob("*/*.py"))
MODULES = {
    "report",
    "suites",
    "corpus",
    "device_trace",
    "disk_rate",
    "limits",
    "llama_files",
    "roofline",
}
"""Those that others import."""

NEEDS = {"train_tiny_opt": "optax", "torch_reference": "torch"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDS.get(path.stem, "flexgen_jax"))
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    if path.stem not in MODULES:
        assert hasattr(module, "main"), "it can be called"
        assert f"scripts/{path.parent.name}/{path.name}" in (module.__doc__ or ""), "it says how"
