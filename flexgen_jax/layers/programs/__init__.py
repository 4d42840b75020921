"""Compiled functions: `table.py` compiles them, each further file has one kind."""

from __future__ import annotations

from flexgen_jax.layers.programs.cache import append as append
from flexgen_jax.layers.programs.cache import attend as attend
from flexgen_jax.layers.programs.cache import attend_chunk as attend_chunk
from flexgen_jax.layers.programs.cache import attend_prefix as attend_prefix
from flexgen_jax.layers.programs.cache import attend_ranked as attend_ranked
from flexgen_jax.layers.programs.cache import rank_tokens as rank_tokens
from flexgen_jax.layers.programs.cache import seal as seal
from flexgen_jax.layers.programs.ends import embed as embed
from flexgen_jax.layers.programs.ends import head as head
from flexgen_jax.layers.programs.ends import pool as pool
from flexgen_jax.layers.programs.ends import score as score
from flexgen_jax.layers.programs.experts import add_experts as add_experts
from flexgen_jax.layers.programs.experts import combine as combine
from flexgen_jax.layers.programs.experts import combine_beside as combine_beside
from flexgen_jax.layers.programs.experts import ending as ending
from flexgen_jax.layers.programs.experts import guess as guess
from flexgen_jax.layers.programs.experts import num_experts as num_experts
from flexgen_jax.layers.programs.experts import route as route
from flexgen_jax.layers.programs.prompts import finish_chunk as finish_chunk
from flexgen_jax.layers.programs.prompts import mix as mix
from flexgen_jax.layers.programs.prompts import prefill as prefill
from flexgen_jax.layers.programs.prompts import project_chunk as project_chunk
from flexgen_jax.layers.programs.prompts import unpack as unpack
from flexgen_jax.layers.programs.table import Program as Program
from flexgen_jax.layers.programs.table import Programs as Programs
from flexgen_jax.layers.programs.tokens import decode as decode
from flexgen_jax.layers.programs.tokens import decode_joined as decode_joined
from flexgen_jax.layers.programs.tokens import finish as finish
from flexgen_jax.layers.programs.tokens import project as project
