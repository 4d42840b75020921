"""Tests how compiled programs are weighed, and that a card's description is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"

MODULE = """HloModule jit_run, is_scheduled=true

%fused_take (param_0.1: f16[1000,64], param_1.2: s32[2]) -> f16[2,64] {
  %param_0.1 = f16[1000,64]{1,0} parameter(0)
  %param_1.2 = s32[2]{0} parameter(1)
  ROOT %gather.3 = f16[2,64]{1,0} gather(%param_0.1, %param_1.2), offset_dims={1}
}

%fused_append (param_0.4: f16[8,64], param_1.5: f16[1,64], param_2.6: s32[]) -> f16[8,64] {
  %param_0.4 = f16[8,64]{1,0} parameter(0)
  %param_1.5 = f16[1,64]{1,0} parameter(1)
  %param_2.6 = s32[] parameter(2)
  ROOT %dus.1 = f16[8,64]{1,0} dynamic-update-slice(%param_0.4, %param_1.5, %param_2.6)
}

%body (arg.1: (s32[], f32[64])) -> (s32[], f32[64]) {
  %arg.1 = (s32[], f32[64]{0}) parameter(0)
  %get-tuple-element.1 = s32[] get-tuple-element(%arg.1), index=0
  %get-tuple-element.2 = f32[64]{0} get-tuple-element(%arg.1), index=1
  %copy.9 = f32[64]{0} copy(%get-tuple-element.2)
  ROOT %tuple.3 = (s32[], f32[64]{0}) tuple(%get-tuple-element.1, %copy.9)
}

ENTRY %main (table: f16[1000,64], rows: s32[2]) -> (f16[2,64], f16[8,64]) {
  %table = f16[1000,64]{1,0} parameter(0)
  %rows = s32[2]{0} parameter(1)
  %tail = f16[8,64]{1,0} parameter(2)
  %new = f16[1,64]{1,0} parameter(3)
  %at = s32[] parameter(4)
  %x = f32[64]{0} parameter(5)
  %take = f16[2,64]{1,0} fusion(%table, /*index=1*/%rows), kind=kLoop, calls=%fused_take
  %append = f16[8,64]{1,0} fusion(%tail, %new, %at), kind=kLoop, calls=%fused_append
  %tuple.1 = (s32[], f32[64]{0}) tuple(%at, %x)
  %while.1 = (s32[], f32[64]{0}) while(%tuple.1), body=%body, config={"known_trip_count":{"n":"3"}}
  %kernel = (f16[64]{0}, f32[2]{0}) custom-call(%new, %x), target="__gpu$xla.gpu.triton"
  %gemm = (f16[64]{0}, s8[4194304]{0}) custom-call(%new, %x), custom_call_target="__cublas$gemm"
  ROOT %tuple.2 = (f16[2,64]{1,0}, f16[8,64]{1,0}) tuple(%take, %append)
}
"""
"""A module as XLA prints it."""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "benchmarks"))


@pytest.mark.usefixtures("scripts")
def test_the_cost_of_a_module() -> None:
    import hlo_cost

    cost = hlo_cost.cost(MODULE)
    assert cost.opcodes == {"fusion": 2, "copy": 3, "custom-call": 2}
    assert cost.kernels == 7
    row = 64 * 2
    taken = 2 * row + 2 * row + 2 * 4  # read, written, and the rows' numbers
    appended = row + row + 4  # the tail is not read
    copied = 3 * 2 * 64 * 4
    called = row + 64 * 4 + 64 * 2 + 2 * 4
    multiplied = row + 64 * 4 + 64 * 2  # without the room that cuBLAS asks for
    assert cost.nbytes == taken + appended + copied + called + multiplied


@pytest.mark.parametrize(
    ("cards", "model", "rows", "bits", "count", "most"),
    [
        (["a100", "l4", "h100"], "facebook/opt-125m", 1, (4, 16), 3 * 4, 1.3),
        (["l4"], "facebook/opt-125m", 64, (4, 4), 4, 4.0),  # so small a model's hidden states weigh
        (["l4"], "deepseek-ai/DeepSeek-V2-Lite", 8, (4, 16), 2 * 3, 1.5),
    ],
    ids=["cards", "many rows", "latent attention"],
)
def test_programs_compile_for_cards_that_are_not_there(
    cards: list[str], model: str, rows: int, bits: tuple[int, int], count: int, most: float
) -> None:
    """All kernels; bits: of weights and of the cache; count: programs of a token; most: bytes that
    they move over the least."""
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the extra gpu-compile")
    command = [sys.executable, str(SCRIPTS / "gpu_compile.py"), "--cards", *cards]
    command += ["--models", model, "--rows", str(rows)]
    command += ["--bits", str(bits[0]), "--cache-bits", str(bits[1])]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MORE than" not in done.stdout
    tokens = [line for line in done.stdout.splitlines() if ": token" in line]
    assert len(tokens) == count
    for line in tokens:
        assert float(line.split(" of the least")[0].split()[-1]) < most
