"""Client requests to GenerateRequests: one for each choice of the answer."""

import base64
import binascii
import codecs
import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from skydraft.config import CAPTION_PROMPT, MIN_CALL_PROB, DecodingParams, decoding_params
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.errors import UsageError
from skydraft.gateway.items import AudioPart, Skipped, Unread
from skydraft.gateway.pair import ModelNames
from skydraft.gateway.refusals import TOO_LONG, Refusal, refusal_of
from skydraft.gateway.schema import ChatMessage, ChatRequest, TextRequest
from skydraft.gateway.thinking import arranged
from skydraft.gateway.tools import OtherTool
from skydraft.grammars import check_grammar, followable, json_schema
from skydraft.prompts import tool_calls
from skydraft.prompts.audio import Audio, audio_from_bytes
from skydraft.prompts.messages import Message, as_objects
from skydraft.prompts.pair import ShareAudio
from skydraft.prompts.thinking import REASONING, Think

log = logging.getLogger("skydraft.gateway")
B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
_TEXT_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context
_MAX_TEXT = 2 * 1024 * 1024  # bytes beside recordings: each choice encodes all of it before it can be refused
_MAX_ITEMS = 200_000  # brackets and commas, each of which can become an object
_MAX_SPEECH_S = 900.0  # of all recordings together: 58 MB of samples
_SAME_NAMES = (
    "temperature", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "stop_token_ids",
)  # fmt: skip
_RECORDING = re.compile(rb'"data"\s*:\s*"')
_LOCAL_ONLY = re.compile(rb'"local_only"\s*:\s*(?:true|1|")')
_CLIENTS_OWN = {"arguments", "input", "parameters", "input_schema", "schema"}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a client says nothing. `given` are the names of the options that the operator set.

    Without `max_new_tokens` among them an answer may fill the context, and without `seed` seeds are random.
    """

    params: DecodingParams
    system: str | None = None
    given: frozenset[str] = frozenset()
    share_audio: ShareAudio = "features"
    think: Think = "auto"

    def max_new_tokens(self, otherwise: int) -> int:
        return self.params.max_new_tokens if "max_new_tokens" in self.given else otherwise

    def seed(self, given: int | None) -> int:
        if given is None and "seed" in self.given:
            return self.params.seed
        return random.SystemRandom().randrange(2**32) if given in (None, -1) else given % 2**64  # -1 is random


@dataclass(frozen=True, slots=True)
class Order:
    requests: list[GenerateRequest]  # one for each choice
    # Makes what finds the calls in one choice, if it can have any.
    reader: Callable[[], tool_calls.Reader | None] = lambda: None
    left_out: Seq[str] = ()  # what was asked for and is not done: kinds of tools, thinking


def read_body(data: bytes | bytearray, kind: type[B]) -> B:
    """Parse and check a body. Raises Refusal. The interpreter is held meanwhile, so all that costs time is bounded."""
    if data.startswith(codecs.BOM_UTF8):  # `removeprefix` would copy each body
        data = data[len(codecs.BOM_UTF8) :]
    _check_text(len(data) - (_num_recorded(data) if len(data) > _MAX_TEXT else 0))
    if sum(map(data.count, (b"[", b"{", b","))) > _MAX_ITEMS:
        raise Refusal(413, f"The body has more than {_MAX_ITEMS} brackets and commas.", code="body_too_long")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise refusal_of(error) from None


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Raise errors as refusals with the client's `names` of fields, whose messages are numbered otherwise."""
    try:
        yield
    except Exception as error:
        refusal = refusal_of(error)
        given = refusal.param or ""
        if old := next((name for name in names if f"{given}.".startswith(f"{name}.")), None):
            rest = given.removeprefix(old)
            refusal.param = names[old] + ("" if rest[1:2].isdecimal() else rest)
            refusal.message = refusal.message.replace(f"{given}:", f"{refusal.param}:", 1)
        raise refusal from error


def _num_recorded(data: bytes | bytearray) -> int:
    """Bytes in the places of recordings, where they may be some: these alone are cheap to parse."""
    places = ((found.end(), data.find(b'"', found.end())) for found in _RECORDING.finditer(data))
    return sum(end - start for start, end in places if data[start:end].isascii())


