"""Errors as OpenAI's error bodies with a status. A client never sees a path or a traceback."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from pydantic import ValidationError

from skydraft.errors import (
    CloudError,
    CloudTimeout,
    ContextExceeded,
    LimitExceeded,
    RateLimited,
    SkydraftError,
    UsageError,
)

log = logging.getLogger("skydraft.gateway")
RETRY_AFTER_S = 2
_MOST_CHARS = 1000


class Refusal(Exception):
    """An error answer: `status` for HTTP, the rest for OpenAI's clients."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = message[:_MOST_CHARS], param and param[:_MOST_CHARS]  # may quote the client
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The extra headers of this answer."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def refusal_of(error: Exception) -> Refusal:
    """The refusal for an error. An unexpected error is logged, and the client does not see its message."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, ContextExceeded):
        # LangChain and LiteLLM recognise this error by these words, not by its code.
        message = f"This model's maximum context length is exceeded: the prompt is too long. {error.message}"
        return Refusal(400, message, param="messages", code="context_length_exceeded")
    if isinstance(error, LimitExceeded):
        return Refusal(400, error.message, param="messages", code="context_length_exceeded")
    if isinstance(error, UsageError):
        return Refusal(400, error.message)  # its hint is for the command line
    if isinstance(error, CloudError):
        code = "cloud_timeout" if isinstance(error, CloudTimeout) else "cloud_lost"
        wait_s = round(error.retry_after_s + 0.5) if isinstance(error, RateLimited) else RETRY_AFTER_S
        return Refusal(503, error.message, code=code, retry_after_s=max(wait_s, 1))
    if isinstance(error, SkydraftError):
        log.error("a request failed: %s", error)
        return Refusal(500, "The model failed; the gateway's log says why.", code="engine_error")
    log.error("a request failed", exc_info=error)
    return Refusal(500, "The gateway failed; its log says why.", code="internal_error")


_WHY = {
    "function_call": "Use tools instead.",
    "modalities": "Answers are text.",
    "best_of": "Use n instead.",
    "background": "An answer is written while its client waits.",
}
_OPENAIS = {
    "max_new_tokens": "Use max_tokens.",
    "stop": "Use stop of the request.",
    "logit_bias": "Use logit_bias of the request.",
}


def _invalid(error: ValidationError) -> Refusal:
    # The client probably meant the alternative of a union whose error lies deepest.
    first = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
    if first["type"] == "json_invalid":
        return Refusal(400, f"The body is not valid JSON: {first['ctx']['error']}.")
    # The location of an error also holds names of alternatives, which are not fields.
    place = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    fields = [part for part in place[1:] if part not in ("str", "int", "list", "text", "NamedTool")]
    param = ".".join(part for part, _ in itertools.groupby([*place[:1], *fields])) or None
    why = _WHY.get(place[0] if place else "") or _said(first, place)
    return Refusal(400, f"{param or 'The body'}: {why}", param=param)


def _said(error: Any, place: list[str]) -> str:
    """What is wrong, in our words where pydantic's do not say what to do."""
    kind, facts = error["type"], error.get("ctx", {})
    if kind == "union_tag_invalid" and "image" in facts["tag"]:
        return "Pictures are not read. The models take text, and some take recordings (input_audio)."
    if kind == "union_tag_invalid":
        return f"There is no type '{facts['tag']}' here. Use one of: {facts['expected_tags']}."
    if kind == "extra_forbidden":
        return f"There is no such field. {_OPENAIS.get(place[-1], 'Remove it.')}"
    return "It is missing." if kind == "missing" else error["msg"].removeprefix("Value error, ")
