"""The server's part of traces: a span for each request, in the trace that the device says it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from skydraft.protocol.values import Emission, SessionCall, VerifyCall
from skydraft.tracing import HEADER, Attributes, Tracing, is_traceparent
from skydraft.types import Cost, Verdict

_parent: ContextVar[str] = ContextVar(
    "parent", default=""
)  # each call and each stream is answered in a task of its own
Note: TypeAlias = Callable[[Any], None]


def belongs_to(metadata: Any) -> None:
    """Note which trace the call or stream belongs to that this task answers."""
    header = str(dict(metadata or ()).get(HEADER, ""))
    _parent.set(header if is_traceparent(header) else "")


@contextmanager
def request_span(tracing: Tracing, kind: str, call: SessionCall | VerifyCall, owner: str) -> Iterator[Note]:
    """A span around the answer to a request, which is noted, or the answers; none where it belongs to no trace."""
    if not _parent.get():
        yield lambda answer: None
        return
    with tracing.span(kind, _parent.get(), serves=True) as span:
        span.note(_asked(call, owner))
        total, num_tokens = Cost(), 0

        def note(answer: Any) -> None:
            nonlocal total, num_tokens
            total += answer.cost
            num_tokens += len(answer.token_ids) if isinstance(answer, Emission) else 0
            span.note(_answered(answer, total, num_tokens))

        yield note


def _asked(call: SessionCall | VerifyCall, owner: str) -> Attributes:
    found: dict[str, str | int] = {"skydraft.session": call.session, "skydraft.epoch": call.epoch}
    if owner:
        found["skydraft.client"] = owner
    if isinstance(call, VerifyCall):
        found |= {"skydraft.base": call.base, "skydraft.num_draft": len(call.draft_ids)}
    if call.opening:
        found["skydraft.num_prompt"] = len(call.opening.prompt.token_ids)
    return found


def _answered(answer: Any, cost: Cost, num_tokens: int) -> Attributes:
    found: dict[str, str | int | float] = {
        "skydraft.queue_ms": cost.queue_ms,
        "skydraft.forward_ms": cost.forward_ms,
        "skydraft.prefill_ms": cost.prefill_ms,
        "skydraft.num_rows": cost.num_rows,
        "skydraft.num_cached": cost.num_cached,
    }
    if isinstance(answer, Verdict):
        found["skydraft.num_accepted"] = answer.num_accepted
        num_tokens = answer.num_tokens
    if num_tokens:
        found["skydraft.num_tokens"] = num_tokens
    return found
