"""Several stages as one model: starts their processes, tells them what to compute, watches them.

this process: requests, end tokens, which batches enter and leave
   | what a slot computes, to all           ^ tokens, from the last
   v                                        |
stage 0: embedding, layers  ==>  stage 1: layers  ==>  stage 2: layers, head
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from flexgen_jax.engine.conductor import Conductor
from flexgen_jax.engine.feed import Incoming
from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.engine.outputs import Generation
from flexgen_jax.engine.planner import WORTH_MEASURING_S
from flexgen_jax.engine.requests import EncodedRequest
from flexgen_jax.engine.scoring import Scoring
from flexgen_jax.engine.stage_worker import (
    BEAT_S,
    JOIN_S,
    KEY,
    parse_address,
    read_plan,
)
from flexgen_jax.engine.wire import ClosedError, Wire
from flexgen_jax.errors import StageError, UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec import model_spec
from flexgen_jax.policy.fit import Budgets
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.ledger import BudgetError
from flexgen_jax.policy.machines import generic_machine
from flexgen_jax.policy.plan import BlockPlan, BlockShape
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.search import Problem
from flexgen_jax.policy.stage_search import (
    ChainPlan,
    Link,
    Shape,
    StagePlan,
    chain_plan,
    fastest,
    search_stages,
)
from flexgen_jax.policy.stages import Division, divided, divisions

HELLO_S = 5.0
"""Seconds for whoever connects to say who it is."""

JOIN_OTHERS_S = 600.0
"""Seconds for stages of other machines to join."""

SILENCE_S = 20.0
"""A stage that gives no sign of life for so long counts as lost."""

PATIENCE_S = 3.0
"""Seconds for stages to end by themselves."""

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
"""JAX's own words about stages that end are for its developers."""


class Message(NamedTuple):
    stage: int
    kind: str
    content: dict[str, Any]


def stage_name(number: int, layers: range) -> str:
    """Returns what a stage is called in messages."""
    return f"stage {number} (layers {layers.start} to {layers.stop - 1})"


class Member:
    """A stage's process, seen from the one that leads.

    process: None if it was started elsewhere.
    """

    def __init__(self, number: int, layers: range, process: subprocess.Popen[bytes] | None) -> None:
        self.number, self.layers, self.process = number, layers, process
        self.wire: Wire | None = None
        self.heard = time.monotonic()

    @property
    def name(self) -> str:
        return stage_name(self.number, self.layers)

    def send(self, kind: str, **content: Any) -> None:
        assert self.wire is not None, "it has connected"
        with suppress(ClosedError):  # whoever waits for an answer is told
            self.wire.send(kind, **content)


