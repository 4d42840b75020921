"""Results that belong to prompts: vectors, echoed prompts and their log-probabilities."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("openai")

import httpx
import openai

from flexgen_jax import LLM
from tests.helpers.serving import POLICY, serving

TEXTS = ["hello there", "a", "hello there, all of you"]


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with serving(folder) as (address, _):
        yield address


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[np.ndarray, list[Any], list[list[int]]]:
    """Vectors, scores and token ids of `TEXTS`."""
    with LLM(folder, dtype="float32", policy=POLICY) as llm:
        return llm.embed(TEXTS), llm.score(TEXTS), [llm.encode(text) for text in TEXTS]


def complete(address: str, **body: Any) -> httpx.Response:
    url = f"{address}/v1/completions"
    return httpx.post(url, json={"temperature": 0, "max_tokens": 3, **body}, timeout=60)


def test_vectors_by_openais_client(served: str, expected: Any) -> None:
    """The client asks for base64; plain numbers, token ids and fewer dimensions are the same."""
    vectors, _, ids = expected
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="none")
    found = client.embeddings.create(model="tiny", input=TEXTS)
    assert [entry.index for entry in found.data] == [0, 1, 2]
    np.testing.assert_allclose([x.embedding for x in found.data], vectors, atol=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    plain = client.embeddings.create(model="tiny", input=ids, encoding_format="float")
    np.testing.assert_allclose([x.embedding for x in plain.data], vectors, atol=1e-5)
    few = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
    first = vectors[0, :8] / np.linalg.norm(vectors[0, :8])
    np.testing.assert_allclose(few.data[0].embedding, first, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, '"input" must be a string'),
        ({"input": []}, '"input" must be a string'),
        ({"input": "a", "dimensions": 0}, '"dimensions" must be a positive integer'),
        ({"input": "a", "dimensions": 10_000}, "dimensions must be from 1 to"),
        ({"input": "a", "encoding_format": "int8"}, '"encoding_format" must be'),
        ({"input": "a", "stream": True}, '"stream" cannot be combined'),
        ({"input": ["a"] * 2049}, "2049"),
    ],
)
def test_impossible_vectors_are_refused(served: str, body: dict[str, Any], said: str) -> None:
    answer = httpx.post(f"{served}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_vectors_in_batches(served: str, folder: Path, tmp_path: Path, expected: Any) -> None:
    vectors, _, _ = expected
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "tiny", "input": text, "encoding_format": "base64"},
        }
        for n, text in enumerate(TEXTS)
    ]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(folder, folder=tmp_path / "files") as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        file = client.files.create(file=asked, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch.errors
        records = client.files.content(batch.output_file_id).text.splitlines()
    for record in map(json.loads, records):
        written = record["response"]["body"]["data"][0]["embedding"]
        found = np.frombuffer(base64.b64decode(written), np.float32)
        np.testing.assert_allclose(found, vectors[int(record["custom_id"])], atol=1e-5)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echoed_prompt_has_its_log_probabilities(
    served: str, expected: Any, max_tokens: int
) -> None:
    _, scores, ids = expected
    answer = complete(served, prompt=ids, echo=True, logprobs=2, max_tokens=max_tokens).json()
    for choice, text, score, row in zip(answer["choices"], TEXTS, scores, ids, strict=True):
        assert choice["text"].startswith(text)
        logs = choice["logprobs"]
        assert len(logs["tokens"]) == len(logs["text_offset"]) == len(row) + max_tokens
        first, *others = logs["token_logprobs"][: len(row)]
        assert first is None is logs["top_logprobs"][0]
        np.testing.assert_allclose(others, score.logprobs, atol=1e-5)
        for token, top, greedy in zip(
            logs["tokens"][1:], logs["top_logprobs"][1:], score.greedy, strict=False
        ):
            assert (max(top, key=top.__getitem__) == token) == greedy
    assert answer["usage"]["completion_tokens"] == max_tokens * len(ids)


def test_an_echo_without_log_probabilities(served: str) -> None:
    plain, echoed = (complete(served, prompt="hello", echo=x).json() for x in (False, True))
    assert echoed["choices"][0]["text"] == "hello" + plain["choices"][0]["text"]
    assert complete(served, prompt="hello", max_tokens=0).json()["choices"][0]["text"] == ""
    refused = complete(served, prompt="hello", echo=True, stream=True)
    assert refused.status_code == 400
    assert '"stream" cannot be combined' in refused.json()["error"]["message"]


def test_log_probabilities_of_prompts_in_vllms_form(served: str, expected: Any) -> None:
    _, scores, ids = expected
    choice = complete(served, prompt=ids[0], prompt_logprobs=1).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    found = [entry[str(token)]["logprob"] for entry, token in zip(others, ids[0][1:], strict=True)]
    np.testing.assert_allclose(found, scores[0].logprobs, atol=1e-5)
    assert all(min(x["rank"] or 9 for x in entry.values()) == 1 for entry in others)


def test_cached_tokens_are_counted(served: str) -> None:
    usage = complete(served, prompt="hello").json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_lm_eval_has_the_figures_of_the_adapter() -> None:
    """Log-likelihoods of `local-completions`, whose requests echo prompts as token ids."""
    pytest.importorskip("tenacity")
    lm_eval = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    from flexgen_jax.models.loading import shipped_model

    pairs = [("The people of", " the United States"), ("We hold these truths", " to be")]
    with serving(shipped_model()) as (address, _):
        model = lm_eval.LocalCompletionsAPI(
            model="tiny",
            base_url=f"{address}/v1/completions",
            tokenizer=str(shipped_model()),
            tokenizer_backend="huggingface",
            add_bos_token=True,
        )
        found = model.loglikelihood(
            [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
        )
    with LLM(None, dtype="float32", policy=POLICY) as llm:
        expected = llm.score_pairs(*map(list, zip(*pairs, strict=True)))
    for (logprob, is_greedy), score in zip(found, expected, strict=True):
        assert abs(logprob - score.total) < 1e-4
        assert is_greedy == score.is_greedy
