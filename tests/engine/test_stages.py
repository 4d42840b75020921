"""A model in stages: processes that are real, and end with each other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.engine.stages import members
from flexgen_jax.engine.stages.wire import ClosedError, Wire
from flexgen_jax.engine.stages.worker import KEY
from flexgen_jax.errors import StageError, UserError

POLICY = Policy(batch_size=2, num_batches=4, kv_block_tokens=8)
TEXTS = ["Once upon a time", "The", "A list of all things that there are:", "I", "Two and two"]


def requests() -> Iterator[Request]:
    for number in range(9):
        params = SamplingParams(
            1 + 5 * number % 17,
            temperature=(0, 0.9)[number % 2],
            seed=number,
            logprobs=2 if number % 3 == 0 else None,
            presence_penalty=0.5 * (number % 4 == 0),
            ignore_eos=True,
        )
        yield Request(f"r{number}", TEXTS[number % 5], sampling_params=params)


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    with LLM(dtype="float32", policy=POLICY, stages=2) as made:
        yield made


def processes(llm: LLM) -> list[int]:
    members = llm._runner._members._members  # type: ignore[attr-defined]
    return [member.process.pid for member in members if member.process]


def test_results_are_those_of_one_stage(pair: LLM) -> None:
    with LLM(dtype="float32", policy=POLICY) as whole:
        expected = {r.id: r for r in whole.stream(requests())}
        scores = whole.score(TEXTS)
    found = {r.id: r for r in pair.stream(requests())}
    assert found.keys() == expected.keys()
    for name, result in found.items():
        right = expected[name]
        assert (result.text, result.token_ids) == (right.text, right.token_ids)
        for ours, theirs in zip(result.logprobs or (), right.logprobs or (), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    report = pair.report()
    assert 1 <= report["num_sequences"] <= 9  # of the last run: a slow reader makes several
    assert len(report["stages"]) == 2
    for ours, theirs in zip(pair.score(TEXTS), scores, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_a_stream_may_be_closed_early(pair: LLM) -> None:
    stream = pair.stream(requests())
    first = next(stream)
    stream.close()
    assert first.id in {f"r{n}" for n in range(9)}
    assert len(list(pair.stream(requests()))) == 9


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stage_ends_all(how: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "SILENCE_S", 3.0)
    with LLM(dtype="float32", policy=POLICY, stages=2) as llm:
        known = processes(llm)
        params = SamplingParams(400, temperature=0, ignore_eos=True)
        lost = 0.0

        def lose(_name: str, _token: int) -> None:
            nonlocal lost
            if not lost:
                lost = time.monotonic()
                os.kill(known[1], how)

        with pytest.raises(StageError, match=r"stage 1 \(layers 3 to 4\) (was ended|has not)"):
            llm.generate(TEXTS, params, on_token=lose)
        assert time.monotonic() - lost < 10
        assert not any(Path(f"/proc/{number}").exists() for number in known)
        with pytest.raises(StageError, match="create another LLM"):
            llm.generate(TEXTS)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="--stages 6 is more than the model's 5 layers"):
        LLM(stages=6)
    with pytest.raises(UserError, match="trace works with one stage"):
        LLM(stages=2, trace="x.json")
    with pytest.raises(UserError, match="'here' is not an address"):
        LLM(stages=2, coordinator="here")


@pytest.mark.slow
def test_what_a_stage_cannot_do_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    policy = Policy.from_percent(0, 0, 100, 0, 100, 0)
    with (
        LLM(dtype="float32", policy=policy, stages=2, offload_dir=file) as llm,
        pytest.raises(UserError, match=r"stage \d \(layers"),
    ):
        llm.generate("The")


@pytest.mark.slow
def test_stages_of_other_machines_join(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    how = {"dtype": "float32", "policy": POLICY, "stages": 2, "coordinator": address}
    with pytest.raises(UserError, match="set FLEXGEN_JAX_STAGE_KEY"):
        LLM(**how)
    monkeypatch.setenv(KEY, "a secret")
    command = [sys.executable, "-m", "flexgen_jax", "stage", "--join", address, "--number"]
    stranger = subprocess.Popen(
        [*command, "1"], env={**os.environ, KEY: "a guess"}, stderr=subprocess.PIPE
    )
    other = subprocess.Popen([*command, "1"], stdout=subprocess.DEVNULL)
    with LLM(**how) as llm:
        (found,) = llm.generate("The", SamplingParams(5, temperature=0, ignore_eos=True))
        assert len(found.token_ids) == 5
    assert other.wait(20) == 0
    stranger.kill()
    stranger.communicate()


def test_messages_are_what_was_sent() -> None:
    left, right = socket.socketpair()
    ours, theirs = Wire(left), Wire(right)
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 2), np.uint8)]
    ours.send("kind", plain={"a": [1, None, "b"]}, arrays=arrays, one=np.float32([1.5]))
    kind, content = theirs.receive()
    assert (kind, content["plain"]) == ("kind", {"a": [1, None, "b"]})
    for found, sent in zip([*content["arrays"], content["one"]], [*arrays, [1.5]], strict=True):
        np.testing.assert_array_equal(found, sent)
    ours.close()
    with pytest.raises(ClosedError, match="closed"):
        theirs.receive()
    right.close()
