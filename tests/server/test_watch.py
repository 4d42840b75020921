"""The page beside a job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

import httpx

from flexgen_jax import LLM, Policy
from flexgen_jax.errors import UserError
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.options import JobOptions
from flexgen_jax.server.watch import Watch, watched


def test_it_shows_how_far_a_job_is(
    checkpoint: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"id": str(n), "prompt": "ab", "max_tokens": 3, "ignore_eos": True} for n in range(4)]
    lines[1]["temperature"] = -1
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen: list[dict[str, Any]] = []
    take = Job._take

    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=1)) as llm:
        job = Job(llm, JobOptions(source, tmp_path / "out.jsonl"))
        policy = llm.policy
        watch = Watch("tiny", "out", job.progress, lambda: policy and policy.in_words)
        with watched(watch.app(), 0) as port:
            address = f"http://127.0.0.1:{port}"

            def taking(self: Job, *given: Any) -> None:
                take(self, *given)
                seen.append(httpx.get(f"{address}/status").json())

            monkeypatch.setattr(Job, "_take", taking)
            before = httpx.get(f"{address}/status").json()
            job.run()
            page = httpx.get(address).text
            with pytest.raises(UserError, match=f"--watch {port}"), watched(watch.app(), port):
                pass
        with pytest.raises(httpx.ConnectError):
            httpx.get(address)
    assert before["jobs"] == [{"name": "out", "done": 0, "failed": 0, "total": 0, "eta_s": None}]
    assert [each["jobs"][0]["done"] for each in seen] == [2, 3, 4]
    assert seen[-1]["jobs"][0] | {"eta_s": 0} == {
        "name": "out",
        "done": 4,
        "failed": 1,
        "total": 4,
        "eta_s": 0,
    }
    assert seen[-1]["new_tokens"] == 9 and not seen[-1]["talks"]
    assert 'id="jobs"' in page
