"""The server's part of traces: a span for each request, in the trace that the client names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from skydraft.protocol.values import OpenCall, Opened, VerifyCall, Written
from skydraft.tracing import Tracing, is_traceparent
from skydraft.types import Cost, Verdict


@contextmanager
def request_span(
    tracing: Tracing, parent: str, call: OpenCall | VerifyCall, owner: str
) -> Iterator[Callable[[Opened | Verdict | Written], None]]:
    """Wrap the answers to a request in a span, which takes notes of them; none if the client names no trace."""
    answers: list[Any] = []
    if not is_traceparent(parent):
        yield answers.append
        return
    span, failed = tracing.begin(call.kind, parent, serves=True), None
    try:
        yield answers.append
    except BaseException as error:
        failed = error
        raise
    finally:
        cost = sum((answer.cost for answer in answers), Cost())
        span.note({"skydraft.session": call.session, "skydraft.epoch": call.epoch, "skydraft.client": owner})
        span.note({f"skydraft.{name}": getattr(cost, name) for name in _COSTS})
        if isinstance(call, VerifyCall):
            num_tokens = sum(a.num_tokens if isinstance(a, Verdict) else len(a.token_ids) for a in answers)
            num_accepted = sum(answer.num_accepted for answer in answers[:1])
            span.note({"skydraft.base": call.base, "skydraft.num_draft": len(call.draft_ids)})
            span.note({"skydraft.num_accepted": num_accepted, "skydraft.num_tokens": num_tokens})
        span.end(failed)


_COSTS = ("queue_ms", "forward_ms", "prefill_ms", "num_rows", "num_cached")
