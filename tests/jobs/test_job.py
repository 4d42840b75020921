"""Jobs: whatever breaks them off, every line has exactly one record in the end, and the right
one."""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

import flexgen_jax
from flexgen_jax import LLM, Policy, SamplingParams, UserError
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.options import JobOptions, Summary
from flexgen_jax.jobs.store import Disk

DATA = Path(flexgen_jax.__file__).parent / "data/tiny_opt"

TEXTS = ["The people of the United States", "It is", "In the year", "We have", "The debt"]


def completion(number: int, **body: Any) -> dict[str, Any]:
    given = {"model": "tiny", "prompt": TEXTS[number % 5], "temperature": 0, "max_tokens": 9}
    return {
        "custom_id": f"c{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": given | body,
    }


LINES = [
    completion(0),
    completion(1, temperature=0.9, n=2, max_tokens=14),
    {"id": "p2", "prompt": TEXTS[2], "max_tokens": 12, "temperature": 0, "logprobs": 2},
    completion(3, logprobs=1, presence_penalty=1, seed=7, temperature=0.7),
    {"id": "p4", "prompt": TEXTS[4], "max_tokens": 5, "unknown": 1},
    completion(5, prompt=[TEXTS[0], TEXTS[1]], stop=" of"),
    completion(6, max_tokens=20, frequency_penalty=0.5, logit_bias={"5": 2}),
    {"id": "p7", "prompt_token_ids": [5, 6, 7], "max_tokens": 8, "temperature": 0.8, "n": 2},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", policy=Policy(batch_size=3, kv_block_tokens=8)) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


class Cut(BaseException):
    """The power is gone."""


class CutDisk(Disk):
    """Works up to an operation, of which half is done; then nothing works."""

    def __init__(self, last: int, error: BaseException) -> None:
        self.left, self._error = last, error

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self._error

    def write(self, file: IO[bytes], content: bytes) -> int:
        if self.left == 0:
            super().write(file, content[: len(content) // 2])
        self._count()
        return super().write(file, content)

    def sync(self, file: IO[bytes]) -> None:
        self._count()
        super().sync(file)

    def replace(self, old: Path, new: Path) -> None:
        self._count()
        super().replace(old, new)


def run(llm: LLM, source: Path, disk: Disk | None = None, **options: Any) -> Summary:
    return Job(llm, JobOptions(source, source.with_name("out.jsonl"), **options), disk=disk).run()


def records(source: Path) -> dict[int, dict[str, Any]]:
    """The records by line; no line has two, and times and checksums are left out."""
    found: dict[int, dict[str, Any]] = {}
    for content in source.with_name("out.jsonl").read_text().splitlines():
        record = json.loads(content)
        assert record.pop("crc32") > 0
        assert record["line"] not in found
        found[record["line"]] = record
        if record.get("response"):
            record["response"]["body"].pop("created")
    return found


def rounded(found: Any) -> Any:
    """Numbers to three digits: log-probabilities may differ in the last ones."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [rounded(value) for value in found]
    return round(found, 3) if isinstance(found, float) else found


@pytest.fixture(scope="module")
def expected(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    path = tmp_path_factory.mktemp("whole") / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    run(llm, path)
    return records(path)


def test_texts_are_those_of_generate(llm: LLM, expected: dict[int, dict[str, Any]]) -> None:
    assert expected.keys() == set(range(1, 9))
    params = SamplingParams(9, temperature=0)
    (alone,) = llm.generate([TEXTS[0]], params)
    body = expected[1]["response"]["body"]
    assert body["choices"][0]["text"] == alone.text
    assert body["usage"]["completion_tokens"] == len(alone.token_ids)
    assert 'unknown field "unknown"' in expected[5]["error"]["message"]
    assert expected[3]["logprobs"] and len(expected[3]["token_ids"]) == 12
    (scored,) = llm.score(
        prompt_token_ids=[
            [*llm.generate([TEXTS[2]], params)[0].prompt_token_ids, *expected[3]["token_ids"]]
        ]
    )
    assert [x["logprob"] for x in expected[3]["logprobs"]] == pytest.approx(
        scored.logprobs[-12:], abs=1e-4
    )


def test_openai_s_types_parse_the_bodies(expected: dict[int, dict[str, Any]]) -> None:
    types = pytest.importorskip("openai.types")
    bodies = [r["response"]["body"] for r in expected.values() if r.get("response")]
    assert len(bodies) == 5
    for body in bodies:
        parsed = types.Completion.model_validate({**body, "created": 0}, strict=True)
        assert parsed.usage.total_tokens > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(10))
def test_a_job_that_is_cut_goes_on(
    llm: LLM, source: Path, expected: dict[int, dict[str, Any]], seed: int
) -> None:
    """Cut at a random write, sync or rename, and again, until it is done."""
    rng, jobs = random.Random(seed), list[Job]()
    options = JobOptions(source, source.with_name("out.jsonl"), journal_s=0)
    while True:
        disk = CutDisk(rng.randrange(1, 300), Cut())
        jobs.append(Job(llm, options, disk=disk))
        try:
            jobs[-1].run()
            break
        except Cut:
            pass
    assert rounded(records(source)) == rounded(expected)
    assert not source.with_name("out.jsonl.journal").exists()
    again = run(llm, source)
    assert again.tokens == 0 and again.finished == len(LINES)
    made = sum(job.summary.tokens for job in jobs)
    whole = sum(_tokens(record) for record in expected.values())
    # Each time, what was made since the last journal is lost: a token of each text at most.
    assert whole <= made <= whole + 10 * len(jobs)


def _tokens(record: dict[str, Any]) -> int:
    if record.get("response"):
        return int(record["response"]["body"]["usage"]["completion_tokens"])
    return int(record["usage"]["completion_tokens"]) if "usage" in record else 0


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_leaves_valid_files(
    llm: LLM, source: Path, expected: dict[int, dict[str, Any]], number: int
) -> None:
    """Whichever operation fails first: a message, valid files, and the job goes on."""
    broken = 0
    for last in range(40):
        disk = CutDisk(last, OSError(number, "it failed"))
        try:
            run(llm, source, disk)
        except UserError as error:
            broken += 1
            assert "out.jsonl" in str(error) and "it failed" in str(error)
            assert records(source).items() <= expected.items() or rounded(records(source))
        if disk.left >= 0:
            break
    assert broken == last > 3
    assert rounded(records(source)) == rounded(expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal", "out.jsonl.manifest"])
def test_damage_changes_no_result(
    llm: LLM, source: Path, expected: dict[int, dict[str, Any]], name: str, seed: int
) -> None:
    """A byte of what an interrupted job has written is another one: it is computed again, or
    refused by name."""
    rng, refused = random.Random(seed), 0
    with pytest.raises(Cut):
        run(llm, source, CutDisk(60, Cut()), journal_s=0)
    whole = {path: path.read_bytes() for path in source.parent.glob("out.jsonl*")}
    damaged_path = source.with_name(name)
    for _ in range(4):
        for path in source.parent.glob("out.jsonl*"):
            path.unlink()
        for path, written in whole.items():
            path.write_bytes(written)
        content = bytearray(whole[damaged_path])
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        damaged_path.write_bytes(content)
        try:
            run(llm, source)
        except UserError as error:
            refused += 1
            assert "out.jsonl.manifest is damaged" in str(error)
        else:
            assert rounded(records(source)) == rounded(expected)
    assert refused == (4 if name.endswith("manifest") else 0)


def test_a_job_goes_on_with_a_copy_of_its_model_but_not_with_another(
    source: Path, tmp_path: Path
) -> None:
    """Of a model that differs in one byte, which is found however large its files are."""
    shutil.copytree(DATA, tmp_path / "m")

    def run_with(folder: Path, limit: int) -> Summary:
        policy = Policy(batch_size=4, num_batches=1)
        with LLM(folder, policy=policy, dtype="float32", progress=False) as llm:
            job = Job(llm, JobOptions(source, source.with_name("out.jsonl"), limit=limit))
            summary = job.run()
            if job._hashed is not None:
                job._hashed.result()
                job._complete_manifest()
            return summary

    assert run_with(tmp_path / "m", limit=2).finished == 2
    shutil.copytree(tmp_path / "m", tmp_path / "copy")
    assert run_with(tmp_path / "copy", limit=1).finished == 3
    file = tmp_path / "copy/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="different settings: the model"):
        run_with(tmp_path / "copy", limit=1)


def test_a_job_of_something_else_is_refused(llm: LLM, source: Path) -> None:
    run(llm, source)
    with pytest.raises(UserError, match="different settings: the seed"):
        run(llm, source, seed=1)
    source.write_text(json.dumps(completion(9)) + "\n" + source.read_text())
    with pytest.raises(UserError, match="different settings: the input"):
        run(llm, source)
    other = LLM(policy=Policy(batch_size=3, weight_bits=4))
    with other, pytest.raises(UserError, match="the model"):
        run(other, source)
    source.with_name("out.jsonl").write_text("something\n")
    with pytest.raises(UserError, match="not a record of a job"):
        run(llm, source)
    source.with_name("out.jsonl.manifest").unlink()
    source.with_name("out.jsonl").write_text("no end")
    with pytest.raises(UserError, match="not the output of a job"):
        run(llm, source)
    assert source.with_name("out.jsonl").read_text() == "no end"


def test_a_limit_reads_no_further(llm: LLM, source: Path) -> None:
    assert run(llm, source, limit=3).finished == 3
    assert records(source).keys() == {1, 2, 3}
    assert run(llm, source, is_ordered=True).finished == len(LINES)
    assert list(records(source)) == list(range(1, 9))


def test_what_a_limit_leaves_stays_in_the_journal(llm: LLM, source: Path) -> None:
    lines = [completion(n, max_tokens=60) for n in range(3)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(Cut):
        run(llm, source, CutDisk(150, Cut()), journal_s=0)
    kept = json.loads(source.with_name("out.jsonl.journal").read_text())
    run(llm, source, limit=1)
    left = json.loads(source.with_name("out.jsonl.journal").read_text())
    assert left.keys() < kept.keys() and left.keys()
    assert run(llm, source).taken_up > 0
    assert not source.with_name("out.jsonl.journal").exists()


def test_refused_ids_are_refused_again(llm: LLM, source: Path) -> None:
    lines = ['{"id": "\\ud800", "prompt": "x"}', '{"id": "a", "temperature": NaN}']
    lines += ['{"id": "b", "prompt": "x", "top_k": 3000000000, "temperature": 1}']
    lines += [json.dumps({"id": "a", "prompt": "It is", "max_tokens": 2})]
    source.write_text("\n".join(lines))
    assert run(llm, source, limit=3).errors == 3
    assert run(llm, source).errors == 3
    assert records(source)[4]["error"] is None


def test_bad_lines_have_records_and_good_ones_results(llm: LLM, source: Path) -> None:
    rng = random.Random(0)
    lines: list[bytes] = []
    for number in range(200):
        good = json.dumps(completion(number, max_tokens=2)).encode()
        at = rng.randrange(len(good))
        bad = [
            good[:at],
            good[:at] + b"\xff" + good[at:],
            json.dumps(completion(0)).encode(),  # an id twice
            json.dumps(completion(number, prompt=[1] * 600)).encode().replace(b'"c', b'"d'),
            json.dumps(completion(number, temperature=-1)).encode().replace(b'"c', b'"e'),
            b"[" * rng.randrange(1, 3000),
            json.dumps({"id": number}).encode(),
        ]
        lines += [good] if number % 10 == 0 else [rng.choice(bad)]
    source.write_bytes(b"\n".join(lines))
    summary = run(llm, source)
    assert summary.errors == 180
    found = records(source)
    assert found.keys() == set(range(1, 201))
    for number, record in found.items():
        is_good = number % 10 == 1
        assert (record["error"] is None) == is_good
        if not is_good:
            assert record["error"]["message"].startswith(f"line {number}: ")


@pytest.mark.slow
def test_what_all_prompts_begin_with_is_computed_once(llm: LLM, source: Path) -> None:
    examples = "One and one is two. Two and two is four. The people of the United States. " * 2
    prompts = [examples + text for text in TEXTS]
    lines = [
        {"id": str(n), "prompt": p, "max_tokens": 6, "temperature": 0}
        for n, p in enumerate(prompts)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(llm, source)
    alone = llm.generate(prompts, SamplingParams(6, temperature=0))
    assert [r["token_ids"] for _, r in sorted(records(source).items())] == [
        r.token_ids for r in alone
    ]
