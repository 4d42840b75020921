"""Files and batches of the server, by OpenAI's own client and by hand."""

from __future__ import annotations

import errno
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("openai")

import httpx
import openai

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.store import Disk
from flexgen_jax.server import batches
from flexgen_jax.server.errors import RefusedError
from flexgen_jax.server.files import Files
from tests.helpers.serving import POLICY, serving


@pytest.fixture(scope="module")
def library(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", policy=POLICY) as llm:
        yield llm


def lines_of(count: int, tokens: int) -> bytes:
    """Requests of a batch, and one that cannot be run."""
    lines = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": "abc" * (number % 5 + 1),
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(count)
    ]
    lines.append({**lines[0], "custom_id": "bad", "body": {"prompt": "x", "temperature": -1}})
    return "\n".join(map(json.dumps, lines)).encode()


def until_done(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "cancelled"):
        assert time.monotonic() < deadline and batch.status != "failed", batch
        time.sleep(0.05)
    return batch


def test_batches_outlive_the_server_and_do_each_line_once(
    folder: Path, tmp_path: Path, library: LLM
) -> None:
    """Beside a client that waits, and with a server that ends amid the batch."""
    count, kept = 60, tmp_path / "kept"
    with serving(folder, folder=kept) as (address, server):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=("in.jsonl", lines_of(count, 20)), purpose="batch")
        assert client.files.content(file.id).content == lines_of(count, 20)
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while server.engine.counts.texts < 5:
            time.sleep(0.01)
    with serving(folder, folder=kept) as (address, server):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="tiny", prompt="hi", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens <= 2
        done = until_done(client, batch.id)
        assert server.engine.counts.texts < count, "some were done before"
        assert (done.request_counts.completed, done.request_counts.failed) == (count, 1)
        records = [
            json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()
        ]
        (bad,) = client.files.content(done.error_file_id).text.splitlines()
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
    assert json.loads(bad)["custom_id"] == "bad"
    assert sorted(record["custom_id"] for record in records) == sorted(
        f"line {number}" for number in range(count)
    )
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    wanted = [x.text for x in library.generate(["abc" * n for n in range(1, 6)], params)]
    for record in records:
        number = int(record["custom_id"].split()[1])
        assert record["response"]["body"]["choices"][0]["text"] == wanted[number % 5]


