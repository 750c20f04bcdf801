"""What a server without skydraft is asked, and how its answers are read.

A dialect only makes requests and reads answers; `text` decides what to ask, and `wire` carries it.
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
    """The target's own choice after a prefix. `finish`: the server ended the text here for this reason, without a
    token. It `goes_on` if the next token came with it."""

    token_id: int
    finish: FinishReason | None = None
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """What an answer or an event says: rows in order, or text; the server's own counts of tokens, 0 where it told
    none; whether the model `thinks`; and why the text ended ("": it did not).

    `num_written`, if not 0, is the number of tokens so far: the last rows are new, others are told again.
    """

    rows: tuple[Row, ...] = ()
    usage: LinkCost = UNTOLD
    num_written: int = 0
    text: str = ""
    thinks: bool = False
    finish: str = ""


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of a model beside its name: the most tokens of prompt and text (0: unknown), and the file or
    folder of its weights ("": unknown)."""

    context_len: int = 0
    origin: str = ""


class Dialect:
    """One kind of server. Paths are below the server's root; `life` answers at once whatever the server does.

    It `takes` these of the parameters that change a model's logits, and grammars of these kinds.
    """

    name = ""
    life = "/v1/models"
    gives_ids = False
    takes_drafts = False  # by a port beside it
    salt = ""  # the field of a request that keeps its cache apart from that of other values; "": there is none
    separates = False  # whether all versions do what `salt` asks for
    takes = frozenset(("presence_penalty", "frequency_penalty"))
    grammars: tuple[str, ...] = ()

    async def describe(self, wire: Wire, model: str | None, timeout_s: float) -> dict[str, About]:
        """The card of each model, or of `model` alone if it was named."""
        listed = items(field(await wire.ask("/v1/models", timeout_s), "data"))
        known = {name(field(it, "id")): About(count(it, "max_model_len"), name(it.get("root"))) for it in listed}
        return {each: card for each, card in known.items() if model in (None, each)}

    async def tokenize(self, wire: Wire, model: str, text: str, timeout_s: float) -> TokenTuple | None:
        """The ids of a text, special tokens in it included; None if its tokens need not be ours."""
        return None

    def written(self, event: Any) -> Read:
        raise NotImplementedError

    def refused_by(self, says: str) -> set[str]:
        """The fields of a request that an error names, where a request can do without."""
        return set()


class IdDialect(Dialect):
    """A server that takes and gives token ids. Here is what vLLM and SGLang share."""

    gives_ids = True
    takes = Dialect.takes | {"logit_bias"}
    grammars: tuple[str, ...] = ("json_schema", "json_object", "regex")

    async def tokenize(self, wire: Wire, model: str, text: str, timeout_s: float) -> TokenTuple | None:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return numbers(field(await wire.ask("/tokenize", timeout_s, body), "tokens"))

    def sampling(self, params: DecodingParams) -> dict[str, Any]:
        # Each is named, else vLLM takes the model's generation_config.json, and all take what they were started with.
        names = ["repetition_penalty", "presence_penalty", "frequency_penalty"]
        names += ["temperature", "top_p", "min_p"] if params.temperature else ["temperature"]
        how: dict[str, Any] = {each: getattr(params, each) for each in names}
        if params.temperature:
            how["top_k"] = params.top_k or -1
        if params.logit_bias:
            how["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        return how

    def writing(self, model: str, token_ids: Seq[int], num_tokens: int, params: DecodingParams) -> tuple[str, Body]:
        """Path and body of a request for a stream of the next tokens."""
        raise NotImplementedError


def read_safely(read: Callable[..., T], *given: Any) -> T:
    """Raises CloudFailure for an answer of another shape than `read` expects."""
    try:
        return read(*given)
    except (TypeError, AttributeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise CloudFailure("The server sent an answer that cannot be read.") from error


def is_refusal(answer: Any) -> bool:
    """Whether an error stands in the place of an answer or event."""
    return isinstance(answer, dict) and bool(answer.get("error"))


def sound(answer: Any) -> dict[str, Any]:
    """An answer or event. Raises the SkydraftError of an error in its place, which may come within a stream too."""
    if not isinstance(answer, dict):
        raise CloudFailure("The server sent something else where an answer was due.")
    if is_refusal(answer):
        raise refusal(200, {}, as_json(answer))
    return answer


def choices(answer: Any) -> list[Any]:
    """The choices of an answer or event of OpenAI's kind: none if it only counts tokens, or is the server's own."""
    return [choice for choice in items(sound(answer).get("choices") or []) if choice is not None]


def field(value: Any, name: str) -> Any:
    """A value inside of JSON. Raises CloudFailure where it is missing."""
    try:
        return value[name]
    except (TypeError, KeyError) as error:
        raise CloudFailure(f"The server's answer lacks '{name}'.") from error


def number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise CloudFailure("The server sent something else where a number was due.")
    return value


def items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CloudFailure("The server sent something else where a list was due.")
    return value


def numbers(value: Any) -> TokenTuple:
    return tuple(map(number, items(value)))


def rows_of(token_ids: Any) -> tuple[Row, ...]:
    return tuple(map(Row, numbers(token_ids)))


def count(value: Any, *names: str) -> int:
    """A count that may be missing or nonsense: then 0."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0


def openai_usage(answer: Any) -> LinkCost:
    """The counts of an answer, an event or a choice at an interface of OpenAI's kind. xAI and Gemini count thoughts,
    which nobody sees and which are paid, in the total alone."""
    usage = answer.get("usage")
    num_read, num_written = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    num_others = count(usage, "total_tokens") - num_read if num_read else 0
    cached = count(usage, "prompt_tokens_details", "cached_tokens")
    return LinkCost(tokens_in=num_read, tokens_hit=cached, tokens_out=max(num_written, num_others))


def name(value: Any) -> str:
    """A name that may be missing, or has characters that no terminal should get: then ""."""
    return value[:1000] if isinstance(value, str) and value.isprintable() else ""
