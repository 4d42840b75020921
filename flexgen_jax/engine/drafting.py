"""What guesses tokens for a run: made from the options, and its description for planning."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from flexgen_jax.caches import cache_folder, read_cached, write_cached
from flexgen_jax.drafting.draft_model import ModelDrafter, check_drafts
from flexgen_jax.drafting.lookup import LookupDrafter
from flexgen_jax.engine.options import LOOKUP, SELF_4BIT, EngineOptions
from flexgen_jax.errors import UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.loading import Model, open_model, shape_of
from flexgen_jax.offload.speculation import Acceptance, Drafter
from flexgen_jax.policy.drafts import DraftRates
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.progress import Progress
from flexgen_jax.search.costs import Costs

EXPECTED = {LOOKUP: 0.4, SELF_4BIT: 0.8}
"""The share of right guesses that is expected where none was measured: of lookups, and of the same
model in 4 bits."""

OF_A_MODEL = 0.6
"""The same of another model."""

MIN_GUESSES = 200
"""Guesses after right ones that a run must have had for its share to count in later plans."""

HISTORY_WEIGHT = 0.5
"""The weight of earlier measurements relative to a run's."""


class Guessing(NamedTuple):
    """A model that guesses, and the bits of its weights."""

    setting: Setting
    policy: Policy


@dataclass
class Drafting:
    """What guesses tokens, and how often it was right so far.

    guessing: the model that guesses, None where there is none; memory: the file with the acceptance
    rate of earlier runs.
    """

    name: str
    drafter: Drafter
    memory: Path
    guessing: Guessing | None = None
    # The share of right guesses among those after right ones, None where none was measured.
    _measured: float | None = field(init=False)
    # A machine, and the rates there.
    _rates: tuple[HardwareProfile, DraftRates] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._measured = read_cached(self.memory)

    def rates(self, hw: HardwareProfile) -> DraftRates:
        """Returns the description for planning."""
        if self._rates is None or self._rates[0] != hw:
            self._rates = (hw, rates_of(self.name, self.guessing, hw, self._measured))
        return self._rates[1]

    def observe(self, acceptance: Acceptance) -> None:
        """Keeps how often guesses were right, for later plans."""
        rate = acceptance.rate
        if rate is None or acceptance.accepted + acceptance.wrong < MIN_GUESSES:
            return
        before = rate if self._measured is None else self._measured
        self._measured = HISTORY_WEIGHT * before + (1 - HISTORY_WEIGHT) * rate
        self._rates = None
        write_cached(self.memory, self._measured)


def name_of(draft: str | Path | Model) -> str:
    """Returns the requested drafter."""
    return draft.name if isinstance(draft, Model) else str(draft)


def guessing_of(setting: Setting, config: ModelConfig | None) -> Guessing:
    """Returns a model that guesses: one of this config with the bits that it is published in, or
    the setting's own in 4 bits."""
    if config is None:
        return Guessing(setting, Policy(weight_bits=4))
    bits = 16 if config.published is None else config.published.bits
    return Guessing(replace(setting, config=config), Policy(weight_bits=bits))


def rates_of(
    name: str, guessing: Guessing | None, hw: HardwareProfile, accepted: float | None
) -> DraftRates:
    """Returns the rates of guesses, which a model makes if there is one. accepted: the acceptance
    rate, None for the expected rate."""
    accepted = EXPECTED.get(name, OF_A_MODEL) if accepted is None else accepted
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
    draft: str | Path | Model, setting: Setting, hw: HardwareProfile, accepted: float | None
) -> DraftRates:
    """Returns the rates of guesses for a plan, before any model is opened; accepted: as for
    `rates_of`."""
    name = name_of(draft)
    if name == LOOKUP:
        return rates_of(name, None, hw, accepted)
    config = draft.config if isinstance(draft, Model) else None
    if config is None and name != SELF_4BIT:
        config = shape_of(name)
    return rates_of(name, guessing_of(setting, config), hw, accepted)


def drafting_of(
    options: EngineOptions, model: Model, setting: Setting, progress: Progress
) -> Drafting | None:
    """Returns the options' drafter, None without drafting; raises `UserError` for impossible
    drafters."""
    draft = options.draft
    if draft is None and options.base_policy.draft_tokens:
        draft = LOOKUP  # a policy asks for guesses, and does not say whose
    if draft is None:
        return None
    name = name_of(draft)
    key = f"{model.fingerprint(setting.dtype)}\n{name}"
    memory = cache_folder("drafts") / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if name == LOOKUP:
        return Drafting(name, LookupDrafter(), memory)
    if name == SELF_4BIT and (model.config.published is not None or options.weight_bits == 4):
        raise UserError(
            f"--draft {SELF_4BIT}: {model.name} has few bits already, so drafting would take as "
            f"long as decoding; use --draft {LOOKUP}, or a smaller model"
        )
    if name == SELF_4BIT and model.config.adapter_names:
        raise UserError(f"--draft {SELF_4BIT} cannot follow adapters that texts choose")
    draft_model = None
    if name != SELF_4BIT:
        try:
            draft_model = open_model(draft, options.dummy_weights, options.seed)
        except UserError as error:
            raise UserError(f"--draft {name}: {error} (--draft {LOOKUP} needs no model)") from None
    check_drafts(draft_model or model, model)
    guessing = guessing_of(setting, None if draft_model is None else draft_model.config)
    drafter = ModelDrafter(
        model=draft_model or model,
        policy=guessing.policy,
        dtype=setting.dtype,
        unified=setting.unified,
        limit=model.config.vocab_size,
        progress=progress,
    )
    return Drafting(name, drafter, memory, guessing)
