"""High-throughput generation with language models larger than the GPU's memory, on JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexgen_jax.version import __version__

__all__ = [
    "LLM",
    "EngineOptions",
    "Model",
    "PairScore",
    "Placement",
    "Policy",
    "PromptError",
    "Report",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "TokenLogprob",
    "UserError",
    "__version__",
    "register_family",
    "set_up_jax",
]

if TYPE_CHECKING:
    from flexgen_jax.engine.llm import LLM
    from flexgen_jax.engine.options import EngineOptions
    from flexgen_jax.engine.report import Report
    from flexgen_jax.errors import PromptError, UserError
    from flexgen_jax.machine.jax_settings import set_up_jax
    from flexgen_jax.models.families import register_family
    from flexgen_jax.models.loading import Model
    from flexgen_jax.policy.policy import Placement, Policy
    from flexgen_jax.requests.outputs import RequestOutput, TokenLogprob
    from flexgen_jax.requests.requests import Request
    from flexgen_jax.requests.sampling import SamplingParams
    from flexgen_jax.requests.scoring import PairScore, ScoreOutput

_HOMES = {
    "EngineOptions": "flexgen_jax.engine.options",
    "LLM": "flexgen_jax.engine.llm",
    "Model": "flexgen_jax.models.loading",
    "PairScore": "flexgen_jax.requests.scoring",
    "Placement": "flexgen_jax.policy.policy",
    "Policy": "flexgen_jax.policy.policy",
    "PromptError": "flexgen_jax.errors",
    "Report": "flexgen_jax.engine.report",
    "Request": "flexgen_jax.requests.requests",
    "RequestOutput": "flexgen_jax.requests.outputs",
    "SamplingParams": "flexgen_jax.requests.sampling",
    "ScoreOutput": "flexgen_jax.requests.scoring",
    "TokenLogprob": "flexgen_jax.requests.outputs",
    "UserError": "flexgen_jax.errors",
    "register_family": "flexgen_jax.models.families",
    "set_up_jax": "flexgen_jax.machine.jax_settings",
}


def __getattr__(name: str) -> Any:
    """Imports the public names when they are used, so that policies need no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
