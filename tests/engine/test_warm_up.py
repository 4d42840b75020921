"""After warming up, a greedy run compiles nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.layers import programs
from flexgen_jax.layers.programs import Program, cache, ends, experts, prompts, tokens
from flexgen_jax.policy.policy import Placement, Workload
from tests.helpers.families import BASE, EXPERTS
from tests.helpers.models import BASE as OPT
from tests.helpers.models import byte_tokenizer

CONFIGS: dict[str, dict[str, Any]] = {
    "dense": OPT,
    "experts": BASE | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 8},
    "a shared expert": BASE
    | EXPERTS
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 16},
}


HOST = {"attention": "host", "cache": Placement(0.5, 0.5)}
CASES = [
    ("dense", {"weight_bits": 4}, {}),
    ("dense", {"prefill_chunk": 16}, {}),
    ("dense", {"cache_bits": 4, **HOST}, {"unified": False}),
    ("dense", {"attention_sparsity": 0.5, **HOST}, {"unified": False}),
    ("dense", {"attention_sparsity": 0.5, **HOST, "attention": "device"}, {"unified": False}),
    ("dense", {**HOST, "cache": Placement(0, 1)}, {"unified": True}),
    ("dense", {"cache": Placement(0.5, 0.5), "attention": "device"}, {"unified": False}),
    ("experts", {"prefill_chunk": 16}, {}),
    ("experts", {"weight_bits": 4}, {}),
    ("a shared expert", {}, {}),
    ("dense", {"batch_size": 1, "num_batches": 3, "draft_tokens": 2}, {"unified": False}),
    ("experts", {"batch_size": 1, "num_batches": 3, "draft_tokens": 2}, {}),
]


def write_model(folder: Path, name: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "policy", "options"), CASES)
def test_a_greedy_run_compiles_nothing_after_warming_up(
    tmp_path: Path, name: str, policy: dict[str, Any], options: dict[str, Any]
) -> None:
    write_model(tmp_path, name)
    given = Policy(**{"batch_size": 3, "kv_block_tokens": 4, **policy})
    with LLM(tmp_path, dtype="float32", policy=given, dummy_weights=True, **options) as llm:
        llm.warm_up(32, 7, 3)
        params = SamplingParams.plain(7)
        llm.generate(prompt_token_ids=[[5] * 32] * 3, sampling_params=params)
        assert llm.report()["compile_in_run_s"] == 0


@pytest.mark.parametrize("unified", [True, False])
def test_a_run_with_a_prefix_compiles_nothing_after_warming_up(
    tmp_path: Path, unified: bool
) -> None:
    write_model(tmp_path, "dense")
    policy = Policy(batch_size=3, kv_block_tokens=4, cache=Placement(0.5, 0.5))
    with LLM(tmp_path, dtype="float32", policy=policy, dummy_weights=True, unified=unified) as llm:
        prefix = list(range(20, 52))  # its last token is computed with each row
        workload = Workload(prompt_len=32, gen_len=7, num_sequences=3, prefix_len=32)
        llm._runner.open(llm._runner.policy_for(workload), workload, compiles=True)
        llm.generate(
            prompt_token_ids=[[*prefix, *[n] * 16] for n in (5, 6, 7)],
            sampling_params=SamplingParams.plain(7),
            prefix=prefix,
        )
        report = llm.report()
        assert report["prompt_tokens"] == 31 + 3 * 17 and report["compile_in_run_s"] == 0


def test_the_package_names_all_kinds_of_programs() -> None:
    """Each stands in one file of the package, and says what its function takes and returns."""
    found = {
        value
        for module in (prompts, tokens, cache, experts, ends)
        for value in vars(module).values()
        if isinstance(value, Program)
    }
    assert found == {value for value in vars(programs).values() if isinstance(value, Program)}
    assert len({kind.name for kind in found}) == len(found)
    assert all("->" in (kind.build.__doc__ or "") for kind in found)
