"""Turn a client's request into GenerateRequests, one for each choice of the answer."""

import json
import random
import re
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from skydraft.config import CAPTION_PROMPT, MIN_CALL_PROB, DecodingParams, decoding_params
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.gateway.items import AudioPart, Other
from skydraft.gateway.pair import ModelNames
from skydraft.gateway.refusals import Refusal
from skydraft.gateway.schema import Ask
from skydraft.grammars import check_grammar, followable, json_schema
from skydraft.prompts import tool_calls
from skydraft.prompts.audio import Audio, audio_from_bytes
from skydraft.prompts.messages import Message, as_objects
from skydraft.prompts.pair import ShareAudio
from skydraft.prompts.thinking import REASONING, Think, template_of

_TEXT_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context
_MAX_SPEECH_S = 900.0  # all recordings of a request together: 58 MB of samples


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for options that a client leaves out. `given` has the names of the options that the operator set.

    Without `max_new_tokens` among them an answer may fill the context. Without `seed` seeds are random.
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


_Requests: TypeAlias = tuple[list[GenerateRequest], list[str]]  # (requests, ignored features)


@dataclass(frozen=True, slots=True)
class Order:
    ask: Ask
    requests: list[GenerateRequest]  # one for each choice
    left_out: Seq[str] = ()  # ignored features: kinds of tools, schema keywords, thinking


def order_of(ask: Ask, edge: Engine, names: ModelNames, defaults: Defaults, **more: Any) -> Order:
    """Turn an Ask into an Order. `more` has further fields of each request. Raises Refusal or UsageError."""
    body, ours = ask.body, ask.body.choice
    scored = [num for num in (ask.num_best, ours.logprobs) if num is not None]
    more |= {"num_best": max(scored, default=None), "local_only": ours.local_only, "breaks_loops": ours.break_loops}
    more |= {"adapter": body.model.partition(":")[2] or None}  # of skydraft:ADAPTER and skydraft-MODE:ADAPTER
    requests, left_out = (_texts if ask.prompts else _chat)(ask, edge, names, defaults, **more)
    choices = [
        replace(each, params=replace(each.params, seed=(each.params.seed + number) % 2**64)) if number else each
        for each in requests
        for number in range(body.n or 1)
    ]
    return Order(ask, choices, left_out)


def _chat(ask: Ask, edge: Engine, names: ModelNames, defaults: Defaults, **more: Any) -> _Requests:
    """Return a chat's request and its ignored features."""
    functions, ours = ask.calling.functions, ask.body.choice
    if functions and not tool_calls.writes_calls(edge.vocab):
        message = "This model cannot use tools: its chat template has no <tool_call>."
        raise Refusal(400, message, param="tools")
    messages, begun, unfollowed = _messages(ask, edge, defaults.system), _begun(ask, edge.vocab), set[str]()
    think, settings, budget, is_unmet = _thinking(ask, edge.vocab, defaults.think)
    num_tokens = (ask.max_tokens or defaults.max_new_tokens(edge.context_len)) + len(begun)
    params = _params(
        ask, defaults, grammar=_grammar(ask, unfollowed), think_budget=ours.think_budget or budget,
        max_new_tokens=min(num_tokens - (len(begun) if ours.continue_as_prompt else 0), 2**31 - 1),
    )  # fmt: skip
    plan = names.plan_of(ask.body.model, ours)
    if messages and functions and not params.grammar:
        messages = tool_calls.may_answer(messages)
        if ours.min_call_prob is None:
            params = replace(params, min_call_prob=MIN_CALL_PROB)
        # The first tokens decide whether the answer is a call, which has effects: the target must check them.
        plan = plan if ours.gate else plan.checking_start()
    if plan.verifies and defaults.share_audio == "none" and any(message.audio for message in messages):
        message = "This gateway shares no audio. Use skydraft-edge, or start it with --share-audio features."
        raise Refusal(400, message, param=ask.body.prompt_field)
    tools = [{"type": "function", "function": each} for each in functions]
    request = GenerateRequest(
        tuple(messages), plan, params, tools=tuple(tools), think=ours.think or think, settings=tuple(settings.items()),
        share_audio=defaults.share_audio, begun=begun, begun_is_prompt=ours.continue_as_prompt,
        prediction=ask.prediction or "", **more,
    )  # fmt: skip
    return [request], [*sorted(unfollowed.union(ask.calling.others)), *["thinking"] * is_unmet]


def _texts(ask: Ask, edge: Engine, names: ModelNames, defaults: Defaults, **more: Any) -> _Requests:
    """Return the requests of texts to continue, and their ignored features."""
    ours = ask.body.choice
    if "" in ask.prompts and not edge.vocab.bos_text:
        raise Refusal(400, "prompt: It is empty.", param="prompt")
    _begun(ask, edge.vocab)
    plan = names.plan_of(ask.body.model, ours)
    params = _params(ask, defaults, max_new_tokens=ask.max_tokens or defaults.max_new_tokens(_TEXT_TOKENS))
    params = replace(params, think_budget=ours.think_budget or 0)  # the operator's default is for chats
    more |= {"raw": True, "think": ours.think or "auto", "scores_prompt": ask.echoes, "writes": ask.max_tokens != 0}
    requests = []
    for prompt in ask.prompts:
        messages, ids = ((Message("user", prompt),), ()) if isinstance(prompt, str) else ((), tuple(prompt))
        check_ids(ids, edge.vocab, "prompt")
        requests.append(GenerateRequest(messages, plan, params, prompt_ids=ids, **more))
    return requests, ["thinking"] if ask.body.effort not in (None, "none") else []  # a text has no chat template


