"""What the gateway tells Prometheus. Counts, no prompts and no names."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from skydraft.gateway.desk import Desk, Ended, Event, Wrote

_TTFT_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class GatewayMetrics:
    """The metrics of one gateway, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._registry = CollectorRegistry()
        registry = self._registry
        self._answers = Counter("skydraft_gateway_answers", "Choices that came to their end", registry=registry)
        self._refusals = Counter("skydraft_gateway_refusals", "Errors told", ["status"], registry=registry)
        self._tokens = Counter(
            "skydraft_gateway_tokens", "Tokens by where they came from", ["origin"], registry=registry
        )
        self._rounds = Counter("skydraft_gateway_rounds", "Rounds by outcome", ["outcome"], registry=registry)
        self._cached = Counter("skydraft_gateway_cached_tokens", "Prompt tokens reused", ["side"], registry=registry)
        self._ttft = Histogram(
            "skydraft_gateway_ttft_seconds", "Start to first round", buckets=_TTFT_S, registry=registry
        )
        registry.register(self)

    def happened(self, event: Event) -> None:
        """Count an event of a desk."""
        if isinstance(event, Wrote):
            self._rounds.labels(event.done.record.outcome).inc()
            for token in event.tokens:
                self._tokens.labels(token.origin).inc()
        elif isinstance(event, Ended):
            self._answers.inc()
            self._cached.labels("edge").inc(event.stats.cached_tokens.edge)
            self._cached.labels("cloud").inc(event.stats.cached_tokens.cloud)
            if event.stats.ttft_ms is not None:
                self._ttft.observe(event.stats.ttft_ms / 1e3)

    def refused(self, status: int) -> None:
        """Count an error."""
        self._refusals.labels(str(status)).inc()

    def collect(self) -> list[GaugeMetricFamily]:
        """What is so at this moment, when it is asked for."""
        running, waiting = self._desk.num_running, self._desk.num_waiting
        return [
            GaugeMetricFamily("skydraft_gateway_running", "Choices being written", value=running),
            GaugeMetricFamily("skydraft_gateway_waiting", "Choices in the queue", value=waiting),
        ]

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)