def _check_text(num_bytes: int) -> None:
    if num_bytes > _MAX_TEXT:
        message = f"There are {num_bytes} bytes beside recordings; at most {_MAX_TEXT} are read."
        raise Refusal(400, message, code=TOO_LONG)


def check_sent(data: bytes | bytearray, body: ChatRequest | TextRequest) -> None:
    """Raise Refusal for a body with too much beside the recordings that were found in it, or a misplaced `local_only`.

    It would be passed over, and the text sent.
    """
    _check_text(len(data) - sum(len(each.input_audio.data) for each in body.recordings))
    if "local_only" not in body.choice.model_fields_set and _LOCAL_ONLY.search(data) and _asks(json.loads(data)):
        raise Refusal(400, 'Write it as "skydraft": {"local_only": true}.', param="local_only")


def _asks(part: Any) -> bool:
    """Whether a part of a body has `local_only`, arguments and schemas of tools apart, which are the client's own."""
    if isinstance(part, list):
        return any(map(_asks, part))
    if not isinstance(part, dict):
        return False
    return bool(part.get("local_only")) or any(_asks(part[name]) for name in part.keys() - _CLIENTS_OWN)


def order_of(
    body: ChatRequest | TextRequest, edge: Engine, names: ModelNames, defaults: Defaults, **more: Any
) -> Order:
    """What a body asks for. `more` holds further fields of each request."""
    how = edge, names, defaults
    order = _chat_order(body, *how) if isinstance(body, ChatRequest) else _text_order(body, *how)
    scored = [num for num in (body.num_best, body.choice.logprobs) if num is not None]
    more |= {"num_best": max(scored, default=None), "local_only": body.choice.local_only}
    more |= {"breaks_loops": body.choice.break_loops}
    more |= {"adapter": body.model.partition(":")[2] or None}  # of skydraft:ADAPTER and skydraft-MODE:ADAPTER
    requests = [
        replace(each, params=replace(each.params, seed=(each.params.seed + number) % 2**64), **more)
        for each in order.requests
        for number in range(body.n or 1)
    ]
    return replace(order, requests=requests)


def _chat_order(body: ChatRequest, edge: Engine, names: ModelNames, defaults: Defaults) -> Order:
    """The order of one choice."""
    if body.callable_tools and not tool_calls.writes_calls(edge.vocab):
        message = "This model's chat template does not write calls as <tool_call>, so it cannot use tools."
        raise Refusal(400, message, param="tools")
    messages = _messages(body.messages, edge)
    if body.continue_final_message and messages:
        messages[-1] = _named("messages", lambda: replace(messages[-1], is_open=True))
    if defaults.system and not any(message.role == "system" for message in messages):
        messages.insert(0, Message("system", defaults.system))
    begun, is_prompt = _begun(body, edge), bool(body.choice.continue_as_prompt)
    max_tokens = body.max_completion_tokens or body.max_tokens or defaults.max_new_tokens(edge.context_len)
    max_tokens = min(max_tokens + (0 if is_prompt else len(begun)), 2**31 - 1)
    has_results = any(message.role == "tool" for message in messages)
    if has_results and not body.callable_tools and tool_calls.writes_calls(edge.vocab):
        messages = tool_calls.results_before_questions(messages)
    unfollowed = set[str]()
    params = _params(body, defaults, max_tokens, _grammar(body, unfollowed))
    thinking = arranged(body, edge.vocab, defaults.think)
    params = replace(params, think_budget=body.choice.think_budget or thinking.budget or params.think_budget)
    plan = names.plan_of(body.model, body.choice)
    if messages and body.callable_tools and not params.grammar:
        messages = tool_calls.may_answer(messages)
        if body.choice.min_call_prob is None:
            params = replace(params, min_call_prob=MIN_CALL_PROB)
        # A call is an act, and a text begins as one or does not: the draft model alone never decides it.
        plan = plan if body.choice.gate else plan.checking_start()
    if plan.verifies and defaults.share_audio == "none" and any(message.audio for message in messages):
        message = "This gateway shares no recordings. Use skydraft-edge, or start it with --share-audio features."
        raise Refusal(400, message, param="messages")
    tools = (tool.model_dump(exclude_unset=True) for tool in body.described_tools)
    request = GenerateRequest(
        tuple(messages), plan, params, tools=tuple(tools) if body.callable_tools else (),
        think=body.choice.think or thinking.think, settings=tuple(thinking.settings.items()),
        share_audio=defaults.share_audio, begun=begun, begun_is_prompt=is_prompt,
        prediction=body.prediction.text if body.prediction else "",
    )  # fmt: skip
    left_out = sorted(unfollowed.union(tool.type for tool in body.tools or () if isinstance(tool, OtherTool)))
    left_out += ["thinking"] * thinking.is_unmet
    return Order([request], partial(reader_of, body), left_out)


