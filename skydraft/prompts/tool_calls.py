"""Tool calls in the format of Qwen's and Hermes' chat templates: read from a text, or enforced by a grammar.

<tool_call>
{"name": "get_weather", "arguments": {"city": "上海"}}
</tool_call>

Qwen3-Coder and later models write <function=get_weather> between the marks (`functions`).
"""

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from skydraft.engines.vocab import Vocab
from skydraft.errors import PromptError
from skydraft.grammars import with_ascii_refs
from skydraft.prompts.functions import FUNCTION, Tools, call_of, end_of
from skydraft.prompts.messages import Message
from skydraft.thinking import num_suspect

_BEGIN, _END = "<tool_call>", "</tool_call>"
_STRAY = re.compile(r"\s*\}")  # after a call's object: small models write one bracket too many
# The head of a call, perhaps after the end of another one.
_HEAD = re.compile(rf'(?:\}}\n{_END}\n)?{_BEGIN}\n\{{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_OPENING = re.compile(rf"\s*(?:(?P<mark>{_BEGIN})\s*|(?P<fence>`{{1,3}})\w*(?:\s+|$|(?=\{{)))?")
_MAY_ANSWER = (
    "You are a helpful assistant. If one of the functions answers the request, call it. "
    "If none does, answer from your own knowledge."
)
_ARGUMENTS = {"arguments", "parameters"}
_MAX_HELD, _MAX_BREAKS = 256, 64  # characters before a call's arguments (128 for a name); line breaks before a call
_HOLDING = {"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "minProperties"}  # about the content of an object
# As `tojson` writes arguments into the history, and as models saw them in training.
_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer's text, of the thinking before it, or of a call's arguments.

    The first piece of a call has the tool's name; the last one (`is_last`) completes the arguments' object. A call
    without a last piece was cut off.
    """

    text: str
    kind: Literal["text", "thinking", "call"] = "text"
    name: str = ""
    is_last: bool = False


def writes_calls(vocab: Vocab) -> bool:
    """Whether the template shows that its model was trained to call tools in this format."""
    template = vocab.tool_template or vocab.chat_template or ""
    return "tools" in template and _BEGIN in template


def may_answer(messages: Seq[Message]) -> list[Message]:
    """Add a system prompt that makes tool calls optional.

    With the template's own system prompt, small code models call a tool for nearly every question. A conversation with
    a system prompt, or with tool results after the last question, stays unchanged: models would repeat the results.
    """
    turn = takewhile(lambda message: message.role != "user", reversed(messages))
    stays = any(message.role == "system" for message in messages) or any(message.role == "tool" for message in turn)
    return list(messages) if stays else [Message("system", _MAY_ANSWER), *messages]


def calling_grammar(tools: Seq[Mapping[str, Any]], *, parallel: bool, answer: str | None = None) -> str:
    """Return the Lark grammar of texts that call one of `tools` (functions); with `parallel`, up to eight times.

    With `answer`, JSON of that schema may replace the calls. Raises PromptError if parameters are no object.
    """
    rules = [f"start: calls | answer\nanswer: %json {_for_lark(answer)}" if answer else "start: calls"]
    rules.append('calls: call ("\\n" call){0,7}' if parallel else "calls: call")
    names = [f"call_{number}" for number in range(len(tools))]
    rules.append(f'call: "{_BEGIN}\\n" ({" | ".join(names)}) "\\n{_END}"')
    for name, tool in zip(names, tools, strict=True):
        head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "arguments": '
        rules.append(f'{name}: {json.dumps(head, ensure_ascii=False)} {name}_args "}}"')
        rules.append(f"{name}_args: %json {_schema_of(tool)}")
    return "lark:" + "\n".join(rules)


def _schema_of(tool: Mapping[str, Any]) -> str:
    schema = {key: value for key, value in (tool.get("parameters") or {}).items() if value is not None}
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise PromptError(f"The parameters of the tool '{tool['name']}' must be a schema of an object.")
    # Forbid arguments that the schema does not name, unless other keywords describe the object.
    closed = {} if _HOLDING & schema.keys() else {"properties": {}, "additionalProperties": False}
    return _for_lark(json.dumps({**closed, **schema, "type": "object", "x-guidance": _STYLE}))


def _for_lark(schema: str) -> str:
    return json.dumps(with_ascii_refs(schema), ensure_ascii=False)


class Reader:
    """Splits an arriving text into calls and text. With `single` it stops after the first call.

    This base class finds no calls.
    """

    def __init__(self, *, single: bool = False) -> None:
        self._held, self._single = "", single
        self._num_calls = 0  # complete calls

    @property
    def is_done(self) -> bool:
        return self._single and self._num_calls > 0

    def push(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that are now certain."""
        self._held += text
        said: list[Piece] = []
        while not self.is_done and self._read_on(said):
            pass
        return said

    def finish(self, thought: str = "") -> list[Piece]:
        """End the text; returns the last pieces. If it ended while thinking, give the `thought`: its calls count."""
        held, self._held = self._held, ""
        left = self._rest(held) if held and not self.is_done else []
        calls = self.push(thought[thought.index(_BEGIN) :]) if _BEGIN in thought else ()
        return left + [each for each in calls if each.kind == "call"]

    def _read_on(self, said: list[Piece]) -> bool:
        """Add certain pieces to `said`; returns whether more can be read."""
        self._release(len(self._held), said)
        return False

    def _release(self, length: int, said: list[Piece]) -> None:
        said += [Piece(self._held[:length])] if length else []
        self._held = self._held[length:]

    def _rest(self, held: str) -> list[Piece]:
        return []


class _Object:
    """An object or function being read, from `start` to `at`. `closing` ends the marks or fence around it."""

    def __init__(self, start: int, closing: str) -> None:
        self.start = self.at = start
        self.closing = closing
        self._depth, self._is_quoted = 0, False

    def ends(self, text: str) -> bool:
        """Continue reading `text`; returns whether the object ends at `at`."""
        if text.startswith(FUNCTION, self.start):
            self.at, has_ended = end_of(text, self.start, self.at)
            return has_ended
        while self.at < len(text):
            char = text[self.at]
            self.at += 2 if char == "\\" and self._is_quoted else 1
            if char == '"':
                self._is_quoted = not self._is_quoted
            elif char in "{}" and not self._is_quoted:
                self._depth += 1 if char == "{" else -1
                if not self._depth:
                    return True
        return False


class CallReader(Reader):
    """Reads optional calls of `tools` in a text.

    A call stands between the template's marks. Without marks, bare or in a code fence, it must begin the answer or
    follow another call. Text that may become a call is held back, and released unchanged if it does not.
    """

    def __init__(self, tools: Tools, *, single: bool = False) -> None:
        super().__init__(single=single)
        self._tools = tools
        self._heads = [f'{{"name":{json.dumps(name, ensure_ascii=False)}' for name in tools]
        self._heads += [f"{FUNCTION}{name}>" for name in tools]
        self._may_call = True  # whether the held text may begin a call: at the beginning, after a call, at a mark
        self._closing = ""  # the end mark or fence expected after the last call
        self._object: _Object | None = None  # of the call that is being read

    def _rest(self, held: str) -> list[Piece]:
        ends_call = self._num_calls and self._may_call and not self._object and self._closing.startswith(held.strip())
        return [] if ends_call else [Piece(held)]

    def _read_on(self, said: list[Piece]) -> bool:
        if self._object:
            return self._read_object(self._object, said)
        return self._read_opening(said) if self._may_call else self._read_text(said)

    def _read_text(self, said: list[Piece]) -> bool:
        at = self._held.find(_BEGIN)
        self._may_call = at >= 0
        text = self._held[: at if self._may_call else len(self._held) - num_suspect(self._held, _BEGIN)]
        num_breaks = len(text) - len(text.rstrip("\n"))  # a call begins on a line of its own
        self._release(len(text) - min(num_breaks, _MAX_BREAKS), said)
        return self._may_call

    def _read_opening(self, said: list[Piece]) -> bool:
        if self._num_calls and (stray := _STRAY.match(self._held, 0, _MAX_HELD)):
            self._held = self._held[stray.end() :]
            return True
        rest = self._held[:_MAX_HELD].lstrip()
        if self._closing and rest.startswith(self._closing):
            self._held, self._closing = self._held.lstrip()[len(self._closing) :], ""
            return True
        opening = _OPENING.match(self._held, 0, _MAX_HELD)
        assert opening  # it matches every text
        mark, fence, start = opening["mark"], opening["fence"], opening.end()
        is_call = self._is_call(mark, self._held[start:_MAX_HELD])
        if is_call:
            # A function may have an end mark without a begin mark.
            self._object = _Object(start, _END if mark or self._held[start] == "<" else fence or self._closing)
        elif len(self._held) <= _MAX_HELD and (is_call is None or self._closing.startswith(rest)):
            return False
        else:
            self._may_call, self._closing = False, ""
            self._release(start if mark else 0, said)
        return True

    def _is_call(self, mark: str | None, rest: str) -> bool | None:
        """Whether `rest` begins a call's object, with or without a mark before; None while both are possible."""
        bare = re.sub(r"\s", "", rest)
        if not bare:
            return None
        if mark and not FUNCTION.startswith(bare):
            return bare[0] == "{" or bare.startswith(FUNCTION)
        if any(bare.startswith(head) for head in self._heads):
            return True
        return None if any(head.startswith(bare) for head in (*self._heads, _BEGIN)) else False

    def _read_object(self, read: _Object, said: list[Piece]) -> bool:
        if not read.ends(self._held):
            return False
        call = _call_of(self._held[read.start : read.at], self._tools)
        self._object, self._may_call, self._closing = None, call is not None, read.closing if call else ""
        if not call:
            self._release(read.at, said)
            return True
        self._held = self._held[read.at :]
        said.append(call)
        self._num_calls += 1
        return True


def _call_of(text: str, tools: Tools) -> Piece | None:
    """Parse a complete call; None if `text` describes a tool, or calls none of `tools`."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        call = call_of(text, tools) if text.startswith(FUNCTION) else json.loads(text, strict=False)
        is_call = "description" not in call and (len(call) == 1 or _ARGUMENTS & call.keys())
        given = call.get("arguments", call.get("parameters", {}))  # Llama models write "parameters"
        given = json.loads(given, strict=False) if isinstance(given, str) else given
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # raises for half of a character
        if is_call and call.get("name") in tools and isinstance(given, dict):
            return Piece(arguments, "call", call["name"], is_last=True)
    return None


class EnforcedReader(Reader):
    """Reads an answer that follows `calling_grammar`. Arguments are returned while they are written.

    A call's first piece always has some of its arguments: clients would take a call without them as complete. Marks are
    not returned as text.
    """

    def __init__(self, *, single: bool = False) -> None:
        super().__init__(single=single)
        self._name = ""  # of the call that begins
        self._arguments: _Object | None = None  # of the current call
        self._is_answer = False

    def _read_on(self, said: list[Piece]) -> bool:
        held = self._held
        if self._arguments:
            return self._read_arguments(self._arguments, said)
        if self._is_answer or (held and not self._num_calls and held[0] != "<"):
            self._is_answer = True
            return super()._read_on(said)
        if head := _HEAD.match(held):
            self._name, self._arguments, self._held = json.loads(head[1]), _Object(0, ""), held[head.end() :]
        return head is not None

    def _read_arguments(self, read: _Object, said: list[Piece]) -> bool:
        is_last = read.ends(self._held)
        text, self._held = self._held[: read.at], self._held[read.at :]
        read.at -= len(text)  # may be past the end if a backslash is the last character
        if text:
            said.append(Piece(text, "call", self._name, is_last))
            self._name = ""
        if is_last:
            self._arguments, self._num_calls = None, self._num_calls + 1
        return is_last
