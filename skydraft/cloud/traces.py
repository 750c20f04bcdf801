"""The server's part of traces: a span for each request, in the trace that the device says it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from skydraft.protocol.values import Emission, SessionCall, VerifyCall
from skydraft.tracing import HEADER, Attributes, Tracing
from skydraft.types import Cost, Verdict

_parent: ContextVar[str] = ContextVar(
    "parent", default=""
)  # each call and each stream is answered in a task of its own
Note: TypeAlias = Callable[[Any], None]


def belongs_to(metadata: Any) -> None:
    """Note which trace the call or stream belongs to that this task answers."""
    _parent.set(str(dict(metadata or ()).get(HEADER, "")))


@contextmanager
def request_span(tracing: Tracing, kind: str, call: SessionCall | VerifyCall, owner: str) -> Iterator[Note]:
    """A span around the answer to a request, which is noted, or the answers; none where it belongs to no trace."""
    if not _parent.get():
        yield lambda answer: None
        return
    with tracing.span(kind, _parent.get(), serves=True) as span:
        span.note(_asked(call, owner))
        total = Cost()

        def note(answer: Any) -> None:
            nonlocal total
            total += answer.cost
            span.note(_answered(answer, total))

        yield note


def _asked(call: SessionCall | VerifyCall, owner: str) -> Attributes:
    found: dict[str, str | int] = {"skydraft.session": call.session, "skydraft.epoch": call.epoch}
    if owner:
        found["skydraft.client"] = owner
    if isinstance(call, VerifyCall):
        found |= {"skydraft.base": call.base, "skydraft.num_draft": len(call.draft_ids)}
    if call.opening:
        found["gen_ai.usage.input_tokens"] = len(call.opening.prompt.token_ids)
    return found


def _answered(answer: Any, cost: Cost) -> Attributes:
    found: dict[str, str | int | float] = {
        "skydraft.queue_ms": cost.queue_ms,
        "skydraft.forward_ms": cost.forward_ms,
        "skydraft.prefill_ms": cost.prefill_ms,
        "skydraft.num_rows": cost.num_rows,
        "skydraft.num_cached": cost.num_cached,
    }
    if isinstance(answer, Verdict):
        found["skydraft.num_accepted"] = answer.num_accepted
    if isinstance(answer, Emission):
        found["gen_ai.usage.output_tokens"] = answer.base + len(answer.token_ids)
    return found
