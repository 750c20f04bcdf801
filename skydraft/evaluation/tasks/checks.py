"""Checks of answers: each reads the answer out of a text and compares it.

What follows the last "答案：", "Answer:", "####" or "\\boxed{" of a text is its answer; without such a mark, all of it.
"""

from __future__ import annotations

import datetime
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from skydraft.errors import MissingDependency
from skydraft.evaluation.tasks import sandbox

_MARK = re.compile(r"(?:\banswer\b\**|答案\**)(?:\s*(?:is|为|是))?\s*[:：]?|####|\\boxed\{", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])-?\d+(?:,\d{3})*(?:\.\d+)?")
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_EDGES = " \t\r\n.,;:!?\"'`*$。，；：！？“”‘’（）()[]【】{}\\"
_MAX_ANSWER = 2_000  # characters of an answer that are kept


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer that was read out of a text, its score from 0 (wrong) to 1 (right), and what was wrong."""

    score: float
    answer: str = ""
    note: str = ""


def needs(package: str, what: str) -> MissingDependency:
    """The error for a missing package of the extra `tasks`."""
    return MissingDependency(
        f"{what} needs {package}, which is not installed.", hint="Run: pip install 'skydraft[tasks]'."
    )


def answer_part(text: str) -> tuple[str, bool]:
    """The part of a text that holds the answer, and whether a mark said so. Wide characters are made narrow."""
    text = unicodedata.normalize("NFKC", text).replace("−", "-")
    marks = [mark for mark in _MARK.finditer(text) if text[mark.end() :].strip(_EDGES)]
    return (text[marks[-1].end() :], True) if marks else (text, False)


class _Check(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def judge(self, text: str) -> Judgement:
        """The verdict on a whole text. Raises MissingDependency, or OptionError where code cannot be isolated."""
        raise NotImplementedError


def _verdict(right: bool, answer: object, note: str = "") -> Judgement:
    said = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return Judgement(float(right), said[:_MAX_ANSWER], "" if right else note or "not the answer")


class Exact(_Check):
    """The first line of the answer is one of `answer`; case, spaces and punctuation at both ends do not count."""

    kind: Literal["exact"]
    answer: str | tuple[str, ...]

    def judge(self, text: str) -> Judgement:
        lines = [line.strip(_EDGES) for line in answer_part(text)[0].splitlines()]
        found = next(filter(None, lines), "")
        wanted = (self.answer,) if isinstance(self.answer, str) else self.answer
        return _verdict(found.casefold() in {_plain_text(each) for each in wanted}, found)


def _plain_text(text: str) -> str:
    return unicodedata.normalize("NFKC", text).strip(_EDGES).casefold()


class Number(_Check):
    """The number of the answer differs from `answer` by at most `tolerance`.

    After a mark it is the first number of the line, after its last "=" if there is one; else the last of the text.
    """

    kind: Literal["number"]
    answer: float
    tolerance: float = Field(default=1e-6, ge=0)

    def judge(self, text: str) -> Judgement:
        part, marked = answer_part(text)
        line = next((line for line in part.splitlines() if _NUMBER.search(line)), "")
        after = line.rpartition("=")[2]
        numbers = _NUMBER.findall((after if _NUMBER.search(after) else line) if marked else part)
        if not numbers:
            return _verdict(False, "", "no number")
        found = numbers[0 if marked else -1].replace(",", "")
        return _verdict(abs(float(found) - self.answer) <= self.tolerance, found)


class OneOf(_Check):
    """The answer names one of `choices`: the first after a mark, else the last of the text."""

    kind: Literal["choice"]
    answer: str
    choices: tuple[str, ...] = ("A", "B", "C", "D")

    @field_validator("choices")
    @classmethod
    def _has_several(cls, choices: tuple[str, ...]) -> tuple[str, ...]:
        if len(choices) < 2:
            raise ValueError("a choice needs two choices or more")
        return choices

    def judge(self, text: str) -> Judgement:
        part, marked = answer_part(text)
        names = "|".join(re.escape(each) for each in sorted(self.choices, key=len, reverse=True))
        found = re.findall(rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])", part, re.IGNORECASE)
        if not found:
            return _verdict(False, "", "none of the choices")
        named = found[0 if marked else -1]
        return _verdict(named.casefold() == self.answer.casefold(), named)


class Regex(_Check):
    """`pattern` is found in the text; with `answer`, its first group (else all of it) is that."""

    kind: Literal["regex"]
    pattern: str
    answer: str | None = None

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"the pattern is not valid: {error}") from error
        return pattern

    def judge(self, text: str) -> Judgement:
        match = re.search(self.pattern, text)
        if match is None:
            return _verdict(False, "", "no match")
        found = match[1 if match.re.groups else 0] or ""
        return _verdict(self.answer is None or found == self.answer, found)


class Json(_Check):
    """The first JSON object of the text (list, if `answer` is one) is `answer`; spaces inside of texts do not count."""

    kind: Literal["json"]
    answer: dict[str, Any] | list[Any]

    def judge(self, text: str) -> Judgement:
        found = next(json_values(text, "{" if isinstance(self.answer, dict) else "["), None)
        return _verdict(is_same(found, self.answer), "" if found is None else found, "no JSON" if found is None else "")


class Schema(_Check):
    """The text is JSON that fits `schema`."""

    kind: Literal["schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def judge(self, text: str) -> Judgement:
        wrong = complaint(text, self.schema_)
        return _verdict(not wrong, text, wrong)


class Call(_Check):
    """The first call of one of the functions `names` in the text has the name and the arguments of `answer`."""

    kind: Literal["call"]
    answer: dict[str, Any]
    names: tuple[str, ...]

    def judge(self, text: str) -> Judgement:
        found = read_call(text, self.names)
        return _verdict(is_same(found, self.answer), found or "", "" if found else "no call")


class Fields(_Check):
    """Each field of `answer` is what the text says of it; the score is the share of right fields.

    `patterns` has the values of each field, each with a regular expression; the first to be found in the text counts.
    """

    kind: Literal["fields"]
    answer: dict[str, str]
    patterns: dict[str, dict[str, str]]

    def judge(self, text: str) -> Judgement:
        found = {name: _first(text, self.patterns.get(name, {})) for name in self.answer}
        wrong = [name for name, value in self.answer.items() if found[name] != value]
        said = json.dumps(found, ensure_ascii=False)
        return Judgement(1 - len(wrong) / max(len(self.answer), 1), said, f"wrong: {', '.join(wrong)}" if wrong else "")


def _first(text: str, patterns: dict[str, str]) -> str | None:
    matches = [(match.start(), value) for value, pattern in patterns.items() if (match := re.search(pattern, text))]
    return min(matches)[1] if matches else None


class Python(_Check):
    """The code of the text, between `before` and `tests`, runs to its end. It runs only with --run-code.

    The code is the first fenced block that defines `entry`, else the first block, else the text. Without a definition
    of `entry` it goes on from `prompt`.
    """

    kind: Literal["python"]
    tests: str
    before: str = ""
    prompt: str = ""
    entry: str = ""
    seconds: int = Field(default=10, ge=1, le=600)

    def judge(self, text: str) -> Judgement:
        blocks = _FENCE.findall(text) or [text]
        defines = re.compile(rf"^\s*(?:def|class|async def)\s+{re.escape(self.entry)}\b", re.MULTILINE)
        code = next(filter(defines.search, blocks), blocks[0])
        begin = self.before if defines.search(code) or not self.prompt else self.prompt
        outcome = sandbox.run(f"{begin}\n{code}\n{self.tests}", sandbox.CodeLimits(seconds=self.seconds))
        return _verdict(outcome.passed, code, outcome.note)


class Gym(_Check):
    """reasoning-gym's own score of the answer to an entry of `dataset` is 1."""

    kind: Literal["gym"]
    dataset: str
    entry: dict[str, Any]

    def judge(self, text: str) -> Judgement:
        part, marked = answer_part(text)
        lines = [line.strip(_EDGES) for line in part.splitlines() if line.strip(_EDGES)]
        found = (lines[0] if marked else lines[-1]) if lines else ""
        return _verdict(load_gym().get_score_answer_fn(self.dataset)(found, self.entry) >= 1, found)