def test_a_batch_can_be_cancelled(folder: Path, tmp_path: Path) -> None:
    with serving(folder, folder=tmp_path) as (address, server):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=("in.jsonl", lines_of(300, 60)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while server.engine.counts.texts < 2:
            time.sleep(0.01)
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = until_done(client, batch.id)
        assert done.status == "cancelled"
        assert 0 < done.request_counts.completed < 300
        with pytest.raises(openai.BadRequestError):
            client.batches.cancel(batch.id)


def test_a_fault_of_the_disk_is_no_fault_of_a_request(folder: Path, tmp_path: Path) -> None:
    """Clients get 503, lines of batches wait, and the next run places what is missing again."""
    policy = Policy.from_percent(0, 0, 0, 0, 0, 0, batch_size=2)
    with serving(folder, policy, offload_dir=tmp_path / "offload", folder=tmp_path / "files") as (
        address,
        _,
    ):
        url = f"{address}/v1/completions"
        asked = {"prompt": "hi", "max_tokens": 3, "temperature": 0}
        wanted = httpx.post(url, json=asked, timeout=60)
        assert wanted.status_code == 200
        chunk = next((tmp_path / "offload/weights").rglob("*mlp.up*/c/0/0"))
        chunk.unlink()
        answer = httpx.post(url, json=asked, timeout=60)
        assert answer.status_code == 503
        assert str(tmp_path) not in answer.text
        assert httpx.get(f"{address}/health").status_code == 503
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=lines_of(3, 4), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        counts = until_done(client, batch.id).request_counts
        assert (counts.completed, counts.failed) == (3, 1)  # the bad line
        again = httpx.post(url, json=asked, timeout=60)
        assert again.json()["choices"] == wanted.json()["choices"]
        assert httpx.get(f"{address}/health").status_code == 200


@pytest.mark.parametrize("name", ["x", "..", "file-" + "0" * 24, "%2e%2e%2fetc%2fpasswd", "a%00b"])
def test_ids_lead_nowhere_else(folder: Path, tmp_path: Path, name: str) -> None:
    with serving(folder, folder=tmp_path / "kept") as (address, _):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert httpx.get(f"{address}{path}").status_code in (404, 405)
        body = {"endpoint": [], "input_file_id": name}
        assert httpx.post(f"{address}/v1/batches", json=body).status_code == 400
        body = {"endpoint": "/v1/completions", "input_file_id": name}
        assert httpx.post(f"{address}/v1/batches", json=body).status_code == 404
        assert httpx.post(f"{address}/v1/files", data={"purpose": "batch"}).status_code == 400


def test_lists_come_in_pages(folder: Path, tmp_path: Path) -> None:
    with serving(folder, POLICY, folder=tmp_path) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        made = [client.files.create(file=b"{}", purpose="batch").id for _ in range(5)]
        assert {file.id for file in client.files.list(limit=2)} == {*made}, "all pages"
        first = client.files.list(limit=3, order="asc")
        rest = client.files.list(limit=3, order="asc", after=first.data[-1].id)
        assert (first.has_more, rest.has_more) == (True, False)
        ids = [file.id for file in (*first.data, *rest.data)]
        assert sorted(ids) == sorted(made)
        assert [file.id for file in client.files.list()] == ids[::-1]
        assert not client.files.list(purpose="vision").data
        for query, status in (("limit=0", 400), ("order=up", 400), ("after=file-x", 404)):
            assert httpx.get(f"{address}/v1/files?{query}").status_code == status
        assert httpx.get(f"{address}/v1/batches").json()["first_id"] is None


def test_a_damaged_record_of_a_file_is_left_out(tmp_path: Path) -> None:
    files = Files(tmp_path)
    kept_id, lost_id = (files.add("x", "batch", b"{}")["id"] for _ in range(2))
    (tmp_path / "files" / f"{lost_id}.json").write_text('{"id"')
    assert [record["id"] for record in files.all()] == [kept_id]
    with pytest.raises(RefusedError, match="does not exist"):
        files.get(lost_id)


def test_a_batch_continues_after_a_full_disk(
    folder: Path, tmp_path: Path, library: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write of its records, journal and output fails once."""
    monkeypatch.setattr(batches, "MIN_RETRY_S", 0.01)
    monkeypatch.setattr(batches, "MAX_RETRY_S", 0.05)
    monkeypatch.setattr(batches, "JOURNAL_S", 0.01)
    write, failed = Disk.write, set[str]()

    def full(disk: Disk, file: IO[bytes], content: bytes) -> int:
        place = f"{file.name} {content[:40]!r}" if "batch_" in str(file.name) else "uploads"
        if place == "uploads" or place in failed or len(failed) > 20:
            return write(disk, file, content)
        failed.add(place)
        write(disk, file, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with serving(folder, folder=tmp_path) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        batch_id = started(client, lines_of(9, 6), monkeypatch, full)
        done = until_done(client, batch_id)
        assert (done.request_counts.completed, done.request_counts.failed) == (9, 1)
        assert len(failed) > 10
        text = client.files.content(done.output_file_id).text
    assert texts_of(text) == wanted_texts(library, 9, 6)


def started(client: openai.OpenAI, lines: bytes, monkeypatch: Any = None, write: Any = None) -> str:
    """Begins a batch; returns its id. write: replaces `Disk.write` once it has begun."""
    file = client.files.create(file=("in.jsonl", lines), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    if write is not None:
        monkeypatch.setattr(Disk, "write", write)
    return batch.id


def texts_of(records: str) -> dict[str, str]:
    """Returns the text of each record; no id has two."""
    pairs = [
        (record["custom_id"], record["response"]["body"]["choices"][0]["text"])
        for record in map(json.loads, records.splitlines())
    ]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def wanted_texts(library: LLM, count: int, tokens: int) -> dict[str, str]:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    texts = [x.text for x in library.generate(["abc" * n for n in range(1, 6)], params)]
    return {f"line {number}": texts[number % 5] for number in range(count)}


def test_a_deleted_input_and_equal_ids(folder: Path, tmp_path: Path) -> None:
    """The batch has its own copy of the input; the second line of an id is an error."""
    lines = lines_of(3, 2).splitlines()
    with serving(folder, folder=tmp_path) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=("x", b"\n".join([*lines, lines[0]])), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        client.files.delete(file.id)
        done = until_done(client, batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (3, 2)
        assert "earlier line's id" in client.files.content(done.error_file_id).text
        assert [path.suffix for path in (tmp_path / "batches").iterdir()] == [".json"]


def test_a_failed_batch_keeps_its_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: Job, *_: object) -> None:
        if job.progress()["finished"] >= 2:
            raise RuntimeError("a bug")

    monkeypatch.setattr(Job, "_check", broken)
    monkeypatch.setattr("flexgen_jax.jobs.job.WINDOW", 1)
    with serving(folder, folder=tmp_path) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        batch_id = started(client, lines_of(40, 3))
        while (batch := client.batches.retrieve(batch_id)).status != "failed":
            time.sleep(0.02)
        assert batch.errors is not None and batch.errors.data is not None
        assert "a bug" in str(batch.errors.data[0].message)
        assert batch.output_file_id is not None
        assert len(texts_of(client.files.content(batch.output_file_id).text)) >= 2


def test_a_batch_waits_for_a_server_of_its_model(folder: Path, tmp_path: Path) -> None:
    with serving(folder, folder=tmp_path) as (address, server):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        batch_id = started(client, lines_of(60, 30))
        while server.engine.counts.texts < 2:
            time.sleep(0.01)
    description = tmp_path / "batches" / f"{batch_id}.json"
    other = json.loads(description.read_text()) | {"model_id": "other"}
    description.write_text(json.dumps(other))
    with serving(folder, folder=tmp_path) as (address, server):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        assert client.batches.retrieve(batch_id).status == "in_progress"
        assert server.engine.counts.texts == 0


@pytest.mark.parametrize("num_kills", [pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_loses_nothing(folder: Path, tmp_path: Path, library: LLM, num_kills: int) -> None:
    """The server is killed at random moments, and started again."""
    source, batch_id = random.Random(0), ""
    command = [sys.executable, "-m", "flexgen_jax", "serve", "--model", str(folder)]
    command += ["--dtype", "float32", "--files-dir", str(tmp_path), "--port"]
    for number in range(num_kills + 1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        process = subprocess.Popen([*command, port])
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        while not batch_id or number == num_kills:
            with suppress(openai.APIConnectionError):
                batch_id = batch_id or started(client, lines_of(2000, 20))
                if number < num_kills:
                    break
                done = until_done(client, batch_id)
                text = client.files.content(done.output_file_id).text
                break
            time.sleep(0.2)
        if number < num_kills:
            time.sleep(source.uniform(5, 9))
        process.kill()
        process.wait()
    assert (done.request_counts.completed, done.request_counts.failed) == (2000, 1)
    assert texts_of(text) == wanted_texts(library, 2000, 20)
