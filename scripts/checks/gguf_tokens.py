"""Compares token ids with llama.cpp's, for each way of splitting text that GGUF files name.

    pip install llama-cpp-python gguf && python scripts/checks/gguf_tokens.py

Writes a small file with a vocabulary of bytes and merges for each, and prints how many of the texts
differ. Those of tiny_aya do, since llama.cpp knows no cases of letters: here they are split as by
the model's own tokenizer.json.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from tokenizers import pre_tokenizers

from flexgen_jax.models.gguf.pre_tokenizers import PRE_TOKENIZERS, Split
from flexgen_jax.models.loading import open_model

TEXTS = [
    *("hello world", "Hello, WORLD!!", "don't I'll we've IT'S", "  two  spaces   three"),
    *("\ttab\t\ttabs", "line\nline\n\nline\r\n\r\n", "12345678 3.14 1,000,000", "1 22 333 4444"),
    *("ÉCOLE école naïve", "straße Ünïcödé", "こんにちは世界", "你好，世界！123", "한국어 텍스트"),
    *("Привет, мир!", "مرحبا بالعالم", "नमस्ते दुनिया", "🚀🌫️ emoji 👩‍👩‍👧", "foo_bar(baz[1:2])"),
    *("a+b=c; x*=2 //", "<html><b>hi</b></html>", "CamelCase HTTPServer", "mixedCASE123abc"),
    *("'quoted' \"double\"", "…—–•", "$100 €200 £300", "A.B.C. e.g. i.e.", "https://a.b/c?d=e&f#g"),
    *("  leading", "trailing  ", "\n\n\nline", "x" * 50, "'", "''s 'S 'LL 'll", "I'M YOU'RE"),
    *("e\u0301 combining", "ﬁ ligature", "½ ² ³", "١٢٣ digits", "０１２３", "a\u00a0b nbsp"),
    *(
        "a\u200bb",
        "\u3000wide",
        "++--==",
        "/path/to/file.txt",
        "\\back\\n",
        "tab\tnew\nline mix \t\n x",
    ),
    *("word1word2 3word", "Zażółć gęślą jaźń", "ГДЕ я", "ΑΒΓ αβγ", "ไทยภาษา", "日本語テキスト123"),
    *("<sentinel:12> x", "IMGIMGABCZ", "a  b   c    d     e", "\r\n\r\n a", "'d 'D 'm 'M 're 'RE"),
]
NUM_MERGES, WIDTH = 400, 32


def merged() -> tuple[list[str], list[str]]:
    """Byte-pair merges of the texts: the tokens, and the merges."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), list[str]()
    rows = [list("".join(part for part, _ in bytes_of(text))) for text in TEXTS]
    for _ in range(NUM_MERGES):
        (left, right), _ = Counter(pair for row in rows for pair in pairwise(row)).most_common(1)[0]
        if left + right not in tokens:
            tokens.append(left + right)
            merges.append(f"{left} {right}")
        for number, row in enumerate(rows):
            joined: list[str] = []
            for token in row:
                is_pair = bool(joined) and joined[-1] == left and token == right
                joined[-1:] = [left + right] if is_pair else [*joined[-1:], token]
            rows[number] = joined
    return tokens, merges


def write(path: Path, pre: str) -> None:
    tokens, merges = merged()
    tokens += ["<|bos|>", "<|eos|>"]
    writer, count = gguf.GGUFWriter(path, "llama"), len(tokens)
    for name, value in (
        *(("context_length", 256), ("embedding_length", WIDTH), ("block_count", 1)),
        *(("feed_forward_length", WIDTH), ("attention.head_count", 2), ("vocab_size", count)),
        *(("attention.head_count_kv", 2), ("rope.dimension_count", WIDTH // 2)),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (count - 2) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(count - 2)
    writer.add_eos_token_id(count - 1)
    matrix, norm = np.ones((WIDTH, WIDTH), np.float32), np.ones(WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", np.ones((count, WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", norm)
    for name in ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", norm if "norm" in name else matrix)
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", matrix)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


def main() -> None:
    seen: set[Split] = set()
    is_equal = True
    for pre, split in PRE_TOKENIZERS.items():
        if split in seen:
            continue
        seen.add(split)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write(path, pre)
            theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            ours = open_model(path, dummy_weights=False, seed=0).tokenizer
            assert ours is not None
            different = [
                text for text in TEXTS if theirs.tokenize(text.encode()) != ours.encode(text)
            ]
        print(f"{pre:16} {len(different)} of {len(TEXTS)} differ {different[:3]}", flush=True)
        is_equal = is_equal and not different
    sys.exit(not is_equal)


if __name__ == "__main__":
    main()
