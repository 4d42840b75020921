"""Guesses by a model that lies on the device as a whole: a smaller one with the same tokens, or the
same one in 4 bits. Tokens are drafted one by one; where the text is drawn, with the draws that
the text's own tokens will have, so that models that agree guess what will be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.errors import UserError
from flexgen_jax.layers import programs
from flexgen_jax.layers.attention import Block
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.layers.sampling import Choice
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.loading import Model
from flexgen_jax.models.spec import LayerSpec, ModelSpec
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.speculation import Draws
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.policy import Policy
from flexgen_jax.progress import Progress
from flexgen_jax.schedule.ledger import Ledger

CHUNKS = (1, 8, 64)
"""Tokens of a text that a program takes at once; the last ones of a chunk may be none."""

SMALLEST_CACHE, CACHE_GROWTH = 256, 4
"""Tokens of a sequence's first KV cache, and its growth factor."""


def check_drafts(draft: Model, target: Model) -> None:
    """Raises `UserError` for a model that cannot draft for another model."""
    spec = model_spec(draft.config)
    if draft.config.has_experts:
        raise UserError(f"--draft {draft.name}: a mixture-of-experts model cannot be a draft model")
    if any(layer.growing and not layer.attends for layer in spec.decoders):
        raise UserError(
            f"--draft {draft.name}: a {draft.config.model_type} model cannot be a draft model"
        )
    ours, theirs = target.tokenizer, draft.tokenizer
    if draft is target or draft.source is target.source or ours is None or theirs is None:
        if draft.config.vocab_size < target.config.vocab_size:
            raise UserError(
                f"--draft {draft.name} and {target.name} have different vocabularies, of "
                f"{draft.config.vocab_size} and {target.config.vocab_size} tokens"
            )
        return
    size = min(draft.config.vocab_size, target.config.vocab_size)
    different_id = next((n for n in range(size) if ours.piece(n) != theirs.piece(n)), None)
    if different_id is not None:
        raise UserError(
            f"--draft {draft.name} and {target.name} have different vocabularies: token "
            f"{different_id} is {theirs.piece(different_id)!r} and {ours.piece(different_id)!r}"
        )


