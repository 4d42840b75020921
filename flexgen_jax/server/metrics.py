"""Metrics in Prometheus' format."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)

from flexgen_jax.server.engine import Engine


def metrics_of(engine: Engine, model: str) -> tuple[bytes, str]:
    """Returns the metrics as text, and the type of that."""
    registry, counts = CollectorRegistry(), engine.counts
    for name, meaning, value in (
        ("flexgen_texts", "Texts that are finished", counts.texts),
        ("flexgen_prompt_tokens", "Tokens of finished texts' prompts", counts.prompt_tokens),
        ("flexgen_generation_tokens", "New tokens", counts.new_tokens),
        ("flexgen_texts_refused", "Texts refused since too many waited", counts.refused),
        ("flexgen_texts_failed", "Texts that the engine failed to make", counts.failed),
    ):
        Counter(name, meaning, ["model"], registry=registry).labels(model).inc(value)
    for name, meaning, size in (
        ("flexgen_texts_running", "Texts under way that have a token", engine.running),
        ("flexgen_texts_waiting", "Texts without a token yet", engine.waiting),
        ("flexgen_tokens_per_second", "New tokens a second, last minute", engine.tokens_per_s),
    ):
        Gauge(name, meaning, ["model"], registry=registry).labels(model).set(size)
    return generate_latest(registry), CONTENT_TYPE_LATEST
