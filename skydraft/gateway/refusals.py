"""Turn errors into OpenAI's error bodies with a status. A client never sees a path or a traceback."""

import itertools
import logging
import time
from typing import Any

from pydantic import ValidationError

from skydraft import errors

log = logging.getLogger("skydraft.gateway")
RETRY_AFTER_S = 2
TOO_LONG, SPENT = "context_length_exceeded", "insufficient_quota"
_MOST_CHARS = 1000
# Errors that only the operator can fix: files, or servers that started after the gateway.
_OPERATORS = errors.RecordsError, errors.UnknownModel, errors.VocabularyMismatch, errors.WrongServer


class Refusal(Exception):
    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        self.message, self.param = message[:_MOST_CHARS], param and param[:_MOST_CHARS]  # may quote the client

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}
        headers |= {"x-should-retry": "false"} if self.code == SPENT else {}  # SDKs read it
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal for an error. Log an unexpected one, and hide its message from the client."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, errors.ContextExceeded):
        # LangChain and LiteLLM recognise this error by these words. Claude Code compacts by the two numbers.
        said = f"the prompt is too long: {error.num_tokens} tokens > {error.most} maximum."
        return Refusal(400, f"This model's maximum context length is exceeded: {said}", code=TOO_LONG)
    if isinstance(error, errors.LimitExceeded):
        return Refusal(400, error.message, code=TOO_LONG)
    if isinstance(error, errors.UsageError) and not isinstance(error, _OPERATORS):
        return Refusal(400, error.message)  # the hint is for the command line
    if isinstance(error, errors.BudgetSpent):
        wait_s = 86400 - int(time.time()) % 86400  # until the next day (UTC)
        return Refusal(429, error.message, code=SPENT, retry_after_s=wait_s)
    if isinstance(error, errors.EngineBusy):
        return Refusal(503, error.message, code="busy", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, errors.CloudError):
        code = "cloud_timeout" if isinstance(error, errors.CloudTimeout) else "cloud_lost"
        wait_s = round(error.retry_after_s + 0.5) if isinstance(error, errors.RateLimited) else RETRY_AFTER_S
        return Refusal(503, error.message, code=code, retry_after_s=max(wait_s, 1))
    if not isinstance(error, errors.SkydraftError):
        log.error("a request failed", exc_info=error)
        return Refusal(500, "The gateway failed; its log says why.", code="internal_error")
    log.error("a request failed: %s", error)  # with the hint, for the operator
    if isinstance(error, errors.MissingDependency):
        return Refusal(501, f"This server lacks a part: {error.message}", code="not_installed")
    return Refusal(500, "The model failed; the gateway's log says why.", code="engine_error")


# Unsupported fields whose effect a client would silently miss, by advice. Other unknown fields are ignored.
_NOT_SERVED = {
    "Use response_format (of a response: text.format) or skydraft.grammar.": """grammar json_schema guided_json
        guided_regex guided_choice guided_grammar structured_outputs structural_tag regex ebnf output_format""",
    "Use tools and tool_choice.": "functions function_call",
    "Nothing is kept between requests; send the whole conversation.": "previous_response_id conversation background",
    "Answers are text.": "audio modalities",
    "Put its fields into the body itself.": "extra_body",
    "This is not supported.": "chat_template documents ignore_eos suffix",
}
NOT_SERVED = {name: why for why, names in _NOT_SERVED.items() for name in names.split()}
NEUTRAL = ("none", "auto", ["text"], {"type": "text"})  # values without effect, like null, false, 0 and empty ones


_ALTERNATIVES = {"str", "int", "list", "text", "NamedTool", "message", "function_call", "function_call_output"}


def invalid(error: ValidationError) -> Refusal:
    """Return the refusal for an invalid body, with the field's path, but without pydantic's names of alternatives."""
    # In a union the client probably meant the alternative with the deepest error, or the one of the value's type.
    found = error.errors(include_url=False, include_input=False)
    first = max(found, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    if first["type"] == "json_invalid":
        return Refusal(400, f"The body is not valid JSON: {first['ctx']['error']}.")
    place = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    fields = [part for part in place[1:] if part not in _ALTERNATIVES]
    param = ".".join(part for part, _ in itertools.groupby([*place[:1], *fields])) or None
    return Refusal(400, f"{param or 'The body'}: {first['msg'].removeprefix('Value error, ')}", param=param)