class ModelDrafter:
    """Makes drafts by a model; see `offload.speculation.Drafter`. Its weights are brought to the
    device for the first text.

    model: is not changed; policy: has the bits of its weights; dtype: its compute format; limit:
    the number of tokens that the guessed model knows.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        dtype: str,
        unified: bool,
        limit: int,
        progress: Progress,
    ) -> None:
        self._model, self._policy, self._dtype, self._unified = model, policy, dtype, unified
        self._progress, self._limit = progress, limit
        self._network: Network | None = None

    def _opened(self) -> Network:
        """Brings the model to the device."""
        formats = self._policy.formats(self._dtype)
        device = Device.create(self._model.config, formats, self._unified)
        tensors = device.spec.tensors
        weights = WeightStore(
            device, self._model.source, dict.fromkeys(tensors, "device"), Ledger({})
        )
        total = sum(formats.weight(tensor).nbytes for tensor in tensors.values())
        with self._progress.placing(total) as placed:
            weights.place(placed)
        return Network(device, weights)

    def begin(self) -> ModelDraft:
        self._network = self._network or self._opened()
        return ModelDraft(self._network, self._model.config, self._limit)

    def close(self) -> None:
        network, self._network = self._network, None
        if network is not None:
            network.close()


class Network:
    """A model on the device, and the programs of its layers for one text."""

    def __init__(self, device: Device, weights: WeightStore) -> None:
        self._device, self._store = device, weights
        self._programs = device.programs
        self._weights = {layer.index: weights.resident(layer) for layer in device.spec.layers}
        self._checks = device.memories.numbers((1, 0))

    @property
    def spec(self) -> ModelSpec:
        return self._device.spec

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self._device.formats.dtype)

    def close(self) -> None:
        """Frees the weights."""
        self._weights.clear()
        self._store.close()
        self._device.close()

    def rows(self, max_tokens: int) -> Rows:
        """Sets up a sequence without padding, of at most `max_tokens` tokens."""
        zero = np.zeros(1, np.int32)
        constant = self._device.memories.constant
        return Rows(*map(constant, (zero, zero, np.array([max_tokens], np.int32))))

    def run(self, ids: Any, start: int, num_known: int, state: TextState) -> jax.Array:
        """Runs tokens, int32 [1, token], from index `start` through the layers; only the first
        `num_known` tokens change the state. Returns hidden states, [1, token, hidden]."""
        numbers, tokens = self._device.memories.numbers, ids.shape[1]
        embed = self._programs.get(programs.embed, rows=1, tokens=tokens)
        hidden: jax.Array
        hidden, checks = embed(self._weights[0], ids, numbers(start), state.rows)
        for layer in self.spec.decoders:
            weights, number = self._weights[layer.index], layer.index - 1
            if layer.attends:
                decode = self._get(programs.decode, layer, tokens, tail=state.room, appends=True)
                position_arguments = (numbers(start), state.rows)
                hidden, state.tails[number], checks = decode(
                    weights, hidden, (), state.tails[number], checks, *position_arguments
                )
            else:
                shape = {"asked": tokens, "tail": 0, "cuts": (), "has_guesses": tokens > 1}
                mix = self._get(programs.mix, layer, tokens, **shape)
                end = (numbers(num_known),) if tokens > 1 else ()
                mix_arguments = (weights, hidden, (), state.states[number], numbers(start), checks)
                hidden, _, state.states[number], checks = mix(*mix_arguments, state.rows, *end)
        return hidden

    def _get(self, kind: Any, layer: LayerSpec, tokens: int, **shape: Any) -> Any:
        """Returns a program of a layer."""
        return self._programs.get(kind, layer=layer, rows=1, tokens=tokens, blocks=(), **shape)

    def choose(self, hidden: jax.Array, draws: Draws) -> jax.Array:
        """Returns the token, int32 [1, 1], after hidden states of one, [1, 1, hidden]."""
        choice = Choice(is_greedy=not draws.sampling)
        place = (self._device.memories.numbers(draws.token),) if draws.sampling else ()
        head = self._programs.get(programs.head, rows=1, choice=choice)
        weights = self._weights[self.spec.head.index]
        token, _ = head(weights, hidden, self._checks, *draws.sampling, *place)
        next_token: jax.Array = token
        return next_token


class TextState:
    """The layers' state for a sequence: of those that attend KV caches with room for `room` tokens,
    of others what they replace with every token."""

    def __init__(self, network: Network) -> None:
        self._spec, self._dtype = network.spec, network.dtype
        self.room = 0
        self.rows = network.rows(0)
        self.tails: list[Block] = [() for _ in self._spec.decoders]
        self.states: list[tuple[jax.Array, ...]] = [
            tuple(
                jnp.zeros(leaf.array_shape(1), leaf.dtype or self._dtype) for leaf in layer.replaced
            )
            for layer in self._spec.decoders
        ]

    def make_room(self, network: Network, tokens: int) -> None:
        """Makes room for `tokens` tokens; its programs are compiled again."""
        if tokens <= self.room:
            return
        before, self.room = self.room, max(self.room, SMALLEST_CACHE)
        while self.room < tokens:
            self.room *= CACHE_GROWTH
        self.rows = network.rows(self.room)
        for number, layer in enumerate(self._spec.decoders):
            if layer.attends and before:
                self.tails[number] = tuple(_longer(x, self.room) for x in self.tails[number])
            elif layer.attends:
                shapes = [leaf.array_shape(1, self.room) for leaf in layer.growing]
                self.tails[number] = tuple(jnp.zeros(shape, self._dtype) for shape in shapes)


def _longer(x: Any, room: int) -> jax.Array:
    """Returns [..., token, element] with zeros after it, for `room` tokens."""
    widths = [(0, 0)] * x.ndim
    widths[-2] = (0, room - x.shape[-2])
    return jnp.pad(x, widths)


@jax.jit
def _one(hidden: jax.Array, index: int) -> jax.Array:
    """Returns the hidden states of one token, [1, 1, hidden]."""
    token_hidden: jax.Array = jax.lax.dynamic_slice_in_dim(hidden, index, 1, axis=1)
    return token_hidden


class ModelDraft:
    """Drafts the continuation of one sequence; see `offload.speculation.TextDraft`."""

    def __init__(self, network: Network, config: ModelConfig, limit: int) -> None:
        self._network, self._config, self._limit = network, config, limit
        self._kept = TextState(network)
        self._seen = 0

    def guess(self, ids: Sequence[int], count: int, draws: Draws) -> Sequence[int]:
        is_long = len(ids) + count > self._config.max_positions
        if is_long or max(ids[self._seen :]) >= self._config.vocab_size:
            return ()  # of a text that the model cannot take
        state, network = self._kept, self._network
        state.make_room(network, len(ids) + count)
        hidden = self._read(ids)
        states = list(state.states)  # guesses leave nothing there
        guesses = [network.choose(hidden, draws)]
        for number in range(1, count):
            hidden = network.run(guesses[-1], len(ids) + number - 1, 1, state)
            guesses.append(network.choose(hidden, draws._replace(token=draws.token + number)))
        state.states = states
        tokens = [int(guess[0, 0]) for guess in jax.device_get(guesses)]
        num_valid = next((n for n, token in enumerate(tokens) if token >= self._limit), count)
        return tokens[:num_valid]

    def _read(self, ids: Sequence[int]) -> jax.Array:
        """Runs the tokens that have come through the model; returns the last token's hidden
        states."""
        while True:
            unread = ids[self._seen :]
            size = next((size for size in CHUNKS if size >= len(unread)), CHUNKS[-1])
            num_known = min(size, len(unread))
            chunk = np.zeros((1, size), np.int32)
            chunk[0, :num_known] = unread[:num_known]
            hidden = self._network.run(chunk, self._seen, num_known, self._kept)
            self._seen += num_known
            if num_known == len(unread):
                last: jax.Array = _one(hidden, num_known - 1)
                return last

    def close(self) -> None:
        self._kept = TextState(self._network)
        self._seen = 0
