"""A tiny model that writes a given text, whatever the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WIDTH, INNER = 128, 32
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_author(
    folder: Path, texts: Sequence[str], special: Sequence[str] = (), template: str = CHAT_TEMPLATE
) -> Path:
    """Writes a model's folder. texts: the pieces of its text; one in `special` is a special token.

    Each token is a state of its own: its embedding is a unit vector, and the head maps it to the
    next token. So no token comes twice: pieces are cut into pairs of characters, or more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    marks = ("<|im_start|>", "<|im_end|>", *special)
    names: list[str] = []
    for text in texts:
        names += [text] if text in special else _cut(text, names)
    assert len({*names}) == len(names) < WIDTH - 1, "each token comes once"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: n for n, name in enumerate(dict.fromkeys([*alphabet, *names]))}
    tokenizer = Tokenizer(
        models.BPE({n: i for i, n in enumerate(n for n in vocab if n not in marks)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    written = [tokenizer.token_to_id(name) for name in (*names, "<|im_end|>")]
    _write_weights(folder, tokenizer.get_vocab_size(), written)
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _cut(text: str, others: Sequence[str]) -> list[str]:
    """Cuts a text into tokens of two or more of ByteLevel's characters, which no prompt has: none
    of them twice, and none of the others."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((characters, _),) = pre.pre_tokenize_str(text)
    pieces: list[str] = []
    while characters:
        size = 2
        while characters[:size] in {*pieces, *others} and size < len(characters):
            size += 1
        if pieces and (len(characters) < 2 or characters[:size] in {*pieces, *others}):
            pieces[-1] += characters
            break
        pieces.append(characters[:size])
        characters = characters[size:]
    return pieces


def _write_weights(folder: Path, vocab_size: int, written: Sequence[int]) -> None:
    embedding = np.zeros((vocab_size, WIDTH), np.float32)
    head = np.zeros((vocab_size, WIDTH), np.float32)
    embedding[:, 0] = 1  # of the prompt's tokens
    for state, token in enumerate(written):
        head[token, state] = 100
        if state + 1 < len(written):
            embedding[token] = np.eye(WIDTH)[state + 1]
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(WIDTH, np.float32),
        f"{layer}input_layernorm.weight": np.ones(WIDTH, np.float32),
        f"{layer}post_attention_layernorm.weight": np.ones(WIDTH, np.float32),
        f"{layer}mlp.gate_proj.weight": np.zeros((INNER, WIDTH), np.float32),
        f"{layer}mlp.up_proj.weight": np.zeros((INNER, WIDTH), np.float32),
        f"{layer}mlp.down_proj.weight": np.zeros((WIDTH, INNER), np.float32),
    }
    for name in "qkvo":
        tensors[f"{layer}self_attn.{name}_proj.weight"] = np.zeros((WIDTH, WIDTH), np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": written[-1],
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
