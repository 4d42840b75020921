"""Compiled functions: `table.py` compiles them, each further file has one kind."""

from __future__ import annotations

from typing import Any

from flexgen_jax.layers.programs.cache import (
    append,
    attend,
    attend_chunk,
    attend_prefix,
    attend_ranked,
    rank_tokens,
    seal,
)
from flexgen_jax.layers.programs.ends import embed, head, score
from flexgen_jax.layers.programs.experts import (
    combine,
    combine_beside,
    ending,
    expert,
    guess,
    route,
)
from flexgen_jax.layers.programs.prompts import finish_chunk, mix, prefill, project_chunk, unpack
from flexgen_jax.layers.programs.table import Program, Programs
from flexgen_jax.layers.programs.tokens import decode, decode_joined, finish, project

TABLE: tuple[Program[Any], ...] = (
    embed,
    prefill,
    project_chunk,
    attend_chunk,
    attend_prefix,
    finish_chunk,
    decode,
    decode_joined,
    project,
    attend,
    rank_tokens,
    attend_ranked,
    finish,
    mix,
    append,
    seal,
    unpack,
    route,
    guess,
    expert,
    combine,
    combine_beside,
    head,
    score,
)
"""All kinds of programs."""

__all__ = [
    "TABLE",
    "Program",
    "Programs",
    "append",
    "attend",
    "attend_chunk",
    "attend_prefix",
    "attend_ranked",
    "combine",
    "combine_beside",
    "decode",
    "decode_joined",
    "embed",
    "ending",
    "expert",
    "finish",
    "finish_chunk",
    "guess",
    "head",
    "mix",
    "prefill",
    "project",
    "project_chunk",
    "rank_tokens",
    "route",
    "score",
    "seal",
    "unpack",
]
