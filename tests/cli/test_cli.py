"""Tests the commands, and that every wrong use gives one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_jax.cli.main import main
from tests.helpers.command_line import run
from tests.helpers.models import write_checkpoint

REPORT = {
    "model",
    "policy",
    "prompt_len",
    "gen_len",
    "num_sequences",
    "prefill_s",
    "decode_s",
    "total_s",
    "compile_s",
    "generation_throughput",
    "prefill_throughput",
    "decode_throughput",
    "bytes",
    "busy_s",
    "peak_bytes",
    "realized",
}


def test_a_prefix_is_put_before_every_prompt(tmp_path: Path) -> None:
    text = "The Congress shall have power to lay and collect taxes, duties, imposts and excises, "
    prefix, out = tmp_path / "prefix.txt", tmp_path / "out.json"
    prefix.write_text(text)
    ends = ["and to pay the debts", "and", "to the States"]
    found = []
    for prompts, flags in ((ends, ["--prefix", prefix]), ([text + end for end in ends], [])):
        shape = ["--max-tokens", 5, "--dtype", "float32", "--json", out]
        result = run("generate", *prompts, *shape, *flags)
        assert result.exit_code == 0, result.output
        found.append([r["token_ids"] for r in json.loads(out.read_text())["results"]])
    assert found[0] == found[1]
    prefix.write_bytes(b"\xff")
    assert "cannot read --prefix" in refused("generate", "a", "--prefix", prefix)


def refused(*arguments: object) -> str:
    """Runs a command that must end with exit code 2; returns the one line that it writes to
    stderr."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("flexgen-jax: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr


