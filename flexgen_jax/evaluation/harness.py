"""An adapter for EleutherAI's lm-evaluation-harness 0.4 (`lm_eval`).

Importing this module registers it: `lm_eval.simple_evaluate(model="flexgen-jax", ...)` then takes
`model_args` such as "model=path/to/model,dtype=float32", which are arguments of `LLM`. With
`task_manager=CheckedTasks()` it refuses options of tasks that are not supported before it runs any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lm_eval.models  # noqa: F401 - registers the others, which it does only before any is
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from flexgen_jax.engine.llm import LLM
from flexgen_jax.errors import UserError
from flexgen_jax.models.chat import ChatOptions
from flexgen_jax.requests.sampling import IN_REQUESTS, SamplingParams

NEW_TOKENS = 256
"""New tokens where a task does not say how many, as in the harness's own models."""

Pairs = Sequence[tuple[Any, Sequence[int], Sequence[int]]]
"""A request's key: the tokens of its context and of its continuation."""


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
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """model, or `pretrained`: a folder or a known name, or an `LLM`; options: those of `LLM`.
        Further options are those of the harness's `hf` model; batch_size and device mean nothing
        here, since the policy chooses the batches."""
        super().__init__()
        model_name = pretrained if model is None else model
        self.llm = model_name if isinstance(model_name, LLM) else LLM(model_name, **options)
        self.max_gen_toks = max_gen_toks
        self.max_length = max_length or self.llm.config.max_positions
        self._prefix_token_id, self._think_end_token = prefix_token_id, think_end_token
        self._variables = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._variables["enable_thinking"] = enable_thinking

    @property
    def eot_token_id(self) -> int:
        """The end token: the tokenizer's, or else the model's."""
        end = self.llm.special_id("eos_token")
        ends = self.llm.config.eos_ids if end is None else (end,)
        if not ends:
            raise UserError("scoring without a context needs an end token, and this model has none")
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: the tokenizer's beginning token, or the end
        token."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        begin = self.llm.special_id("bos_token")
        begins = self.tok_encode("") if begin is None else [begin]
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
        """Without a generation prompt, the assistant's last message is continued. As in the
        harness, a template that refuses system messages gets the messages without them."""
        options = ChatOptions(
            variables=self._variables,
            adds_generation_prompt=add_generation_prompt,
            continues_final=not add_generation_prompt,
        )
        other_messages = [message for message in chat_history if message["role"] != "system"]
        try:
            return self.llm.chat_prompt(chat_history, options)[0]
        except UserError:
            if len(other_messages) == len(chat_history):
                raise
            return self.llm.chat_prompt(other_messages, options)[0]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The harness keeps it with its results; the model's folder has the template itself."""
        return self.llm.fingerprint if chat_template else None

    def _loglikelihood_tokens(
        self, requests: Pairs, disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        contexts = [list(context) for _, context, _ in requests]
        continuations = [list(continuation)[-self.max_length :] for _, _, continuation in requests]
        scored = [
            (score.total, score.is_greedy)
            for score in self.llm.score_pairs(contexts, continuations)
        ]
        for (name, *_), answer in zip(requests, scored, strict=True):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return scored

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        cut = [self._windows(request.args[0]) for request in requests]
        scores = iter(self._loglikelihood_tokens([pair for pairs in cut for pair in pairs]))
        sums = []
        for request, pairs in zip(requests, cut, strict=True):
            sums.append(sum(next(scores)[0] for _ in pairs))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def _windows(self, text: str) -> list[tuple[None, list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [(None, *make_disjoint_window(window)) for window in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        wishes = [self._wish(request.args[1]) for request in requests]
        params, ids = [], []
        for request, wish in zip(requests, wishes, strict=True):
            row, choice = self._fitting(self.tok_encode(request.args[0]), wish)
            ids.append(row)
            params.append(choice)
        results = self.llm.generate(prompt_token_ids=ids, sampling_params=params, on_error="raise")
        texts = [
            wish.text_of(result.text, self._think_end_token)
            for wish, result in zip(wishes, results, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _fitting(self, ids: list[int], wish: Wish) -> tuple[list[int], SamplingParams]:
        """Returns the last tokens of a prompt, cut to leave room for new tokens, and the sampling
        parameters."""
        max_new_tokens = wish.params.most_tokens
        if wish.max_length is not None:
            max_new_tokens = max(1, wish.max_length - len(ids))
        room = self.max_length - max_new_tokens
        if room < 1:
            raise UserError(
                f"max_gen_toks={max_new_tokens} leaves no room for a prompt in the model's context "
                f"of {self.max_length} tokens"
            )
        return ids[-room:], replace(wish.params, max_tokens=max_new_tokens)

    def _wish(self, kwargs: Mapping[str, Any]) -> Wish:
        return read_wish(kwargs, self.max_gen_toks, self._think_end_token is not None)


@dataclass(frozen=True)
class Wish:
    """A task's `generation_kwargs`. until: where a text ends; max_length: the most tokens of prompt
    and text together, None where the new ones are limited; think_end_token: the text before the
    answer."""

    params: SamplingParams
    until: tuple[str, ...] = ()
    max_length: int | None = None
    think_end_token: str | None = None

    def text_of(self, made: str, think_end_token: str | None) -> str:
        """Returns the answer in a text: the text after the reasoning, up to the first stop
        string."""
        end = self.think_end_token or think_end_token
        return str(postprocess_generated_text(made, list(self.until), end))


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True, False),
    "early_stopping": (True, False),
    "length_penalty": (1,),
    "typical_p": (1,),
}
"""Options of tasks that may have these values only, which ask for nothing."""


def read_wish(kwargs: Mapping[str, Any], tokens: int, thinks: bool = False) -> Wish:
    """Reads a task's `generation_kwargs`; raises `UserError` for an option that is not supported.

    tokens: new tokens where the task does not say; thinks: whether reasoning precedes the answer;
    stop strings then do not end the reasoning.
    """
    remaining = {key: value for key, value in kwargs.items() if value is not None}
    for name, convert in KINDS.items():
        if name in remaining and (
            not isinstance(remaining[name], convert) or remaining[name] is True
        ):
            raise UserError(f"generation_kwargs: {name} must not be {remaining[name]!r}")
    until = remaining.pop("until", ())
    until = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    named = [remaining.pop(name) for name in TOKEN_LIMIT_NAMES if name in remaining]
    warmth = float(remaining.pop("temperature", 0.0))
    is_sampled = bool(remaining.pop("do_sample", warmth > 0))
    temperature = warmth if "temperature" in kwargs else float(is_sampled)
    for name, allowed in NEUTRAL.items():
        if name in remaining and remaining.pop(name) not in allowed:
            raise UserError(
                f"generation_kwargs has {name}={kwargs[name]!r}, which is not supported"
            )
    remaining.pop("pad_token_id", None)
    ends = remaining.pop("eos_token_id", ())
    remaining["stop_token_ids"] = [
        *(ends if isinstance(ends, list | tuple) else [ends]),
        *remaining.get("stop_token_ids", ()),
    ]
    end = remaining.pop("think_end_token", None)
    length = remaining.pop("max_length", None)
    params_by_name = {name: remaining.pop(name) for name in IN_REQUESTS if name in remaining}
    if remaining:
        raise UserError(f"generation_kwargs has {sorted(remaining)[0]!r}, which is not supported")
    try:
        params = SamplingParams(
            max_tokens=int(named[0]) if named else tokens,
            temperature=temperature if is_sampled else 0.0,
            stop=() if end or thinks else until,
            **params_by_name,
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"generation_kwargs: {error}") from None
    return Wish(params, until, None if named else length, end)


KINDS: Mapping[str, Any] = {
    "until": str | list | tuple,
    "temperature": int | float | str,
    "max_length": int,
    "max_gen_toks": int,
    "max_new_tokens": int,
    "max_tokens": int,
}
"""Types of options that differ from `SamplingParams`."""

TOKEN_LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the most new tokens, in the harness's order."""


class CheckedTasks(TaskManager):  # type: ignore[misc]
    """The harness's tasks, whose `generation_kwargs` are checked when they are loaded, before hours
    of work on others."""

    def load(self, task_list: Any) -> Any:
        loaded = super().load(task_list)
        for name, task in loaded["tasks"].items():
            if task.OUTPUT_TYPE != "generate_until":
                continue
            try:
                read_wish(task.config.generation_kwargs or {}, NEW_TOKENS)
            except UserError as error:
                raise UserError(f"task {name}: {error}") from None
        return loaded
