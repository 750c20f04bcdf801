"""Servers that give text, not token ids: OpenAI's completions, and chats that go on from the assistant's last message.
None of the hosts was run by us but against imitations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from skydraft.characters import one_line
from skydraft.config import DecodingParams
from skydraft.edge.channel import Waiting
from skydraft.edge.stock.dialect import Body, Dialect, Read, choices, name, openai_usage, read_safely
from skydraft.edge.stock.ledger import Carried, Usage
from skydraft.edge.stock.wire import Events, Wire
from skydraft.errors import CloudFailure, WrongServer

_NUM_GOING_ON, _TEMPLATE = 4, 16  # tokens that a chat is asked for first; those that a template may add
_MAX_EVENTS = 256  # of a text of a few tokens


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a text is to go on from: the messages, the prompt that the draft model's template made of them, and the
    text so far."""

    messages: tuple[Mapping[str, Any], ...]
    prompt: str
    text: str


class TextDialect(Dialect):
    echoes = False  # whether an answer begins with the text that it goes on from

    async def describe(self, wire: Wire, model: str | None, timeout_s: float) -> dict[str, int]:
        """One that was named is believed. How many tokens of ours fit is unknown."""
        return dict.fromkeys([model] if model is not None else await super().describe(wire, None, timeout_s), 0)

    def going_on(self, model: str, so_far: SoFar, num_tokens: int, params: DecodingParams) -> tuple[str, Body]:
        raise NotImplementedError


def _choice(event: Any) -> Any:
    return next(iter(choices(event)), {})


def _read(event: Any, choice: Any, text: Any) -> Read:
    if isinstance(text, list):  # in parts, as messages may be
        text = "".join(part["text"] for part in text)
    if text is not None and not isinstance(text, str):
        raise CloudFailure("The server sent something else where text was due.")
    finish = name(choice.get("finish_reason")).strip()
    usage = openai_usage(event if event.get("usage") else choice)  # Moonshot counts in the choice
    return Read((), usage, name(event.get("model")), text=text or "", finish=finish)


def _body(model: str, num_tokens: int, params: DecodingParams) -> dict[str, Any]:
    sampling = {"temperature": params.temperature} | ({"top_p": params.top_p} if params.temperature else {})
    return {
        "model": model, "max_tokens": num_tokens, "stream": True, "stream_options": {"include_usage": True}, **sampling,
    }  # fmt: skip


class Completions(TextDialect):
    name = "completions"

    def going_on(self, model: str, so_far: SoFar, num_tokens: int, params: DecodingParams) -> tuple[str, Body]:
        return "/v1/completions", {**_body(model, num_tokens, params), "prompt": so_far.prompt + so_far.text}

    def written(self, event: Any) -> Read:
        choice = _choice(event)
        return _read(event, choice, choice.get("text"))


How: TypeAlias = tuple[dict[str, Any], dict[str, Any], bool]
# End of the host's name: what the last message says, what the body says, whether the answer begins with that message.
HOSTS: dict[str, How] = {
    "aliyuncs.com": ({"partial": True}, {}, False),
    "moonshot.cn": ({"partial": True}, {}, False),
    "moonshot.ai": ({"partial": True}, {}, False),
    "deepseek.com": ({"prefix": True}, {}, False),
    "mistral.ai": ({"prefix": True}, {}, True),
    "siliconflow.cn": ({}, {"prefix": ""}, False),
    "siliconflow.com": ({}, {"prefix": ""}, False),
}
_VLLM: How = ({}, {"continue_final_message": True, "add_generation_prompt": False}, False)
# DeepSeek and llama-server; vLLM since 0.16 and OpenRouter; Mistral sends parts with "thinking" in place of these.
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")


class Chat(TextDialect):
    """/v1/chat/completions, whose last message is the assistant's text so far."""

    name = "chat"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        known = (how for host, how in HOSTS.items() if f".{self._host}".endswith(f".{host}"))
        self._mark, self._more, self.echoes = next(known, _VLLM)

    def going_on(self, model: str, so_far: SoFar, num_tokens: int, params: DecodingParams) -> tuple[str, Body]:
        body, messages = _body(model, num_tokens, params), list(so_far.messages)
        if so_far.text and "prefix" in self._more:
            body["prefix"] = so_far.text
        elif so_far.text:
            messages.append({"role": "assistant", "content": so_far.text, **self._mark})
            body |= self._more
        return "/v1/chat/completions", {**body, "messages": messages}

    def written(self, event: Any) -> Read:
        choice = _choice(event)
        delta = choice.get("delta") or choice.get("message") or {}
        content = delta.get("content")
        parts = content if isinstance(content, list) else []
        if any(map(delta.get, _REASONING)) or any("thinking" in part for part in parts):
            raise CloudFailure("This model reasons before it answers, so its answer cannot be gone on with.")
        return _read(event, choice, content)

    async def check_that_it_goes_on(self, wire: Wire, model: str, timeout_s: float) -> None:
        """Raise WrongServer for a chat that begins its answer again, rather than go on from the last message."""
        question, begun = "从一数到十，只写汉字，不加标点。", "一二三四五"
        so_far = SoFar(({"role": "user", "content": question},), "", begun)
        path, body = self.going_on(model, so_far, _NUM_GOING_ON, DecodingParams())
        num_tokens = len((question + begun).encode()) + _TEMPLATE  # at most, whatever its tokenizer
        request = wire.request(path, body, Carried(num_tokens))
        text, waiting, events = "", Waiting(timeout_s, timeout_s, timeout_s), Events(wire, request, self.life)
        try:
            for _ in range(_MAX_EVENTS):
                if (event := events.read(await events.arriving(waiting))) is None:
                    break
                read = read_safely(self.written, event)
                request.says(Usage(read.usage.num_read, 0, _NUM_GOING_ON))  # none counts as cached, all as written
                text += read.text
            else:
                raise CloudFailure("The server does not end a text after a few tokens.")
        finally:
            events.close()
        if text.removeprefix(begun if self.echoes else "").lstrip().startswith("一二"):
            raise WrongServer(
                f"{one_line(model)} at {wire.base} does not go on from the assistant's last message.",
                hint="Use --cloud-api completions, or another server.",
            )
