"""The server's part of traces: a span for each request, in the trace that the client names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from skydraft.protocol.values import OpenCall, VerifyCall, Written
from skydraft.tracing import HEADER, Attributes, Tracing, is_traceparent
from skydraft.types import Cost, Verdict

_parent: ContextVar[str] = ContextVar("parent", default="")  # each call and each stream has its own task
Note: TypeAlias = Callable[[Any], None]


def belongs_to(metadata: Any) -> None:
    """Note the trace of the call or stream that this task answers."""
    header = str(dict(metadata or ()).get(HEADER, ""))
    _parent.set(header if is_traceparent(header) else "")


@contextmanager
def request_span(tracing: Tracing, call: OpenCall | VerifyCall, owner: str) -> Iterator[Note]:
    """Wrap the answers to a request in a span, which takes notes of them; no span if the request has no trace."""
    if not _parent.get():
        yield lambda answer: None
        return
    with tracing.span(call.kind, _parent.get(), serves=True) as span:
        span.note(_asked(call, owner))
        total, num_tokens = Cost(), 0

        def note(answer: Any) -> None:
            nonlocal total, num_tokens
            total += answer.cost
            if isinstance(answer, Verdict | Written):
                num_tokens += answer.num_tokens if isinstance(answer, Verdict) else len(answer.token_ids)
            span.note(_answered(answer, total, num_tokens))

        yield note


def _asked(call: OpenCall | VerifyCall, owner: str) -> Attributes:
    attributes: dict[str, str | int] = {"skydraft.session": call.session, "skydraft.epoch": call.epoch}
    if owner:
        attributes["skydraft.client"] = owner
    if isinstance(call, VerifyCall):
        attributes |= {"skydraft.base": call.base, "skydraft.num_draft": len(call.draft_ids)}
    if call.opening:
        attributes["skydraft.num_prompt"] = len(call.opening.prompt.token_ids)
    return attributes


def _answered(answer: Any, cost: Cost, num_tokens: int) -> Attributes:
    attributes: dict[str, str | int | float] = {
        "skydraft.queue_ms": cost.queue_ms,
        "skydraft.forward_ms": cost.forward_ms,
        "skydraft.prefill_ms": cost.prefill_ms,
        "skydraft.num_rows": cost.num_rows,
        "skydraft.num_cached": cost.num_cached,
    }
    if isinstance(answer, Verdict):
        attributes["skydraft.num_accepted"] = answer.num_accepted
    if num_tokens:
        attributes["skydraft.num_tokens"] = num_tokens
    return attributes