def _begun(body: ChatRequest, edge: Engine) -> tuple[int, ...]:
    """The tokens that the answer begins with. Raises Refusal."""
    token_ids, param = tuple(body.choice.continue_ids or ()), "skydraft.continue_ids"
    _check_ids(token_ids, edge, param)
    if token_ids and (body.callable_tools or body.continue_final_message):
        what = "tools that may be called" if body.callable_tools else "continue_final_message"
        raise Refusal(400, f"{param}: It does not apply with {what}.", param=param)
    return token_ids


def _check_ids(token_ids: Seq[int], edge: Engine, param: str) -> None:
    if max(token_ids, default=0) >= edge.vocab.size:
        raise Refusal(400, f"{param}: An id is outside the vocabulary of {edge.vocab.size} tokens.", param=param)


def reader_of(body: ChatRequest) -> tool_calls.Reader | None:
    """What finds the calls in one choice. None if it can have none."""
    if not body.callable_tools:
        return None
    single = not body.calls_in_parallel
    if body.must_call or body.schema_of_answer is not None:
        return tool_calls.EnforcedReader(single=single)
    return tool_calls.CallReader({tool.name: tool.parameters for tool in body.callable_tools}, single=single)


def _grammar(body: ChatRequest, left_out: set[str]) -> str:
    """What the answer follows, or "". Keywords of schemas that it does not follow are added to `left_out`."""
    functions, parallel = body.callable_tools, body.calls_in_parallel
    schema = None if body.must_call else body.schema_of_answer
    grammar = ""
    if functions and (body.must_call or schema is not None):
        tools = [{"name": each.name, "parameters": followable(each.parameters, left_out)} for each in functions]
        answer = None if schema is None else json.dumps(followable(schema, left_out), ensure_ascii=False)
        calling = partial(tool_calls.calling_grammar, tools, parallel=parallel, answer=answer)
        grammar = _named("tools", lambda: check_grammar(calling()))
    elif schema is not None:
        grammar = _named("response_format", lambda: json_schema(followable(schema, left_out)))
    for keyword in left_out:
        _say_unfollowed(keyword)
    return grammar


@cache
def _say_unfollowed(keyword: str) -> None:
    """Once for each keyword."""
    log.warning("No grammar here follows '%s' of a schema. It is left out, and answers may not fit it.", keyword)


def _named(param: str, make: Callable[[], T]) -> T:
    """Raises Refusal with the name of the field if it cannot be made."""
    try:
        return make()
    except UsageError as error:
        raise Refusal(400, error.message, param=param) from error


def _text_order(body: TextRequest, edge: Engine, names: ModelNames, defaults: Defaults) -> Order:
    if "" in body.prompt and not edge.vocab.bos_text:
        raise Refusal(400, "prompt: It is empty.", param="prompt")
    if body.choice.continue_ids:
        raise Refusal(400, "Put them into the prompt.", param="skydraft.continue_ids")
    for prompt in body.prompt:
        _check_ids(() if isinstance(prompt, str) else prompt, edge, "prompt")
    plan = names.plan_of(body.model, body.choice)
    params = _params(body, defaults, body.max_tokens or defaults.max_new_tokens(_TEXT_TOKENS))
    params = replace(params, think_budget=body.choice.think_budget or 0)  # the operator's is for chats
    make = partial(GenerateRequest, plan=plan, params=params, raw=True, think=body.choice.think or "auto")
    make = partial(make, scores_prompt=bool(body.echo), writes=body.max_tokens != 0)
    asked = [((Message("user", text),), ()) if isinstance(text, str) else ((), tuple(text)) for text in body.prompt]
    requests = [make(messages, prompt_ids=prompt_ids) for messages, prompt_ids in asked]
    left_out = ["thinking"] if body.reasoning_effort not in (None, "none") else []  # a text has no chat template
    return Order(requests, left_out=left_out)


