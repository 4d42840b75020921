from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.helpers import as_on_gpu, units
from tests.helpers.file_times import FileTimes

if as_on_gpu.is_asked():
    as_on_gpu.pretend()

from tests.helpers.models import write_checkpoint

settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=200)

QUICK_XLA = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}
"""Options with which XLA compiles in a third of the time."""


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--file-times", type=Path, help="write each file's seconds and programs here")


def pytest_configure(config: pytest.Config) -> None:
    """Prepares JAX, XLA and Hypothesis. A run without slow tests compiles quickly and draws few
    examples."""
    units.declared()  # a misspelt one is an error before anything runs
    is_quick = config.option.markexpr == "not slow"
    settings.load_profile("quick" if is_quick else "thorough")
    if is_quick:
        os.environ["XLA_FLAGS"] = f"{_quick_xla_flags()} {os.environ.get('XLA_FLAGS', '')}"
    _set_program_cache(os.environ.get("FLEXGEN_TEST_CACHE"))
    if config.option.file_times is not None:
        config.pluginmanager.register(FileTimes(config.option.file_times))


def _quick_xla_flags() -> str:
    options = dict(QUICK_XLA)
    if jax.__version_info__ >= (0, 11):  # its XLA has one kind of emitters
        del options["xla_cpu_use_fusion_emitters"]
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())


def _set_program_cache(folder: str | None) -> None:
    """Keeps compiled programs in a folder for later test runs, or nowhere. JAX has been imported,
    so its variables in the environment are for processes that tests start."""
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = str(int(folder is not None))
    jax.config.update("jax_enable_compilation_cache", folder is not None)
    if folder is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


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
