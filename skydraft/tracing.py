"""Traces in OpenTelemetry's format: on a device a span for each answer, on a server one for each request of it.

The W3C header `traceparent` says which trace something belongs to; to a server it travels as metadata, once for each
call or stream. A trace holds names, numbers and times, never a text or a token.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from skydraft.characters import one_line
from skydraft.errors import OptionError, importing

HEADER = "traceparent"
_PATH = "/v1/traces"
_HEADER = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_SEND_S = 2.0  # for one batch, and at the end for what is left: a collector that is gone must not hold anybody up


def is_traceparent(text: str) -> bool:
    # https://www.w3.org/TR/trace-context/
    return bool(_HEADER.fullmatch(text)) and not text.startswith("ff")


class TraceSpan:
    """Spans whose parent is `header` belong to it; attributes are added until it ends."""

    def __init__(self, span: Any, header: str) -> None:
        self._span = span
        self.header = header

    def note(self, attributes: Mapping[str, str | int | float | bool]) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: BaseException | None = None) -> None:
        """An error makes it a failed one and names the kind of error; the error's words may be a user's."""
        from opentelemetry.trace import StatusCode

        if type(error).__name__ in ("GeneratorExit", "CancelledError"):  # the client has left, which is no failure
            self.note({"skydraft.left": True})
        elif error is not None:
            self.note({"error.type": type(error).__name__})
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def check_collector(url: str) -> str:
    """The address that spans are posted to, of a collector's. Raises OptionError."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        hint = "Give it as http://HOST:4318, or as https://HOST:4318."
        raise OptionError(f"{one_line(url[:80])} is not the address of a collector.", hint=hint)
    base = url.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


class Tracing:
    """Sends the spans of one process, `service`, to a collector (OTLP over HTTP). Threads may share it.

    `notify` gets one line when spans are lost. OpenTelemetry's own environment variables choose sampling, further
    attributes and another name of the service. Raises OptionError or MissingDependency.
    """

    def __init__(self, service: str, url: str, notify: Callable[[str], None] = lambda line: None) -> None:
        endpoint = check_collector(url)
        parts = urlsplit(url)
        self._where = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        self._notify = notify
        self._has_lost = False
        self._provider = _provider(os.environ.get("OTEL_SERVICE_NAME") or service, endpoint, self._lost)
        self._tracer = self._provider.get_tracer("skydraft")

    def _lost(self) -> None:
        if not self._has_lost:
            self._has_lost = True
            hint = "Is a collector there that takes OTLP over HTTP (usually port 4318, not 4317)?"
            self._notify(f"Traces cannot be sent to {self._where}; they are lost. {hint}")

    def begin(self, name: str, parent: str = "", *, serves: bool = False) -> TraceSpan:
        """A span that is to be ended, below that of the header `parent`. `serves`: it answers another process."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        context = propagator.extract({HEADER: parent})  # an invalid header: a trace of its own
        span = self._tracer.start_span(name, context, SpanKind.SERVER if serves else SpanKind.INTERNAL)
        carrier: dict[str, str] = {}
        propagator.inject(carrier, set_span_in_context(span))
        return TraceSpan(span, carrier.get(HEADER, ""))  # none where the variables turn tracing off

    def close(self) -> None:
        """Send what is left, for two seconds at most; the library alone would wait much longer."""
        ending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        ending.start()
        ending.join(_SEND_S)
        if ending.is_alive():
            self._lost()


def _provider(service: str, endpoint: str, lost: Callable[[], None]) -> Any:
    with importing("Traces need", "otel"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    class Exporter(OTLPSpanExporter):  # type: ignore[misc,unused-ignore]
        def export(self, spans: Any) -> Any:
            result = super().export(spans)
            if result is not SpanExportResult.SUCCESS:
                lost()
            return result

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # of lost spans it would print a traceback each
    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Exporter(endpoint=endpoint, timeout=_SEND_S)))
    return provider
