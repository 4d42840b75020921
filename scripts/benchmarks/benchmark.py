"""Measures this project and the PyTorch reference alternately, under equal limits.

    sudo .venv/bin/python scripts/benchmarks/benchmark.py cpu-full --folder /ssd/b --json r.json

Every run is a process of its own that begins with a cold page cache. On a CPU it has a memory
cgroup of its own, which counts the page cache. Compilation, warm-up in memory, and placing the
weights are not counted. The machine is measured first, for the planner and for the bound, and again
before each round that begins ten minutes later or more. The disk's rate in the bound is the higher
rate of reading a run's weights directly before and after the run. The reference's best batch is
found by doubling it until the run fails or slows; then all take turns (A B C A B C ...). The suites
for the CPU leave a GPU alone. Suites:

  cpu-quick  ten minutes            ablation   one technique less at a time (the paper's table 4)
  cpu-full   some hours             latency    throughput over latency (figure 1)
  gpu-16gb   the paper's table 2    lengths    other lengths of prompts and texts
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from disk_rate import read_rate
from flexgen_jax.machine.jax_settings import DEFAULT_GPU_SHARE, FRACTION, OLD_FRACTION
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.weight_source import DummyWeights
from flexgen_jax.policy.hardware import UNSTEADY, HardwareProfile, Rate
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import Setting
from limits import run_limited
from report import markdown
from roofline import binding, bound_s, roofline
from suites import Case, Ours, narrowed, suites

HERE = Path(__file__).parent
KEPT = (
    *("generation_throughput", "total_s", "prefill_s", "decode_s", "num_sequences", "policy"),
    *("predicted", "bytes", "busy_s", "breakdown", "storage_read_bytes", "peak_bytes"),
    *("computed_peak_bytes", "device_peak_bytes", "offload", "batch_size"),
)
"""Fields of a run's report that are kept."""

FRESH_S = 600.0
"""A profile older than this many seconds is measured again before a round: shared machines drift
within minutes, and an old bound says nothing."""

TRIES = 3
"""A machine too busy to be measured is measured again, at most this many times in all."""


class Way(NamedTuple):
    """One way to run the reference: see the flags of `torch_reference.py`."""

    offload: str
    batch: int
    dtype: str = ""

    def of(self, dtype: str) -> Way:
        """Returns the way with this dtype, unless it has one."""
        return self._replace(dtype=self.dtype or dtype)

    def __str__(self) -> str:
        return f"{self.offload}, {self.dtype}, batch {self.batch}"


