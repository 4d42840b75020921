"""Every script says how it is called, and what it imports is there."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
MODULES = {
    "report",
    "suites",
    "corpus",
    "device_trace",
    "disk_rate",
    "gpu_targets",
    "hlo_cost",
    "limits",
    "llama_files",
    "roofline",
}
"""Those that others import."""

NEEDS = {
    "train_tiny_opt": "optax",
    "torch_reference": "torch",
    "check_mutations": "torch",
    "gguf_tokens": "llama_cpp",
}
"""The package that a script needs beyond the extra `test`; without it the script is not loaded."""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDS.get(path.stem, "flexgen_jax"))
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which a script may add to
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    if path.stem not in MODULES:
        assert hasattr(module, "main"), "it can be called"
        assert str(path.relative_to(ROOT)) in (module.__doc__ or ""), "it says how"
