"""What guesses tokens for a run: made of the options, and what planning needs to know of it."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from flexgen_jax.engine.draft_model import ModelDrafter, check_drafts
from flexgen_jax.engine.lookup import LookupDrafter
from flexgen_jax.engine.options import LOOKUP, SELF_4BIT, EngineOptions
from flexgen_jax.errors import UserError
from flexgen_jax.machine.caches import cache_folder
from flexgen_jax.models.loading import Model, open_model, shape_of
from flexgen_jax.offload.speculation import Acceptance, Drafter
from flexgen_jax.policy.costs import Costs
from flexgen_jax.policy.drafts import DraftRates
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.progress import Progress

EXPECTED = {LOOKUP: 0.4, SELF_4BIT: 0.8}
"""The share of right guesses that is expected where none was measured: of lookups, and of the same
model in 4 bits."""

OF_A_MODEL = 0.6
"""The same of another model."""

ENOUGH_TRIED = 200
"""Guesses after right ones that a run must have had for its share to count in later plans."""

KEPT_SHARE = 0.5
"""The weight of what was measured before, beside a run's."""


class Guessing(NamedTuple):
    """A model that guesses, and the bits of its weights."""

    setting: Setting
    policy: Policy


@dataclass(frozen=True)
class Drafting:
    """What guesses tokens, and how often it was right so far.

    guessing: the model that guesses and its bits, None where there is none; memory: the file in
    which the share of right guesses is kept between runs.
    """

    name: str
    drafter: Drafter
    expected: float
    memory: Path
    guessing: Guessing | None = None

    @property
    def accepted(self) -> float:
        """The share of right guesses among those after right ones, as measured, or expected."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            measured = float(json.loads(self.memory.read_text(encoding="utf-8"))["accepted"])
            return min(max(measured, 0.0), 1.0)
        return self.expected

    def rates(self, hw: HardwareProfile) -> DraftRates:
        """Returns what planning needs to know."""
        return rates_of(self.name, self.guessing, hw, self.accepted)

    def observe(self, acceptance: Acceptance) -> None:
        """Keeps how often guesses were right, for later plans."""
        rate = acceptance.rate
        if rate is None or acceptance.accepted + acceptance.wrong < ENOUGH_TRIED:
            return
        share = KEPT_SHARE if self.memory.exists() else 0.0
        text = json.dumps({"accepted": share * self.accepted + (1 - share) * rate})
        with suppress(OSError):  # a plan without it is only less good
            self.memory.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.memory.with_suffix(".new")
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.memory)


def rates_of(
    name: str, guessing: Guessing | None, hw: HardwareProfile, accepted: float
) -> DraftRates:
    """Returns the rates of guesses, which a model makes if there is one."""
    if guessing is None:
        return DraftRates(name, accepted)
    costs = Costs(*guessing, hw)
    layers = costs.spec.decoders
    seconds = sum(costs.linear_s(layer, 1) + hw.step_s for layer in layers)
    tensors = costs.spec.tensors.values()
    return DraftRates(
        name=name,
        accepted=accepted,
        token_s=seconds + costs.head_s(1) + 2 * hw.step_s,
        device_bytes=sum(costs.formats.weight(tensor).nbytes for tensor in tensors),
        token_bytes=sum(costs.open_kv_bytes(layer, 1, 1) for layer in layers),
    )


def planned_rates(
    options: EngineOptions, setting: Setting, hw: HardwareProfile, accepted: float | None
) -> DraftRates:
    """Returns the rates of guesses for a plan, before any model is opened; accepted: the share of
    right guesses, None for what is expected."""
    draft = options.draft
    if draft is None:
        return DraftRates()
    name = draft.name if isinstance(draft, Model) else str(draft)
    accepted = EXPECTED.get(name, OF_A_MODEL) if accepted is None else accepted
    if draft == LOOKUP:
        return DraftRates(name, accepted)
    guessing = Guessing(setting, Policy(weight_bits=4))
    if draft != SELF_4BIT:
        config = draft.config if isinstance(draft, Model) else shape_of(name)
        bits = 16 if config.published is None else config.published.bits
        guessing = Guessing(replace(setting, config=config), Policy(weight_bits=bits))
    return rates_of(name, guessing, hw, accepted)


def drafting_of(
    options: EngineOptions, model: Model, setting: Setting, progress: Progress
) -> Drafting | None:
    """Returns what the options have guess tokens, None if that is nothing; raises `UserError` for
    what cannot."""
    draft = options.draft
    if draft is None and options.base_policy.draft_tokens:
        draft = LOOKUP  # a policy asks for guesses, and does not say whose
    if draft is None:
        return None
    name = draft.name if isinstance(draft, Model) else str(draft)
    key = f"{model.source.fingerprint(setting.dtype)}\n{name}"
    memory = cache_folder("drafts") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if draft == LOOKUP:
        return Drafting(name, LookupDrafter(), EXPECTED[LOOKUP], memory)
    guessing, policy = model, Policy(weight_bits=4)
    if draft != SELF_4BIT:
        guessing, policy = open_model(draft, options.dummy_weights, options.seed), Policy()
        if guessing.config.published is not None:
            policy = Policy(weight_bits=guessing.config.published.bits)
    elif model.config.published is not None or options.weight_bits == 4:
        raise UserError(
            f"--draft {SELF_4BIT}: {model.name} has few bits already, so that its guesses would "
            f"take as long as its tokens; use --draft {LOOKUP}, or a smaller model"
        )
    check_drafts(guessing, model)
    drafter = ModelDrafter(
        model=guessing,
        policy=policy,
        dtype=setting.dtype,
        unified=setting.unified,
        limit=model.config.vocab_size,
        progress=progress,
    )
    return Drafting(
        name=name,
        drafter=drafter,
        expected=EXPECTED.get(name, OF_A_MODEL),
        memory=memory,
        guessing=Guessing(replace(setting, config=guessing.config), policy),
    )
