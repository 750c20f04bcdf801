"""Checks of answers: each reads the answer in a text and compares it. A check that no text can pass is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictFloat, StrictInt

from skydraft.errors import importing
from skydraft.files import Stored
from skydraft.lab.tasks import sandbox
from skydraft.lab.tasks.reading import EDGES, choice_of, line_of, narrow, number_of

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MAX_ANSWER = 2_000  # characters to keep of an answer


@dataclass(frozen=True, slots=True)
class Judgement:
    score: float  # from 0 (wrong) to 1 (right)
    answer: str = ""
    note: str = ""


class _Check(Stored):
    """`judge` returns the verdict on a whole text. It raises MissingDependency, or OptionError if code cannot be
    isolated.

    `model_post_init` raises ValueError if no text can be right.
    """


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern is not valid: {error}") from error
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]


def _verdict(right: bool, answer: object, note: str = "") -> Judgement:
    said = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return Judgement(float(right), said[:_MAX_ANSWER], "" if right else note or "not the answer")


class Exact(_Check):
    """The answer's line, else the first line, is one of `answer`. Case does not count, nor spaces and punctuation at
    the ends."""

    kind: Literal["exact"]
    answer: str | tuple[str, ...]

    def model_post_init(self, context: object) -> None:
        if not (wanted := self._wanted()) or "" in wanted:
            raise ValueError("an answer needs a letter or a digit")

    def _wanted(self) -> set[str]:
        given = (self.answer,) if isinstance(self.answer, str) else self.answer
        return {narrow(each).strip(EDGES).casefold() for each in given}

    def judge(self, text: str) -> Judgement:
        found = line_of(text)
        return _verdict(found.casefold() in self._wanted(), found)


class Number(_Check):
    """The answer's number differs from `answer` by at most `tolerance`. Units, % included, do not count."""

    kind: Literal["number"]
    answer: StrictInt | StrictFloat
    tolerance: float = Field(default=1e-6, ge=0)

    def judge(self, text: str) -> Judgement:
        found = number_of(text)
        if not found:
            return _verdict(False, "", "no number")
        return _verdict(abs(Decimal(found) - Decimal(str(self.answer))) <= Decimal(str(self.tolerance)), found)


class OneOf(_Check):
    """The answer's line, else the first line, names `answer` and no other of `choices`."""

    kind: Literal["choice"]
    answer: str
    choices: tuple[str, ...] = ("A", "B", "C", "D")

    def model_post_init(self, context: object) -> None:
        names = {narrow(each).casefold() for each in self.choices if each.strip()}
        if len(names) < max(2, len(self.choices)):
            raise ValueError("a choice needs two choices or more, which differ by more than their case")
        if self.answer not in self.choices:
            raise ValueError(f"the answer '{self.answer}' is none of the choices")

    def judge(self, text: str) -> Judgement:
        found = choice_of(text, self.choices)
        return _verdict(found == self.answer, found, "" if found else "none or several of the choices")


class Regex(_Check):
    """`pattern` is found in the text. With `answer`, its first group (else the whole match) equals `answer`."""

    kind: Literal["regex"]
    pattern: Pattern
    answer: str | None = None

    def judge(self, text: str) -> Judgement:
        match = re.search(self.pattern, text)
        if match is None:
            return _verdict(False, "", "no match")
        found = match[1 if match.re.groups else 0] or ""
        return _verdict(self.answer is None or found == self.answer, found)


class Json(_Check):
    """The text's first JSON object (or list, if `answer` is one) equals `answer`. Spaces in strings do not count."""

    kind: Literal["json"]
    answer: dict[str, Any] | list[Any]

    def judge(self, text: str) -> Judgement:
        found = next(json_values(text, "{" if isinstance(self.answer, dict) else "["), None)
        return _verdict(is_same(found, self.answer), "" if found is None else found, "no JSON" if found is None else "")


class Call(_Check):
    """The text's first call of a function in `names` has the name and the arguments of `answer`."""

    kind: Literal["call"]
    answer: dict[str, Any]
    names: tuple[str, ...]

    def model_post_init(self, context: object) -> None:
        if set(self.answer) != {"name", "arguments"} or not isinstance(self.answer["arguments"], dict):
            raise ValueError('the answer is not {"name": …, "arguments": {…}}')
        if self.answer["name"] not in self.names:
            raise ValueError("the name of the answer is none of the names")

    def judge(self, text: str) -> Judgement:
        found = read_call(text, self.names)
        return _verdict(is_same(found, self.answer), found or "", "" if found else "no call")


