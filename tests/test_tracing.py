"""Traces: one across the device, the server and whoever asked; no text in it; nothing of it unless asked for."""

import dataclasses
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, ClassVar

import grpc
import httpx2 as httpx
import numpy as np
import pytest

import skydraft
from skydraft.cli.main import run as command
from skydraft.cloud.options import ServeOptions
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.traced import TraceObserver
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError, UsageError
from skydraft.prompts.messages import asked
from skydraft.protocol import codec
from skydraft.protocol.values import Opening, VerifyCall
from skydraft.tracing import Tracing, is_traceparent
from skydraft.types import Prompt

from .gateway.running import gateway, toy_pair
from .serving import RawSession, free_port, serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

OUTER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = bytes.fromhex(OUTER[3:35])
PROMPT = "一段谁也不该在别处读到的话"


class Handler(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, and keeps what came."""

    bodies: ClassVar[list[bytes]]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class Collector(http.server.ThreadingHTTPServer):
    bodies = property(lambda self: Handler.bodies)
    url = property(lambda self: f"http://127.0.0.1:{self.server_address[1]}")

    def spans(self) -> list[Any]:
        """(service, span) of all that arrived."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                found += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    Handler.bodies = []
    with Collector(("127.0.0.1", 0), Handler) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


def request(mode: str = "edge", prompt: str = "你好", header: str = "", num: int = 4, **given: Any) -> GenerateRequest:
    params = skydraft.DecodingParams(max_new_tokens=num, **given)
    return GenerateRequest(asked(prompt), make_plan(mode), params, traceparent=header)


def run(asked_for: GenerateRequest, collector: Collector | None = None, cloud: Any = None) -> Any:
    """Write a text; its trace goes to the collector, if there is one."""
    with ExitStack() as stack:
        observers = []
        if collector:
            observers = [TraceObserver(stack.enter_context(closing(Tracing("device", collector.url))))]
        with skydraft.start(asked_for, edge=open_toy("toy:drift=0.2"), cloud=cloud, observers=observers) as generation:
            return generation.run()


def figures(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.mark.usefixtures("fixed_k")
@pytest.mark.parametrize("mode", ["lossless", "quality", "cloud"])
def test_a_trace_goes_from_the_device_to_the_server(mode: str) -> None:
    with collecting() as collector:
        with serving(open_toy("toy"), otlp=collector.url) as server, closing(skydraft.connect(server.address)) as cloud:
            generation = run(request(mode, PROMPT, header=OUTER, num=24), collector, cloud)
        spans = collector.spans()
        assert all(PROMPT.encode() not in body and generation.text.encode() not in body for body in collector.bodies)
    assert {span.trace_id for _, span in spans} == {TRACE_ID}
    ((service, whole),) = [each for each in spans if each[1].name == "generate"]
    assert service == "device" and whole.parent_span_id.hex() == OUTER[36:52]
    stats, found = generation.stats, figures(whole)
    assert (found["skydraft.mode"], found["skydraft.num_rounds"]) == (mode, stats.num_rounds)
    assert found["gen_ai.usage.output_tokens"] == stats.num_tokens and found["skydraft.wait_ms"] > 0
    assert found["skydraft.hand_back"] == ("agree:4" if mode == "quality" else "0")
    served = [span for service, span in spans if service == "skydraft-serve"]
    assert len(served) == len(spans) - 1 and {span.parent_span_id for span in served} == {whole.span_id}
    verified = [figures(span) for span in served if span.name == "verify"]
    judged = {record.base for record in generation.records if record.outcome == "verified"}
    if mode == "cloud":
        assert [each["skydraft.base"] for each in verified] == [0] and len(served) == 1
        assert verified[0]["skydraft.num_tokens"] == stats.num_tokens
    else:
        assert {each["skydraft.base"] for each in verified} == judged != set()
        assert sum(each["skydraft.num_accepted"] for each in verified) == stats.num_accepted_tokens


def test_a_trace_ends_where_another_one_begins() -> None:
    """One connection, three generations: with a trace, without one, and with one again."""
    other = OUTER.replace("0af7", "1bf8")
    with collecting() as collector:
        with serving(open_toy("toy"), otlp=collector.url) as server, closing(skydraft.connect(server.address)) as cloud:
            for header in (OUTER, "", other):
                run(request("lossless", header=header, num=8), collector if header == OUTER else None, cloud)
        traces = {span.trace_id for _, span in collector.spans()}
    assert traces == {TRACE_ID, bytes.fromhex(other[3:35])}


def test_a_failure_is_in_the_trace_without_its_words_and_passes() -> None:
    with collecting() as collector:
        with pytest.raises(UsageError, match=PROMPT):
            run(request(grammar=f"regex:({PROMPT}"), collector)
        ((_, span),) = collector.spans()
        assert all(PROMPT.encode() not in body for body in collector.bodies)
    assert span.status.code == span.status.STATUS_CODE_ERROR and figures(span)["error.type"] == "GrammarRefused"


def test_whoever_leaves_a_text_has_not_failed_and_a_header_that_is_none_makes_no_span() -> None:
    params = skydraft.DecodingParams(max_new_tokens=3500, min_new_tokens=3500)
    with collecting() as collector:
        with serving(open_toy("toy"), otlp=collector.url) as server, grpc.insecure_channel(server.address) as channel:
            opening = Opening(server.server.info().fingerprint, Prompt((1,)), params=params)
            call = VerifyCall(1, 0, 0, (), (), codec.digest(np.array([1])), opening, write=3500)
            for header in ("zzzz", OUTER):
                stream = RawSession(channel, traceparent=header)
                assert all((stream.ask(codec.encode_verify(call)), *(stream.answer() for _ in range(6))))
                stream.end()
        ((_, span),) = collector.spans()
    assert (span.trace_id, span.name) == (TRACE_ID, "verify")
    assert not span.status.code and figures(span)["skydraft.left"]
    assert 6 <= figures(span)["skydraft.num_tokens"] < 3500


def test_the_gateway_takes_a_client_s_trace() -> None:
    with collecting() as collector, closing(Tracing("gateway", collector.url)) as tracing:
        pair = dataclasses.replace(toy_pair(), observers=(TraceObserver(tracing),))
        with gateway(pair) as running:
            for header in (OUTER, "00-nonsense", OUTER + "\u00e9"):
                body = {"model": "skydraft", "messages": [{"role": "user", "content": "你好"}], "max_tokens": 4}
                headers = {b"traceparent": header.encode("latin-1")}
                answer = httpx.post(f"{running.v1}/chat/completions", json=body, headers=headers, timeout=30)
                assert answer.status_code == 200
        tracing.close()
        assert [span.trace_id == TRACE_ID for _, span in collector.spans()] == [True, False, False]


@pytest.mark.parametrize("answers", [True, False])
def test_a_collector_that_is_gone_or_silent_costs_one_line_and_no_answer(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skydraft.tracing._SEND_S", 0.3)
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = free_port() if answers else silent.getsockname()[1]
        tracing = Tracing("device", f"http://me:secret@127.0.0.1:{port}", lines.append)
        for _ in range(3):
            observers = [TraceObserver(tracing)]
            with skydraft.start(request(num=40), edge=open_toy("toy"), observers=observers) as generation:
                assert generation.run().finish_reason
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < 5  # the library waits longer
    (line,) = lines
    assert line.startswith(f"Traces cannot be sent to http://127.0.0.1:{port}; they are lost.") and "secret" not in line


def test_a_command_has_its_trace_and_name_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", OUTER)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kitchen")
    with collecting() as collector:
        where = ["--otlp", collector.url, "--edge-model", "toy"]
        assert command(["generate", "你好", "--mode", "edge", "-n", "4", "-q", *where]) == 0
        assert {(service, span.trace_id) for service, span in collector.spans()} == {("kitchen", TRACE_ID)}


@pytest.mark.parametrize("url", ["localhost:4318", "file:///tmp/x", "", "http://[::1", "http://a:99999", "http://a:0"])
def test_an_address_that_is_none_is_one_line(url: str) -> None:
    for made in (partial(Tracing, "device", url), partial(ServeOptions, otlp=url)):
        with pytest.raises(OptionError, match="not the address of a collector"):
            made()


@pytest.mark.parametrize(
    ("header", "is_one"),
    [
        (OUTER, True), (OUTER.upper(), False), (OUTER + "\n", False), ("ff" + OUTER[2:], False), ("", False),
        (OUTER.replace("b7ad6b7169203331", "0" * 16), False), (OUTER.replace(OUTER[3:35], "0" * 32), False),
    ],
)  # fmt: skip
def test_headers(header: str, is_one: bool) -> None:
    assert is_traceparent(header) is is_one
    if header and not is_one:
        with pytest.raises(OptionError, match="not a traceparent"):
            GenerateRequest(asked("你好"), traceparent=header)
