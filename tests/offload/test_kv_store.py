"""The KV cache of prompts and texts is kept over runs, and changes no text."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.offload.disk.kv_pieces import TOKENS, DamagedError, KeptArray, PieceLayout
from flexgen_jax.offload.disk.kv_store import KVStore
from tests.helpers.cases import covering, examples
from tests.helpers.models import PLACEMENTS, assert_within_plan
from tests.helpers.numpy_opt import reference

LAYOUT = PieceLayout(
    (
        (KeptArray((2, 3), np.dtype(np.float32)), KeptArray((2, 1), np.dtype(np.uint8))),
        (),
        (KeptArray((5,), np.dtype(np.float16)),),
    )
)
STATE = KeptArray((7, 2), np.dtype(np.float32), grows=False)
ENDED = PieceLayout((*LAYOUT.layers[:1], (STATE,), (*LAYOUT.layers[2], STATE)))
ONE = LAYOUT.nbytes(TOKENS)


def arrays_of(
    layout: PieceLayout, ids: list[int], layer: int, start: int, stop: int
) -> list[np.ndarray]:
    """What a layer keeps of some tokens, which follows from all tokens up to each; at their end,
    also what follows from all."""
    sums, arrays = np.cumsum(ids)[start:stop] + layer, []
    for array in layout.layers[layer]:
        numbers = np.broadcast_to(sums[-1], array.shape)
        if array.grows:
            sizes = [1] * len(array.shape)
            numbers = np.broadcast_to(sums.reshape(-1, *sizes), (stop - start, *array.shape))
        if array.grows or stop == len(ids):
            arrays.append(numbers.astype(array.dtype).copy())
    return arrays


def put(store: KVStore, ids: list[int], dies: bool = False) -> None:
    """Stores a sequence; dies: whether the process ends amid it."""
    draft = store.draft(ids)
    if draft is None:
        return
    for place, (start, stop) in enumerate(draft.spans):
        for layer in range(3):
            draft.write(place, layer, arrays_of(store.layout, ids, layer, start, stop))
    if dies:
        for part in draft.parts:
            os.close(part.file)
        return
    store.finish(draft)


def check(store: KVStore, ids: list[int]) -> int:
    """Returns how many tokens of a sequence are there, whose arrays are right, or damaged."""
    stored = ids[: store.stored_tokens(ids)]
    sequence = store.open(stored) if stored else None
    if sequence is None:
        return 0
    with closing(sequence):
        assert sequence.tokens == len(stored)
        try:
            for layer, arrays in enumerate(sequence.read()):
                wanted = arrays_of(store.layout, stored, layer, 0, len(stored))
                assert all(map(np.array_equal, arrays, wanted))
        except DamagedError:
            return 0
    return len(stored)


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.*"))


OPERATION = st.tuples(
    st.sampled_from(["put", "put", "check", "die", "flip", "truncate", "reopen"]),
    st.integers(0, 3),
    st.integers(1, 5 * TOKENS),
    st.integers(0, 10**6),
)


@examples(20)
@given(st.lists(OPERATION, max_size=40), st.integers(1, 9), st.sampled_from([LAYOUT, ENDED]))
def test_whatever_happens_no_wrong_array_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[Any],
    room: int,
    layout: PieceLayout,
) -> None:
    """Sequences that share a prefix, processes that die, damaged files; and never over the cap."""
    folder, cap = tmp_path_factory.mktemp("kv"), room * ONE
    texts = [[*[5] * (100 * kind), *range(kind, kind + 600)] for kind in range(4)]
    store = KVStore(folder, cap, "model", layout)
    for what, text, tokens, place in operations:
        files = sorted(folder.rglob("*.kv"))
        if what in ("put", "die"):
            put(store, texts[text][:tokens], dies=what == "die")
        elif what == "check":
            check(store, texts[text])
        elif what == "reopen":
            store.close()
            store = KVStore(folder, cap, "model", layout)
        elif files:
            path = files[place % len(files)]
            content = bytearray(path.read_bytes()) or bytearray(1)
            content[place % len(content)] ^= 1 + place % 255
            path.write_bytes(content[: place % len(content)] if what == "truncate" else content)
        with store._locked():
            assert used(folder) <= cap
    store.close()
    assert used(folder) <= cap


def test_pieces_of_another_model_are_not_taken(tmp_path: Path) -> None:
    ids = list(range(2 * TOKENS))
    for model in ("one", "two"):
        with closing(KVStore(tmp_path, 100 * ONE, model, LAYOUT)) as store:
            put(store, ids)
            store.settle()
            assert check(store, ids) == len(ids)
    one, two = (path for path in tmp_path.iterdir() if path.is_dir())
    for piece in one.glob("*.kv"):
        piece.replace(two / piece.name)
    with closing(KVStore(tmp_path, 100 * ONE, "one", LAYOUT)) as store:
        assert check(store, ids) == 0
    with closing(KVStore(tmp_path, 100 * ONE, "two", LAYOUT)) as store:
        assert check(store, ids) == 0


def test_what_was_used_longest_ago_is_evicted_from_its_end(tmp_path: Path) -> None:
    store = KVStore(tmp_path, 6 * ONE, "model", LAYOUT)
    first, second, third = ([n, *range(3 * TOKENS - 1)] for n in (1, 2, 3))
    for ids in (first, second):
        put(store, ids)
        store.close()
        store = KVStore(tmp_path, 6 * ONE, "model", LAYOUT)
    assert check(store, first) == 3 * TOKENS  # which makes it the latest
    put(store, third[: 2 * TOKENS])
    store.close()
    store = KVStore(tmp_path, 6 * ONE, "model", LAYOUT)
    assert [check(store, ids) for ids in (first, second, third)] == [192, 64, 128]
    other = KVStore(tmp_path, 6 * ONE, "another model", LAYOUT)
    assert check(other, first) == 0
    put(other, first)
    other.close()
    assert used(tmp_path) <= 6 * ONE


def test_a_state_is_there_at_ends_alone(tmp_path: Path) -> None:
    """The longest sequence that has an end is what goes on."""
    texts = [list(range(n)) for n in (100, 64, 300)]
    lengths = []
    for ids in texts:
        with closing(KVStore(tmp_path, 99 * ONE, "model", ENDED)) as store:
            put(store, ids)
    with closing(KVStore(tmp_path, 99 * ONE, "model", ENDED)) as store:
        for count in (99, 100, 299, 350):
            lengths.append(check(store, [*range(count)]))
        lengths.append(check(store, [*range(299), 5, 5]))
    assert lengths == [64, 100, 100, 300, 100]
    with closing(KVStore(tmp_path / "small", 3 * ONE, "model", ENDED)) as store:
        put(store, texts[2])
    assert not used(tmp_path / "small"), "pieces without an end are of no use"


def test_long_sequences_are_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_jax.offload.disk.kv_store.MAX_OPEN_PIECES", 2)
    for layout in (LAYOUT, ENDED):
        store = KVStore(tmp_path, 99 * ONE, "model", layout)
        ids = [*range(5 * TOKENS + 3)]
        spans = []
        while (draft := store.draft(ids)) is not None:
            spans.append(len(draft.spans))
            for place, (start, stop) in enumerate(draft.spans):
                for layer in range(3):
                    draft.write(place, layer, arrays_of(layout, ids, layer, start, stop))
            store.finish(draft)
            if not draft.is_partial:
                break
            assert not check(store, ids) or layout is LAYOUT
            store.settle()
        store.settle()
        assert spans == [2, 2, 2] and check(store, ids) == len(ids)
        store.close()


def test_a_process_writes_no_more_than_it_may(tmp_path: Path) -> None:
    store = KVStore(tmp_path, 9 * ONE, "model", LAYOUT, write_limit=2 * ONE)
    for n in range(4):
        put(store, [n, *range(TOKENS - 1)])
    store.close()
    assert used(tmp_path) == store.written == 2 * ONE


WRITES = """
import sys
from pathlib import Path
from tests.offload.test_kv_store import LAYOUT, ONE, put
from flexgen_jax.offload.disk.kv_store import KVStore
store = KVStore(Path(sys.argv[1]), 20 * ONE, "model", LAYOUT)
print("begun", flush=True)
for n in range(10**6):
    put(store, [n % 50, *range(3 * 64)])
