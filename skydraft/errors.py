"""All errors that a caller can meet.

    SkydraftError
    ├── UsageError              the request is wrong; nothing was done
    │   ├── UnknownModel        no such name, file, folder or hub id
    │   ├── VocabularyMismatch  draft and target do not share a tokenizer
    │   ├── PromptError         an empty prompt, or one that the model does not take
    │   │   └── ContextExceeded longer than the context
    │   ├── OptionError         an option is out of range or does not apply here
    │   │   ├── GrammarRefused  a grammar that cannot be followed here
    │   │   └── WrongServer     the server at an address is not of the kind that the options name
    │   ├── RecordsError        records, a calibration or an adapter: broken, of a newer version, or of another pair
    │   ├── ProtocolError       a message that the other side cannot read
    │   └── LimitExceeded       a message, prompt or block beyond the server's limits
    ├── ModelFilesError         the files of a model are not available
    │   ├── HashMismatch        a file or piece is not the published one
    │   ├── BrokenModel         a file is there but no engine can read it
    │   ├── NotEnoughDisk       the download would not fit
    │   └── NetworkUnavailable  neither cache nor network has it
    ├── MissingDependency       an optional package is not installed, or its version does not fit
    ├── EngineError             the engine refused a forward or a rollback
    │   └── EngineBusy          no sequence of the model was free in time
    ├── BaseMismatch            a block or verdict does not begin where the committed text ends
    ├── Cancelled               the generation was cancelled while it waited
    └── CloudError              the cloud did not answer as it should
        ├── CloudLost           no answer: no connection, no server, or the server is shutting down
        │   ├── CloudTimeout    no answer within the time allowed
        │   ├── CloudLoading    the server loads its model, or has none for now
        │   └── CloudDraining   the server is shutting down and takes no new request
        ├── CloudBusy           the server has no room for another request
        ├── RateLimited         the token has used up its share for now
        ├── BudgetSpent         today's requests have reached the limit on their cost
        ├── NotAuthorized       no token, or a token that the server does not know
        ├── TargetChanged       the model or execution changed during the text, or the context shrank
        ├── TlsFailure          no encrypted connection to this server, now or later
        ├── SessionNotFound     the session ended, was evicted, or the server was restarted
        ├── SessionTaken        another generation uses this session number
        ├── Diverged            the two sides have different texts of the same length
        ├── BrokenOff           a chat server ended within its answer, and cannot continue it
        └── CloudFailure        the server failed; its log says why
            ├── ContentFiltered the server's content filter refuses the text
            └── LeftGrammar     the server's text breaks the grammar

Every message is one line; `hint` is the next thing to do. Code that raises an error names options as flags of the
command line (--temperature). `line` keeps the flags; `message`, `hint` and `str` have Python's names (temperature).
"""

import errno
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from json import JSONDecodeError
from typing import Any, ClassVar

# A command to run keeps its flags.
_FLAGS = re.compile(
    r"((?:skydraft [a-z]|pip |llama-gguf-split |llama-server |vllm serve )(?:[^.]|\.(?!\s|$))*)|--([a-z][a-z-]*)"
)
_ENDLESS = re.compile(r"(\S{400})\S{200,}")
_NAMES = {
    "cloud-timeout": "timeout_s", "grace": "grace_s", "session-ttl": "session_ttl_s", "require-cloud": "require",
    "edge-model": "edge", "cloud-model": "model", "cloud-api": "api", "cloud-token-file": "token",
    "cloud-key-file": "token",
}  # fmt: skip


def _clear(text: str) -> str:
    """Escape halves of characters, which cannot be encoded, and shorten words of more than 600 characters."""
    return _ENDLESS.sub(r"\1…", text.encode(errors="backslashreplace").decode())


def _in_python(text: str) -> str:
    return _FLAGS.sub(lambda match: match[1] or _NAMES.get(match[2]) or match[2].replace("-", "_"), text)


class SkydraftError(Exception):
    """`exit_status` is for the command line, `grpc_status` for a server's answer. If `retryable`, try again later."""

    exit_status: ClassVar[int] = 1
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(_clear(str(message)))
        self._hint = _clear(hint)

    @property
    def retryable(self) -> bool:
        return self.grpc_status in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")

    @property
    def message(self) -> str:
        return _in_python(str(self.args[0]))

    @property
    def hint(self) -> str:
        return _in_python(self._hint)

    @property
    def line(self) -> str:
        return f"{self.args[0]} {self._hint}".strip()

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class UsageError(SkydraftError):
    exit_status = 2
    grpc_status = "INVALID_ARGUMENT"


class UnknownModel(UsageError): ...


class VocabularyMismatch(UsageError):
    grpc_status = "FAILED_PRECONDITION"


