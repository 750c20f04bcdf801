"""Turn errors of servers without skydraft, and of connections to them, into SkydraftErrors."""

import json
import re
import ssl
from collections.abc import Mapping
from typing import Any

from skydraft import errors
from skydraft.characters import one_line
from skydraft.errors import SkydraftError

# Words in the errors of hosts that refuse a text for its content.
_FILTERED = ("content_filter", "content_policy", "contentpolicy", "data_inspection", "datainspection", "content exists")
NOT_READY = 503  # the model is loading, or a router has no server; a text under way treats it as lost
_BY_STATUS = {408: errors.CloudTimeout, 504: errors.CloudTimeout, NOT_READY: errors.CloudLoading}
_TOO_LONG = ("cannot be greater than", "context length", "context size", "maximum context", "too long", "exceed")


def refusal(status: int, headers: Mapping[str, str], start: bytes) -> SkydraftError:
    """Return the error for an HTTP status; 200 stands for an error inside an answer. `start` begins the body."""
    error, says = _error(start)
    code = str(error.get("code"))
    if status == 200 and code.isdecimal() and len(code) == 3:
        status = int(code)
    why = "sent an error in place of an answer" if status == 200 else f"answered {status}"
    why = re.sub(r"(?<![.!?。！])$", ".", f"The server {why}{f': {says}' if says else ''}")
    words = f"{code} {error.get('type')} {says}".lower()
    if status < 429 and any(word in words for word in _FILTERED):
        return errors.ContentFiltered(why)
    if status in (401, 403):
        return errors.NotAuthorized(why, hint="Give its key with --cloud-key-file.")
    if status == 429:
        wait_s = headers.get("retry-after", "")
        return errors.RateLimited(why, retry_after_s=min(float(wait_s), 3600.0) if wait_s.isdecimal() else 1.0)
    if status in (400, 413, 422) and any(part in says.lower() for part in _TOO_LONG):
        return errors.LimitExceeded(why)
    return _BY_STATUS.get(status, errors.CloudFailure)(why)


def _error(start: bytes) -> tuple[Mapping[str, Any], str]:
    """Return the error object in a body, and the server's message as one short line; both may be empty."""
    try:
        body = json.loads(start)
    except (ValueError, RecursionError):
        body = start.decode("utf-8-sig", errors="replace")
        if body.lstrip().startswith("<"):
            return {}, "a web page, not a model server's answer."
    error = (body.get("error") or body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return {}, one_line(str(error))[:300]
    return error, one_line(str(error.get("message") or error.get("detail") or ""))[:300]


def no_connection(error: Exception) -> SkydraftError:
    text = str(error)
    if "CERTIFICATE" in text or "SSL" in text or isinstance(error, ssl.SSLError):
        hint = "Give its CA certificate with --tls-ca, or use http:// if the server does not encrypt."
        return errors.TlsFailure(f"The encrypted connection to the server failed ({one_line(text)[:200]}).", hint=hint)
    return errors.CloudLost(f"no connection ({one_line(text)[:200]}).")
