"""OpenAI's `/v1/chat/completions`: its body, and its answers, whole or as server-sent events."""

import time
import uuid
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from skydraft.gateway.answers import Answer, Choice, Run, WrittenCall, token_logprobs
from skydraft.gateway.desk import Ended, Event
from skydraft.gateway.items import (
    AS_ROLE,
    IN_PARTS,
    CalledTool,
    Checked,
    Content,
    Some,
    TextPart,
    ToolChoice,
    Tools,
    Turn,
    calling_of,
    flat,
    lines,
)
from skydraft.gateway.schema import MAX_LOGPROBS, Ask, Body, MaxTokens, ResponseFormat
from skydraft.prompts.messages import Role
from skydraft.types import Score

_AS_CALL = BeforeValidator(lambda call: {**flat(call), "type": "function_call"} if isinstance(call, dict) else call)


class _Prediction(Checked):
    """Text that the answer may repeat, in parts."""

    type: Literal["content"]
    content: Annotated[Some[TextPart], Field(max_length=4096), IN_PARTS]


class _Message(Checked):
    role: Annotated[Role, AS_ROLE]
    content: Content | None = None
    name: str | None = None
    tool_calls: Some[Annotated[CalledTool, _AS_CALL]] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None  # thoughts that a client sends back, in any server's form
    reasoning: Any = None  # the same by another name

    def turn(self) -> Turn:
        thought = lines(self.reasoning_content or self.reasoning)
        return Turn(self.role, self.content or [], self.tool_calls or [], self.tool_call_id, self.name, thought)


class ChatRequest(Body):
    messages: Some[_Message]
    max_completion_tokens: MaxTokens = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    continue_final_message: bool | None = None
    prediction: _Prediction | None = None

    def to_ask(self) -> Ask:
        predicted = self.prediction
        return Ask(
            self, [message.turn() for message in self.messages], goes_on=bool(self.continue_final_message),
            max_tokens=self.max_completion_tokens or self.max_new_tokens,
            num_best=(self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None,
            calling=calling_of(self.tools, self.tool_choice, self.parallel_tool_calls),
            schema=self.response_format.schema_ if self.response_format else None,
            prediction="".join(part.text for part in predicted.content) if predicted else None,
        )  # fmt: skip


class ChatAnswer(Answer):
    """A chat completion. `kinds` has the `object` of a whole answer and of a chunk, and the prefix of ids."""

    reads: ClassVar[type[Body]] = ChatRequest
    ending = b"data: [DONE]\n\n"
    kinds = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        kind = {"id": f"{self.kinds[2]}-{uuid.uuid4().hex}", "object": self.kinds[1]}
        self._wants_usage = bool(self._body.stream_options.get("include_usage"))
        self._head = {**kind, "created": int(time.time()), "model": self._body.model}

    def first(self) -> Iterator[dict[str, Any]]:
        for index, choice in enumerate(self.choices):
            may_only_call = self._ask.calling.functions and not choice.text
            yield self._chunk(index, {"role": "assistant", "content": None if may_only_call else ""})

    def _write(self, index: int, run: Run) -> Iterator[dict[str, Any]]:
        choice = self.choices[index]
        logprobs = self._logprobs(run.scores, len(choice.prefix) + len(choice.text)) if run.ours else None
        yield self._chunk(index, _delta(choice, run), None, run.ours, logprobs)

    def take(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        yield from super().take(index, event)
        if isinstance(event, Ended):
            choice = self.choices[index]
            yield self._chunk(index, {}, choice.finish_reason, choice.figures | self._left_out)

    def _logprobs(self, scores: Seq[Score], offset: int) -> dict[str, Any] | None:
        """Return the tokens' log-probabilities, None if not requested. `offset` counts prompt and text characters."""
        wanted = self._ask.num_best is not None
        return {"content": token_logprobs(self._vocab, scores), "refusal": None} if wanted else None

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, ours: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        choice = {"index": index, **self._part(delta, logprobs), "finish_reason": finish}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        chunk |= {"usage": None} if self._wants_usage else {}
        return chunk | ({"skydraft": ours} if ours and self._body.choice.extension else {})

    def _part(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"delta": delta} | ({"logprobs": logprobs} if logprobs else {})

    def last(self) -> Iterator[dict[str, Any]]:
        if self._wants_usage:
            yield {**self._head, "choices": [], "usage": self._used()}

    def _used(self) -> dict[str, Any]:
        num_read, cached, written = self.usage
        thought = {"reasoning_tokens": self.num_reasoning}
        if self._ask.prediction is not None:
            stats = [each.ended.stats for each in self.choices if each.ended]
            right = sum(each.num_right_copies for each in stats)
            wrong = sum(each.num_copied_tokens for each in stats) - right
            thought |= {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}
        return {
            "prompt_tokens": num_read, "completion_tokens": written, "total_tokens": num_read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": thought,
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            ending = {"logprobs": self._logprobs(choice.scores, 0), "finish_reason": choice.finish_reason}
            choices.append({"index": index, **self._text(choice), **ending})
        body: dict[str, Any] = {**self._head, "object": self.kinds[0], "choices": choices, "usage": self._used()}
        if self._body.choice.extension:
            body["skydraft"] = self._ours(self.choices[0])
            if len(self.choices) > 1:
                body["skydraft"]["choices"] = [self._ours(choice) for choice in self.choices]
        return body

    def _text(self, choice: Choice) -> dict[str, Any]:
        content = choice.text if choice.text or not choice.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _thought(choice.thought)
        return {"message": message | ({"tool_calls": list(map(_as_chats, choice.calls))} if choice.calls else {})}


def _delta(choice: Choice, run: Run) -> dict[str, Any]:
    """Add a run to its choice, and return the delta."""
    text = "".join(piece.text for piece in run.pieces if piece.kind == "text")
    thought = "".join(piece.text for piece in run.pieces if piece.kind == "thinking")
    calls = list[dict[str, Any]]()
    for piece in (piece for piece in run.pieces if piece.kind == "call"):
        call = choice.take(piece)
        more = {"function": {"arguments": piece.text}}
        calls.append({"index": len(choice.calls) - 1, **(_as_chats(call) if piece.name else more)})
    choice.text += text
    choice.thought += thought
    delta: dict[str, Any] = {"content": text} if text or not (calls or thought) else {}
    delta |= _thought(thought)
    return delta | ({"tool_calls": calls} if calls else {})


def _thought(text: str) -> dict[str, str]:
    """Name thoughts as DeepSeek does, for most clients, and as vLLM and OpenRouter do."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _as_chats(call: WrittenCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
