from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
"""Tests leave the user's cache alone. One of their own saves no time: they share programs. Before
JAX is imported, which reads this."""

from tests.helpers import as_on_gpu, units

if as_on_gpu.is_asked():
    as_on_gpu.pretend()

from tests.helpers.models import write_checkpoint

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")  # a busy machine is no failure


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What runs keep for later ones, such as how often experts were chosen, is not the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


class TogetherByPrograms(LoadScopeScheduling):
    """Tests that share compiled programs, which take most of the suite's time, go to one worker:
    all cases of a test and, where kernels for the CPU are compiled, all tests of a file."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::" if nodeid.startswith("tests/cpu/") else "[")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByPrograms:
    return TogetherByPrograms(config, log)


def pytest_configure() -> None:
    units.declared()  # a misspelt one is an error before anything runs


QUICK_FIRST = ("test_structure.py", "test_units.py", "models", "policy", "machine", "layers")
"""Tests that run first, by the beginnings of their paths within `tests/`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts quick rooms first, leaves other units of the processor than its best to slow runs, and
    leaves out what is true only where the CPU is the device."""
    items.sort(key=_order)
    _keep_few(items)
    best = next(iter(units.present()), None)
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        asked = {params.get(name) for name in ("unit", "multiply")} & {*units.ALL}
        if asked - {best} and {"always", "multiply"} & {*item.fixturenames}:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    _skip_on_gpu(items)


def _keep_few(items: list[pytest.Item]) -> None:
    """Leaves all cases of a test that is marked `few(n)` to slow runs but for n of them, which are
    spread over all."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("few")
        assert marker is not None
        count, quick = len(group), [x for x in group if not x.get_closest_marker("slow")]
        kept = {id(quick[len(quick) * n // marker.args[0]]) for n in range(marker.args[0]) if quick}
        for item in group if count > marker.args[0] else ():
            if id(item) not in kept:
                item.add_marker(pytest.mark.slow)


def _order(item: pytest.Item) -> int:
    room = item.nodeid.removeprefix("tests/")
    places = [n for n, name in enumerate(QUICK_FIRST) if room.startswith(name)]
    return places[0] if places else len(QUICK_FIRST) + room.startswith("cpu")


def _skip_on_gpu(items: list[pytest.Item]) -> None:
    has_gpu = as_on_gpu.has_gpu()
    if not has_gpu and not as_on_gpu.is_asked():
        return
    skip = pytest.mark.skip(reason="the CPU is not the device")
    for item in items:
        is_unified = has_gpu and getattr(item, "callspec", None) is not None
        is_unified = is_unified and item.callspec.params.get("unified") is True  # type: ignore[attr-defined]
        if is_unified or item.get_closest_marker("cpu_device"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the processor lacks, however quiet the run is."""
    skipped = terminalreporter.stats.get("skipped", [])
    for line in units.summary(str(report.longrepr[2]) for report in skipped):
        terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def sharing_pays() -> Iterator[None]:
    """Prefixes are shared whatever the profile says, by which tiny models compute them faster."""
    from flexgen_jax.engine.planner import Planner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "is_worth_sharing", lambda self, saved, requests: True)
        yield


@pytest.fixture
def loading_pays(monkeypatch: pytest.MonkeyPatch, sharing_pays: None) -> None:
    """What a KV store has is loaded whatever the profile says, too."""
    from flexgen_jax.engine.planner import Planner

    monkeypatch.setattr(Planner, "is_worth_loading", lambda self, tokens, layout: tokens > 0)


QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""XLA's options for programs that are compiled in a third of the time."""


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """XLA compiles in a third of the time: for tests of what is computed where and when. Those of
    layers, kernels and transfers are compiled as for users."""
    import jax

    from flexgen_jax.cpu.backend import CpuKernels

    quick = dict(QUICK)
    if jax.__version_info__ >= (0, 11):  # whose XLA has one kind of emitters
        del quick["xla_cpu_use_fusion_emitters"]

    def options(kernels: Any, formats: Any, is_lone: bool = False) -> dict[str, Any]:
        return {**(real(kernels, formats, is_lone) or {}), **quick}

    real = CpuKernels.compiler_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuKernels, "compiler_options", options)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant's tiny checkpoint, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(variant: str = "base") -> Path:
        folder = root / variant
        return folder if folder.exists() else write_checkpoint(folder, variant)

    return get


@pytest.fixture(scope="module")
def host() -> Iterator[Any]:
    """Attention on the CPU where the cache lies."""
    from flexgen_jax.cpu import HostAttention

    attention = HostAttention()
    yield attention
    attention.close()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small products in tiles too."""
    from flexgen_jax.cpu import matmul
    from flexgen_jax.layers.programs import table

    for name in ("FEW_PRODUCTS", "FEW_ROWS", "FEW_PACKED", "FEW_READ", "FEW_ROUNDED"):
        monkeypatch.setattr(matmul, name, 0)
    table.compiled.cache_clear()
    yield
    table.compiled.cache_clear()


@pytest.fixture(scope="session")
def tiles() -> None:
    """A processor with some unit for tiles."""
    units.need(*units.UNITS)


@pytest.fixture(params=units.UNITS)
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, always: None) -> str:
    """Small products in tiles, by each unit that the processor has."""
    units.use_unit(request.param, monkeypatch)
    return str(request.param)
