"""Opens and runs models whose files are damaged: each generates, or is refused with an error that
says why.

    pip install gguf torch transformers bitsandbytes
    python scripts/checks/check_mutations.py [--count 1000] [--seed 0] [--limit-s 60]

The models are safetensors in several formats, one with an adapter, and GGUF files. Damages are
other bytes, mostly in the header; a file that is cut off, or grows; and other numbers in a header
or config. Prints every other end: an exception of another kind, a crash or a hang.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.errors import MachineError, UserError
from tests.formats.test_gguf import write_gguf
from tests.helpers.adapters import Adapted
from tests.helpers.families import Reference
from tests.helpers.published import write_published

FORMATS = ("fp8-block", "int4-zero", "gptq-order", "awq", "mxfp4", "nvfp4", "nf4-nested", "mlx-4")

NUMBERS = (0, 1, 2, 3, 7, 16, 63, 64, 65, 1000, -1, 2**31, 2**40, 0.5, None, "x", [], {}, True)
"""What a number of a header or a config becomes."""


def prepare(base: Path) -> list[str]:
    """Writes the undamaged models; returns their names."""
    write_gguf(base / "gguf-llama" / "m.gguf", "llama", {"": "Q4_0", "v_proj": "Q6_K"})
    write_gguf(base / "gguf-qwen3" / "m.gguf", "qwen3", {"": "F32"})
    for family in ("llama", "qwen3_moe", "lfm2"):
        Reference(base / family, family, 0)
    for kind in FORMATS:
        write_published(base / kind, "llama", kind)
    both = Reference(base / "adapter", "llama", 0)
    adapted = Adapted(both, base / "own", r".*[qv]_proj")
    for file in adapted.path.iterdir():
        shutil.move(file, base / "adapter" / file.name)
    adapted.path.rmdir()
    return sorted(path.name for path in base.iterdir())


def mutated(path: Path, rng: random.Random) -> str:
    """Damages a file; returns how."""
    content = bytearray(path.read_bytes())
    how = rng.choice(("bytes", "bytes", "bytes", "cut", "grown", "number", "number"))
    if how == "number" and path.suffix in (".json", ".safetensors"):
        return _with_other_number(path, content, rng)
    if how == "cut":
        del content[rng.randrange(len(content)) :]
    elif how == "grown":
        content += rng.randbytes(rng.randrange(1, 100))
    else:
        end = min(len(content), rng.choice((16, 200, 4000, len(content))))
        places = [rng.randrange(end) for _ in range(rng.choice((1, 1, 2, 8)))]
        for place in places:
            content[place] = rng.randrange(256)
        how = f"bytes at {places}"
    path.write_bytes(content)
    return how


def _with_other_number(path: Path, content: bytearray, rng: random.Random) -> str:
    """Changes a number or a list in a JSON file, or in the header of safetensors."""
    is_json = path.suffix == ".json"
    length = len(content) if is_json else 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[0 if is_json else 8 : length])
    entry, places = header, list[tuple[Any, Any]]()

    def walk(entry: Any) -> None:
        items = entry.items() if isinstance(entry, dict) else enumerate(entry)
        for key, value in items:
            places.append((entry, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(entry)
    if not places:
        return "nothing"
    owner, key = rng.choice(places)
    owner[key] = rng.choice(NUMBERS)
    written = json.dumps(header).encode()
    prefix = b"" if is_json else len(written).to_bytes(8, "little")
    path.write_bytes(prefix + written + (b"" if is_json else bytes(content[length:])))
    return f"{key!r} is {owner[key]!r}"


def run(folder: Path) -> str:
    """Returns how a damaged model ends."""
    files = [*folder.glob("*.gguf")]
    policy = Policy(batch_size=1, num_batches=1)
    with LLM(files[0] if files else folder, dtype="float32", policy=policy) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        (result,) = llm.generate(prompt_token_ids=[[5, 9, 20]], sampling_params=params)
        return "generated" if result.error is None else "refused"


def work(connection: Any) -> None:
    """Runs a model for each folder that arrives, until one is empty text."""
    while folder := connection.recv():
        try:
            end = run(Path(folder))
        except (UserError, MachineError) as error:
            end = "refused" if str(error) else "an error without words"
        except BaseException:
            end = f"other error\n{traceback.format_exc(limit=-4)}"
        connection.send(end)


class Worker:
    """A process that runs models; a new one after a crash or a hang."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._process = limit_s, None

    def run(self, folder: Path) -> str:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=work, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._connection.send(str(folder))
        try:
            if self._connection.poll(self._limit_s):
                return str(self._connection.recv())
            end = "hang"
        except EOFError:
            end = "crash"
        self._process.kill()
        self._process = None
        return end

    def close(self) -> None:
        if self._process is not None:
            self._connection.send("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=60.0)
    options = parser.parse_args()
    worker, ends = Worker(options.limit_s), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        base, folder = Path(name) / "base", Path(name) / "damaged"
        base.mkdir()
        names = prepare(base)
        for number in range(options.count):
            rng = random.Random(f"{options.seed}/{number}")  # noqa: S311 - no secret
            shutil.rmtree(folder, ignore_errors=True)
            model = names[number % len(names)]
            shutil.copytree(base / model, folder)
            file = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
            how = mutated(file, rng)
            end = worker.run(folder)
            ends[end.partition("\n")[0]] += 1
            if end not in ("generated", "refused"):
                print(f"{number}: {model}, {file.name}, {how}: {end}", flush=True)
    worker.close()
    print(", ".join(f"{end}: {count}" for end, count in sorted(ends.items())))
    sys.exit(bool(set(ends) - {"generated", "refused"}))


if __name__ == "__main__":
    main()