"""


def test_kill_at_any_moment_leaves_what_is_whole(tmp_path: Path) -> None:
    for seconds in (0.02, 0.15, None):
        command = [sys.executable, "-c", WRITES, str(tmp_path)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"begun\n"
        while seconds is None and not list(tmp_path.rglob("*.kv")):
            assert child.poll() is None, "it has written nothing"
            time.sleep(0.002)
        time.sleep(seconds or 0.0)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert used(tmp_path) <= 20 * ONE
        with closing(KVStore(tmp_path, 20 * ONE, "model", LAYOUT)) as store:
            assert not list(tmp_path.rglob("*.part"))
            for n in range(50):
                check(store, [n, *range(3 * 64)])
    assert list(tmp_path.rglob("*.kv"))


def test_two_at_once_share_a_folder(tmp_path: Path) -> None:
    texts = [[n, *range(2 * TOKENS + 7)] for n in range(12)]
    missing: list[int] = []

    def work(seed: int) -> None:
        rng, store = random.Random(seed), KVStore(tmp_path, 8 * ONE, "model", LAYOUT)
        for _ in range(60):
            ids = rng.choice(texts)
            if not check(store, ids):
                missing.append(seed)
                put(store, ids)
            with store._locked():
                assert used(tmp_path) <= 8 * ONE
        store.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 12 <= len(missing) < 180
    assert used(tmp_path) <= 8 * ONE


# In runs

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def rounds() -> list[list[int]]:
    """What is said in each of four rounds."""
    rng = np.random.default_rng(4)
    return [rng.integers(4, 96, count).tolist() for count in (20, 5, 9, 3)]


@pytest.mark.few(2)
@pytest.mark.usefixtures("loading_pays")
@pytest.mark.parametrize(
    ("percent", "chunk", "unified", "attention"),
    covering(PLACEMENTS, [2048, 16], [True, False], ["device", "host"], together=1),
)
def test_a_conversation_goes_on_after_a_restart(
    checkpoint: Callable[[], Path],
    tmp_path: Path,
    percent: tuple[int, ...],
    chunk: int,
    unified: bool,
    attention: str,
) -> None:
    """Each round computes what is new, and the last token of the answer. The last token that is
    computed fills up a KV block."""
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    model, asked, before = reference(checkpoint()), list[int](), 0
    policy = Policy.from_percent(
        *percent,
        batch_size=3,
        num_batches=2,
        attention=attention,
        prefill_chunk=chunk,
        kv_block_tokens=4,
    )
    options = {"policy": policy, "unified": unified, "kv_store": "1MB", "offload_dir": tmp_path}
    for said in rounds():
        asked += said
        with LLM(checkpoint(), dtype="float32", kv_store_dir=tmp_path / "kv", **options) as llm:
            (result,) = llm.generate(prompt_token_ids=[asked], sampling_params=params)
            report = llm.report()
        assert result.token_ids == model.greedy(asked, 5)
        assert report["stored_prompt_tokens"] == before
        assert report["prompt_tokens"] == len(asked) - before
        assert_within_plan(report)
        before = len(asked) + 4
        asked = [*asked, *result.token_ids]


@pytest.mark.usefixtures("loading_pays")
@pytest.mark.parametrize("bits", [16, pytest.param(4, marks=pytest.mark.slow)])
def test_all_rows_of_batches_are_kept(
    checkpoint: Callable[[], Path], tmp_path: Path, bits: int
) -> None:
    """Rows that end before others, and leave their batch; prompts that share a prefix. Of a packed
    cache, sealed blocks are kept."""
    rng = np.random.default_rng(9)
    first = rng.integers(4, 96, 30).tolist()
    rows = [[*first, *rng.integers(4, 96, n).tolist()] for n in (4, 9, 2, 7, 5)]
    rows += [rng.integers(4, 96, n).tolist() for n in (25, 18)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 12, 7, 12, 2, 9, 5)]
    policy = Policy(batch_size=4, num_batches=2, kv_block_tokens=4, cache_bits=bits)
    options = {"policy": policy, "dtype": "float32", "kv_store": "9MB", "kv_store_dir": tmp_path}
    with LLM(checkpoint(), **options) as llm:
        results = llm.generate(prompt_token_ids=rows, sampling_params=params)
    later = [[*ids, *result.token_ids, 7, 8] for ids, result in zip(rows, results, strict=True)]
    with LLM(checkpoint(), **options) as llm:
        again = llm.generate(prompt_token_ids=later, sampling_params=PARAMS)
        report = llm.report()
    computed = report["prompt_tokens"]
    if bits == 16:
        model = reference(checkpoint())
        wanted = zip(rows, params, strict=True)
        assert [x.token_ids for x in results] == [model.greedy(r, p.max_tokens) for r, p in wanted]
        assert [x.token_ids for x in again] == [model.greedy(ids, 6) for ids in later]
        assert computed == 3 * len(rows)
    assert computed <= 7 * len(rows)


@pytest.mark.usefixtures("loading_pays")
def test_rounds_of_a_stream_go_on_from_each_other(
    checkpoint: Callable[[], Path], tmp_path: Path
) -> None:
    """As in a server: a round comes when the one before is answered, beside other requests."""
    model, rng = reference(checkpoint()), np.random.default_rng(2)
    first, later = rng.integers(4, 96, 40).tolist(), rng.integers(4, 96, 5).tolist()
    answered = threading.Event()
    said: list[int] = []

    def requests() -> Iterator[Request]:
        yield Request("0", None, first, PARAMS)
        yield Request("other", None, later, PARAMS)
        assert answered.wait(60)
        yield Request("1", None, said, PARAMS)

    options = {"dtype": "float32", "kv_store": "9MB", "kv_store_dir": tmp_path}
    with LLM(checkpoint(), policy=Policy(batch_size=2, num_batches=2), **options) as llm:
        for result in llm.stream(requests()):
            asked = {"0": first, "other": later, "1": said}[result.id]
            assert result.token_ids == model.greedy(asked, 6)
            if result.id == "0":
                said = [*first, *result.token_ids, *later]
                answered.set()
        report = llm.report()
    assert report["stored_prompt_tokens"] == 40 + 5
    assert report["prompt_tokens"] == 40 + 5 + 1 + 5


@pytest.mark.usefixtures("loading_pays")
def test_a_damaged_piece_is_computed_again(
    checkpoint: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = np.random.default_rng(1).integers(4, 96, 80).tolist()
    options = {"dtype": "float32", "kv_store": "9MB", "kv_store_dir": tmp_path}
    found, computed = [], []
    for damage in (False, False, True, False):
        for path in tmp_path.rglob("*.kv") if damage else ():
            content = bytearray(path.read_bytes())
            content[-5] ^= 1
            path.write_bytes(content)
        with LLM(checkpoint(), policy=Policy(batch_size=2), **options) as llm:
            (result,) = llm.generate(prompt_token_ids=[asked], sampling_params=PARAMS)
            computed.append(llm.report()["prompt_tokens"])
        found.append(result.token_ids)
    assert found == [reference(checkpoint()).greedy(asked, 6)] * 4
    assert computed[:2] == [80, 16], "a piece has 64 tokens"
    assert computed[2:] == [80, 16]
    assert "damaged; recomputing it" in capsys.readouterr().err


def test_where_nothing_can_be_kept_it_is_said(
    checkpoint: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Policy(attention_sparsity=0.5)
    with LLM(checkpoint(), policy=policy, kv_store="1GB", kv_store_dir=tmp_path / "kv"):
        assert "kv_store stores nothing with sparse attention" in capsys.readouterr().err
    assert not (tmp_path / "kv").exists()
