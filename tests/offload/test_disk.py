"""Tests the offload folder: crashes, damage, other processes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.engine.out_of_memory import is_on_host, is_out_of_memory
from flexgen_jax.offload.disk import direct_reads, records
from flexgen_jax.offload.disk import folder as disk_folder
from flexgen_jax.offload.disk.direct_reads import Piece, read_file, whole_pages
from flexgen_jax.offload.disk.folder import OffloadError, OffloadFolder
from flexgen_jax.schedule.cache_blocks import CacheBlocks
from flexgen_jax.schedule.running import CachedPart, LayerState
from tests.helpers.models import prompts

SHAPE = (300, 16)
DATA = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OffloadFolder]:
    monkeypatch.setattr(disk_folder, "CHUNK_BYTES", 4096)  # several chunks, the last one ragged
    opened = OffloadFolder(tmp_path / "offload")
    yield opened
    opened.close()


def store(folder: OffloadFolder, name: str = "t") -> disk_folder.DiskArray:
    pieces = (DATA[i : i + 64] for i in range(0, SHAPE[0], 64))
    folder.weights("f").write(name, SHAPE, np.dtype(np.float32), pieces)
    return folder.weights("f").open(name, SHAPE, np.dtype(np.float32))


def has(folder: OffloadFolder, name: str = "t") -> bool:
    return folder.weights("f").has(name, SHAPE, np.dtype(np.float32))


def read(array: disk_folder.DiskArray) -> np.ndarray:
    out = np.zeros(array.shape, array.dtype)
    array.read_into(out).result(timeout=10)
    return out


def chunks(folder: OffloadFolder) -> list[Path]:
    return sorted(p for p in folder.root.glob("weights/f/t/c/**/*") if p.is_file())


def test_round_trip_and_reuse(folder: OffloadFolder) -> None:
    assert not has(folder)
    np.testing.assert_array_equal(read(store(folder)), DATA)
    assert has(folder)
    found = folder.weights("f").open("t", SHAPE, np.dtype(np.float32))
    for direct in {found.direct, False}:
        np.testing.assert_array_equal(read(replace(found, direct=direct)), DATA)
    assert len(chunks(folder)) > 2


def test_a_tensor_of_another_model_or_name_is_written_again(folder: OffloadFolder) -> None:
    store(folder)
    for stray in ("weights/g/t", "weights/f/u"):
        shutil.copytree(folder.root / "weights/f/t", folder.root / stray)
    assert has(folder)
    assert not folder.weights("g").has("t", SHAPE, np.dtype(np.float32))
    assert not has(folder, "u")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no done.json"])
def test_damage_is_found_and_removed(folder: OffloadFolder, damage: str) -> None:
    store(folder)
    chunk = chunks(folder)[1]
    if damage == "flip":
        data = bytearray(chunk.read_bytes())
        data[100] ^= 1
        chunk.write_bytes(data)
    elif damage == "truncate":
        os.truncate(chunk, 10)
    elif damage == "remove":
        chunk.unlink()
    else:
        (folder.root / "weights/f/t/done.json").unlink()
    assert not has(folder)
    assert not (folder.root / "weights/f/t").exists()
    np.testing.assert_array_equal(read(store(folder)), DATA)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ENOMEM])
def test_what_cannot_be_read_now_is_not_taken_for_damage(
    folder: OffloadFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store(folder)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(disk_folder, "read_file", fail)
        with pytest.raises(OffloadError, match=os.strerror(number)):
            has(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        with pytest.raises(OffloadError, match=os.strerror(number)):
            has(folder)

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("PERMISSION_DENIED: not now")

    with monkeypatch.context() as patch:
        patch.setattr(disk_folder.ts, "open", refuse)
        with pytest.raises(OffloadError, match="not now"):
            has(folder)
    assert has(folder)


def test_a_failing_read_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(bytes(8192))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=r"Input/output error: .*chunk"):
        read_file(Piece(path, (whole_pages(8192),), False))


def test_no_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that fails raises `MemoryError`, to which an automatic run answers with a smaller
    plan."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(direct_reads.mmap, "mmap", fail)
    with pytest.raises(MemoryError, match="cannot allocate 5 bytes of host memory") as caught:
        whole_pages(5)
    assert is_out_of_memory(caught.value)
    assert is_on_host(caught.value)


def test_missing_chunk_is_an_error_not_zeros(folder: OffloadFolder) -> None:
    array = store(folder)
    chunks(folder)[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"t/c/1/0"):
        read(array)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [1, 4095, 4096, 70_000, 3_000_001])
@pytest.mark.parametrize("offset", [0, 2, 4096])
def test_read_file(tmp_path: Path, direct: bool, size: int, offset: int) -> None:
    """Files of any size can be read to any address, also where a direct read cannot reach."""
    path = tmp_path / "chunk"
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    path.write_bytes(data.tobytes() + b"padding")
    memory = whole_pages(size + offset)
    read_file(Piece(path, (memory[offset:],), direct))
    np.testing.assert_array_equal(memory[offset:], data)
    os.truncate(path, size - 1)
    with pytest.raises(OSError, match=f"chunk is damaged: it has {size - 1} of {size}"):
        read_file(Piece(path, (memory[offset:],), direct))


SIZES = st.lists(st.integers(0, 3 * 4096 + 5) | st.just(8192), min_size=1, max_size=6)


@given(sizes=SIZES, shift=st.sampled_from([0, 2]), direct=st.booleans(), missing=st.integers(0, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_read_file_into_several(
    tmp_path: Path, sizes: list[int], shift: int, direct: bool, missing: int
) -> None:
    """Arrays are filled one after the other, at any address and of any size, unless the file is too
    short."""
    path, total = tmp_path / "chunk", sum(sizes)
    data = np.random.default_rng(total).integers(0, 256, total + 1, np.uint8)
    outs = [whole_pages(size + shift)[shift:] for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_reads, "BOUNCE_BYTES", 4096)
        path.write_bytes(data.tobytes())
        read_file(Piece(path, outs, direct))
        np.testing.assert_array_equal(np.concatenate(outs), data[:total])
        if 0 < missing <= total:
            os.truncate(path, total - missing)
            with pytest.raises(
                OSError, match=f"damaged: it has {total - missing} of {total} bytes"
            ):
                read_file(Piece(path, outs, direct))


@given(sizes=SIZES, chunk=st.sampled_from([4096, 8192, 1 << 20]), index=st.integers(0, 2))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_records(folder: OffloadFolder, sizes: list[int], chunk: int, index: int) -> None:
    """Arrays may change as soon as their write is started, and come back whole; a record is files
    of full pages."""
    rng = np.random.default_rng(sum(sizes))
    arrays = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    total = max(1, sum(sizes))
    folder.clear_scratch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "CHUNK_BYTES", chunk)
        found = records.Records.create(folder, "r", 3, total)
    written = [array.copy() for array in arrays]
    future = found.write(index, written, whole_pages(found.nbytes))
    for array in written:
        array[:] = 0
    future.result(timeout=10)
    outs = [whole_pages(array.size) for array in arrays]
    found.read_into(index, outs).result(timeout=10)
    for out, array in zip(outs, arrays, strict=True):
        np.testing.assert_array_equal(out, array)
    files = [path for path in found.store.path.glob("c/**/*") if path.is_file()]
    assert len(files) == -(-total // chunk)
    assert {path.stat().st_size % 4096 for path in files} == {0}


def test_records_of_strided_arrays(folder: OffloadFolder) -> None:
    array = np.arange(6000, dtype=np.int16).reshape(60, 100).T
    found = records.Records.create(folder, "r", 1, array.nbytes)
    found.write(0, [array], whole_pages(found.nbytes)).result(timeout=10)
    out = np.zeros(array.shape, np.int16)
    found.read_into(0, [out]).result(timeout=10)
    np.testing.assert_array_equal(out, array)


def test_no_cache_is_read_before_all_prompts_are_there(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise read buffers would come on top of the prompts' blocks that wait for the disk."""
    found: list[bool] = []
    part = CacheBlocks.part

    def watched(cache: CacheBlocks, state: LayerState, tokens: int) -> CachedPart:
        found.append(state.running.is_cached)
        return part(cache, state, tokens)

    monkeypatch.setattr(CacheBlocks, "part", watched)
    policy = Policy.from_percent(0, 0, 0, 0, 0, 0, batch_size=2, num_batches=2, schedule="zigzag")
    with LLM(checkpoint(), dtype="float32", policy=policy, offload_dir=tmp_path / "o") as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        llm.generate(prompt_token_ids=prompts()[:4], sampling_params=params)
    assert found and all(found)


