"""What the errors of a server without skydraft mean: by its status, its words, and those of the connection."""

import json
import re
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from html import unescape
from typing import Any

from skydraft import errors
from skydraft.characters import one_line
from skydraft.errors import SkydraftError

# Codes, kinds and words of hosts that refuse a text for what it says: Azure, Moonshot, LiteLLM, DashScope, DeepSeek.
_FILTERED = (
    "content_filter", "content management policy", "contentpolicy", "content_policy", "data_inspection_failed",
    "datainspectionfailed", "content exists risk",
)  # fmt: skip
_ZHIPU_FILTERED = "1301"
_WEB_PAGE = re.compile(r"\s*(<\?xml[^>]{,200}>\s*)?<(!doctype html|html)\b", re.I)
_TITLE = re.compile(r"<title[^>]{,200}>([^<]{1,200})", re.I)
NOT_READY = 503  # it loads its model, or a router has no server: for a text under way as good as gone
_BY_STATUS = {408: errors.CloudTimeout, 504: errors.CloudTimeout, NOT_READY: errors.CloudLoading}
_TOO_LONG = ("cannot be greater than", "context length", "context size", "maximum context", "too long", "exceed")


def refusal(status: int, headers: Mapping[str, str], start: bytes) -> SkydraftError:
    """The error for a status that is not 200, or 200 for an error within an answer; `start` begins its body."""
    error, says = _error(start)
    code = str(error.get("code"))
    if status == 200 and code.isdecimal() and len(code) == 3:
        status = int(code)
    why = "sent an error in place of an answer" if status == 200 else f"answered {status}"
    why = f"The server {why}{f': {says}' if says else '.'}"
    words = f"{code} {error.get('type')} {says}".lower()
    if status < 429 and (code == _ZHIPU_FILTERED or any(word in words for word in _FILTERED)):
        return errors.ContentFiltered(why)
    if status in (401, 403):
        return errors.NotAuthorized(why, hint="Give its key with --cloud-key-file.")
    if status == 429:
        return errors.RateLimited(why, retry_after_s=_seconds(headers.get("retry-after", "")))
    if status in (400, 413, 422) and any(part in says.lower() for part in _TOO_LONG):
        return errors.LimitExceeded(why)
    return _BY_STATUS.get(status, errors.CloudFailure)(why)


def _error(start: bytes) -> tuple[Mapping[str, Any], str]:
    """The error in a body that begins so, and the server's own sentence as one short line; both may be empty. A web
    page says what it is called."""
    try:
        body = json.loads(start)
    except (ValueError, RecursionError):
        body = start.decode("utf-8-sig", errors="replace")
        if _WEB_PAGE.match(body):
            found = _TITLE.search(body)
            title = one_line(unescape(found[1])).strip()[:80] if found else ""
            return {}, f"a web page{title and f' ({title})'}, not the answer of a model server."
    error = (body.get("error") or body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return {}, one_line(str(error))[:300]
    told = (error.get(name) for name in ("message", "detail", "error_message"))
    return error, one_line(str(next(filter(None, told), "")))[:300]


def _seconds(text: str) -> float:
    try:
        seconds = parsedate_to_datetime(text).timestamp() - time.time() if ":" in text else float(text)
    except (ValueError, TypeError):
        return 1.0
    return min(max(seconds, 0.0), 3600.0) if seconds == seconds else 1.0


def no_connection(error: Exception) -> SkydraftError:
    text = str(error)
    if "CERTIFICATE" in text or "SSL" in text or isinstance(error, ssl.SSLError):
        hint = "Give the certificate that signs its own with --tls-ca, or http:// where it does not encrypt."
        return errors.TlsFailure(f"There is no encrypted connection to the server ({one_line(text)[:200]}).", hint=hint)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return errors.CloudLost("no connection (Connection refused).")
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    return errors.CloudLost(f"no connection ({one_line(text)[:200]}).")