def load_gym() -> Any:
    """The package reasoning_gym. Raises MissingDependency."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise needs("reasoning-gym", "This set of tasks") from error
    return reasoning_gym


Check = Annotated[
    Exact | Number | OneOf | Regex | Json | Schema | Call | Fields | Python | Gym, Field(discriminator="kind")
]


def is_same(found: Any, wanted: Any) -> bool:
    """Whether two JSON values are the same, spaces in texts left out. True is not 1."""
    return bool(_plain(found) == _plain(wanted))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return re.sub(r"\s", "", value) if isinstance(value, str) else (type(value) is bool, value)


def complaint(text: str, schema: Any) -> str:
    """Why a text is not JSON that fits a schema; "" where it is. Numbers are those that are written: 39.9 is 399 * 0.1.

    Raises MissingDependency.
    """
    try:
        import jsonschema  # type: ignore[import-untyped]
    except ImportError as error:
        raise needs("jsonschema", "A check against a schema") from error
    try:
        found = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"
    formats = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])
    # jsonschema knows this one only with another package.
    formats.checks("date-time", raises=ValueError)(lambda text: bool(datetime.datetime.fromisoformat(text)))
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact, format_checker=formats)
    return next((error.message[:200] for error in validator.iter_errors(found)), "")


def json_values(text: str, opening: str = "{") -> Iterator[Any]:
    """The JSON objects of a text (lists, where `opening` is a bracket), whatever is around them."""
    at = text.find(opening)
    while at >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
            yield found
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find(opening, end)


def read_call(text: str, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The first call of one of the functions `names`, in the template's marks or not; None if there is none.

    Arguments in a text, as OpenAI's interface has them, and `parameters`, as some models call them, are taken too.
    """
    for found in json_values(text):
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str):
            arguments = next(json_values(arguments), None)
        if found.get("name") in names and isinstance(arguments, dict):
            return {"name": found["name"], "arguments": arguments}
    return None