def _begun(ask: Ask, vocab: Vocab) -> tuple[int, ...]:
    """Return the fixed tokens at the answer's beginning. Raises Refusal."""
    token_ids, param = tuple(ask.body.choice.continue_ids or ()), "skydraft.continue_ids"
    check_ids(token_ids, vocab, param)
    if token_ids and (ask.calling.functions or ask.goes_on or ask.prompts):
        message = f"{param}: It does not apply to completions, tools or continue_final_message."
        raise Refusal(400, message, param=param)
    return token_ids


def check_ids(token_ids: Seq[int], vocab: Vocab, param: str) -> None:
    if max(token_ids, default=0) >= vocab.size:
        raise Refusal(400, f"{param}: An id is outside the vocabulary of {vocab.size} tokens.", param=param)


def _grammar(ask: Ask, left_out: set[str]) -> str:
    """Return the answer's grammar, or "". Add schema keywords that it ignores to `left_out`."""
    calling, own = ask.calling, ask.body.choice.grammar or ""
    schema = None if calling.must else ask.schema
    if schema is None and not calling.must:
        return own
    if own:
        raise Refusal(400, "The answer cannot follow two grammars.", param="skydraft.grammar")
    if not calling.functions:
        return json_schema(followable(schema, left_out))
    tools = [{**each, "parameters": followable(each.get("parameters"), left_out)} for each in calling.functions]
    answer = None if schema is None else json.dumps(followable(schema, left_out), ensure_ascii=False)
    return check_grammar(tool_calls.calling_grammar(tools, parallel=calling.parallel, answer=answer))


def _params(ask: Ask, defaults: Defaults, **made: Any) -> DecodingParams:
    """Return the client's parameters over the gateway's defaults. Values of `made` other than 0 and "" win."""
    body, style, given = ask.body, ask.body.choice.style, ask.body.decoding()
    given["seed"] = defaults.seed(body.seed) if body.choice.seed is None else body.choice.seed
    given |= {name: value for name, value in made.items() if value}
    own = asdict(defaults.params) | ({"sentences": 0} if given.get("grammar") else {})
    return decoding_params(style, **({} if style else own) | given)


def _messages(ask: Ask, edge: Engine, system: str | None) -> list[Message]:
    """Return the model's messages. An unreadable part is an error in the user's last turn, else a placeholder."""
    messages: list[Message] = []
    left_s, param = _MAX_SPEECH_S, ask.body.prompt_field
    last = max((number for number, turn in enumerate(ask.turns) if turn.role == "user"), default=None)
    for number, turn in enumerate(ask.turns):
        texts, recordings = list[str](), list[Audio]()
        for part in turn.content:
            if isinstance(part, AudioPart) and edge.takes_audio and turn.role == "user":
                recordings.append(audio_from_bytes(part.input_audio.data))
                left_s -= recordings[-1].duration_s
                if left_s < 0:
                    message = f"All recordings together last more than {_MAX_SPEECH_S:g} s."
                    raise Refusal(400, message, param=param)
            elif isinstance(part, AudioPart | Other) and number == last:
                takes = "text and recordings (input_audio), no" if edge.takes_audio else "only text: no audio,"
                message = f"{param}: The model {edge.name} takes {takes} pictures or files."
                raise Refusal(400, message, param=param)
            elif not (isinstance(part, Other) and turn.role == "assistant"):
                texts.append(part.text)
        text = "\n".join(texts)
        text = CAPTION_PROMPT if recordings and not text.strip() else text
        if turn.role == "system" and not text.strip():
            continue  # some clients always send an empty system message
        calls = as_objects(call.as_chat() for call in turn.tool_calls)
        more = {"tool_calls": calls, "tool_call_id": turn.tool_call_id, "name": turn.name}
        more |= {REASONING: turn.thought if turn.role == "assistant" else None}
        kept = tuple((key, value) for key, value in more.items() if value not in (None, []))
        messages.append(Message(turn.role, text, kept, tuple(recordings)))
    if ask.goes_on and messages:
        messages[-1] = replace(messages[-1], is_open=True)
    if system and not any(message.role == "system" for message in messages):
        messages.insert(0, Message("system", system))
    return messages


def _thinking(ask: Ask, vocab: Vocab, default: Think) -> tuple[Think, dict[str, Any], int, bool]:
    """Return (think, template settings, budget or 0, whether the model cannot follow the client's switch).

    The last is not an error: agents ask every model to think. Raises Refusal for template settings that cannot apply.
    """
    body, template = ask.body, template_of(vocab.chat_template)
    for name, value in body.chat_template_kwargs.items():
        param = f"chat_template_kwargs.{name}"
        if name not in template.names and re.search(rf"\b{re.escape(name)}\b", vocab.chat_template or ""):
            raise Refusal(400, f"{param}: The chat template uses it, but it cannot be set here.", param=param)
        if name in ("enable_thinking", "thinking") and value and not template.thinks:
            raise Refusal(400, f"{param}: This model's chat template has no thinking.", param=param)
    settings = {name: value for name, value in body.chat_template_kwargs.items() if name in template.names}
    has_level = bool(body.effort) and "reasoning_effort" in template.names
    if has_level:
        settings = {"reasoning_effort": body.effort, **settings}
    by_effort = None if body.effort is None else body.effort != "none"
    switch = by_effort if body.enable_thinking is None else body.enable_thinking
    budget = 0
    if body.thinking:
        switch = {"enabled": True, "disabled": False, "adaptive": None}.get(body.thinking.type or "", switch)
        budget = body.thinking.budget_tokens or 0
    think: Think = default if switch is None or not template.switch else "on" if switch else "off"
    is_unmet = switch is not None and not template.switch and not has_level and switch != template.thinks
    return think, settings, budget if template.thinks else 0, is_unmet
