"""Adapters that requests choose by the model's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import httpx

from flexgen_jax import LLM, SamplingParams
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.options import JobOptions
from tests.helpers.adapters import random_pair, write_adapter
from tests.helpers.serving import POLICY, served

PROMPT = "hello there"
NAMES = (None, "one", "two")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    adapters = []
    for seed, name in enumerate(("one", "two")):
        path, generator = tmp_path_factory.mktemp("adapters") / name, np.random.default_rng(seed)
        modules = [f"model.decoder.layers.{n}.self_attn.v_proj" for n in range(3)]
        write_adapter(path, {module: random_pair(generator, 32, 32, 4) for module in modules})
        adapters.append(f"{name}={path}")
    return adapters


@pytest.fixture(scope="module")
def llm(folder: Path, adapters: list[str]) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", policy=POLICY, adapter=adapters) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str | None, str]:
    """Each adapter's text."""
    params = SamplingParams(max_tokens=8, temperature=0)
    results = llm.generate([PROMPT] * 3, params, adapter=NAMES)
    texts = dict(zip(NAMES, (result.text for result in results), strict=True))
    assert len({*texts.values()}) == 3
    return texts


@pytest.fixture(scope="module")
def address(llm: LLM, expected: dict[str | None, str]) -> Iterator[str]:
    with served(llm) as (address, _):
        yield address


def test_a_model_is_an_adapters_name(address: str, expected: dict[str | None, str]) -> None:
    data = httpx.get(f"{address}/v1/models").json()["data"]
    assert [model["id"] for model in data] == ["tiny", "one", "two"]
    assert httpx.get(f"{address}/v1/models/two").json()["id"] == "two"
    for name, text in expected.items():
        answer = complete(address, model=name or "tiny").json()
        assert answer["model"] == (name or "tiny")
        assert answer["choices"][0]["text"] == text
    assert complete(address, adapter="one").json()["choices"][0]["text"] == expected["one"]


def test_unknown_names_are_refused(address: str) -> None:
    assert complete(address, model="three").status_code == 404
    answer = complete(address, adapter="three")
    assert answer.status_code == 400
    assert "adapter 'three' is not known: the adapters are one, two" in answer.text
    assert complete(address, adapter=3).status_code == 400


def complete(address: str, **body: Any) -> httpx.Response:
    given = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, **body}
    return httpx.post(f"{address}/v1/completions", json=given, timeout=60)


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
def test_conversations_choose_adapters(address: str, route: str) -> None:
    said = [{"role": "user", "content": PROMPT}]
    body: dict[str, Any] = {"messages": said, "max_tokens": 8}
    if route == "responses":
        body = {"input": said, "max_output_tokens": 16}
    texts = set()
    for name in ("tiny", "one"):
        given = {**body, "model": name, "temperature": 0}
        answer = httpx.post(f"{address}/v1/{route}", json=given, timeout=60).json()
        assert answer["model"] == name
        found = answer.get("choices") or answer.get("content") or answer.get("output")
        texts.add(json.dumps([{**found[0], "id": ""}]))
    assert len(texts) == 2


def test_lines_of_a_job_choose_adapters(
    folder: Path, adapters: list[str], expected: dict[str | None, str], tmp_path: Path
) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    lines: list[dict[str, Any]] = [
        {"id": str(name), "adapter": name, **body} if name else {"id": str(name), **body}
        for name in NAMES
    ]
    lines += [
        {"custom_id": f"o{name}", "url": "/v1/completions", "body": body | {"model": name}}
        for name in ("one", "two")
    ]
    lines.append({"id": "three", "adapter": "three", **body})
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with LLM(folder, dtype="float32", policy=POLICY, adapter=adapters) as llm:
        Job(llm, JobOptions(source, out)).run()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    by_id = {record.get("custom_id") or record["id"]: record for record in records}
    for name, text in expected.items():
        assert by_id[str(name)]["text"] == text
    for name in ("one", "two"):
        answer = by_id[f"o{name}"]["response"]["body"]
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[name])
    assert "is not known" in by_id["three"]["error"]["message"]


def test_a_job_knows_its_adapters(llm: LLM, folder: Path) -> None:
    """Lines are not continued with other adapters."""
    with LLM(folder, dtype="float32", policy=POLICY) as plain:
        assert plain.fingerprint != llm.fingerprint
        assert plain.files_fingerprint != llm.files_fingerprint
