"""The processes of stages: starts them, talks with them, watches them, ends them."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from flexgen_jax.engine.stages.wire import ClosedError, Wire
from flexgen_jax.engine.stages.worker import BEAT_S, JOIN_S, KEY, parse_address
from flexgen_jax.errors import StageError, UserError
from flexgen_jax.offload.batch import HeadResult
from flexgen_jax.schedule.stages import Division

HELLO_S = 5.0
"""Seconds for a connecting process to identify itself."""

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
    """Returns a stage's name in messages."""
    return f"stage {number} (layers {layers.start} to {layers.stop - 1})"


class Member:
    """A stage's process, seen from the leader.

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
        with suppress(ClosedError):  # waiters for an answer get the error
            self.wire.send(kind, **content)


class Members:
    """The processes of all stages, which live until `close`.

    Raises `StageError` when one is lost; all other stages are stopped then. ready: what each said
    when it was.
    """

    def __init__(
        self,
        layers: Sequence[range],
        coordinator: str | None,
        options: dict[str, Any],
        say: Callable[[str], object],
    ) -> None:
        """layers: of each stage; coordinator: the address at which stages of other machines join,
        None if all are on this one; options: theirs; say: called with a hint for the user."""
        self._say = say
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._results: dict[int, Any] = {}
        self._members: list[Member] = []
        try:
            self._start(layers, coordinator, options)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._members)

    def _start(self, layers: Sequence[range], asked: str | None, options: dict[str, Any]) -> None:
        """Starts the processes, and waits until all are ready."""
        host, port = ("127.0.0.1", 0) if asked is None else parse_address(asked)
        key = os.environ.get(KEY) if asked is not None else secrets.token_hex(16)
        if not key:
            raise UserError(
                f"--coordinator {asked} needs the environment variable {KEY}, with the same secret "
                "on all machines"
            )
        num_local = 1 if asked is not None else len(layers)
        try:
            server = socket.create_server((host, port))
        except OSError as error:
            raise UserError(f"--coordinator {asked}: {error.strerror or error}") from None
        with server:
            server.settimeout(1)
            address = f"{host}:{server.getsockname()[1]}"
            for number, layer_range in enumerate(layers):
                process = _started(address, number, num_local, key) if number < num_local else None
                self._members.append(Member(number, layer_range, process))
            if num_local < len(layers):
                self._say(
                    "flexgen-jax: waiting for the other stages; for each, N from 1 to "
                    f"{len(layers) - 1}, run `flexgen-jax stage --join {address} --number N`"
                )
            self._welcome(server, key, JOIN_S if num_local == len(layers) else JOIN_OTHERS_S)
        meeting = f"{host}:{_free_port(host)}"
        for member in self._members:
            member.heard = time.monotonic()
            threading.Thread(target=self._listen, args=(member,), daemon=True).start()
            member.send(
                "start",
                options=options,
                stages=len(layers),
                here=num_local,
                meeting=meeting,
                cores=_cores(member.number, num_local) if member.process is not None else [],
            )
        self.ready = self.answers("ready")

    def _welcome(self, server: socket.socket, key: str, wait_s: float) -> None:
        """Accepts the connections of all stages."""
        until = time.monotonic() + wait_s
        while any(member.wire is None for member in self._members):
            self._check_processes()
            if time.monotonic() > until:
                missing_member = next(member for member in self._members if member.wire is None)
                raise StageError(f"{missing_member.name} did not connect within {wait_s:g} s")
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

    def _listen(self, member: Member) -> None:
        assert member.wire is not None
        while True:
            try:
                message_kind, content = member.wire.receive()
            except ClosedError:
                message_kind, content = "gone", {}
            member.heard = time.monotonic()
            if message_kind != "beat":
                self._messages.put(Message(member.number, message_kind, content))
            if message_kind == "gone":
                return

    def _check_processes(self) -> None:
        for member in self._members:
            if member.process is not None and member.process.poll() is not None:
                raise self._lost(member)

    def _lost(self, member: Member) -> StageError:
        """Stops all other stages; returns the error for a lost stage."""
        reason = "is gone"
        if member.process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = member.process.wait(5)
                reason = (
                    f"was ended by signal {-code}" if code < 0 else f"has ended with code {code}"
                )
        return self._failed(f"{member.name} {reason}")

    def _failed(self, reason: str) -> StageError:
        """Ends all stages at once; returns an error that says what failed."""
        self._kill()
        return StageError(f"{reason}; all other stages were stopped")

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
                error_text = f"{member.name}: {message.content['message']}"
                self._kill()
                raise (
                    UserError(error_text) if message.content["is_known"] else StageError(error_text)
                )
            if message.kind == "result":
                self._results[message.content["batch"]] = message.content
            return message

    def answers(self, kind: str) -> list[dict[str, Any]]:
        """Waits for one message of a kind from each stage; returns their contents in order."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._members):
            message = self._next()
            if message.kind == kind:
                answers[message.stage] = message.content
        return [content for _, content in sorted(answers.items())]

    def tell(self, kind: str, **content: Any) -> None:
        if not self._members:
            raise StageError("the stages of this model were stopped; create another LLM")
        for member in self._members:
            member.send(kind, **content)

    def tell_parts(self, kind: str, layers: Division, **content: Any) -> None:
        """Tells all stages something about a division of the layers."""
        self.tell(
            kind,
            layers=[[layer_range.start, layer_range.stop] for layer_range in layers],
            **content,
        )

    def assign(self, layers: Division) -> None:
        """Notes which layers each stage has from now on."""
        for member, layer_range in zip(self._members, layers, strict=True):
            member.layers = layer_range

    def result(self, batch: int) -> HeadResult:
        """Returns the last stage's head result for a batch's step; waits for it."""
        while batch not in self._results:
            self._next()
        result = self._results.pop(batch)["result"]
        return HeadResult(*result)

    def forget_results(self) -> None:
        """Drops leftovers of earlier runs."""
        self._results.clear()

    def close(self) -> None:
        """Stops all stages, and waits for their exit."""
        until = time.monotonic() + PATIENCE_S
        for member in reversed(self._members):  # the first stage serves the others
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


def _greeted(wire: Wire, key: str) -> int | None:
    """Returns the number of the stage that says hello, None if a stranger does."""
    try:
        _, hello = wire.receive(max_bytes=1 << 12)
        is_ours = secrets.compare_digest(str(hello["key"]), key)
        return int(hello["stage"]) if is_ours else None
    except (ClosedError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _started(address: str, number: int, num_local: int, key: str) -> subprocess.Popen[bytes]:
    """Starts the process of a stage, one of `num_local` on this machine."""
    command = [sys.executable, "-m", "flexgen_jax", "stage", "--join", address]
    return subprocess.Popen(
        [*command, "--number", str(number)],
        env={**QUIET, **os.environ, KEY: key, **(_visible_device(number) if num_local > 1 else {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process
    )


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
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
    device = devices[number] if number < len(devices) else str(number)
    return {"CUDA_VISIBLE_DEVICES": device}
