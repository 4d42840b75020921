"""A stage's own process: runs its layers on the leader's slots, and sends tokens back.

It is started by `Stages` (`stages.py`), or manually on another machine.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flexgen_jax.caches import cache_folder
from flexgen_jax.cpu import kernels_of_device
from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.engine.session import Session
from flexgen_jax.engine.stages.wire import ClosedError, Wire
from flexgen_jax.errors import UserError
from flexgen_jax.machine.limits import detect_budgets
from flexgen_jax.machine.profiles import assumed_profile, known_profile
from flexgen_jax.machine.start import start_jax
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.loading import resolve_dtype
from flexgen_jax.offload.batch import Batch, Guesses, HeadResult
from flexgen_jax.offload.chain import Chain, measured_link
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.machines import generic_machine
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import HeadUse, Policy, Workload
from flexgen_jax.policy.shapes import BatchShape, Setting
from flexgen_jax.progress import Progress
from flexgen_jax.requests.batching import PromptTokens
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.stages import Slot, Slots, Told
from flexgen_jax.schedule.waves import Step
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Choices, Problem
from flexgen_jax.search.stage_search import Shape, StagePlan, predicted, stage_plan

BEAT_S = 1.0
"""Seconds between two signs of life."""

KEY = "FLEXGEN_JAX_STAGE_KEY"
"""The environment variable with the secret that stages show when they connect."""

JOIN_S = 120
"""Seconds for all stages to find each other."""

THREADS = "NPROC"
"""The environment variable for the number of threads of XLA's CPU client. One thread waits while
hidden states are shifted: one more than cores, or a stage with one core would compute nothing
meanwhile."""


class StageSource(Slots):
    """The batches of the slots sent to a stage; see `offload.executor.Source` and
    `Neighbours`."""

    def __init__(self, plan: BlockPlan, failed: Callable[[BaseException], object]) -> None:
        """failed: told what ends the shifting of hidden states too early."""
        super().__init__(plan)
        self._batches: dict[int, Batch] = {}
        self._more: dict[int, dict[str, Any]] = {}
        self.chain = Chain(self, plan.config.hidden_size, plan.dtype, failed)

    def given(self, running: Running) -> Batch:
        return self._batches[running.number]

    @property
    def slots(self) -> Slots:
        return self

    def hear(self, content: Mapping[str, Any]) -> None:
        """Receives a message about a slot."""
        entering = {}
        for number, shape, arrays in content["entering"]:
            self._batches[number] = read_batch(arrays)
            entering[number] = BatchShape(*shape)
        for batch, further_rows in content["more"]:
            self._more[batch] = further_rows
        steps = tuple(Told(*step) for step in content["steps"])
        self.tell(Slot(content["number"], steps, entering, tuple(content["leaving"])))

    def _forget(self, running: Running) -> None:
        super()._forget(running)
        del self._batches[running.number]
        self._more.pop(running.number, None)

    def keep(self, running: Running, rows: Sequence[int]) -> None:
        raise AssertionError("batches of stages keep their rows")

    def adjusted(self, running: Running, guesses: Guesses = ()) -> tuple[np.ndarray, ...]:
        return tuple(self._more.get(running.number, {}).get("adjusted", ()))

    def allowed(self, running: Running, guesses: Guesses = ()) -> np.ndarray | None:
        allowed: np.ndarray | None = self._more.get(running.number, {}).get("allowed")
        return allowed

    def ids(self, step: Step) -> np.ndarray:
        ids: np.ndarray = self._more[step.batch.number]["ids"]
        return ids

    def receive(self, step: Step, rows: int, tokens: int) -> jax.Array:
        return self.chain.receive(self.number_of(step), step.batch.number, rows, tokens)

    def send(self, step: Step, hidden: jax.Array) -> None:
        self.chain.send(self.number_of(step), step.batch.number, hidden)


def batch_arrays(batch: Batch) -> dict[str, Any]:
    """Returns a batch as the content of a message."""
    arrays = ("ids", "first_valid", "sampling", "targets", "forced", "most", "adapters")
    names = (*arrays, "logprobs", "prompt_logprobs", "pooling")
    return {name: getattr(batch, name) for name in names}


def read_batch(content: Mapping[str, Any]) -> Batch:
    """Returns the batch of `batch_arrays`."""
    return Batch(**{**content, "sampling": tuple(content["sampling"])})


class Worker:
    """One stage: does what messages ask for until the connection ends."""

    def __init__(
        self, wire: Wire, number: int, start: Mapping[str, Any], leaving: threading.Event
    ) -> None:
        """leaving: set when the leader says that this stage may end."""
        self._wire, self._number, self._leaving = wire, number, leaving
        options = EngineOptions(**start["options"])
        device, host, disk = options.budgets
        on_cpu = start_jax(host)
        unified = on_cpu if options.unified is None else options.unified
        model = options.open_model()
        self._source, self._whole = model.source, model.config
        self._config: ModelConfig | None = None  # of the layers whose weights are placed
        self._dtype = resolve_dtype(options.dtype, self._whole, on_cpu)
        self._unified = unified
        self._folder = Path(options.offload_dir or cache_folder("offload")).expanduser()
        fingerprint = self._source.fingerprint(self._dtype)
        budgets = detect_budgets(device, host, disk, self._folder, fingerprint, unified)
        self._budgets = _shared(budgets, start["here"], device, host)
        self._session: Session | None = None
        self._slots: StageSource | None = None
        self._assumed: HardwareProfile | None = None
        self._asked: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        wire.send(
            "ready",
            on_cpu=on_cpu,
            unified=unified,
            dtype=self._dtype,
            is_probed=self._profile() is not None,
            link=measured_link(),
        )

    def run(self) -> None:
        """Serves requests until the connection ends."""
        threading.Thread(target=self._listen, name="flexgen-listen", daemon=True).start()
        while True:
            message_kind, content = self._asked.get()
            match message_kind:
                case "check":
                    self._wire.send("checked", **self._checked(**content))
                case "plan":
                    self._wire.send("planned", **self._planned(**content))
                case "probe":
                    self._probe()
                    self._wire.send("probed")
                case "open":
                    self._open(**content)
                    self._wire.send("opened")
                case "begin":
                    self._begin(**content)
                case "close":
                    return

    def _listen(self) -> None:
        """Receives messages; those about slots go where a run waits for them."""
        while True:
            try:
                message_kind, content = self._wire.receive()
            except ClosedError:
                os._exit(1)  # nobody is there to compute for
            if message_kind == "close":  # then the connection may end before this process does
                self._leaving.set()
                self._asked.put((message_kind, content))
                return
            if message_kind == "slot":
                assert self._slots is not None
                self._slots.hear(content)
            elif message_kind == "end":
                assert self._slots is not None
                self._slots.end()
            else:
                self._asked.put((message_kind, content))

    def _part(self, layers: Sequence[Sequence[int]]) -> ModelConfig:
        """Returns this stage's part of the model. layers: from where to where, of each stage."""
        return self._whole.part(range(*layers[self._number]))

    def _checked(
        self,
        layers: Sequence[Sequence[int]],
        policy: str,
        workload: Mapping[str, Any],
        groups: int,
    ) -> dict[str, Any]:
        """Returns the misfit of a given policy with this stage's budgets, or its plan."""
        given_policy = Policy.from_json(policy)
        problem = self._problem(layers, given_policy, workload)
        needed = problem.peak(given_policy)
        missing = self._budgets.shortfalls(needed)
        plan = None if missing else predicted(problem, given_policy, groups, needed)
        return {"missing": missing, "plan": _plan_content(plan)}

    def _planned(
        self,
        layers: Sequence[Sequence[int]],
        base: str,
        workload: Mapping[str, Any],
        shape: Sequence[int],
    ) -> dict[str, Any]:
        """Returns the plan of this stage for batches of a shape, None if none fits."""
        problem = self._problem(layers, Policy.from_json(base), workload)
        return {"plan": _plan_content(stage_plan(problem, Shape(*shape)))}

    def _profile(self) -> HardwareProfile | None:
        return self._assumed or known_profile(self._dtype, self._folder)

    def _probe(self) -> None:
        """Probes this stage's share of the machine, while the other stages do the same."""
        with suppress(OSError, ValueError, RuntimeError):  # a failed probe does not stop the run
            self._assumed = assumed_profile(
                self._dtype, self._folder, self._unified, Progress(False)
            )

    def _problem(
        self, layers: Sequence[Sequence[int]], base: Policy, workload: Mapping[str, Any]
    ) -> Problem:
        return Problem(
            setting=self._setting(self._part(layers)),
            hw=self._profile() or generic_machine(self._unified),
            budgets=self._budgets,
            workload=_workload(workload),
            base=base,
            choices=Choices.keeping(base),
        )

    def _setting(self, config: ModelConfig) -> Setting:
        return Setting(config, self._dtype, self._unified, kernels_of_device().sizes)

    def _open(
        self,
        layers: Sequence[Sequence[int]],
        policies: Sequence[str],
        workload: Mapping[str, Any],
        compiles: bool,
    ) -> None:
        """Brings the weights of this stage's layers to where its policy puts them."""
        layer_part = self._part(layers)
        stage_policy, load = Policy.from_json(policies[self._number]), _workload(workload)
        is_same = layer_part == self._config
        if self._session is not None and is_same and self._session.suits(stage_policy):
            self._session.adopt(stage_policy, load)
        else:
            if self._session is not None:
                self._session.close()
            self._config = layer_part
            self._session = Session(
                setting=self._setting(layer_part),
                policy=stage_policy,
                workload=load,
                budgets=self._budgets,
                offload_dir=self._folder,
                source=self._source,
                metrics=Metrics(None, False),
            )
            self._session.place(Progress(False))
        if compiles:
            self._session.compile(load)

    def _begin(self) -> None:
        """Computes the slots of a run, and reports on it."""
        session = self._session
        assert session is not None, "it was opened"
        source = StageSource(session.plan, partial(_tell_error, self._wire))
        self._slots = source
        self._wire.send("began")
        session.start()

        def on_result(step: Step, result: HeadResult) -> None:
            self._wire.send("result", batch=step.batch.number, token=step.token, result=result)

        for _ in session.run(source, on_result, lambda: None, source):
            pass
        source.chain.close()
        message_kind, content = self._asked.get()
        if message_kind == "drop":
            self._wire.send("dropped")
            return
        prompts = PromptTokens(*content.pop("prompts"))
        session.finish(**content, prompts=prompts)
        report = {**session.report(), "waited_s": source.chain.waited_s}
        self._wire.send("report", report=report)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def _shared(budgets: Budgets, num_local: int, device: int | None, host: int | None) -> Budgets:
    """Returns the budgets of one of `num_local` stages on this machine. They share its disk and, by
    default, its RAM. device, host: the requested budgets."""

    def part(nbytes: int | None, budget: int | None) -> int | None:
        return nbytes if nbytes is None or budget is not None else nbytes // num_local

    is_one_ram = budgets.shared is not None
    return replace(
        budgets,
        device=part(budgets.device, device) if is_one_ram else budgets.device,
        host=part(budgets.host, host),
        disk=part(budgets.disk, None),
        shared=part(budgets.shared, device),
    )


