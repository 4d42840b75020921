"""Compiles the programs of a greedy run before it begins."""

from __future__ import annotations

import time
from typing import Any

from flexgen_jax.layers import programs
from flexgen_jax.layers.programs import Program
from flexgen_jax.layers.sampling import Choice
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.dispatch import sharing_rows
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.admission import block_of
from flexgen_jax.schedule.joined import joined_layers
from flexgen_jax.schedule.passes import BlocksAt
from flexgen_jax.schedule.running import LayerState, Running


def warm_up(device: Device, plan: BlockPlan) -> float:
    """Compiles every program that a greedy run of a plan's batches may need; returns the seconds of
    compiling the CPU's kernels."""
    WarmUp(device, plan).compile()
    states = [state for running in block_of(plan) for state in running.layers]
    generated = [state for state in states if state.running.blocks.generated]
    if not any(state.stays_on_host(block) for state in generated for block in _blocks(state)):
        return 0.0
    started = time.perf_counter()
    device.prepare_host(plan.policy.is_sparse, not plan.policy.attends_on_host)
    return time.perf_counter() - started


def _blocks(state: LayerState) -> range:
    return range(len(state.homes))


class WarmUp:
    """Walks the steps of a plan's batches, and asks for their programs."""

    def __init__(self, device: Device, plan: BlockPlan) -> None:
        self._device, self._plan, self._spec = device, plan, device.spec
        self._programs, self._of_layers = device.programs, device.layer_programs(plan)
        self._joined_layers = joined_layers(plan)

    def compile(self) -> None:
        """Compiles the programs."""
        for layer, _ in self._spec.decoder_kinds if self._plan.unpacks else ():
            self._programs.get(programs.unpack, layer=layer)
        for running in block_of(self._plan):
            self._ends(running)
            for layer in self._spec.decoders:
                self._prompt(running, layer)
            for count in range(len(running.blocks.generated)):
                for state in running.layers:
                    for tokens in self._passes:
                        self._token(state, len(running.blocks.prompt) + count, tokens)

    @property
    def _passes(self) -> tuple[int, ...]:
        """How many tokens of a sequence a step after the prompt may compute."""
        return tuple({1, self._plan.policy.pass_tokens})

    def _get(self, kind: Program[Any], layer: LayerSpec, **shape: Any) -> None:
        self._of_layers.get(kind, layer=layer, **shape)

    def _ends(self, running: Running) -> None:
        """The embedding and the head."""
        config, rows = self._plan.config, running.rows
        lengths = {*running.chunks, *(self._passes if running.blocks.generated else ())}
        for tokens in lengths if config.has_embedding else ():
            self._programs.get(programs.embed, rows=rows, tokens=tokens)
        if config.has_head and not running.is_prefix:
            for tokens in (1, *self._passes):
                choice = Choice(is_greedy=True)
                self._programs.get(programs.head, rows=rows, choice=choice, tokens=tokens)

    def _prompt(self, running: Running, layer: LayerSpec) -> None:
        """A layer's programs for prompts: for whole ones or first chunks, and for later chunks."""
        for token in (token for token in running.tokens if token <= 0):
            start, tokens = running.span(token)
            num_queries = 1 if running.only_last(layer.index) else tokens
            prompt_blocks = running.prompt_blocks(token)
            cuts = running.lengths[prompt_blocks.start : prompt_blocks.stop]
            if not layer.attends:
                earlier = running.lengths[: prompt_blocks.start]
                state = running.layers[layer.index - 1]
                self._mix(state, token, tokens, num_queries, earlier, tail=0, cuts=cuts)
            elif start or running.shared:
                self._chunk(
                    running, layer, tokens, num_queries, running.lengths[: prompt_blocks.start]
                )
            else:
                only_last = running.only_last(layer.index)
                self._get(
                    programs.prefill, layer, rows=running.rows, cuts=cuts, only_last=only_last
                )
            if not self._plan.only_caches(token, layer.index):
                self._experts(layer, running.rows, num_queries)

    def _mix(
        self,
        state: LayerState,
        token: int,
        tokens: int,
        queries: int,
        blocks: tuple[int, ...],
        tail: int,
        cuts: tuple[int, ...] = (),
        has_guesses: bool = False,
    ) -> None:
        """A layer that does not attend."""
        running, layer = state.running, state.layer
        self._get(
            programs.mix,
            layer,
            rows=running.rows,
            tokens=tokens,
            asked=queries,
            blocks=blocks if layer.growing else (),
            tail=tail if layer.growing else 0,
            cuts=cuts,
            donates=state.may_overwrite(token),
            has_guesses=has_guesses,
        )

    def _chunk(
        self,
        running: Running,
        layer: LayerSpec,
        tokens: int,
        queries: int,
        earlier: tuple[int, ...],
    ) -> None:
        """A chunk that attends to earlier ones, or to a prefix."""
        rows = running.rows
        self._get(programs.project_chunk, layer, rows=rows, tokens=tokens, asked=queries)
        for length in set(earlier):
            self._get(programs.attend_chunk, layer, rows=rows, asked=queries, tokens=length)
        self._to_prefixes(running, layer, queries, is_first=False)
        self._get(programs.finish_chunk, layer, rows=rows, tokens=tokens, asked=queries)

    def _to_prefixes(
        self, running: Running, layer: LayerSpec, queries: int, is_first: bool
    ) -> None:
        """Attention to prefixes; is_first: whether there is no partial result before."""
        for number, (prefix, start, stop) in enumerate(running.shared):
            self._programs.get(
                programs.attend_prefix,
                layer=layer,
                rows=running.rows,
                asked=queries,
                sharing=sharing_rows(stop - start, running.rows),
                blocks=prefix.blocks.prompt,
                is_first=is_first and not number,
            )

    def _token(self, state: LayerState, sealed: int, tokens: int) -> None:
        """A layer's programs for `tokens` tokens per sequence when `sealed` KV blocks are
        sealed."""
        running, layer = state.running, state.layer
        rows, tail = running.rows, running.lengths[sealed]
        on_device, on_host = state.places(sealed)
        if self._plan.formats.cache_bits < 16 and layer.growing:
            self._programs.get(programs.seal, layer=layer, rows=rows, tail=tail)
        self._experts(layer, rows, tokens, is_prompt=False)
        if not layer.attends:
            self._mix(
                state=state,
                token=1,
                tokens=tokens,
                queries=tokens,
                blocks=on_device.lengths,
                tail=on_device.tail,
                has_guesses=tokens > 1,
            )
        elif on_host.starts or running.shared:
            self._split(state, sealed, tokens)
        else:
            appends = state.appends(sealed)
            self._joined(state, sealed)
            self._get(
                programs.decode,
                layer,
                rows=rows,
                blocks=on_device.lengths,
                tail=on_device.tail,
                room=self._room(running, sealed),
                appends=appends,
                tokens=tokens,
            )
            if appends:
                return
        if on_device.tail and not self._plan.unified and layer.growing:
            self._programs.get(
                programs.append, layer=layer, rows=rows, tail=on_device.tail, tokens=tokens
            )

    def _joined(self, state: LayerState, sealed: int) -> None:
        """The program of a layer with those after it."""
        layers = self._joined_layers.get(state.layer.index)
        if layers is None or state.running.shared:
            return
        on_device, _ = state.places(sealed)
        self._of_layers.get(
            programs.decode_joined,
            layers=tuple(self._spec.alike[layer] for layer in layers),
            rows=state.running.rows,
            blocks=on_device.lengths,
            tail=on_device.tail,
        )

    def _room(self, running: Running, sealed: int) -> int:
        """Returns how many tokens sparse attention attends to at most, 0 if it is dense."""
        policy = self._plan.policy
        return policy.attended(sum(running.lengths[: sealed + 1])) if policy.is_sparse else 0

    def _split(self, state: LayerState, sealed: int, tokens: int) -> None:
        """Attention in several places: on the device, on the host, and to a prefix."""
        running, layer, rows = state.running, state.layer, state.running.rows
        on_device, on_host = state.places(sealed)
        places = bool(on_device.starts) + bool(on_host.starts) + bool(running.shared)
        self._get(programs.project, layer, rows=rows, tokens=tokens)
        self._get(programs.finish, layer, rows=rows, places=places, tokens=tokens)
        self._to_prefixes(running, layer, queries=tokens, is_first=True)
        room = self._room(running, sealed)

        def to_blocks(kind: Program[Any], at: BlocksAt, **more: int) -> None:
            self._programs.get(
                kind, layer=layer, rows=rows, blocks=at.lengths, tail=at.tail, **more
            )

        if on_device.starts and not room:
            to_blocks(programs.attend, on_device, tokens=tokens)
        elif on_device.starts:
            to_blocks(programs.rank_tokens, on_device, room=room)
            to_blocks(programs.attend_ranked, on_device, room=room)
        if room and on_host.starts and not self._plan.policy.attends_on_host:
            to_blocks(programs.rank_tokens, on_host, room=room)

    def _experts(self, layer: LayerSpec, rows: int, tokens: int, is_prompt: bool = True) -> None:
        """A layer's expert programs for `tokens` tokens per row."""
        if layer.experts is None:
            return
        self._get(programs.route, layer, rows=rows, tokens=tokens)
        self._get(programs.add_experts, layer, tokens=rows * tokens)
        is_split = bool(self._plan.host_experts) and not is_prompt
        for places in (1, 2) if is_split else (1,):
            program, shape = programs.ending(layer, rows, tokens, places)
            self._of_layers.get(program, **shape)
        if is_split:
            of_host = self._device.host_programs
            of_host.get(programs.add_experts, layer=layer, tokens=rows * tokens)
        if tokens == 1 or not is_prompt:
            self._get(programs.guess, layer, rows=rows, tokens=tokens)
