"""A generation as a trace: one span for all of it, one for each round, and in that one for each step."""

from __future__ import annotations

import time
from dataclasses import replace

from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.tracing import TraceSpan, Tracing
from skydraft.types import StepRecord

_MAX_ROUNDS = 1000  # rounds with spans: a long text of the target alone has a round for each token


class TraceObserver:
    """Makes a trace of each generation, and sends it at the end.

    Its parent is the request's `traceparent`, or else `parent`; the spans of servers are its children. Only the first
    thousand rounds have spans.
    """

    def __init__(self, tracing: Tracing, parent: str = "") -> None:
        self._tracing = tracing
        self._parent = parent
        self._open: dict[str, TraceSpan] = {}  # by header, which names a span

    def begins(self, request: GenerateRequest) -> GenerateRequest:
        if request.local_only:
            return request
        span = self._tracing.begin("generate", request.traceparent or self._parent)
        self._open[span.header] = span
        span.note(_asked(request))
        return replace(request, traceparent=span.header)

    def ended(self, request: GenerateRequest, generation: Generation | None, error: BaseException | None) -> None:
        span = self._open.pop(request.traceparent, None)
        if span is None:  # without tracing no span has a header, and a local text has none
            return
        try:
            if generation is not None:
                span.note(_sides(generation))
                _add_rounds(self._tracing, span, generation)
        except Exception:
            self._tracing.lost()
        finally:
            span.end(error)


def _asked(request: GenerateRequest) -> dict[str, str | int | float]:
    plan = request.plan
    return {
        "gen_ai.operation.name": "text_completion" if request.raw else "chat",
        "gen_ai.request.temperature": request.params.temperature,
        "gen_ai.request.max_tokens": request.params.max_new_tokens,
        "skydraft.mode": plan.mode or "",
        "skydraft.gate": str(plan.gate),
        "skydraft.k": "auto" if plan.k is None else str(plan.k),
        "skydraft.hand_back": "auto" if plan.hand_back is None else str(plan.hand_back),
    }


def _sides(generation: Generation) -> dict[str, str]:
    engines = {"skydraft.edge": generation.edge, "skydraft.cloud": generation.target and generation.target.engine}
    return {name: engine.name for name, engine in engines.items() if engine}


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
