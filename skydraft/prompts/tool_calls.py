"""Tool calls in the format of the chat templates of Qwen and Hermes: read from a text, or enforced by a grammar.

<tool_call>
{"name": "get_weather", "arguments": {"city": "上海"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias

from skydraft.errors import PromptError
from skydraft.grammars import with_ascii_refs

MAX_CALLS = 8  # in one answer that must call
MAX_TRIES = 64  # end marks that end no call, after which an answer is text: each is tried on all that is held
_BEGIN, _END = "<tool_call>", "</tool_call>"
# As `tojson` writes arguments into the next turn of the conversation, and as models saw them in training.
_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True, slots=True)
class CallText:
    """A piece of call number `index` of an answer; the first piece of a call has the name of the tool."""

    index: int
    arguments: str
    name: str = ""


Piece: TypeAlias = str | CallText


def writes_calls(chat_template: str | None) -> bool:
    """Whether a model with this template was trained to call tools in this format."""
    return chat_template is not None and "tools" in chat_template and _BEGIN in chat_template


def as_objects(tool_calls: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls of an earlier turn with their arguments as objects, which templates write as JSON.

    OpenAI's messages have arguments as JSON in a string. A string that is not JSON, or not of whole characters, stays.
    """
    return [{**call, "function": _with_object(call["function"])} for call in tool_calls]


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
        json.dumps(arguments, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        arguments = None
    return {**function, "arguments": arguments if isinstance(arguments, dict) else function["arguments"]}


def calling_grammar(tools: Seq[Mapping[str, Any]], *, parallel: bool, answer: str | None = None) -> str:
    """The Lark grammar of texts that call one of `tools`; with `parallel`, up to eight times.

    `tools` are functions with `name` and `parameters`. With `answer`, a JSON schema as text, JSON of that schema is
    allowed instead of a call. Raises PromptError for parameters whose schema is not of an object.
    """
    rules = [f"start: calls | answer\nanswer: %json {_for_lark(answer)}" if answer else "start: calls"]
    rules.append(f'calls: call ("\\n" call){{0,{MAX_CALLS - 1}}}' if parallel else "calls: call")
    names = [f"call_{number}" for number in range(len(tools))]
    rules.append(f'call: "{_BEGIN}\\n" ({" | ".join(names)}) "}}\\n{_END}"')
    for name, tool in zip(names, tools, strict=True):
        head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": '
        rules.append(f"{name}: {json.dumps(head, ensure_ascii=False)} {name}_args")
        rules.append(f"{name}_args: %json {_schema_of(tool)}")
    return "lark:" + "\n".join(rules)


def _schema_of(tool: Mapping[str, Any]) -> str:
    schema = tool.get("parameters") or {"properties": {}}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise PromptError(f"The parameters of the tool '{tool['name']}' must be a schema of an object.")
    # A tool takes no argument that its schema does not name.
    closed = {"additionalProperties": False, **schema, "type": "object", "x-guidance": _STYLE}
    return _for_lark(json.dumps(closed))


def _for_lark(schema: str) -> str:
    return json.dumps(with_ascii_refs(schema), ensure_ascii=False)


class CallReader:
    """Splits a text, while it arrives, into calls and the text around them.

    Text between the marks that is not a call of one of the tools `names` is returned as text, and so is everything
    after `MAX_TRIES` end marks that ended no call. If the calls are `certain` because a grammar enforces them, their
    arguments are returned while they are written; otherwise when the call is complete.
    """

    def __init__(self, names: Seq[str], *, certain: bool) -> None:
        self._names = frozenset(names)
        self._certain = certain
        self._held = ""
        self._num_calls = 0
        self._tried_len = 0  # of what is held: no end mark begins there that was not tried
        self._num_tried = 0
        # "text", "call": from the mark on, "arguments": of a call whose name was given, "over": nothing but text
        self._state = "text"

    def push(self, text: str) -> Iterator[Piece]:
        """Add `text` and return the pieces that are now certain."""
        self._held += text
        while True:
            state, length = self._state, len(self._held)
            if state == "text":
                yield from self._read_text()
            elif state == "call":
                yield from self._read_call()
            elif state == "arguments":
                yield from self._read_arguments()
            else:
                yield from self.finish()
            if (state, length) == (self._state, len(self._held)):
                return

    def finish(self) -> Iterator[Piece]:
        """The rest at the end of the text: a call without its end mark, or text."""
        held, self._held = self._held, ""
        if self._state == "arguments":
            yield from [CallText(self._num_calls - 1, held)] if held else []
        elif self._state == "call":
            yield self._complete(held) or held
        elif held and (held.strip() or not self._num_calls or self._state == "over"):
            yield held

    def _read_text(self) -> Iterator[Piece]:
        at = self._held.find(_BEGIN)
        if at >= 0:
            # A call begins on a line of its own; white space between calls is dropped.
            self._state = "call"
        else:
            at = len(self._held) - _num_suspect(self._held, _BEGIN)
        text = self._held[:at].rstrip("\n")
        self._held = self._held[len(text) :]
        if text and (text.strip() or not self._num_calls):
            yield text

    def _read_call(self) -> Iterator[Piece]:
        if self._certain:
            yield from self._read_head()
            return
        while (end := self._held.find(_END, self._tried_len)) >= 0:
            if call := self._complete(self._held[:end]):
                self._held, self._state, self._tried_len = self._held[end + len(_END) :], "text", 0
                yield call
                return
            self._tried_len, self._num_tried = end + 1, self._num_tried + 1  # an argument may contain the mark
            if self._num_tried == MAX_TRIES:
                self._state = "over"
                return
        self._tried_len = max(self._tried_len, len(self._held) - len(_END))

    def _read_head(self) -> Iterator[Piece]:
        """The name of the tool, as soon as the text up to the arguments is complete."""
        before, mark, after = self._held.partition('", "arguments": ')
        if mark:
            self._held, self._state, self._num_calls = after, "arguments", self._num_calls + 1
            name = json.loads(before[before.index(": ") + 2 :] + '"')
            yield CallText(self._num_calls - 1, "", name)

    def _read_arguments(self) -> Iterator[Piece]:
        end = f"}}\n{_END}"  # this JSON has no line break, not even in a string
        before, mark, after = self._held.partition(end)
        if mark:
            self._held, self._state = after, "text"
        else:
            num_sure = len(before) - _num_suspect(before, end)
            before, self._held = before[:num_sure], before[num_sure:]
        if before:
            yield CallText(self._num_calls - 1, before)

    def _complete(self, text: str) -> CallText | None:
        """The call that `text` consists of from its mark on, or None."""
        try:
            call = json.loads(text.partition(_BEGIN)[2])
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
            return None
        if call.get("name") not in self._names:
            return None
        self._num_calls += 1
        arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        return CallText(self._num_calls - 1, arguments, call["name"])


def _num_suspect(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if mark.startswith(text[-length:])), 0)
