"""Prometheus metrics. The speculation counters have vLLM's names with our prefix."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from skydraft.cloud.docket import Docket


class Metrics(Collector):
    """The counters of a docket at each scrape, and the number of ended calls by (path, outcome)."""

    def __init__(self, model: str, docket: Docket, num_ended: Mapping[tuple[str, str], int]) -> None:
        self._model, self._docket, self._num_ended = model, docket, num_ended

    def collect(self) -> Iterator[Metric]:
        docket, totals = self._docket, self._docket.totals
        yield GaugeMetricFamily("skydraft_requests_waiting", "Requests in the worker", len(docket.jobs))
        yield GaugeMetricFamily("skydraft_sessions", "Sessions that hold KV memory", docket.num_sessions)
        yield GaugeMetricFamily("skydraft_sessions_evicted", "Evicted since the start", docket.sessions.num_evicted)
        for name, about, num in (
            ("spec_decode_num_drafts", "Blocks judged", totals.num_blocks),
            ("spec_decode_num_draft_tokens", "Tokens drafted", totals.num_drafts),
            ("spec_decode_num_accepted_tokens", "Drafts accepted", totals.num_accepted),
            ("generated_tokens", "Tokens committed", totals.num_tokens),
        ):
            counter = CounterMetricFamily(f"skydraft_{name}", about, labels=["model"])
            counter.add_metric([self._model], num)
            yield counter
        yield SummaryMetricFamily("skydraft_batch_rows", "Rows in a forward", totals.num_forwards, totals.num_rows)
        yield SummaryMetricFamily("skydraft_forward_seconds", "Of a forward", totals.num_forwards, totals.forward_s)
        calls = CounterMetricFamily("skydraft_calls", "Calls that have ended", labels=["method", "outcome"])
        for (path, outcome), num in dict(self._num_ended).items():
            calls.add_metric([path.rpartition("/")[2], outcome], num)
        yield calls

    def serve(self, port: int, host: str) -> None:
        """Serve the metrics from a new thread until `close`. Raises OSError."""
        registry = CollectorRegistry()  # instead of the global one
        registry.register(self)
        self._server, _ = start_http_server(port, host, registry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