def test_everything_is_private(folder: OffloadFolder) -> None:
    store(folder)
    for path in (folder.root, folder.root / "weights", folder.root / "runs"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_half_written_tensors_are_cleared(folder: OffloadFolder) -> None:
    part = folder.root / "weights/f/t.part"
    part.mkdir(parents=True)
    (part / "junk").write_text("x")
    with folder.weights("f").locked():
        assert not part.exists()


def test_failed_write_leaves_nothing(folder: OffloadFolder) -> None:
    def pieces() -> Iterator[np.ndarray]:
        yield DATA[:64]
        raise OSError(28, "No space left on device")

    with pytest.raises(OffloadError, match=r"f/t.*No space left"):
        folder.weights("f").write("t", SHAPE, np.dtype(np.float32), pieces())
    assert list((folder.root / "weights/f").iterdir()) == []


def test_unwritable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OffloadError, match="--offload-dir"):
        OffloadFolder(file / "inside")


def test_dead_runs_are_removed_and_live_ones_are_not(tmp_path: Path) -> None:
    first = OffloadFolder(tmp_path)
    first.scratch_array("kv", (2, 2), (2, 2), np.dtype(np.float32))
    dead = tmp_path / "runs" / "dead"
    dead.mkdir()
    dead.with_suffix(".lock").write_text("")
    second = OffloadFolder(tmp_path)
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert "dead" not in names
    assert "dead.lock" not in names
    assert len([name for name in names if name.endswith(".lock")]) == 2
    first.close()
    second.close()
    assert list((tmp_path / "runs").iterdir()) == []


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of a shell's background
from flexgen_jax import LLM, Policy, SamplingParams
from tests.helpers.models import prompts
policy = Policy.from_percent(0, 0, 0, 0, 0, 0, batch_size=2, num_batches=4, kv_block_tokens=8)
with LLM(sys.argv[1], dtype="float32", policy=policy, offload_dir=sys.argv[2]) as llm:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    results = llm.generate(prompt_token_ids=prompts(), sampling_params=params)
print([result.token_ids for result in results])
"""


@pytest.fixture(scope="module", autouse=True)
def kept_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one process compiles the next ones find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "1")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


def run_script(folder: Path, offload: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(offload)]
    root = Path(__file__).parent.parent.parent
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=root)


def signal_at(process: subprocess.Popen[str], offload: Path, pattern: str, number: int) -> None:
    """Sends a signal as soon as there is such a file, if within a minute and before the end."""
    deadline = time.monotonic() + 60
    try:
        while not any(offload.glob(pattern)):
            assert process.poll() is None, f"ended without {pattern}: {process.communicate()}"
            assert time.monotonic() < deadline, f"no {pattern} within a minute"
            time.sleep(0.002)
        process.send_signal(number)
    except BaseException:
        process.kill()
        raise


def resident_tokens(folder: Path) -> str:
    with LLM(folder, dtype="float32", policy=Policy()) as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=params)
    return str([result.token_ids for result in results])


def test_kill_at_any_moment_then_again(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A process killed while it writes weights, or generates, leaves a folder that the next run
    reuses."""
    folder, offload = checkpoint(), tmp_path / "offload"
    for pattern in ("weights/*/decoder.1.*/done.json", "runs/*/kv-0-*/c/**/0"):
        process = run_script(folder, offload)
        signal_at(process, offload, pattern, signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    written = {p: p.stat().st_mtime_ns for p in offload.glob("weights/*/*/done.json")}
    assert written
    process = run_script(folder, offload)
    assert process.communicate(timeout=120)[0].strip() == resident_tokens(folder)
    for path, when in written.items():
        assert path.stat().st_mtime_ns == when
    assert list((offload / "runs").iterdir()) == []


@pytest.mark.slow
def test_two_runs_in_one_folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    processes = [run_script(checkpoint(), tmp_path / "offload") for _ in range(2)]
    expected = resident_tokens(checkpoint())
    for process in processes:
        assert process.communicate(timeout=120)[0].strip() == expected


def test_interrupt_leaves_only_reusable_files(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    process = run_script(checkpoint(), tmp_path / "offload")
    signal_at(process, tmp_path / "offload", "runs/*/kv-0-*/c/**/0", signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0, errors
    assert list((tmp_path / "offload" / "runs").iterdir()) == []
