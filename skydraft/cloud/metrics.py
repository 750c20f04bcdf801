"""Prometheus metrics; the speculation counters have vLLM's names with our prefix."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from skydraft.config import MAX_K
from skydraft.types import Verdict

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)


class Metrics:
    """The metrics of one server, in a registry of their own: nothing is global."""

    def __init__(self, model: str) -> None:
        self.registry = own = CollectorRegistry()
        spec, labels = "skydraft_spec_decode_num_", ("model",)
        seconds = partial(Histogram, buckets=_LATENCY_S, registry=own)
        self._drafts = Counter(f"{spec}drafts", "Blocks judged", labels, registry=own).labels(model)
        self._draft_tokens = Counter(f"{spec}draft_tokens", "Tokens drafted", labels, registry=own).labels(model)
        self._accepted = Counter(f"{spec}accepted_tokens", "Drafts accepted", labels, registry=own).labels(model)
        places = "model", "position"
        per_pos = Counter(f"{spec}accepted_tokens_per_pos", "Drafts accepted, by position", places, registry=own)
        self._per_position = [per_pos.labels(model, str(position)) for position in range(MAX_K)]
        self._emitted = Counter("skydraft_generated_tokens", "Tokens committed", labels, registry=own).labels(model)
        self._requests = Counter("skydraft_requests", "Requests answered", ("kind", "outcome"), registry=own)
        self._queue = Gauge("skydraft_requests_waiting", "Requests in the worker", registry=own)
        self._sessions = Gauge("skydraft_sessions", "Sessions that hold KV memory", registry=own)
        self._evicted = Gauge("skydraft_sessions_evicted", "Sessions evicted since the start", registry=own)
        self._expired = Gauge("skydraft_sessions_expired", "Sessions expired since the start", registry=own)
        self._batch_jobs = Histogram("skydraft_batch_jobs", "Requests in a forward", buckets=_ROWS, registry=own)
        self._batch_rows = Histogram("skydraft_batch_rows", "Rows in a forward", buckets=_ROWS, registry=own)
        self._forward_s = seconds("skydraft_forward_seconds", "Time of a forward")
        self._queue_s = seconds("skydraft_queue_seconds", "Waiting of a request")
        self._verify_s = seconds("skydraft_verify_seconds", "Verification on the server")

    def state(self, num_jobs: int, num_sessions: int, num_evicted: int, num_expired: int) -> None:
        """Set the numbers of jobs, of seated sessions, and of those evicted and expired so far."""
        self._queue.set(num_jobs)
        self._sessions.set(num_sessions)
        self._evicted.set(num_evicted)
        self._expired.set(num_expired)

    def forward(self, num_jobs: int, num_rows: int, seconds: float) -> None:
        self._batch_jobs.observe(num_jobs)
        self._batch_rows.observe(num_rows)
        self._forward_s.observe(seconds)

    def asked(self, kind: str, error: Exception | None) -> None:
        self._requests.labels(kind, type(error).__name__ if error else "ok").inc()

    def judged(
        self, verdict: Verdict | None, num_draft: int, num_written: int, num_fed: int = 0, num_right: int = 0
    ) -> None:
        """Count a job that got its last answer. `verdict` is None if none was computed for it. While the target wrote
        on, it judged `num_fed` drafts, of which `num_right` stand."""
        self._draft_tokens.inc(num_fed)
        self._accepted.inc(num_right)
        if verdict is not None:
            self._drafts.inc()
            self._draft_tokens.inc(num_draft)
            self._accepted.inc(verdict.num_accepted)
            for position in range(min(verdict.num_accepted, MAX_K)):
                self._per_position[position].inc()
            self._emitted.inc(verdict.num_tokens)
            self._queue_s.observe(verdict.cost.queue_ms / 1e3)
            self._verify_s.observe((verdict.cost.queue_ms + verdict.cost.forward_ms) / 1e3)
        self._emitted.inc(num_written)

    def serve(self, port: int, host: str) -> None:
        """Serve them from a new thread until `close`. Raises OSError."""
        self._server, _ = start_http_server(port, host, self.registry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
