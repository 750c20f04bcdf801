"""Requests to servers without skydraft, and their answers.

A dialect only makes requests and reads answers. `text` decides what to send, and `wire` sends it.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from skydraft.config import DecodingParams
from skydraft.edge.stock.ledger import UNTOLD
from skydraft.edge.stock.refusals import refusal
from skydraft.edge.stock.wire import Wire, as_json
from skydraft.errors import CloudFailure
from skydraft.types import FinishReason, LinkCost

T = TypeVar("T")
Body: TypeAlias = Mapping[str, Any]
TokenTuple: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The target's token after a prefix. With `finish` there is no token: the server ended the text for this reason.
    `goes_on`: the next token came in the same event."""

    token_id: int
    finish: FinishReason | None = None
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """The content of an answer or an event: rows in order, or text.

    `usage` has the server's token counts, 0 where it gave none. `finish` is why the text ended, "" if it did not. If
    `num_written`, the tokens so far, is not 0, earlier rows may be repeats of rows already sent.
    """

    rows: tuple[Row, ...] = ()
    usage: LinkCost = UNTOLD
    num_written: int = 0
    text: str = ""
    thinks: bool = False
    finish: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """A model at a server: its context length in tokens (0: unknown), and its weights' file or folder ("": unknown)."""

    context_len: int = 0
    origin: str = ""


class Dialect:
    """One kind of server. Paths are below the server's root. The path `life` answers at once, even on a busy server.

    `takes` has the parameters for logits that it supports, `grammars` the kinds of grammars.
    """

    name = ""
    life = "/v1/models"
    gives_ids = False
    takes_drafts = False  # at a port beside the server
    salt = ""  # the request field that separates caches by its value; "": none
    separates = False  # whether all versions obey `salt`
    takes = frozenset(("presence_penalty", "frequency_penalty"))
    grammars: tuple[str, ...] = ()

    async def describe(self, wire: Wire, model: str | None, timeout_s: float) -> dict[str, About]:
        """Return each model's card by name; only the named `model`, if given."""
        listed = items(field(await wire.ask("/v1/models", timeout_s), "data"))
        known = {name(field(it, "id")): About(count(it, "max_model_len"), name(it.get("root"))) for it in listed}
        return {each: card for each, card in known.items() if model in (None, each)}

    async def tokenize(self, wire: Wire, model: str, text: str, timeout_s: float) -> TokenTuple | None:
        """Return the ids of a text, with special tokens parsed; None if its vocabulary does not matter."""
        return None

    def written(self, event: Any) -> Read:
        raise NotImplementedError

    def refused_by(self, says: str) -> set[str]:
        """Return the optional request fields that an error message rejects."""
        return set()


class IdDialect(Dialect):
    """A server that takes and returns token ids. The defaults are what vLLM and SGLang share."""

    gives_ids = True
    takes = Dialect.takes | {"logit_bias"}
    grammars: tuple[str, ...] = ("json_schema", "json_object", "regex")

    async def tokenize(self, wire: Wire, model: str, text: str, timeout_s: float) -> TokenTuple | None:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return numbers(field(await wire.ask("/tokenize", timeout_s, body), "tokens"))

    def sampling(self, params: DecodingParams) -> dict[str, Any]:
        # Name each one, else vLLM reads the model's generation_config.json, and every server its start options.
        names = ["repetition_penalty", "presence_penalty", "frequency_penalty"]
        names += ["temperature", "top_p", "min_p"] if params.temperature else ["temperature"]
        how: dict[str, Any] = {each: getattr(params, each) for each in names}
        if params.temperature:
            how["top_k"] = params.top_k or -1
        if params.logit_bias:
            how["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        return how

    def writing(self, model: str, token_ids: Seq[int], num_tokens: int, params: DecodingParams) -> tuple[str, Body]:
        """Return path and body of a request for a stream of the next tokens."""
        raise NotImplementedError


def read_safely(read: Callable[..., T], *given: Any) -> T:
    """Return `read(*given)`. Raises CloudFailure for an answer of an unexpected shape."""
    try:
        return read(*given)
    except (TypeError, AttributeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise CloudFailure("The server sent an answer that cannot be read.") from error


def is_refusal(answer: Any) -> bool:
    """Return whether an answer or event is an error."""
    return isinstance(answer, dict) and bool(answer.get("error"))


def sound(answer: Any) -> dict[str, Any]:
    """Return an answer or event. If it is an error, even within a stream, raise its SkydraftError."""
    if not isinstance(answer, dict):
        raise CloudFailure("The server's answer is not a JSON object.")
    if is_refusal(answer):
        raise refusal(200, {}, as_json(answer))
    return answer


def choices(answer: Any) -> list[Any]:
    """Return the choices of an OpenAI answer or event; empty if it has only token counts or the server's own data."""
    return [choice for choice in items(sound(answer).get("choices") or []) if choice is not None]


def field(value: Any, name: str) -> Any:
    """Return a value inside JSON. Raises CloudFailure if it is missing."""
    try:
        return value[name]
    except (TypeError, KeyError) as error:
        raise CloudFailure(f"The server's answer lacks '{name}'.") from error


def number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise CloudFailure("The server's answer has no valid number where one is needed.")
    return value


def items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CloudFailure("The server's answer has no list where one is needed.")
    return value


def numbers(value: Any) -> TokenTuple:
    return tuple(map(number, items(value)))


def rows_of(token_ids: Any) -> tuple[Row, ...]:
    return tuple(map(Row, numbers(token_ids)))


def count(value: Any, *names: str) -> int:
    """Return a count; 0 if it is missing or invalid."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0


def openai_usage(answer: Any) -> LinkCost:
    """Return the token counts of an OpenAI answer, event or choice. xAI and Gemini count hidden thoughts, which cost
    money, only in the total."""
    usage = answer.get("usage")
    num_read, num_written = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    num_others = count(usage, "total_tokens") - num_read if num_read else 0
    cached = count(usage, "prompt_tokens_details", "cached_tokens")
    return LinkCost(tokens_in=num_read, tokens_hit=cached, tokens_out=max(num_written, num_others))


def name(value: Any) -> str:
    """Return a name; "" if it is missing or has unprintable characters."""
    return value[:1000] if isinstance(value, str) and value.isprintable() else ""