class Bench:
    """The runs of one suite, which end up in one file."""

    def __init__(self, args: argparse.Namespace, gpu_memory: int | None) -> None:
        self.folder: Path = args.folder
        self.repeat: int = args.repeat
        self.gpu_memory = gpu_memory
        self.dtype = "bfloat16" if gpu_memory is None else "float16"
        self.dtypes = ("bfloat16", "float32") if gpu_memory is None else ("float16",)
        self.known: Way | None = args.reference and args.reference.of(self.dtypes[0])
        self.keep_profile: bool = args.keep_profile and self._profile_file.exists()
        self.profiled_at = 0.0
        self.profiles: list[HardwareProfile] = []
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")  # where runs look for it
        self.renew_profile()

    @property
    def _profile_file(self) -> Path:
        return self.folder / "profile.json"

    def renew_profile(self) -> None:
        """Measures this machine, unless that was done recently or its profile is to be kept."""
        if self.profiles and (self.keep_profile or time.monotonic() - self.profiled_at < FRESH_S):
            return
        for _ in range(0 if self.keep_profile else TRIES):
            self._measure_profile()
            if self._read_profile().spread() <= UNSTEADY:
                break
        self.profiles.append(self._read_profile())
        self.profiled_at = time.monotonic()

    def _read_profile(self) -> HardwareProfile:
        return HardwareProfile.from_json(self._profile_file.read_text())

    def _measure_profile(self) -> None:
        command = [sys.executable, "-m", "flexgen_jax", "profile", "--json"]
        command += [str(self._profile_file), "--dtype", self.dtype]
        subprocess.run([*command, "--offload-dir", str(self.folder / "offload")], check=True)

    def case(self, case: Case, keep: Any) -> None:
        """Runs a case; calls `keep` with every run's row."""
        best = self._best_reference(case, keep) if self._write_checkpoint(case) else None
        chosen: dict[str, Any] | None = None
        for round_ in range(self.repeat):
            self.renew_profile()
            for ours in case.ours:
                row = self.ours(case, ours, chosen)
                keep(row | {"round": round_})
                if ours == case.ours[0] and chosen is None and "failed" not in row:
                    chosen = row["policy"]
            if best is not None:
                keep(self.reference(case, best) | {"round": round_})

    def _write_checkpoint(self, case: Case) -> bool:
        """Writes the reference's checkpoint; returns false if the case has no reference or there is
        no room."""
        if not case.offloads:
            return False
        way = Way("none", 1, self.dtypes[0])
        write = [*self._reference_command(case, way), "--write-only"]
        if subprocess.run(write).returncode == 0:
            return True
        print(f"{case.name}: no reference, its checkpoint could not be written", flush=True)
        shutil.rmtree(self.folder / case.model.replace("/", "--"), ignore_errors=True)
        return False

    def _best_reference(self, case: Case, keep: Any) -> Way | None:
        """Returns the reference's way of the highest throughput. Its dtype is the faster one at the
        first batch, because processors differ in their matmul rates."""
        if self.known is not None and not case.is_batch_fixed:
            return self.known
        found: dict[Way, float] = {}

        def run(offload: str, batch: int, dtype: str) -> float:
            way = Way(offload, batch, dtype)
            if way not in found:
                row = self.reference(case, way)
                keep(row | {"round": "search"})
                found[way] = float(row.get("generation_throughput", 0.0))
            return found[way]

        for offload in case.offloads:
            dtype = max(self.dtypes, key=partial(run, offload, case.batch))
            if not case.is_batch_fixed:
                search(partial(run, offload, dtype=dtype), case.batch)
        best = max(found, key=lambda way: found[way], default=None)
        return best if best is not None and found[best] > 0 else None

    def ours(self, case: Case, ours: Ours, chosen: dict[str, Any] | None) -> dict[str, Any]:
        """Runs `flexgen-jax bench` once; returns its row, with its bound."""
        flags = [*self._shape(case), "--dtype", self.dtype, "--dummy-weights", *ours.flags]
        flags += ["--offload-dir", str(self.folder / "offload")]
        if ours.policy is not None:
            if chosen is None:
                row = {"case": case.name, "name": f"ours, {ours.name}"}
                return row | {"failed": "no policy to change"}
            file = self.folder / "policy.json"
            file.write_text(json.dumps(chosen | ours.policy))
            flags += ["--policy", str(file)]
        command = [sys.executable, "-m", "flexgen_jax", "bench", *flags]
        before = self._disk_rate(case, flags)
        row = self._measured(case, f"ours, {ours.name}", command, self._gpu_settings(case))
        if "failed" in row:
            return row
        found = (before, self._disk_rate(case, flags))
        row["disk_read_rates"] = [rate for rate in found if rate is not None]
        return row | self._bound(case, row)

    def _gpu_settings(self, case: Case) -> dict[str, str | None]:
        """Returns the variables that keep JAX within the case's memory, as the reference is kept
        within it by PyTorch; on a smaller card it gets what a card can give."""
        if not case.on_gpu or self.gpu_memory is None:
            return {}
        share = min(float(DEFAULT_GPU_SHARE), case.limit / self.gpu_memory)
        return {FRACTION: f"{share:.4f}", OLD_FRACTION: None}  # both together are an error

    def _disk_rate(self, case: Case, flags: list[str]) -> float | None:
        """Returns the byte/s at which the weights of a run can be read now; None if they are not on
        disk."""
        bits = int(flags[flags.index("--weight-bits") + 1]) if "--weight-bits" in flags else 16
        name = DummyWeights(known_shape(case.model)).fingerprint(self.dtype)
        name += Policy(weight_bits=bits).formats(self.dtype).suffix
        return read_rate(self.folder / "offload" / "weights" / name)

    def reference(self, case: Case, way: Way) -> dict[str, Any]:
        """Runs the PyTorch reference once; returns its row."""
        return self._measured(case, f"reference, {way}", self._reference_command(case, way))

    def _reference_command(self, case: Case, way: Way) -> list[str]:
        command = [sys.executable, str(HERE / "torch_reference.py"), *self._shape(case)]
        command += ["--offload", way.offload, "--batch-size", str(way.batch)]
        command += ["--dtype", way.dtype, "--folder", str(self.folder)]
        if case.on_gpu:
            return [*command, "--device", "cuda", "--device-memory", str(case.limit)]
        # The rest of the limit is for Python, PyTorch, the KV cache and temporaries.
        return [*command, "--host-memory", str(case.limit // 3)]

    def _shape(self, case: Case) -> list[str]:
        lengths = ["--prompt-len", str(case.prompt_len), "--gen-len", str(case.gen_len)]
        return ["--model", case.model, *lengths]

    def _measured(
        self,
        case: Case,
        name: str,
        command: list[str],
        settings: dict[str, str | None] | None = None,
    ) -> dict[str, Any]:
        """Runs a command that writes its figures to a file; returns them, or how the run failed.

        settings: environment variables for it.
        """
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        command = [*command, "--json", str(result)]
        limit = None if case.on_gpu else case.limit
        outcome = run_limited(command, limit, case.timeout, settings)
        row: dict[str, Any] = {"case": case.name, "name": name, "limit": case.limit}
        row |= {"command": " ".join(command), "process_s": outcome.seconds}
        row |= {"cgroup_peak_bytes": outcome.peak_bytes, "cold_page_cache": outcome.is_cold}
        row |= {"settings": settings or {}}
        if result.exists():
            report = json.loads(result.read_text())
            row |= {key: report[key] for key in KEPT if key in report}
        else:
            code = "timed out" if outcome.returncode is None else f"exit code {outcome.returncode}"
            row["failed"] = f"{code}: {outcome.output[-300:]}"
        speed = row.get("generation_throughput")
        said = f"{speed:.2f} token/s" if speed else row["failed"]
        print(f"{case.name}: {name}: {said}", flush=True)
        return row

    def _bound(self, case: Case, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the least possible seconds of a run, and their share of its time: by the profile,
        but with the disk at its best around the run."""
        policy = Policy.from_json(json.dumps(row["policy"]))
        workload = Workload(case.prompt_len, case.gen_len, row["num_sequences"])
        hw, rates = self.profiles[-1], row["disk_read_rates"]
        if rates:
            hw = replace(hw, disk_read=Rate.constant(max(rates)))
        setting = Setting(known_shape(case.model), self.dtype, hw.unified, hw.sizes)
        seconds = roofline(setting, policy, workload, hw)
        share = bound_s(seconds) / row["total_s"]
        return {"bound_s": seconds, "binding": binding(seconds), "of_bound": share}


def search(run: Callable[[int], float], first: int) -> dict[int, float]:
    """Searches the fastest batch; returns token/s by batch, where 0 is a run that failed.

    It halves the first batch until a run succeeds, doubles it until a run fails or two in a row are
    slower, and tries the middle before a failure.
    """
    found = {first: run(first)}
    batch = first
    while not found[batch] and batch > 1:
        batch //= 2
        found[batch] = run(batch)
    slower = 0
    while found[batch] and slower < 2:
        batch *= 2
        if batch not in found:
            found[batch] = run(batch)
        slower = slower + 1 if found[batch] < max(found.values()) else 0
    middle = batch * 3 // 4
    if not found[batch] and found.get(batch // 2) and middle > batch // 2:
        found[middle] = run(middle)
    return found


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    packages = ("jax", "flax", "tensorstore", "torch", "transformers", "accelerate")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in packages},
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_gpu(suite: str) -> int | None:
    """Returns the bytes of memory of the GPU that the suite is to use, None if it uses none. A
    process of its own asks JAX, so that the GPU is free again afterwards."""
    if not suite.startswith("gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        return None
    # JAX tells its own limit, here half of the card.
    settings = {FRACTION: "0.5", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    code = "import jax; device = jax.devices()[0]\n"
    code += 'print(2 * device.memory_stats()["bytes_limit"] if device.platform != "cpu" else 0)'
    command = [sys.executable, "-c", code]
    environment = {k: v for k, v in os.environ.items() if k != OLD_FRACTION} | settings
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = found.stdout.split()
    nbytes = int(said[-1]) if said and said[-1].isdigit() else 0
    if not nbytes:
        error = found.stderr.strip().splitlines()
        reason = f" ({error[-1]})" if found.returncode and error else ""
        print(
            f"{suite}: JAX finds no GPU{reason}. The suite runs on the CPU, with a tenth of the "
            "models' size, prompts and memory; its figures say nothing about a GPU.",
            file=sys.stderr,
            flush=True,
        )
    return nbytes or None


def known_best(text: str) -> Way:
    """Parses `disk:16` or `disk:16:float32` as a way; raises `ValueError`."""
    offload, batch, *dtype = text.split(":")
    if dtype and dtype[0] not in ("bfloat16", "float32", "float16"):
        raise ValueError(f"there is no dtype {dtype[0]!r}")
    return Way(offload, int(batch), *dtype)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=suites(False))
    parser.add_argument("--folder", type=Path, required=True, help="On the disk to measure.")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="Only cases whose name contains this.")
    parser.add_argument(
        "--ours",
        default="",
        help="Of our own ways, only those whose name contains this, e.g. '4 bits'.",
    )
    parser.add_argument(
        "--reference",
        type=known_best,
        metavar="OFFLOAD:BATCH[:DTYPE]",
        help="Its best way, e.g. disk:16, where a run before has found it; saves the search.",
    )
    parser.add_argument(
        "--keep-profile", action="store_true", help="Use only the profile of an earlier run."
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    gpu_memory = find_gpu(args.suite)
    try:
        cases = narrowed(suites(gpu_memory is not None)[args.suite](), args.only, args.ours)
    except ValueError as error:
        parser.error(str(error))
    args.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    about = {"suite": args.suite, "command": " ".join(sys.argv), "machine": machine()}
    about["gpu_memory"] = gpu_memory

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if args.json:  # written after every run, since a suite takes long
            profiles = [json.loads(profile.to_json()) for profile in bench.profiles]
            content = {**about, "profiles": profiles, "runs": rows}
            args.json.write_text(json.dumps(content, indent=1) + "\n")

    bench = Bench(args, gpu_memory)
    for case in cases:
        bench.case(case, keep)
    print(markdown(rows))


if __name__ == "__main__":
    main()