class Fields(_Check):
    """The score is the share of `answer`'s fields with the right value in the text. `patterns` has a regular expression
    for each value of each field. The value found first in the text counts."""

    kind: Literal["fields"]
    answer: dict[str, str]
    patterns: dict[str, dict[str, Pattern]]

    def model_post_init(self, context: object) -> None:
        if not self.answer:
            raise ValueError("the answer has no field")
        for name, value in self.answer.items():
            if value not in self.patterns.get(name, {}):
                raise ValueError(f"there is no pattern for {name}: {value}")

    def judge(self, text: str) -> Judgement:
        found = {name: _first(text, self.patterns[name]) for name in self.answer}
        wrong = [name for name, value in self.answer.items() if found[name] != value]
        said = json.dumps(found, ensure_ascii=False)
        return Judgement(1 - len(wrong) / len(self.answer), said, f"wrong: {', '.join(wrong)}" if wrong else "")


def _first(text: str, patterns: dict[str, str]) -> str | None:
    matches = [(match.start(), value) for value, pattern in patterns.items() if (match := re.search(pattern, text))]
    return min(matches)[1] if matches else None


class Python(_Check):
    """The text's code, between `before` and `tests`, runs to its end. It runs only with --run-code.

    The code is the first fenced block that defines `entry`, else the first block, else the text. Without a definition
    of `entry` it continues `prompt`.
    """

    kind: Literal["python"]
    tests: str
    before: str = ""
    prompt: str = ""
    entry: str = ""
    seconds: int = Field(default=sandbox.SECONDS, ge=1, le=600)

    def judge(self, text: str) -> Judgement:
        blocks = _FENCE.findall(text) or [text]
        defines = re.compile(rf"^\s*(?:def|class|async def)\s+{re.escape(self.entry)}\b", re.MULTILINE)
        code = next(filter(defines.search, blocks), blocks[0])
        begin = self.before if defines.search(code) or not self.prompt else self.prompt
        fault = sandbox.run(f"{begin}\n{code}\n{self.tests}", self.seconds)
        return _verdict(not fault, code, fault)


class Gym(_Check):
    """reasoning-gym's own score of the answer to an entry of `dataset` is 1."""

    kind: Literal["gym"]
    dataset: str
    entry: dict[str, Any]

    def judge(self, text: str) -> Judgement:
        found = line_of(text, last=True)
        return _verdict(load_gym().get_score_answer_fn(self.dataset)(found, self.entry) >= 1, found)


def load_gym() -> Any:
    with importing("This set of tasks needs", "tasks"):
        import reasoning_gym
    return reasoning_gym


Check = Annotated[Exact | Number | OneOf | Regex | Json | Call | Fields | Python | Gym, Field(discriminator="kind")]


class Task(Stored):
    """The check and the settings of a task in the set `set`.

    `messages` are the whole conversation, if it is more than the prompt. `grammar` and `max_new_tokens` (None: the
    mode's) are for this task only. `tools` are for the chat template.
    """

    set: str
    check: Check
    max_new_tokens: int | None = Field(default=None, ge=1)
    grammar: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()


def is_same(found: Any, wanted: Any) -> bool:
    """Return whether two JSON values are equal, ignoring spaces in strings. True differs from 1."""
    return bool(_plain(found) == _plain(wanted))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return re.sub(r"\s", "", value) if isinstance(value, str) else (type(value) is bool, value)


def json_values(text: str, opening: str = "{") -> Iterator[Any]:
    """Yield the JSON objects in a text (lists, if `opening` is a bracket)."""
    at = text.find(opening)
    while at >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
            yield found
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find(opening, end)


def read_call(text: str, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the first call of a function in `names`, with or without the template's marks. Its arguments may be named
    `arguments` or `parameters`."""
    for found in json_values(text):
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str):
            arguments = next(json_values(arguments), None)
        if found.get("name") in names and isinstance(arguments, dict):
            return {"name": found["name"], "arguments": arguments}
    return None