class Stages:
    """The stages of one model: processes that this one has started, each with a range of layers and
    with a device, or a share of the cores, of its own.

    They live until `close`. Raises `StageError` when one is lost; the others are ended then.
    """

    def __init__(
        self, options: EngineOptions, config: ModelConfig, say: Callable[[str], object]
    ) -> None:
        """say: told what the user should do meanwhile."""
        count = options.stages
        if count > config.num_layers:
            raise UserError(
                f"--stages {count}: the model has {config.num_layers} layers, and each stage needs "
                "at least one"
            )
        for name in ("trace", "breakdown", "hardware", "write_limit"):
            if getattr(options, name):
                raise UserError(f"{name} is for one stage; leave it out, or run with stages=1")
        self._config, self._options, self._say = config, options, say
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._report: dict[str, Any] | None = None
        self._results: dict[int, Any] = {}
        self._known: dict[tuple[Workload, Policy, bool], ChainPlan] = {}
        self._plan: ChainPlan | None = None
        self.policy: Policy | None = None
        self.workload: Workload | None = None
        self._members: list[Member] = []
        self._divisions = divisions(model_spec(config), count)
        self._placed: Division | None = None
        try:
            self._start(self._divisions[0])
        except BaseException:
            self.close()
            raise

    # Processes

    def _start(self, layers: Sequence[range]) -> None:
        """Starts the processes, and waits until all are ready."""
        asked = self._options.coordinator
        host, port = ("127.0.0.1", 0) if asked is None else parse_address(asked)
        key = os.environ.get(KEY) if asked is not None else secrets.token_hex(16)
        if not key:
            raise UserError(f"--coordinator {asked}: set {KEY} to one secret on all machines first")
        here = 1 if asked is not None else len(layers)
        try:
            server = socket.create_server((host, port))
        except OSError as error:
            raise UserError(f"--coordinator {asked}: {error.strerror or error}") from None
        with server:
            server.settimeout(1)
            address = f"{host}:{server.getsockname()[1]}"
            for number, part in enumerate(layers):
                process = _started(address, number, here, key) if number < here else None
                self._members.append(Member(number, part, process))
            if here < len(layers):
                self._say(
                    "flexgen-jax: waiting for the other stages; for each, N from 1 to "
                    f"{len(layers) - 1}, run `flexgen-jax stage --join {address} --number N`"
                )
            self._welcome(server, key, JOIN_S if here == len(layers) else JOIN_OTHERS_S)
        meeting = f"{host}:{_free_port(host)}"
        for member in self._members:
            member.heard = time.monotonic()
            threading.Thread(target=self._listen, args=(member,), daemon=True).start()
            member.send(
                "start",
                options=self._worker_options(),
                stages=len(layers),
                here=here,
                meeting=meeting,
                cores=_cores(member.number, here) if member.process is not None else [],
            )
        ready = self._answers("ready")
        self.on_cpu, self.unified = ready[0]["on_cpu"], ready[0]["unified"]
        self.dtype = ready[0]["dtype"]
        self._is_measured = all(answer["is_measured"] for answer in ready)
        seconds, rates = zip(*(answer["link"] for answer in ready), strict=True)
        self._link = Link(max(seconds), min(rates))
        self.sizes = KernelSizes() if self.on_cpu else KernelSizes.of_gpu()

    def _welcome(self, server: socket.socket, key: str, wait_s: float) -> None:
        """Accepts the connections of all stages."""
        until = time.monotonic() + wait_s
        while any(member.wire is None for member in self._members):
            self._check_processes()
            if time.monotonic() > until:
                late = next(member for member in self._members if member.wire is None)
                raise StageError(f"{late.name} has not connected within {wait_s:g} s")
            try:
                connected, _ = server.accept()
            except TimeoutError:
                continue
            connected.settimeout(HELLO_S)
            wire = Wire(connected)
            number = _greeted(wire, key)
            member = next((m for m in self._members if m.number == number), None)
            if member is None or member.wire is not None:
                with suppress(ClosedError):
                    if number is not None:
                        wire.send("refused", why=f"there is no stage {number} to be")
                wire.close()
                continue
            connected.settimeout(None)
            member.wire = wire

    def _worker_options(self) -> dict[str, Any]:
        found = self._options.arguments
        own = ("policy", "stages", "coordinator", "progress", "trace", "hardware", "breakdown")
        for name in own:
            del found[name]
        for name in ("model", "offload_dir"):
            found[name] = None if found[name] is None else str(found[name])
        return found

    def _listen(self, member: Member) -> None:
        assert member.wire is not None
        while True:
            try:
                kind, content = member.wire.receive()
            except ClosedError:
                kind, content = "gone", {}
            member.heard = time.monotonic()
            if kind != "beat":
                self._messages.put(Message(member.number, kind, content))
            if kind == "gone":
                return

    def _check_processes(self) -> None:
        for member in self._members:
            if member.process is not None and member.process.poll() is not None:
                raise self._lost(member)

    def _lost(self, member: Member) -> StageError:
        """Ends the other stages; returns the error of one that is gone."""
        how = "is gone"
        if member.process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = member.process.wait(5)
                how = f"was ended by signal {-code}" if code < 0 else f"has ended with code {code}"
        return self._failed(f"{member.name} {how}")

    def _failed(self, what: str) -> StageError:
        """Ends all stages at once; returns an error that says what failed."""
        self._kill()
        return StageError(f"{what}; the other stages are ended")

    def _next(self) -> Message:
        """Returns the next message, and keeps it if it is a result; raises if a stage says that it
        failed, or is lost."""
        while True:
            try:
                message = self._messages.get(timeout=BEAT_S)
            except queue.Empty:
                for member in self._members:
                    if time.monotonic() - member.heard > SILENCE_S:
                        raise self._failed(
                            f"{member.name} has not answered for {SILENCE_S:g} s"
                        ) from None
                continue
            member = self._members[message.stage]
            if message.kind == "gone":
                raise self._lost(member)
            if message.kind == "error":
                if not message.content["is_known"]:
                    time.sleep(BEAT_S)  # one whose neighbour was lost may be the first to say so
                    self._check_processes()
                said = f"{member.name}: {message.content['message']}"
                self._kill()
                raise UserError(said) if message.content["is_known"] else StageError(said)
            if message.kind == "result":
                self._results[message.content["batch"]] = message.content
            return message

    def _answers(self, kind: str) -> list[dict[str, Any]]:
        """Waits for one message of a kind from each stage; returns their contents in order."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self._members):
            message = self._next()
            if message.kind == kind:
                found[message.stage] = message.content
        return [content for _, content in sorted(found.items())]

    def _tell(self, kind: str, **content: Any) -> None:
        if not self._members:
            raise StageError("the stages of this model are ended; make another LLM")
        for member in self._members:
            member.send(kind, **content)

    def _tell_parts(self, kind: str, layers: Division, **content: Any) -> None:
        """Tells all stages something about a division of the layers."""
        self._tell(kind, layers=[[part.start, part.stop] for part in layers], **content)

    def close(self) -> None:
        """Ends all stages, and waits until they are gone."""
        until = time.monotonic() + PATIENCE_S
        for member in reversed(self._members):  # the first one serves the others
            if member.wire is not None:
                member.send("close")
            if member.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    member.process.wait(max(0.0, until - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        """Ends all stages at once."""
        running = [member.process for member in self._members if member.process is not None]
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        for member in self._members:
            if member.wire is not None:
                member.wire.close()
        self._members.clear()

    # Plans

    def policy_for(self, workload: Workload, given: Policy, is_auto: bool) -> Policy:
        """Returns the policy of all stages, of which each has its own placement where they are
        chosen; raises `BudgetError` if none fits.

        is_auto: whether batches and placements are chosen.
        """
        key = (workload, given, is_auto)
        if key not in self._known:
            self._known[key] = (self._searched if is_auto else self._as_given)(workload, given)
        self._plan = self._known[key]
        rows, batches, groups = self._plan.shape
        return replace(given, batch_size=rows, num_batches=batches * groups)

    def _as_given(self, workload: Workload, given: Policy) -> ChainPlan:
        """Returns the plan of a policy; raises `BudgetError` if it does not fit."""
        problem, hidden = self._problem(workload, given)
        groups = divided(given.num_batches, len(self._members))
        shape = Shape(given.batch_size, max(1, given.num_batches // groups), groups)
        policy = replace(given, num_batches=shape.batches * groups)
        plans, missing = list[ChainPlan](), list[str]()
        for layers in self._divisions:
            how = {"policy": policy.to_json(), "workload": asdict(workload), "groups": groups}
            self._tell_parts("check", layers, **how)
            answers = self._answers("checked")
            found = [plan for answer in answers if (plan := read_plan(answer["plan"])) is not None]
            if len(found) == len(layers):
                plans.append(chain_plan(problem, found, layers, shape, hidden, self._link))
            missing += [
                f"{stage_name(number, part)}: the plan does not fit: {answer['missing'][0]}"
                for number, (part, answer) in enumerate(zip(layers, answers, strict=True))
                if answer["missing"]
            ]
        best = fastest(plans, self._placed)
        if best is None:
            raise BudgetError(missing[0])
        return best

    def _searched(self, workload: Workload, given: Policy) -> ChainPlan:
        """Returns the best plan, after measuring the machines if a long run is predicted; raises
        `BudgetError` if none fits."""
        problem, _ = self._problem(workload, given)

        def plan_all(shape: Shape, layers: Division) -> list[StagePlan | None]:
            how = {"base": given.to_json(), "workload": asdict(workload)}
            self._tell_parts("plan", layers, **how, shape=list(shape))
            return [read_plan(answer["plan"]) for answer in self._answers("planned")]

        def search() -> ChainPlan | None:
            return search_stages(problem, self._divisions, self._placed, plan_all, self._link)

        best = search()
        if best and not self._is_measured and best.total_s > WORTH_MEASURING_S:
            self._say("flexgen-jax: measuring this machine, once, for one to three minutes")
            self._tell("measure")
            self._answers("measured")
            self._is_measured = True
            self._known.clear()
            best = search()
        if best is None:
            raise BudgetError(
                f"no plan fits {len(self._members)} stages; give them more memory or disk, or "
                "--weight-bits 4"
            )
        return best

    def _problem(self, workload: Workload, base: Policy) -> tuple[Problem, int]:
        """Returns the problem of the whole model, for which no machine is known here, and the bytes
        of a token's hidden state."""
        hw = replace(generic_machine(self.unified), sizes=self.sizes)
        found = Problem(self._config, self.dtype, hw, Budgets(), self.unified, workload, base=base)
        return found, int(found.costs(base).hidden_bytes(1, 1))

    def open(self, policy: Policy, workload: Workload, compiles: bool = False) -> None:
        """Brings the weights of all stages to where their policies put them."""
        self.policy, self.workload = policy, workload
        assert self._plan is not None, "it was planned"
        for member, part in zip(self._members, self._plan.layers, strict=True):
            member.layers = part
        self._placed = self._plan.layers
        policies = [stage.policy.to_json() for stage in self._plan.stages]
        how = {"workload": asdict(workload), "compiles": compiles}
        self._tell_parts("open", self._plan.layers, policies=policies, **how)
        self._answers("opened")

    # Runs

    def run(
        self, incoming: Incoming[EncodedRequest], collector: Generation | Scoring
    ) -> Iterator[None]:
        """Walks the requests through all stages, one slot at a time."""
        self._report = None
        before = collector.num_tokens
        self._results.clear()
        self._tell("begin")
        self._answers("began")
        assert self._plan is not None and self.workload is not None, "it is open"
        plan = self._plan_of_group(self._plan.shape, self.workload)
        count, groups = len(self._members), self._plan.shape.groups
        conductor = Conductor(self, count, groups, plan, incoming, collector)
        try:
            yield from conductor.run()
        except BaseException:
            if self._members:
                self._tell("end")
                self._tell("drop")
                self._answers("dropped")
            raise
        self._tell("end")
        waiting = conductor.waiting
        incoming.put_back(waiting.unfinished())
        self._tell(
            "finish",
            num_sequences=waiting.entered,
            num_tokens=collector.num_tokens - before,
            padding=[waiting.prompt_tokens, waiting.padded_tokens],
        )
        joined = _joined([answer["report"] for answer in self._answers("report")])
        self._report = {**joined, "predicted": self._predicted()}

    def _predicted(self) -> dict[str, float] | None:
        """Returns the predicted times of the workload that was planned for."""
        plan = self._plan
        if plan is None:
            return None
        return {
            "total_s": plan.total_s,
            "prefill_s": plan.prefill_s,
            "decode_s": plan.decode_s,
            "generation_throughput": plan.throughput,
        }

    def tell_slot(self, **content: Any) -> None:
        self._tell("slot", **content)

    def result(self, batch: int) -> Any:
        while batch not in self._results:
            self._next()
        found = self._results.pop(batch)["result"]
        return tuple(found) if isinstance(found, list) else found

    def _plan_of_group(self, shape: Shape, workload: Workload) -> BlockPlan:
        """Returns the plan of the whole model for one group, which no batch has entered."""
        assert self.policy is not None, "it is open"
        one = replace(self.policy, num_batches=shape.batches)
        block = BlockShape.of(one, workload)
        how = (self._config, self.dtype, one, block, self.unified, self.sizes)
        return BlockPlan(*how).emptied()

    def report(self) -> dict[str, Any] | None:
        """Returns what the last run measured: of the last stage, and under "stages" of all."""
        return self._report


