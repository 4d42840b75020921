"""LoRA adapters give the logits of transformers with merged weights, wherever the data lie."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.adapters import Adapted, ByPrompt
from tests.helpers.contract import ALL_AXES, PLACEMENT_AXES, Case, Contract, cases, prompts
from tests.helpers.families import Reference

ATTENTION = r".*self_attn\.[qkvo]_proj"
LINEAR = r"model\.(?!embed).*_proj"

FAMILIES = {
    "llama": LINEAR,
    "qwen3_moe": r"model\..*(_proj|gate)",
    "phi3": LINEAR,
    "gpt_neox": r".*(query_key_value|dense\w*)",
    "deepseek_v3": r".*(self_attn\.(?!kv_b_proj)\w+_proj|kv_a_proj_with_mqa|mlp.*_proj)",
    "qwen3_next": r".*(linear_attn\.(in_proj_\w+|out_proj)|self_attn\.\w+_proj|mlp.*_proj)",
    "lfm2": r".*(conv\.(in|out)_proj|self_attn\.\w+_proj|feed_forward\.w\d)",
    "gpt_oss": ATTENTION,
    "opt": r".*(self_attn\.\w+_proj|fc\d)",
}
"""Which modules are adapted in each family: woven and joined ones, experts, routers, and those of
layers that do not attend."""


@pytest.mark.parametrize(
    ("family", "case"),
    [*zip(FAMILIES, cases(PLACEMENT_AXES), strict=False)],
    ids=[*FAMILIES],
)
def test_an_adapter_of_all_texts(
    family: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = Adapted(Reference(tmp_path / "model", family, 0), tmp_path / "a", FAMILIES[family])
    contract = Contract(adapted, has_logprobs=True, adapters=(str(adapted.path),))
    contract.check(case, tmp_path / "offload", monkeypatch)


CHOSEN = (None, "one", "two", "one")


def chosen_cases() -> list[object]:
    quick = zip(("llama", "qwen3_moe"), cases(PLACEMENT_AXES, seed=1), strict=False)
    all_at_once = Case(weights=(30, 40), cache=(30, 40), chunk=16, has_draft=True)
    slow = [(family, case) for family in ("qwen3_moe", "qwen3_next") for case in cases(ALL_AXES)]
    return [
        *quick,
        ("llama", all_at_once),
        ("qwen3_next", all_at_once),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in slow),
    ]


@pytest.mark.parametrize(("family", "case"), chosen_cases(), ids=str)
def test_texts_of_one_batch_choose_adapters(
    family: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Reference(tmp_path / "model", family, 0)
    named = {
        "one": Adapted(base, tmp_path / "one", FAMILIES[family], seed=1),
        "two": Adapted(base, tmp_path / "two", ATTENTION, seed=2, rank=5),
    }
    references = [named[name] if name is not None else base for name in CHOSEN]
    contract = Contract(
        ByPrompt(base.folder, list(zip(prompts(), references, strict=True))),
        has_logprobs=True,
        adapters=[f"{name}={adapted.path}" for name, adapted in named.items()],
        chosen=CHOSEN,
    )
    contract.check(case, tmp_path / "offload", monkeypatch)