def _params(
    body: ChatRequest | TextRequest, defaults: Defaults, max_new_tokens: int, grammar: str = ""
) -> DecodingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAMES}
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    given["stop"] = [text for text in stops if text] or None
    given["top_p"] = None if body.top_p is None else max(body.top_p, 1e-9)
    given["top_k"] = None if body.top_k is None else max(body.top_k, 0)  # -1 is off for some clients
    given["logit_bias"] = body.logit_bias.items() if body.logit_bias else None
    given["seed"] = defaults.seed(body.seed)
    given["min_new_tokens"] = body.min_tokens
    given |= body.choice.decoding()
    if grammar and given.get("grammar"):
        raise Refusal(400, "The answer cannot follow two grammars.", param="skydraft.grammar")
    given["grammar"] = given.get("grammar") or grammar or None
    given["max_new_tokens"] = max_new_tokens
    chosen = {name: value for name, value in given.items() if value is not None}
    if body.choice.style is not None:
        return decoding_params(body.choice.style, **chosen)
    by_default = asdict(defaults.params) | ({"sentences": 0} if "grammar" in chosen else {})  # which says where it ends
    return decoding_params(None, **by_default | chosen)


def _messages(given: list[ChatMessage], edge: Engine) -> list[Message]:
    messages: list[Message] = []
    left_s, turn = _MAX_SPEECH_S, _last_turn(given)
    for number, message in enumerate(given):
        text, speech = _content(message, number, edge, is_last=number in turn)
        text = CAPTION_PROMPT if speech and not text.strip() else text
        recordings: list[Audio] = []
        for part in speech:
            recordings.append(_audio(part, f"messages.{number}.content"))
            left_s -= recordings[-1].duration_s
            if left_s < 0:
                raise Refusal(400, f"All recordings together last more than {_MAX_SPEECH_S:g} s.", param="messages")
        if message.role == "system" and not text.strip():
            continue  # some clients always send an empty one
        calls = as_objects(call.as_chat() for call in message.tool_calls or ())
        more = {"tool_calls": calls or None, "tool_call_id": message.tool_call_id, "name": message.name}
        more |= {REASONING: message.thought if message.role == "assistant" else None}
        kept = tuple((key, value) for key, value in more.items() if value is not None)
        messages.append(Message(message.role, text, kept, tuple(recordings)))
    return messages


def _last_turn(given: list[ChatMessage]) -> range:
    """The places of the user's last messages, with system messages beside them."""
    end = max((number + 1 for number, message in enumerate(given) if message.role == "user"), default=0)
    others = (number + 1 for number in range(end) if given[number].role not in ("user", "system"))
    return range(max(others, default=0), end)


def _content(message: ChatMessage, number: int, edge: Engine, *, is_last: bool) -> tuple[str, list[AudioPart]]:
    """The words and the recordings. What a model cannot take is refused in the user's last turn, and words before."""
    texts, recordings = list[str](), list[AudioPart]()
    for at, part in enumerate(message.content or ()):
        param = f"messages.{number}.content.{at}"
        if isinstance(part, AudioPart) and edge.takes_audio and message.role == "user":
            recordings.append(part)
        elif isinstance(part, AudioPart | Unread) and is_last:
            takes = "text and recordings (input_audio), no" if edge.takes_audio else "only text: no audio,"
            raise Refusal(400, f"{param}: The model {edge.name} takes {takes} pictures or files.", param=param)
        elif not isinstance(part, Skipped):
            texts.append(part.text)
    return "\n".join(texts), recordings


def _audio(part: AudioPart, param: str) -> Audio:
    try:
        data = base64.b64decode(part.input_audio.data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal(400, "The recording is not valid base64.", param=param) from error
    return audio_from_bytes(data)