def _joined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the report of the last stage, which has the tokens, with those of all under
    "stages"."""
    totals = ("bytes", "decode_bytes", "peak_bytes")
    sums = {name: _added([report[name] for report in reports]) for name in totals}
    return {**reports[-1], **sums, "stages": list(reports)}


def _added(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _greeted(wire: Wire, key: str) -> int | None:
    """Returns the number of the stage that says hello, None if a stranger does."""
    try:
        _, hello = wire.receive(most=1 << 12)
        is_ours = secrets.compare_digest(str(hello["key"]), key)
        return int(hello["stage"]) if is_ours else None
    except (ClosedError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _started(address: str, number: int, here: int, key: str) -> subprocess.Popen[bytes]:
    """Starts the process of a stage, one of `here` on this machine."""
    command = [sys.executable, "-m", "flexgen_jax", "stage", "--join", address]
    return subprocess.Popen(
        [*command, "--number", str(number)],
        env={**QUIET, **os.environ, KEY: key, **(_visible_device(number) if here > 1 else {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process
    )


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
        return port


def _cores(number: int, stages: int) -> list[int]:
    """Returns the cores of one of the stages on this machine; all, if there are fewer than
    stages."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < stages:
        return []
    return cores[number * len(cores) // stages : (number + 1) * len(cores) // stages]


def _visible_device(number: int) -> dict[str, str]:
    """Returns the variable that shows a stage one GPU of those that are visible here."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = seen.split(",") if seen else []
    own = devices[number] if number < len(devices) else str(number)
    return {"CUDA_VISIBLE_DEVICES": own}
