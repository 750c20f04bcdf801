"""A generation as a trace: a span for all of it, one for each round, and in it what drafting and verifying took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.tracing import TraceSpan, Tracing
from skydraft.types import StepRecord

Start: TypeAlias = Callable[..., AbstractContextManager[Generation]]


_MAX_ROUNDS = 1000  # of which spans are made: a long text of the target alone has one for each token


def traced(tracing: Tracing, start: Start, parent: str = "") -> Start:
    """`start`, as `skydraft.start` is one, with a trace of each generation, sent when its block ends.

    It belongs to the request's `traceparent`, or else to that of `parent`; the spans of a server belong to it. Of a
    thousand rounds at most there are spans.
    """

    @contextmanager
    def begin(request: GenerateRequest, *, edge: Any = None, cloud: Any = None) -> Iterator[Generation]:
        with tracing.span("generate", request.traceparent or parent) as span:
            span.note(_asked(request, edge, cloud))
            with start(replace(request, traceparent=span.header), edge=edge, cloud=cloud) as generation:
                try:
                    yield generation
                finally:
                    try:
                        _add_rounds(tracing, span, generation)
                    except Exception:  # a trace is worth no answer
                        tracing.lost()

    return begin


def _asked(request: GenerateRequest, edge: Any, cloud: Any) -> dict[str, str | int | float]:
    plan = request.plan
    named = {"skydraft.edge": getattr(edge, "name", ""), "skydraft.cloud": getattr(cloud, "name", "")}
    return {name: value for name, value in named.items() if value} | {
        "gen_ai.operation.name": "text_completion" if request.raw else "chat",
        "gen_ai.request.temperature": request.params.temperature,
        "gen_ai.request.max_tokens": request.params.max_new_tokens,
        "skydraft.mode": plan.mode or "",
        "skydraft.gate": str(plan.gate),
        "skydraft.k": "auto" if plan.k is None else str(plan.k),
    }


def _add_rounds(tracing: Tracing, span: TraceSpan, generation: Generation) -> None:
    stats = generation.stats
    span.note(
        {
            "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
            "gen_ai.usage.output_tokens": stats.num_tokens,
            "gen_ai.response.finish_reasons": generation.finish_reason or "",
            "skydraft.num_rounds": stats.num_rounds,
            "skydraft.num_escalated": stats.num_escalated,
        }
    )
    began_ns = time.time_ns() - int((time.perf_counter() - generation.started) * 1e9)
    if (num_left_out := stats.num_rounds - _MAX_ROUNDS) > 0:
        span.note({"skydraft.num_rounds_left_out": num_left_out})
    for record in generation.records[:_MAX_ROUNDS]:
        _add_round(tracing, span.header, record, began_ns)


def _add_round(tracing: Tracing, parent: str, record: StepRecord, began_ns: int) -> None:
    end_ns = began_ns + int(record.ended_ms * 1e6)
    begin_ns = end_ns - int(record.wall_ms * 1e6)
    header = tracing.add("round", parent, begin_ns, end_ns, _figures(record))
    if record.num_draft:
        drafted_ns = min(begin_ns + int(record.draft.forward_ms * 1e6), end_ns)
        tracing.add("draft", header, begin_ns, drafted_ns, {"skydraft.num_draft": record.num_draft})
    if record.outcome != "skipped":
        waited_ms = record.link.rtt_ms or record.target.forward_ms
        figures = {
            "skydraft.forward_ms": record.target.forward_ms,
            "skydraft.queue_ms": record.target.queue_ms,
            "skydraft.bytes_up": record.link.bytes_up,
            "skydraft.bytes_down": record.link.bytes_down,
        }
        tracing.add("wait for the verdict", header, max(end_ns - int(waited_ms * 1e6), begin_ns), end_ns, figures)


def _figures(record: StepRecord) -> dict[str, str | int]:
    return {
        "skydraft.base": record.base,
        "skydraft.outcome": record.outcome,
        "skydraft.reason": record.reason,
        "skydraft.num_draft": record.num_draft,
        "skydraft.num_accepted": record.num_accepted,
        "skydraft.num_committed": record.num_committed,
    }
