"""An adapter for EleutherAI's lm-evaluation-harness 0.4 (`lm_eval`).

Importing this module registers it: `lm_eval.simple_evaluate(model="flexgen-jax", ...)` then takes
`model_args` such as "model=path/to/model,dtype=float32", which are arguments of `LLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401 - registers the others, which it does only before any is
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from flexgen_jax.engine.llm import LLM
from flexgen_jax.engine.sampling import SamplingParams
from flexgen_jax.errors import UserError

NEW_TOKENS = 256
"""New tokens where a task does not say how many, as in the harness's own models."""

Pairs = Sequence[tuple[Any, Sequence[int], Sequence[int]]]
"""What a request is known by, its context's tokens and its continuation's."""


@register_model("flexgen-jax")
class FlexGenLM(TemplateLM):  # type: ignore[misc]
    """A model of this engine; see the module."""

    def __init__(
        self,
        model: str | LLM | None = None,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = NEW_TOKENS,
        **options: Any,
    ) -> None:
        """model, or `pretrained`: a folder or a known name, or an `LLM`; options: those of `LLM`.
        batch_size and device are the harness's; here the policy chooses the batches."""
        super().__init__()
        given = pretrained if model is None else model
        self.llm = given if isinstance(given, LLM) else LLM(given, **options)
        self.max_gen_toks = max_gen_toks
        self.max_length = self.llm.config.max_positions

    @property
    def eot_token_id(self) -> int:
        ends = self.llm.config.eos_ids
        if not ends:
            raise UserError("the model has no end token, which scoring without a context needs")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: its beginning token, or the end token."""
        begins = self.tok_encode("")
        return begins[0] if begins else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """A text that has its beginning token, as chat templates write it, gets no other."""
        whole, begin = self.llm.encode(string, is_whole=True), self.llm.encode("")
        has_begin = bool(begin) and whole[: len(begin)] == begin
        if add_special_tokens is False or has_begin:
            return whole
        return self.llm.encode(string)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if not add_generation_prompt:
            raise UserError("continuing an assistant's message is not supported")
        return self.llm.chat_prompt(chat_history)[0]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The harness keeps it with its results; the model's folder has the template itself."""
        return self.llm.fingerprint if chat_template else None

    def _loglikelihood_tokens(
        self, requests: Pairs, disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        contexts = [list(context) for _, context, _ in requests]
        continuations = [list(continuation)[-self.max_length :] for _, _, continuation in requests]
        found = [
            (score.total, score.is_greedy)
            for score in self.llm.score_pairs(contexts, continuations)
        ]
        for (name, *_), answer in zip(requests, found, strict=True):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        cut = [self._windows(request.args[0]) for request in requests]
        scores = iter(self._loglikelihood_tokens([pair for pairs in cut for pair in pairs]))
        found = []
        for request, pairs in zip(requests, cut, strict=True):
            found.append(sum(next(scores)[0] for _ in pairs))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _windows(self, text: str) -> list[tuple[None, list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [(None, *make_disjoint_window(window)) for window in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [request.args[0] for request in requests]
        asked = [dict(request.args[1]) for request in requests]
        params = [self._params(kwargs) for kwargs in asked]
        ids = []
        for text, choice in zip(texts, params, strict=True):
            room = self.max_length - choice.max_tokens
            if room < 1:
                raise UserError(
                    f"max_gen_toks={choice.max_tokens} leaves no room for a prompt: the model's "
                    f"context has {self.max_length} tokens"
                )
            ids.append(self.tok_encode(text)[-room:])
        found = [x.text for x in self.llm.generate(prompt_token_ids=ids, sampling_params=params)]
        for request, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return found

    def _params(self, kwargs: dict[str, Any]) -> SamplingParams:
        """Returns sampling parameters from a task's `generation_kwargs`."""
        until = kwargs.pop("until", None) or ()
        until = (until,) if isinstance(until, str) else tuple(text for text in until if text)
        tokens = kwargs.pop("max_gen_toks", self.max_gen_toks)
        is_sampled = kwargs.pop("do_sample", kwargs.get("temperature", 0) > 0)
        temperature = kwargs.pop("temperature", 1.0 if is_sampled else 0.0)
        known = {name: kwargs.pop(name) for name in ("top_k", "top_p", "min_p") if name in kwargs}
        if kwargs:
            raise UserError(f"generation_kwargs has {sorted(kwargs)[0]!r}, which is not supported")
        return SamplingParams(
            tokens, temperature=temperature if is_sampled else 0.0, stop=until, **known
        )
