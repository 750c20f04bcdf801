"""An OpenAI chat as a target. It takes messages and returns text, and cannot continue a partial answer.

We tested it with llama-server's chat and imitations of the hosts.
"""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from typing import Any

from skydraft.config import DecodingParams
from skydraft.edge.server import CHAT
from skydraft.edge.stock.dialect import About, Body, Dialect, Read, choices, name, openai_usage
from skydraft.edge.stock.wire import Wire
from skydraft.errors import CloudFailure

# Fields of DeepSeek and llama-server; vLLM since 0.16; OpenRouter. Mistral sends content parts with "thinking".
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")
_REFUSED = re.compile(r"answered (400|422)\b")
_GIVEN = {"top_p": 1.0, "seed": 0, **dict.fromkeys(Dialect.takes, 0.0)}  # sent if they differ from these
_LIMIT, _NEW_LIMIT, _TEMPERATURE = "max_tokens", "max_completion_tokens", "temperature"


class Chat(Dialect):
    name = CHAT

    async def describe(self, wire: Wire, model: str | None, timeout_s: float) -> dict[str, About]:
        """Return empty cards: a chat's context length is unknown. A named model is not checked."""
        return dict.fromkeys([model] if model is not None else await super().describe(wire, None, timeout_s), About())

    def asking(
        self, model: str, messages: Seq[Mapping[str, Any]], params: DecodingParams, refused: AbstractSet[str]
    ) -> tuple[str, Body]:
        """Return path and body of a request without the `refused` fields. A temperature above 0 is always sent."""
        body: dict[str, Any] = {
            "model": model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True},
            _LIMIT: params.max_new_tokens, _TEMPERATURE: params.temperature,
        }  # fmt: skip
        body |= {each: value for each, usual in _GIVEN.items() if (value := getattr(params, each)) != usual}
        if _LIMIT in refused:
            body[_NEW_LIMIT] = body.pop(_LIMIT)
        left_out = refused - {_TEMPERATURE} if params.temperature else refused
        return "/v1/chat/completions", {each: value for each, value in body.items() if each not in left_out}

    def refused_by(self, says: str) -> set[str]:
        """Return the fields that an error rejects. OpenAI's newer models rename the limit, reasoning models take no
        temperature of 0, and some hosts reject stream_options."""
        named = {_LIMIT: _NEW_LIMIT, _TEMPERATURE: _TEMPERATURE, "stream_options": "stream_options"}
        return {field for field, word in named.items() if word in says and _REFUSED.search(says)}

    def written(self, event: Any) -> Read:
        choice: Any = next(iter(choices(event)), {})
        delta = choice.get("delta") or choice.get("message") or {}
        text = delta.get("content") or delta.get("refusal") or ""
        parts = text if isinstance(text, list) else []  # content may be a list of parts
        thinks = any(map(delta.get, _REASONING)) or any("thinking" in part for part in parts)
        text = "".join(part.get("text", "") for part in parts) if parts else text
        if not isinstance(text, str):
            raise CloudFailure("The server's answer has no valid text where one is needed.")
        finish = name(choice.get("finish_reason")).strip()
        usage = openai_usage(event if event.get("usage") else choice)  # Moonshot counts in the choice
        return Read(usage=usage, text=text, thinks=thinks, finish=finish)
