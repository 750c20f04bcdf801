from dataclasses import replace

from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.tracing import TraceSpan, Tracing


class TraceObserver:
    """Makes a span of each generation, below that of the request's `traceparent` or else of `parent`."""

    def __init__(self, tracing: Tracing, parent: str = "") -> None:
        self._tracing = tracing
        self.parent = parent
        self._open: dict[str, TraceSpan] = {}  # by header, which names a span

    def begins(self, request: GenerateRequest) -> GenerateRequest:
        if request.local_only:
            return request
        span = self._tracing.begin("generate", request.traceparent or self.parent)
        self._open[span.header] = span
        return replace(request, traceparent=span.header)  # the parent of the spans of servers

    def ended(self, request: GenerateRequest, generation: Generation | None, error: BaseException | None) -> None:
        if span := self._open.pop(request.traceparent, None):  # a local text has none
            plan = request.plan
            span.note({
                "gen_ai.operation.name": "text_completion" if request.raw else "chat",
                "gen_ai.request.temperature": request.params.temperature,
                "gen_ai.request.max_tokens": request.params.max_new_tokens,
                "skydraft.mode": plan.mode or "", "skydraft.gate": str(plan.gate),
                "skydraft.k": "auto" if plan.k is None else str(plan.k),
                "skydraft.hand_back": "auto" if plan.hand_back is None else str(plan.hand_back),
            })  # fmt: skip
            if generation is not None:
                span.note(_figures(generation))
            span.end(error)


def _figures(generation: Generation) -> dict[str, str | int | float]:
    stats, target = generation.stats, generation.target
    return {
        "gen_ai.usage.input_tokens": generation.num_prompt_tokens,
        "gen_ai.usage.output_tokens": stats.num_tokens,
        "gen_ai.response.finish_reasons": generation.finish_reason or "",
        "skydraft.edge": generation.edge.name if generation.edge else "",
        "skydraft.cloud": target.engine.name if target and target.engine else "",
        "skydraft.num_rounds": stats.num_rounds,
        "skydraft.num_escalated": stats.num_escalated,
        "skydraft.num_accepted": stats.num_accepted_tokens,
        "skydraft.draft_ms": stats.draft_ms,
        "skydraft.wait_ms": sum(record.link.rtt_ms for record in generation.records),
    }
