"""Engine options and the policy from the shared flags."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.errors import UserError
from flexgen_jax.policy.policy import (
    Placement,
    Policy,
    PolicyError,
)
from flexgen_jax.units import parse_bytes

if TYPE_CHECKING:
    from flexgen_jax.engine.llm import LLM


def parse_split(name: str, text: str) -> Placement:
    """Parses "device=20,host=80" as a placement; the rest goes to disk."""
    shares: dict[str, float] = {}
    for entry in text.split(","):
        tier, _, percent = entry.partition("=")
        try:
            value = float(percent)
        except ValueError:
            value = -1.0
        if tier.strip() not in ("device", "host", "disk") or value < 0:
            raise PolicyError(f"--{name} {text}: write it like device=20,host=80")
        shares[tier.strip()] = value / 100
    try:
        placement = Placement(shares.get("device", 0.0), shares.get("host", 0.0))
    except PolicyError as error:
        raise PolicyError(f"--{name} {text}: {error}") from None
    if "disk" in shares and abs(shares["disk"] - placement.disk) > 1e-6:
        raise PolicyError(f"--{name} {text}: device, host and disk must add up to 100")
    return placement


def build_policy(
    policy_file: str,
    percent: tuple[float, ...] | None,
    weights: str | None,
    cache: str | None,
    activations: str | None,
    default_batches: int,
    **shape: Any,
) -> Policy | None:
    """Returns the policy that the flags describe; None for auto."""
    named = {"weights": weights, "cache": cache, "activations": activations}
    given = {name: parse_split(name, text) for name, text in named.items() if text is not None}
    changes = {name: value for name, value in shape.items() if value is not None}
    if changes.pop("no_overlap", False):
        changes["overlap"] = False
    if changes.pop("no_copy_ahead", False):
        changes["copies_ahead"] = False
    if "expert_cache" in changes:
        changes["expert_cache_bytes"] = parse_bytes(changes.pop("expert_cache"), "--expert-cache")
    if "host_experts" in changes:
        changes["host_experts"] /= 100
    if policy_file != "auto":
        if percent or given:
            raise PolicyError("--policy FILE and placement flags cannot be combined")
        try:
            policy = Policy.from_json(Path(policy_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"cannot read --policy {policy_file}: {error}") from None
        except PolicyError as error:
            raise PolicyError(f"--policy {policy_file}: {error}") from None
        return replace(policy, **changes)
    if percent and given:
        raise PolicyError("--percent and --weights, --cache, --activations cannot be combined")
    if not percent and not given and not changes:
        return None
    changes.setdefault("batch_size", min(default_batches, Policy().batch_size))
    if percent:
        return Policy.from_percent(*percent, **changes)
    placements: dict[str, Any] = given
    return Policy(**placements, **changes)


def engine_options(
    flags: Mapping[str, Any], default_batches: int, shows_tokens: bool = False, **more: Any
) -> EngineOptions:
    """Returns the options from the shared flags and `more`. default_batches: upper limit of the
    batch size if a given policy has none; shows_tokens: whether tokens are printed, which
    replaces the progress bar."""
    names = {field.name for field in fields(EngineOptions)}
    option_fields = {name: value for name, value in flags.items() if name in names}
    shape = {name: value for name, value in flags.items() if name not in option_fields}
    policy = build_policy(default_batches=default_batches, **shape)
    if option_fields["progress"] is None:
        option_fields["progress"] = sys.stderr.isatty()
    if option_fields["progress"] and shows_tokens:
        option_fields["progress"] = "placing"
    return EngineOptions(policy=policy or "auto", **option_fields, **more)


def open_llm(options: EngineOptions) -> LLM:
    """The `LLM` with these options."""
    from flexgen_jax.engine.llm import LLM

    try:
        return LLM(**options.arguments)
    except RuntimeError as error:
        raise UserError(f"cannot start: {error}") from None
