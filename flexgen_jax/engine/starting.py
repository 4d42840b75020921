"""Finds out about the machine, and makes what runs a model there."""

from __future__ import annotations

from pathlib import Path

from flexgen_jax.caches import cache_folder
from flexgen_jax.cpu import kernels_of_device
from flexgen_jax.engine.drafting import drafting_of
from flexgen_jax.engine.local import LocalRunner
from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.engine.planner import Planner
from flexgen_jax.engine.routing import measured_routing
from flexgen_jax.engine.serving import Runner
from flexgen_jax.engine.stages.leader import Stages
from flexgen_jax.errors import UserError
from flexgen_jax.machine.jax_settings import set_up_jax
from flexgen_jax.machine.start import start_jax
from flexgen_jax.models.loading import Model, resolve_dtype
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.offload.disk.kv_store import KVStore
from flexgen_jax.offload.kv_keeper import piece_layout
from flexgen_jax.offload.trace import Trace
from flexgen_jax.policy.expert_rates import ExpertRates
from flexgen_jax.policy.machines import read_profile
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.progress import Progress
from flexgen_jax.units import parse_bytes

KV_VERSION = 1
"""Version of the KV store's content: raised where layers compute other numbers than before."""


def start(options: EngineOptions) -> bool | None:
    """Starts JAX; returns whether the CPU is the device, None with stages: this process then
    computes nothing, and may have no device."""
    if options.sets_up_jax:
        set_up_jax()
    _, host_memory, _ = options.budgets
    return None if options.stages > 1 else start_jax(host_memory)


def make_runner(
    options: EngineOptions, on_cpu: bool | None, model: Model, progress: Progress
) -> Runner:
    """Returns what runs a model as the options ask. on_cpu: see `start`."""
    if on_cpu is None:
        return Stages(options, model.config, progress)
    unified = on_cpu if options.unified is None else options.unified
    if unified and not on_cpu:
        raise UserError("unified=True needs a CPU: a GPU has separate memory")
    dtype = resolve_dtype(options.dtype, model.config, on_cpu)
    device_memory, host_memory, disk_space = options.budgets
    policy = options.policy_on(unified, model.config)
    routing = measured_routing(model.source, model.config, dtype)
    rates = ExpertRates() if routing is None else routing.rates
    sizes = kernels_of_device().sizes
    setting = Setting(model.config, dtype, unified, sizes, experts=rates)
    drafting = drafting_of(options, model, setting, progress)
    planner = Planner(
        setting=setting,
        policy=policy,
        is_auto=options.is_auto,
        device_memory=device_memory,
        host_memory=host_memory,
        disk_space=disk_space,
        offload_dir=Path(options.offload_dir or cache_folder("offload")).expanduser(),
        fingerprint=model.source.fingerprint(dtype) + policy.formats(dtype).suffix,
        progress=progress,
        write_limit=parse_bytes(options.write_limit, "write_limit"),
        profile=read_profile(options.hardware) if options.hardware is not None else None,
        drafting=drafting,
    )
    trace = None
    if options.trace is not None:
        trace = Trace(Path(options.trace), f"flexgen_jax, {model.name}")
    kv_store = kv_store_of(options, planner, model, progress)
    return LocalRunner(
        planner=planner,
        source=model.source,
        progress=progress,
        trace=trace,
        breakdown=options.breakdown,
        kv_store=kv_store,
        drafting=drafting,
        routing=routing,
    )


MIN_KV_STORE = 100_000
"""The fewest bytes of a KV store: 20 is a forgotten unit."""


def kv_store_of(
    options: EngineOptions, planner: Planner, model: Model, progress: Progress
) -> KVStore | None:
    """Returns the store of texts' KV cache, if one is asked for and the model can have one."""
    cap, setting = parse_bytes(options.kv_store, "kv_store"), planner.setting
    if cap is None:
        return None
    if cap < MIN_KV_STORE:
        raise UserError(
            f"kv_store {options.kv_store} is too small for any prompt; use a size with a unit, "
            "e.g. 20GB"
        )
    spec, policy = model_spec(setting.config), planner.policy
    if policy.is_sparse or setting.config.short_positions is not None:
        progress.say("flexgen-jax: kv_store stores nothing with sparse attention or longrope")
        return None
    if setting.config.adapter_names:
        progress.say("flexgen-jax: kv_store stores nothing where texts choose an adapter")
        return None
    formats = policy.formats(setting.dtype)
    fingerprint = model.fingerprint(setting.dtype) + formats.suffix
    name = f"{fingerprint}-{formats}-{KV_VERSION}"
    folder = Path(options.kv_store_dir or cache_folder("kv"))
    return KVStore(
        folder=folder,
        cap=cap,
        model=name,
        layout=piece_layout(spec, formats),
        write_limit=planner.write_limit,
    )
