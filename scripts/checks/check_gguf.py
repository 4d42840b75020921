"""Checks GGUF files that llama.cpp's own converter makes of tiny models of every family.

    pip install llama-cpp-python gguf torch transformers
    python scripts/checks/check_gguf.py --llama-cpp FOLDER [--families qwen3 gemma2 ...]

FOLDER is llama.cpp's source. Prints for both variants of each family how far log-probabilities are
from those of transformers, and from llama.cpp's own with the same file; or what refused it.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from flexgen_jax import LLM
from tests.helpers.families import VARIANTS, Reference

IDS = [int(n) for n in np.random.default_rng(0).integers(3, 96, 40)]


KNOWN_AS = {
    "Mistral4ForCausalLM": "Mistral3ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
}
"""Names of classes in llama.cpp's converter, where transformers has others."""


def set_vocab(converter: Any) -> None:
    """Writes a vocabulary of numbered tokens, and one merge, which llama.cpp asks for."""
    names = ["t", "0", "t0", *(f"t{n}" for n in range(3, converter.hparams["vocab_size"]))]
    writer = converter.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([1] * len(names))
    writer.add_token_merges(["t 0"])


def convert(folder: Path, file: Path) -> None:
    """Converts a folder as llama.cpp's `convert_hf_to_gguf.py` does, in fp32."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    name = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    kind = get_model_class(KNOWN_AS.get(name, name), mmproj=False)
    kind.set_vocab, kind.no_mtp = set_vocab, True
    converter = kind(folder, gguf.LlamaFileType.ALL_F32, file, eager=True)
    for inner in (converter, getattr(converter, "impl", converter)):
        type(inner).set_vocab = set_vocab
    converter.write()


THEIRS = """
import json, llama_cpp, numpy as np, sys
ids = json.loads(sys.argv[2])
model = llama_cpp.Llama(sys.argv[1], n_ctx=128, logits_all=True, verbose=False, n_threads=1)
model.eval(ids)
logits = np.asarray(model.scores[: len(ids)], np.float64)
logits -= logits.max(-1, keepdims=True)
logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
print(json.dumps(logits[np.arange(len(ids) - 1), ids[1:]].tolist()))
"""
"""Prints llama.cpp's log-probability of every token but the first: it aborts its process where it
cannot run a model."""


def theirs(file: Path) -> np.ndarray:
    command = [sys.executable, "-c", THEIRS, str(file), json.dumps(IDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}")
    return np.array(json.loads(done.stdout.splitlines()[-1]))


def ours(file: Path) -> np.ndarray:
    with LLM(file, dtype="float32", progress=False) as llm:
        return np.asarray(llm.score(prompt_token_ids=[IDS])[0].logprobs)


def checked(family: str, variant: int) -> str:
    """Returns what became of a variant."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            reference = Reference(Path(folder) / "hf", family, variant)
            file = Path(folder) / "model.gguf"
            convert(reference.folder, file)
        except Exception as error:  # theirs: any of the converter
            return f"not converted: {type(error).__name__}: {str(error)[:100]}"
        right = reference.logprobs(IDS)
        try:
            other = f"{np.abs(theirs(file) - right).max():.1e}"
        except RuntimeError as error:
            other = str(error)
        try:
            own = f"{np.abs(ours(file) - right).max():.1e}"
        except Exception as error:  # shown, so that other families are checked
            own = f"{type(error).__name__}: {str(error).replace(folder, '')[:150]}"
        return f"from transformers {own}; llama.cpp from transformers {other}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    sys.path[:0] = [str(args.llama_cpp), str(args.llama_cpp / "gguf-py")]
    logging.disable(logging.WARNING)
    for family in args.families:
        for variant in (0, 1):
            print(f"{family} {variant}: {checked(family, variant)}", flush=True)


if __name__ == "__main__":
    main()
