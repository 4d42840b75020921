"""Tasks of lm-evaluation-harness: the metrics are those of its own `hf` model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, UserError

lm_eval = pytest.importorskip("lm_eval")
TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
pytest.importorskip("torch")

TASKS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "until": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local tasks with random texts."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefgh ijklmno"))

    def text(count: int) -> str:
        return "".join(rng.choice(letters, count)).strip() or "a"

    questions = [
        {
            "question": text(int(rng.integers(3, 60))),
            "choices": [text(int(rng.integers(1, 9))) for _ in range(3)],
            "answer": int(rng.integers(3)),
            "target": text(3),
        }
        for _ in range(20)
    ]
    texts = [{"text": text(n)} for n in (5, 60, 96, 97, 250)]
    for name, own in TASKS.items():
        data = folder / f"{name}.json"
        data.write_text(json.dumps(texts if name == "rolling" else questions))
        files = {"data_files": {"test": str(data)}}
        where = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        # JSON is YAML, too.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **where, **own}))
    return folder


def evaluated(model: Any, tasks: Path, **options: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(TASKS),
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
        **options,
    )
    return {
        "results": found["results"],
        "answers": {
            name: [sample["filtered_resps"] for sample in samples]
            for name, samples in found["samples"].items()
        },
    }


@pytest.mark.slow
def test_metrics_are_those_of_the_harness_s_own_model(
    checkpoint: Callable[..., Path], tasks: Path, tmp_path: Path
) -> None:
    from flexgen_jax.evaluation.harness import FlexGenLM

    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    arguments = f"pretrained={folder},dtype=float32"
    theirs = evaluated("hf", tasks, model_args=arguments + ",device=cpu,batch_size=1")
    with LLM(folder, dtype="float32", policy=Policy(batch_size=4)) as llm:
        ours = evaluated(FlexGenLM(llm), tasks, use_cache=str(tmp_path / "cache"))
        made = llm.report()
        again = evaluated(FlexGenLM(llm), tasks, use_cache=str(tmp_path / "cache"))
        assert llm.report() == made  # all answers were kept
    assert ours["answers"]["until"] == theirs["answers"]["until"]
    for name, metrics in theirs["results"].items():
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        assert numbers
        for key, value in numbers.items():
            assert ours["results"][name][key] == pytest.approx(value, rel=1e-3), (name, key)
            assert again["results"][name][key] == pytest.approx(value, rel=1e-3), (name, key)


def test_it_is_registered_by_name(checkpoint: Callable[..., Path], tasks: Path) -> None:
    from flexgen_jax.evaluation import harness

    arguments = f"model={checkpoint()},dtype=float32"
    made = (
        pytest.importorskip("lm_eval.api.registry")
        .get_model("flexgen-jax")
        .create_from_arg_string(arguments)
    )
    assert isinstance(made, harness.FlexGenLM)
    assert made.max_length == 96
    with pytest.raises(UserError, match="not supported"):
        made._wish({"num_beams": 4})
    made.llm.close()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_new_tokens": 7},
        {"max_tokens": 7, "num_beams": 1, "num_return_sequences": 1, "use_cache": True},
        {"max_gen_toks": 7, "seed": 3, "pad_token_id": 0, "repetition_penalty": 1.2},
        {"max_length": 40},
        {"max_gen_toks": 7, "stop_token_ids": [5], "think_end_token": "e"},
    ],
)
def test_options_of_tasks_that_mean_something_are_taken(kwargs: dict[str, Any]) -> None:
    from flexgen_jax.evaluation.harness import read_wish

    wish = read_wish({"until": ["x"], "do_sample": False, **kwargs}, 99)
    assert wish.params.max_tokens == (99 if "max_length" in kwargs else 7)
    assert wish.max_length == kwargs.get("max_length")
    assert wish.params.temperature == 0
    assert wish.params.repetition_penalty == kwargs.get("repetition_penalty")
    thinks = "think_end_token" in kwargs
    assert wish.params.stop == (() if thinks else ("x",))
    assert wish.text_of("axe bxc", None) == ("b" if thinks else "a")


@pytest.mark.parametrize("wrong", [{"num_beams": 4}, {"typical_p": 0.5}, {"nonsense": 1}])
def test_other_options_are_refused_before_anything_is_run(
    checkpoint: Callable[..., Path], tmp_path: Path, wrong: dict[str, Any]
) -> None:
    from flexgen_jax.evaluation.harness import CheckedTasks

    (tmp_path / "d.json").write_text(json.dumps([{"question": "a", "target": "b"}]))
    files = {"data_files": {"test": str(tmp_path / "d.json")}}
    task = {"task": "bad", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    task |= TASKS["until"] | {"generation_kwargs": {"until": ["e"], **wrong}}
    (tmp_path / "bad.yaml").write_text(json.dumps(task))
    manager = CheckedTasks(include_path=str(tmp_path), include_defaults=False)
    with pytest.raises(UserError, match=rf"task bad: generation_kwargs has '?{next(iter(wrong))}"):
        manager.load(["bad"])


def test_what_stands_before_a_text_is_as_with_the_harness_s_own_model(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from flexgen_jax.evaluation.harness import FlexGenLM

    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}|{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    texts = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]
    hf = pytest.importorskip("lm_eval.models.huggingface").HFLM
    for special in ({"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token": "</s>"}):
        (folder / "tokenizer_config.json").write_text(json.dumps(kind | special))
        theirs = hf(pretrained=str(folder), device="cpu", batch_size=1, dtype="float32")
        with LLM(folder, dtype="float32") as llm:
            ours = FlexGenLM(llm)
            assert ours.prefix_token_id == theirs.prefix_token_id
            assert ours.eot_token_id == theirs.eot_token_id
            for begins in (True, False):
                rendered = ours.apply_chat_template(texts, begins)
                assert rendered == theirs.apply_chat_template(texts, begins)
