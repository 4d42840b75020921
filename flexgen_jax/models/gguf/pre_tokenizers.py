"""How text is split before its bytes are joined, by "tokenizer.ggml.pre", as in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = rf"{ENDINGS}|{WORD}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{ENDINGS}|{WORD}|\p{{N}}|{REST}"
QWEN35 = (
    rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{BEFORE_WORD}{UPPER}*{LOWER}+|{BEFORE_WORD}{UPPER}+{LOWER}*|\p{{N}}|{REST_WITH_SLASH}"
GPT4O = (
    rf"{BEFORE_WORD}{UPPER}*{LOWER}+{ENDINGS}?|{BEFORE_WORD}{UPPER}+{LOWER}*{ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{REST_WITH_SLASH}"
)
CASED = r"\p{Lt}\p{Lm}\p{Lo}\p{M}"
AYA = (
    rf"{BEFORE_WORD}[\p{{Lu}}{CASED}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ENDINGS}?"
    rf"|{BEFORE_WORD}[\p{{Lu}}{CASED}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{REST_WITH_SLASH}"
)
CJK = "[一-龥぀-ゟ゠-ヿ]+"
MARKS_AND_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


class Split(NamedTuple):
    """The patterns that split text, one after another. keeps_words: whether a word that is a token
    is one, whatever its merges; begins: whether prompts begin with the BOS token, unless the file
    says otherwise."""

    patterns: tuple[str, ...]
    keeps_words: bool = False
    begins: bool = False


DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""The split of a file that names none."""


def _named(split: Split, *names: str) -> Iterable[tuple[str, Split]]:
    return ((name, split) for name in names)


PRE_TOKENIZERS: Mapping[str, Split] = dict(
    (
        ("default", DEFAULT),
        *_named(
            Split((LLAMA3,), keeps_words=True, begins=True),
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
            *("lfm2", "jina-v5-nano"),
        ),
        *_named(Split((LLAMA3,), keeps_words=True), "glm4", "glm5"),
        *_named(Split((LLAMA3,)), "dbrx", "smaug-bpe", "chatglm-bpe"),
        *_named(Split((TEKKEN,), keeps_words=True, begins=True), "tekken"),
        *_named(
            Split((QWEN2,)),
            *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan"),
            *("solar-open", "grok-2"),
        ),
        *_named(Split((QWEN35,)), "qwen35"),
        *_named(
            Split((THREE_DIGITS, CJK, MARKS_AND_WORDS)),
            *("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        ),
        *_named(
            Split(
                ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS),
            ),
            "deepseek-coder",
        ),
        *_named(
            Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
            "falcon",
        ),
        *_named(
            Split((DIGITS, GPT2)),
            *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
            "mellum2",
        ),
        *_named(
            Split((GPT2,)),
            *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de"),
            *("a.x-4.0", "mellum", "modern-bert", "jina-en", "jina-v1-en", "jina-v2-code", "mpt"),
            *("roberta-bpe", "olmo", "dolma", "jais", "trillion", "granite-docling", "exaone4"),
        ),
        *_named(Split((GPT4O,)), "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
        *_named(Split((r"\d{1,3}(?=(?:\d{3})*\b)", AYA)), "tiny_aya", "cohere2moe"),
        *_named(Split((BLOOM,)), "poro-chat", "bloom", "gpt3-finnish"),
        *_named(Split((BLOOM, DIGITS)), "viking"),
        *_named(
            Split(
                (
                    rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{WORD}|\p{{N}}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
                )
            ),
            *("bailingmoe", "bailingmoe2", "llada-moe"),
        ),
        *_named(
            Split(
                (
                    rf"{ENDINGS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)"
                    r"|\s+",
                )
            ),
            "seed-coder",
        ),
        *_named(Split((rf"{WORD}|\p{{N}}|{REST}",)), "ufakzeka"),
        *_named(Split((r"[^\n]+|[\n]+", QWEN2)), "laguna"),
        *_named(
            Split((THREE_DIGITS, rf"{ENDINGS}|{WORD}|\p{{N}}+|{REST}"), keeps_words=True),
            "minicpm5",
        ),
        *_named(
            Split(
                (
                    rf"{ENDINGS}|{BEFORE_WORD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
                )
            ),
            "exaone-moe",
        ),
        *_named(
            Split(
                (
                    "<sentinel:[0-9]+>",
                    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                    "([\\t\\n]|    |  )",
                    DIGITS,
                    r"[\p{P}!-/:-@\[-`{-~]",
                    GPT2,
                ),
                begins=True,
            ),
            "chameleon",
        ),
        *_named(
            Split(
                (
                    rf"{ENDINGS}|{WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
                    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)"
                    r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
                )
            ),
            "jais-2",
        ),
    )
)