def _plan_content(plan: StagePlan | None) -> dict[str, Any] | None:
    return None if plan is None else asdict(plan) | {"policy": plan.policy.to_json()}


def read_plan(content: Mapping[str, Any] | None) -> StagePlan | None:
    """Returns a stage's plan from a message."""
    if content is None:
        return None
    return StagePlan(**{**content, "policy": Policy.from_json(content["policy"])})


def _workload(content: Mapping[str, Any]) -> Workload:
    return Workload(**{**content, "head": HeadUse(**content["head"])})


def parse_address(text: str) -> tuple[str, int]:
    """Returns the host and the port of "HOST:PORT"; raises `UserError` for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{text!r} is not an address; use HOST:PORT")
    return host, int(port)


def _joined(address: tuple[str, int], stage: int, key: str) -> tuple[Wire, dict[str, Any]]:
    """Connects to the leader, and waits until all stages have; returns its answer."""
    until = time.monotonic() + JOIN_S
    while True:
        try:
            connected = socket.create_connection(address, timeout=JOIN_S)
            break
        except OSError as error:
            if time.monotonic() > until:
                leader_address = f"{address[0]}:{address[1]}"
                raise UserError(
                    f"nothing is listening at {leader_address}: {error}; start the leader first"
                ) from None
            time.sleep(1)  # the leader may start later
    connected.settimeout(None)
    wire = Wire(connected)
    wire.send("hello", stage=stage, key=key)
    try:
        message_kind, content = wire.receive()
    except ClosedError:
        raise UserError(
            f"the leader closed the connection to stage {stage}; check that it is running and "
            f"has the same {KEY}"
        ) from None
    if message_kind == "refused":
        raise UserError(content["why"])
    return wire, content


def work(address: tuple[str, int], stage: int, key: str) -> None:
    """Connects to the process that leads the stages, and computes what it asks for."""
    wire, start = _joined(address, stage, key)
    leaving = threading.Event()
    beat = threading.Thread(target=_beat, args=(wire, leaving), name="flexgen-beat", daemon=True)
    beat.start()
    worker: Worker | None = None
    try:
        if start["cores"]:
            os.sched_setaffinity(0, start["cores"])
        os.environ.setdefault(THREADS, str(len(os.sched_getaffinity(0)) + 1))
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            start["meeting"], start["stages"], stage, initialization_timeout=JOIN_S
        )
        worker = Worker(wire, stage, start, leaving)
        worker.run()
    except ClosedError:
        pass
    except BaseException as error:
        _tell_error(wire, error)
        time.sleep(JOIN_S)  # until it is stopped: other stages must not notice a loss first
        sys.exit(1)
    finally:
        if worker is not None:
            worker.close()
    os._exit(0)  # without waiting for other stages, which also stop


def _tell_error(wire: Wire, error: BaseException) -> None:
    is_known = isinstance(error, UserError | MemoryError | OSError)
    error_text = str(error) if is_known else "".join(traceback.format_exception(error))
    with suppress(ClosedError):
        wire.send("error", message=error_text or type(error).__name__, is_known=is_known)


def _beat(wire: Wire, leaving: threading.Event) -> None:
    while not leaving.wait(BEAT_S):
        try:
            wire.send("beat")
        except ClosedError:
            if not leaving.is_set():
                os._exit(1)
