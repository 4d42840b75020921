"""Measures this project and llama.cpp in turn: 4-bit weights on a CPU, in memory or with less.

    pip install llama-cpp-python gguf
    sudo .venv/bin/python scripts/benchmarks/llama_reference.py --folder /ssd/b --json r.json
    sudo .venv/bin/python scripts/benchmarks/llama_reference.py --folder /ssd/bench --batches 32 \
        --model meta-llama/Llama-2-7b-hf --limit 3GB --gen-len 8
    sudo .venv/bin/python scripts/benchmarks/llama_reference.py --folder /ssd/bench \
        --batches 1 32 --model openai/gpt-oss-20b --limit 6GB
    sudo .venv/bin/python scripts/benchmarks/llama_reference.py --folder /ssd/b --peer-format Q4_K_M

llama.cpp runs a model of the same shape with random weights, written into the folder: a LLaMA in
Q4_0, or gpt-oss as it is published, with experts in MXFP4 and all else in bfloat16, by the
functions of its library: prompts in batches as large as it likes them, then one token of every
sequence at a time, greedily. It maps its file into memory, as it does by default. Loading, placing
and compiling are not counted. Ours has random 4-bit weights of the same shape, in a format of its
own, or, with --weight-format file, the file that llama.cpp reads. With weights that are not of 16
bits it multiplies 8-bit integers where that is faster, as llama.cpp always does. Every run is a
process of its own, with --limit in a memory cgroup, which takes root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_jax.cpu import features
from flexgen_jax.models.formats.known import WEIGHT_FORMATS
from flexgen_jax.models.shapes import known_shape, raw_shape
from flexgen_jax.units import parse_bytes
from limits import run_limited
from llama_files import write_gguf

KEPT = ("generation_throughput", "prefill_s", "decode_s", "policy", "guessed_experts")
"""Fields of a run's report that are kept."""
PEER_FORMATS = ("Q4_0", "Q4_K_M")
TOGETHER = 2048
"""Most tokens that llama.cpp is given at a time; it takes them in parts of its own choice."""