def test_generate_with_the_shipped_model(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("generate", "The people", "--max-tokens", 8, "--json", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["results"][0]["prompt"] == "The people"
    assert result.stdout.startswith("The people" + found["results"][0]["text"])
    assert len(found["results"][0]["token_ids"]) == 8
    assert any(character.isalpha() for character in found["results"][0]["text"])


def test_prompts_file_and_every_tier(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo three\nfour\n")
    texts = []
    for flags in (
        ["--percent", 0, 0, 0, 0, 0, 0],
        ["--weights", "device=30,host=40", "--cache", "device=20,host=50", "--schedule", "row"],
        ["--no-overlap", "--batch-size", 2, "--num-batches", 2],
        ["--weight-bits", 4, "--cache-bits", 8],
        ["--matmul-bits", 8],
    ):
        out = tmp_path / "out.json"
        common = ["--model", checkpoint(), "--dtype", "float32", "--offload-dir", tmp_path / "o"]
        common += ["--max-tokens", 8]
        result = run("generate", "--prompts-file", prompts, *common, "--json", out, *flags)
        assert result.exit_code == 0, result.output
        texts.append([r["text"] for r in json.loads(out.read_text())["results"]])
    assert len(texts[0]) == 3
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("warm_up", [[], ["--warm-up"]])
def test_bench_report(tmp_path: Path, warm_up: list[str]) -> None:
    """With a warm-up everything runs twice, and the report covers the second time alone."""
    out, trace = tmp_path / "r.json", tmp_path / "trace.json"
    folder = write_checkpoint(tmp_path / "m")
    shape = ["--prompt-len", 16, "--gen-len", 8, "--batch-size", 2, "--num-batches", 2]
    flags = ["--percent", 0, 50, 50, 0, 100, 0, "--offload-dir", tmp_path / "o", "--json", out]
    flags += ["--trace", trace, *warm_up]
    result = run("bench", "--model", folder, "--dummy-weights", *shape, *flags)
    assert result.exit_code == 0, result.output
    assert trace.read_text().count("decoder layer 0, token 0, batch 0") == 1 + len(warm_up)
    report = json.loads(out.read_text())
    assert report.keys() >= REPORT
    assert report["num_tokens"] == 4 * 8
    total = report["prefill_s"] + report["decode_s"]
    assert report["total_s"] == pytest.approx(total)
    assert report["generation_throughput"] == pytest.approx(32 / total)
    weights = report["realized"]["weights"]
    assert weights["host"] == pytest.approx(0.5, abs=0.1)
    # Every token reads the disk's share of the weights once; nothing else reads as much.
    on_disk = report["peak_bytes"]["disk"]
    assert report["bytes"]["disk_read"] >= 8 * 0.9 * on_disk * 0.5
    assert report["peak_bytes"]["host"] <= report["computed_peak_bytes"]["host"]


@pytest.mark.parametrize("sparsity", [1.0, 0.5])
def test_bench_copies(checkpoint: Callable[[str], Path], tmp_path: Path, sparsity: float) -> None:
    """With --copies, host and device are apart on a CPU too, and the report says what a decode step
    moves, in the second block as in the first."""
    out = tmp_path / "r.json"
    shape = ["--prompt-len", 16, "--gen-len", 3, "--batch-size", 2, "--num-sequences", 4]
    flags = ["--cache", "host=100", "--attention-sparsity", sparsity, "--json", out]
    result = run("bench", "--copies", "--model", checkpoint(), *shape, *flags)
    assert result.exit_code == 0, result.output
    assert "moved per decode step: host_to_device" in result.output
    report = json.loads(out.read_text())
    assert report["decode_steps"] == 2 * 2
    assert 0 < report["decode_bytes"]["host_to_device"] <= report["bytes"]["host_to_device"]


def test_policy_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from flexgen_jax import Policy

    path = tmp_path / "p.json"
    path.write_text(Policy.from_percent(0, 100, 0, 100, 0, 100, batch_size=2).to_json())
    out = tmp_path / "out.json"
    fewer = ["--matmul-bits", 8]
    result = run("generate", "a", "--model", checkpoint(), "--policy", path, "--json", out, *fewer)
    assert result.exit_code == 0, result.output
    policy = json.loads(out.read_text())["report"]["policy"]
    assert (policy["weights"]["host"], policy["matmul_bits"]) == (1.0, 8)
    assert "--policy" in refused("generate", "a", "--policy", tmp_path / "missing.json")
    path.write_text("{")
    assert "not JSON" in refused("generate", "a", "--policy", path)


def test_bad_models(tmp_path: Path) -> None:
    assert "config.json" in refused("generate", "a", "--model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llamb"}')
    assert "llamb" in refused("generate", "a", "--model", tmp_path)
    assert "not exist" in refused("generate", "a", "--model", tmp_path / "nowhere")
    said = refused("bench", "--model", "facebook/opt-9t", "--dummy-weights")
    assert "facebook/opt" in said and "flexgen-jax models" in said
    assert "--model" in refused("bench", "--dummy-weights")


def test_bad_flags(tmp_path: Path) -> None:
    assert "more than 100 %" in refused("generate", "a", "--percent", 60, 50, 0, 0, 0, 0)
    assert "cache" in refused("generate", "a", "--percent", 0, 0, -5, 0, 0, 0)
    assert "device=20,host=80" in refused("generate", "a", "--weights", "gpu=3")
    assert "100" in refused("generate", "a", "--weights", "device=20,disk=20")
    assert "cannot be combined" in refused(
        "generate", "a", "--weights", "host=1", "--percent", 0, 0, 0, 0, 0, 0
    )
    assert "16GB" in refused("generate", "a", "--device-memory", "lots")
    assert "top_p" in refused("generate", "a", "--top-p", 3)
    assert "max_tokens" in refused("generate", "a", "--max-tokens", 0)
    assert "batch_size" in refused("generate", "a", "--batch-size", 0)
    assert "context" in refused("bench", "--prompt-len", 10_000)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "no prompts" in refused("generate", "--prompts-file", empty)
    assert "cannot write --json" in refused("generate", "a", "--json", tmp_path / "no" / "x")
    assert "cannot write --latency-curve" in refused(
        "plan", "--latency-curve", tmp_path / "no" / "x.png"
    )
    assert "--num-sequences" in refused("bench", "--num-sequences", 0)
    for_t4 = ("--hardware", "t4-16gb", "--prompt-len", 64)
    assert "more than the model's 5 layers" in refused("plan", "--stages", 9, *for_t4)
    assert "--stages cannot be combined" in refused(
        "plan", "--stages", 2, *for_t4, "--batch-size", 4
    )


def test_a_plan_for_stages_has_one_for_each(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = run("plan", "--stages", 2, "--hardware", "t4-16gb", "--num-sequences", 8,
                 "--prompt-len", 64, "--json", file)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "stage 0, layers 0 to" in result.stdout and "stage 1, layers" in result.stdout
    found = json.loads(file.read_text())
    assert found["num_sequences"] == 8 and len(found["stages"]) == 2
    assert found["predicted"]["generation_throughput"] > 0


@pytest.mark.parametrize("name", ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"])
def test_one_command_leads_in_one_process_and_is_a_stage_in_others(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from flexgen_jax.engine.stages import worker as stage_worker

    class EndedError(Exception):
        pass

    def work(*how: object) -> None:
        raise EndedError(how)

    monkeypatch.setattr(stage_worker, "work", work)
    monkeypatch.setenv(stage_worker.KEY, "secret")
    command = ("generate", "a", "--stages", 2, "--coordinator", "127.0.0.1:65536")
    monkeypatch.setenv(name, "0")
    assert "is not an address" in refused(*command)
    monkeypatch.setenv(name, "1")
    found = run(*command[:-1], "10.0.0.1:4000").exception
    assert isinstance(found, EndedError) and found.args[0] == (("10.0.0.1", 4000), 1, "secret")
    monkeypatch.delenv(stage_worker.KEY)
    assert stage_worker.KEY in refused(*command)


def test_texts_are_printed_where_the_file_cannot_be_written(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    flags = ["--model", checkpoint("base"), "--max-tokens", 1, "--json", tmp_path / "out.json"]
    result = run("generate", "abc", *flags)
    assert result.exit_code == 2
    assert result.stdout.startswith("abc")
    assert "cannot write --json" in result.stderr
    assert "No space left" in result.stderr
    assert list(tmp_path.glob("out*")) == []


def test_results_are_in_the_file_before_they_are_printed(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the output that goes away, as `head` does, loses none of the results in the
    file."""

    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    out = tmp_path / "out.json"
    out.write_text("old")
    monkeypatch.setattr("click.echo", gone)
    with pytest.raises(BrokenPipeError):
        main.commands["generate"].main(
            ["a", "--model", str(checkpoint("base")), "--max-tokens", "1", "--json", str(out)],
            standalone_mode=False,
        )
    assert len(json.loads(out.read_text())["results"]) == 1
    assert list(tmp_path.glob("*.part")) == []


def test_budgets_are_refused_with_numbers_and_a_plan(tmp_path: Path) -> None:
    said = refused("generate", "a", "--temperature", 0, "--device-memory", "1KB")
    assert "device" in said
    assert "no plan fits" in said
    flags = ["--model", "facebook/opt-1.3b", "--dummy-weights", "--offload-dir", tmp_path]
    said = refused("bench", *flags, "--batch-size", 8, "--device-memory", "1GB")
    assert "GiB needed in tier device" in said
    assert "--device-memory" in said
    assert "--percent" in said
    said = refused("bench", *flags, "--percent", 0, 0, 0, 0, 100, 0, "--disk-space", "1GB")
    assert "--disk-space" in said
    said = refused("bench", *flags, "--percent", 0, 100, 100, 0, 100, 0, "--host-memory", "1GB")
    assert "--host-memory" in said


def test_unwritable_offload_folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    flags = ["--percent", 0, 0, 0, 0, 0, 0, "--offload-dir", file / "x"]
    assert "--offload-dir" in refused("generate", "a", "--model", checkpoint(), *flags)


def test_help_of_every_command() -> None:
    assert "Usage" in run("--help").output
    for command in main.commands:
        assert "Usage" in run(command, "--help").output


def test_models_lists_families_and_shapes(tmp_path: Path) -> None:
    out = tmp_path / "models.json"
    found = run("models", "--json", out)
    assert found.exit_code == 0
    for name in ("mixtral", "meta-llama/Llama-3.1-405B", "Qwen/Qwen3-235B-A22B"):
        assert name in found.output
    listed = json.loads(out.read_text())
    assert {shape["family"] for shape in listed["shapes"]} <= set(listed["families"])


def test_a_plans_line_keeps_the_bits_that_a_model_is_published_in() -> None:
    """`generate` would refuse to round these weights again."""
    published = run("plan", "--model", "openai/gpt-oss-20b", "--hardware", "h100-80gb")
    (line,) = (x for x in published.stdout.splitlines() if x.startswith("policy:"))
    assert "--weight-bits" not in line
    packed = run(
        *("plan", "--model", "facebook/opt-6.7b", "--hardware", "h100-80gb", "--weight-bits", "4")
    )
    (line,) = (x for x in packed.stdout.splitlines() if x.startswith("policy:"))
    assert "--weight-bits 4" in line


def test_a_plan_with_experts_on_the_cpu_can_be_given_as_flags() -> None:
    asked = ("plan", "--model", "openai/gpt-oss-20b", "--hardware", "rtx3060-12gb")
    shape = ("--num-sequences", 1, "--prompt-len", 64, "--gen-len", 16)
    searched = run(*asked, *shape).stdout.splitlines()
    (line,) = (x for x in searched if x.startswith("policy:"))
    assert "--host-experts" in line
    flags = line.removeprefix("policy: ").split()
    given = run(*asked, *shape, *flags).stdout.splitlines()
    for name in ("policy:", "predicted:"):
        assert [x for x in given if x.startswith(name)] == [
            x for x in searched if x.startswith(name)
        ]
    cached = run(*asked, *shape, *flags, "--expert-cache", "64MiB").stdout
    assert "--expert-cache 67108864" in cached
    wrong = run(*asked, *shape, *flags, "--expert-cache", "much")
    assert wrong.exit_code == 2 and "--expert-cache: 'much' is not a size" in wrong.stderr


def test_a_plan_needs_no_flags_but_a_machine_that_is_known() -> None:
    assert run("plan", "--hardware", "t4-16gb").exit_code == 0
    assert "hardware nosuch is neither" in run("plan", "--hardware", "nosuch").stderr


def test_names_and_parameters_of_the_library_are_told() -> None:
    import flexgen_jax

    assert {"LLM", "Policy", "SamplingParams"} <= {*dir(flexgen_jax)}
    told = pytest.raises(flexgen_jax.UserError, match=r"sampling_params must be .* not 5")
    with flexgen_jax.LLM(dtype="float32") as llm, told:
        llm.generate(["a"], 5)  # type: ignore[arg-type]
    with pytest.raises(flexgen_jax.UserError, match="kv_store 20 is too small"):
        flexgen_jax.LLM(dtype="float32", kv_store=20)