class PromptError(UsageError): ...


class ContextExceeded(PromptError):
    """The prompt has `num_tokens` (an estimate for very long ones); the context holds `most`."""

    def __init__(self, message: str, *, num_tokens: int = 0, most: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.num_tokens, self.most = num_tokens, most


class OptionError(UsageError): ...


class GrammarRefused(OptionError): ...


class WrongServer(OptionError): ...


class RecordsError(UsageError): ...


class ProtocolError(UsageError): ...


class LimitExceeded(UsageError):
    grpc_status = "OUT_OF_RANGE"


class ModelFilesError(SkydraftError): ...


class HashMismatch(ModelFilesError): ...


class BrokenModel(ModelFilesError): ...


class NotEnoughDisk(ModelFilesError): ...


class NetworkUnavailable(ModelFilesError):
    grpc_status = "UNAVAILABLE"


class MissingDependency(SkydraftError):
    grpc_status = "FAILED_PRECONDITION"


@contextmanager
def telling(kind: type[SkydraftError], what: str, hint: str) -> Iterator[None]:
    """Raise `kind`, which says `what` failed and why, for OSError and ValueError: system errors, invalid content."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise kind(f"{what}: {_reason(error)}.", hint=hint) from error


@contextmanager
def telling_of_disk(kind: type[SkydraftError], what: str, hint: str) -> Iterator[None]:
    """Raise `kind` or NotEnoughDisk, which say `what` failed and why, for an OSError of the disk."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output has gone
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise (NotEnoughDisk if is_full else kind)(f"{what}: {_reason(error)}.", hint=hint) from error


@contextmanager
def naming(kind: type[SkydraftError], what: str, hint: str) -> Iterator[None]:
    """Like `telling`, and also for a SkydraftError, whose own hint stays."""
    with telling(kind, what, hint):
        try:
            yield
        except SkydraftError as error:
            raise kind(f"{what}: {error.message}", hint=error.hint) from error


@asynccontextmanager
async def within(seconds: float, late: Exception) -> AsyncIterator[None]:
    """Raise `late` if the block takes longer."""
    import asyncio  # imported here because it is slow to import

    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise late from error


@contextmanager
def or_else(end: Callable[[], object]) -> Iterator[None]:
    """Call `end` if the block raises anything, an interrupt or a cancellation included."""
    try:
        yield
    except BaseException:
        end()
        raise


def _reason(error: Any) -> str:
    if isinstance(error, UnicodeError):
        return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "no file has such a name"
    if isinstance(error, JSONDecodeError):
        return f"its JSON is not valid: {error}"
    if hasattr(error, "errors"):  # of pydantic
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def importing(need: str, extra: str) -> Iterator[None]:
    """Raise MissingDependency for a failed import. Its message begins with `need` ("A grammar needs")."""
    try:
        yield
    except ImportError as error:
        message = f"{need} {error.name or 'a package'}, which is not installed."
        raise MissingDependency(message, hint=f"Run: pip install 'skydraft[{extra}]'.") from error


class EngineError(SkydraftError): ...


class EngineBusy(EngineError):
    grpc_status = "UNAVAILABLE"


class BaseMismatch(SkydraftError):
    grpc_status = "FAILED_PRECONDITION"


class Cancelled(SkydraftError):
    grpc_status = "CANCELLED"


class CloudError(SkydraftError):
    """An outage (`is_outage`) may pass by itself; meanwhile the draft model continues a gated plan alone."""

    is_outage: ClassVar[bool] = True


class CloudLost(CloudError):
    grpc_status = "UNAVAILABLE"


class CloudTimeout(CloudLost):
    grpc_status = "DEADLINE_EXCEEDED"


class CloudLoading(CloudLost): ...


class CloudDraining(CloudLost): ...


class CloudBusy(CloudError):
    grpc_status = "UNAVAILABLE"


class RateLimited(CloudError):
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class BudgetSpent(CloudError): ...


class NotAuthorized(CloudError):
    grpc_status = "UNAUTHENTICATED"
    is_outage = False


class TargetChanged(CloudError):
    grpc_status = "FAILED_PRECONDITION"
    is_outage = False


class TlsFailure(CloudError):
    is_outage = False


class SessionNotFound(CloudError):
    grpc_status = "NOT_FOUND"


class SessionTaken(CloudError):
    grpc_status = "ALREADY_EXISTS"


class Diverged(CloudError):
    grpc_status = "FAILED_PRECONDITION"


class BrokenOff(CloudError): ...


class CloudFailure(CloudError): ...


class ContentFiltered(CloudFailure): ...


class LeftGrammar(CloudFailure): ...