class Peer:
    """A model in llama.cpp, and one context for `batch` sequences; is_mapped: whether weights stay
    in the mapped file instead of being repacked in memory, which must then hold all weights."""

    def __init__(
        self, file: Path, batch: int, tokens: int, vocabulary: int, is_mapped: bool
    ) -> None:
        import llama_cpp

        self.api, self.vocabulary = llama_cpp, vocabulary
        self.api.llama_backend_init()
        settings = self.api.llama_model_default_params()
        settings.use_extra_bufts = not is_mapped
        self.model = self.api.llama_model_load_from_file(str(file).encode(), settings)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {file}")
        wanted = self.api.llama_context_default_params()
        wanted.n_ctx, wanted.n_seq_max, wanted.n_batch = batch * tokens, batch, TOGETHER
        wanted.n_threads = wanted.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = self.api.llama_init_from_model(self.model, wanted)
        self.room = self.api.llama_batch_init(TOGETHER, 0, 1)

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def advance(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes tokens, each with its position, sequence, and whether its logits are wanted;
        returns the most likely next token for each."""
        for index, (token, position, sequence, is_wanted) in enumerate(tokens):
            self.room.token[index], self.room.pos[index] = token, position
            self.room.n_seq_id[index], self.room.seq_id[index][0] = 1, sequence
            self.room.logits[index] = is_wanted
        self.room.n_tokens = len(tokens)
        if self.api.llama_decode(self.context, self.room):
            raise SystemExit("llama.cpp failed")
        wanted = [index for index, token in enumerate(tokens) if token[3]]
        rows = (self.api.llama_get_logits_ith(self.context, index) for index in wanted)
        return [int(np.ctypeslib.as_array(row, (self.vocabulary,)).argmax()) for row in rows]

    def generate(self, prompts: np.ndarray, new: int) -> tuple[float, float]:
        """Returns the seconds of prompts, int32 [sequence, token], and of `new` tokens of each
        after the first."""
        self.clear()
        count, length = prompts.shape
        started = time.perf_counter()
        every = [
            (int(prompts[n, at]), at, n, at == length - 1)
            for n in range(count)
            for at in range(length)
        ]
        ids: list[int] = []
        for begin in range(0, len(every), TOGETHER):
            ids += self.advance(every[begin : begin + TOGETHER])
        between = time.perf_counter()
        for step in range(new - 1):
            ids = self.advance([(ids[n], length + step, n, True) for n in range(count)])
        return between - started, time.perf_counter() - between


def requantized(file: Path, kind: str) -> Path:
    """Returns the file's weights in another format, converted by llama.cpp next to the file."""
    made = file.with_suffix(f".{kind}.gguf")
    if not made.exists():
        import llama_cpp

        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        settings.allow_requantize = True
        if llama_cpp.llama_model_quantize(bytes(file), bytes(made), settings):
            made.unlink(missing_ok=True)
            raise SystemExit(f"llama.cpp cannot make {made}")
    return made


def run_peer(args: argparse.Namespace) -> dict[str, Any]:
    """Runs llama.cpp once, after a run with two tokens; returns a report like that of `bench`."""
    vocabulary = known_shape(args.model).vocab_size
    room = args.prompt_len + args.gen_len
    peer = Peer(
        file=args.peer,
        batch=args.batches[0],
        tokens=room,
        vocabulary=vocabulary,
        is_mapped=args.is_mapped,
    )
    shape = (args.batches[0], args.prompt_len)
    prompts = np.random.default_rng(1).integers(0, vocabulary, shape, np.int32)
    peer.generate(prompts[:1, :2], 2)
    prefill, decode = peer.generate(prompts, args.gen_len)
    return {
        "generation_throughput": prompts.shape[0] * args.gen_len / (prefill + decode),
        "prefill_s": prefill,
        "decode_s": decode,
    }


def commands(args: argparse.Namespace, file: Path, batch: int) -> dict[str, list[str]]:
    lengths = ["--prompt-len", str(args.prompt_len), "--gen-len", str(args.gen_len)]
    ours = [sys.executable, "-m", "flexgen_jax", "bench", *lengths, "--dtype", "bfloat16"]
    is_published = known_shape(args.model).published is not None
    if args.weight_format == "file":
        ours += ["--model", str(file)]
    else:
        ours += ["--model", args.model, "--dummy-weights"]
        if not is_published:
            ours += ["--weight-bits", "4", "--weight-format", args.weight_format]
    if features().int8:
        ours += ["--matmul-bits", "8"]
    ours += ["--offload-dir", str(args.folder / "offload"), "--num-sequences", str(batch)]
    if args.limit is None:
        ours += ["--percent", "100", "0", "100", "0", "100", "0", "--warm-up"]
        ours += ["--batch-size", str(batch), "--num-batches", "1"]
    elif not is_published:
        ours += ["--cache-bits", "4"]
    peer = [sys.executable, __file__, "--folder", str(args.folder), *lengths]
    peer += ["--model", args.model, "--batches", str(batch), "--peer", str(file)]
    return {"ours": ours, "llama.cpp": peer + ([] if args.limit is None else ["--is-mapped"])}


def measured(args: argparse.Namespace, name: str, command: list[str]) -> dict[str, Any]:
    """Runs a command that writes its figures to a file; returns them, or how the run failed."""
    result = args.folder / "result.json"
    result.unlink(missing_ok=True)
    outcome = run_limited([*command, "--json", str(result)], args.limit, args.timeout)
    if not result.exists():
        code = "timed out" if outcome.returncode is None else f"exit code {outcome.returncode}"
        print(f"{name} failed: {code}: {outcome.output[-300:]}", flush=True)
        return {"failed": f"{code}: {outcome.output[-300:]}"}
    report = json.loads(result.read_text())
    row = {key: report[key] for key in KEPT if key in report}
    speed, *seconds = (f"{row[key]:.2f}" for key in KEPT[:3])
    print(f"{name}: {speed} token/s, prompts {seconds[0]} s, then {seconds[1]} s", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="On the disk to measure.")
    parser.add_argument("--model", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--limit", type=parse_bytes, help="Of a memory cgroup, e.g. 3GB.")
    parser.add_argument(
        "--weight-format", choices=[*WEIGHT_FORMATS, "file"], default="own", help="Of ours."
    )
    parser.add_argument(
        "--peer-format", choices=PEER_FORMATS, default="Q4_0", help="Of llama.cpp's weights."
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=3600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--is-mapped", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        args.json.write_text(json.dumps(run_peer(args)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / f"{args.model.replace('/', '--')}.gguf"
    if not file.exists():
        write_gguf(file, raw_shape(args.model))
    if args.peer_format != "Q4_0":
        file = requantized(file, args.peer_format)
    rows = [
        {
            "name": name,
            "batch": batch,
            "round": round_,
            **measured(args, f"batch {batch}: {name}", command),
        }
        for batch in args.batches
        for round_ in range(args.repeat)
        for name, command in commands(args, file, batch).items()
    ]
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
