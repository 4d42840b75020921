"""Runs a model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from flexgen_jax.engine.drafting import Drafting
from flexgen_jax.engine.out_of_memory import OutOfMemoryError, is_on_host, is_out_of_memory
from flexgen_jax.engine.planner import Planner
from flexgen_jax.engine.routing import MeasuredRouting
from flexgen_jax.engine.session import Session
from flexgen_jax.errors import MachineError, UserError, first_line
from flexgen_jax.models.weight_source import WeightSource
from flexgen_jax.offload.batch import HeadResult
from flexgen_jax.offload.disk.kv_store import KVStore
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.trace import Trace
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.progress import Progress
from flexgen_jax.requests.batching import NOTHING_KEPT, KeptTexts, Waiting
from flexgen_jax.requests.collector import Collector
from flexgen_jax.requests.feed import Incoming
from flexgen_jax.requests.prefix_sharing import spares_enough
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.schedule.waves import Step


class LocalRunner:
    """Runs a model in this process; see `serving.Runner`.

    session: the model with its weights in place, None before the first run.
    """

    def __init__(
        self,
        planner: Planner,
        source: WeightSource,
        progress: Progress,
        trace: Trace | None,
        breakdown: bool,
        kv_store: KVStore | None = None,
        drafting: Drafting | None = None,
        routing: MeasuredRouting | None = None,
    ) -> None:
        """trace, breakdown: as in `EngineOptions`; kv_store: where texts' KV cache is kept;
        drafting: the drafter, if the policy has drafts; routing: keeps how often experts
        are chosen."""
        self._drafting, self._routing = drafting, routing
        self.planner = planner
        self._kv_store = kv_store
        self._source, self._progress = source, progress
        self._trace, self._breakdown = trace, breakdown
        self.session: Session | None = None
        self.given, self.is_auto = planner.policy, planner.is_auto
        self.dtype = planner.setting.dtype

    @property
    def policy(self) -> Policy | None:
        return self.session.policy if self.session else None

    @property
    def machine(self) -> str:
        return self.planner.machine

    @property
    def shares_rows(self) -> bool:
        return True

    @property
    def keeps_texts(self) -> bool:
        return self._kv_store is not None

    def stored_tokens(self, ids: tuple[int, ...]) -> int:
        if self._kv_store is None:
            return 0
        tokens = self._kv_store.stored_tokens(ids)
        return tokens if self.planner.is_worth_loading(tokens, self._kv_store.layout) else 0

    def is_worth_sharing(self, saved: int, requests: Sequence[EncodedRequest]) -> bool:
        return spares_enough(saved, requests) and self.planner.is_worth_sharing(saved, requests)

    def note(self, message: str) -> None:
        self._progress.say(message)

    def policy_for(self, workload: Workload) -> Policy:
        policy = self.planner.policy_for(workload)
        self._progress.detail(f"flexgen-jax: {workload} runs with {policy}")
        return policy

    def block_sequences(self, prompt_len: int, gen_len: int) -> int:
        return self.planner.block_sequences(prompt_len, gen_len)

    def open(self, policy: Policy, workload: Workload, compiles: bool = False) -> None:
        session = self._opened(policy, workload)
        if compiles:
            session.compile(workload)

    def _opened(self, policy: Policy, workload: Workload) -> Session:
        """Returns a session with its weights in place; a new one if they must lie elsewhere."""
        if self.session is not None and self.session.suits(policy):
            self.session.adopt(policy, workload)
            return self.session
        self._close_session()
        session = Session(
            setting=self.planner.planned_setting,
            policy=policy,
            workload=workload,
            budgets=self.planner.budgets,
            offload_dir=self.planner.offload_dir,
            source=self._source,
            metrics=Metrics(self._trace, self._breakdown),
            kv_store=self._kv_store,
            say=self._progress.say,
            drafter=None if self._drafting is None else self._drafting.drafter,
        )
        self.session = session
        try:
            session.place(self._progress)
        except BaseException:
            self._close_session()
            raise
        return session

    def run(
        self, incoming: Incoming[EncodedRequest], collector: Collector, shares: bool
    ) -> Iterator[None]:
        session, before = self.session, collector.num_tokens
        assert session is not None, "it was opened"
        keeper = NOTHING_KEPT
        if self._kv_store is not None:
            keeper = KeptTexts(self.stored_tokens, self._kv_store.open)
        waiting = Waiting(session.plan, incoming, collector, shares, keeper)
        session.start()

        has_results, compiled_before = False, session.num_compiled

        def on_result(step: Step, result: HeadResult) -> Sequence[int]:
            nonlocal has_results
            has_results = True
            self._progress.compiled()
            return collector.receive(waiting.members[step.batch], step.token, result)

        def on_step() -> None:
            tick()
            if not has_results:
                self._progress.compiling(session.num_compiled - compiled_before)

        with (
            closing(waiting),
            self._progress.generating(collector.progress, lambda: session.compile_s) as tick,
            self._progress.erasing(),
        ):
            yield from session.run(waiting, on_result, on_step)
        incoming.put_back(waiting.unfinished())
        session.finish(waiting.entered, collector.num_tokens - before, waiting.prompts)
        self.planner.observe(*session.disk_reads())
        num_new = collector.num_tokens - before
        self.planner.observe_seconds(waiting.entered, num_new, session.seconds)
        if self._drafting is not None:
            self._drafting.observe(session.acceptance)
        if self._routing is not None:
            self._routing.observe(session.chosen)

    def back_off(self, error: Exception) -> None:
        if isinstance(error, MachineError):
            self._close_session()
        if not is_out_of_memory(error):
            raise error
        error_text = first_line(error)
        if not self.planner.back_off(is_on_host(error)):
            if isinstance(error, UserError):
                raise error
            raise OutOfMemoryError(f"out of memory: {error_text}; {self._way_out()}") from error
        self._progress.say(f"flexgen-jax: out of memory, continuing with less: {error_text}")
        self._close_session()

    def _way_out(self) -> str:
        if self.planner.is_auto:
            return "lower --device-memory or --host-memory, so that plans leave more room"
        return (
            "lower --batch-size or what lies in that memory, or leave out all that fixes the "
            "policy, and one is searched that gives way"
        )

    def report(self, texts: Mapping[EncodedRequest, int] | None) -> dict[str, Any] | None:
        session = self.session
        if session is None:
            return None
        predicted = self.planner.predicted(session.policy, session.workload, texts)
        store = self._kv_store
        return {
            **session.report(),
            "predicted": predicted,
            "kv_store_written": 0 if store is None else store.written,
            "kv_store_evicted": 0 if store is None else store.evicted,
        }

    def close(self) -> None:
        self._close_session()
        if self._kv_store is not None:
            self._kv_store.close()
        if self._drafting is not None:
            self._drafting.drafter.close()
        if self._trace is not None:
            self._trace.close()

    def _close_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()
