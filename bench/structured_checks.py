"""What is said of a text: whether it is JSON that fits, and which answer or call stands in it."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema

_FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])
# jsonschema knows this one only with another package.
_FORMATS.checks("date-time", raises=ValueError)(lambda text: bool(datetime.datetime.fromisoformat(text)))


def complaint(text: str, schema: Any) -> str:
    """Why a text is no JSON that fits; "" where it is. Numbers are those that are written: 39.9 is 399 times 0.1."""
    try:
        found = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        return f"no JSON: {error}"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact, format_checker=_FORMATS)
    return next((error.message[:200] for error in validator.iter_errors(found)), "")


def is_right(found: Any, wanted: Any) -> bool:
    """Whether two values are the same, spaces in strings left out."""
    return bool(_plain(found) == _plain(wanted))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    # True is 1 in Python, and not here.
    return re.sub(r"\s", "", value) if isinstance(value, str) else (type(value) is bool, value)


def read_answer(text: str) -> Any:
    """The first object in a text, whatever is around it; None where there is none."""
    return next(_objects(text), None)


def read_call(text: str, names: list[str]) -> Any:
    """The first call of one of the functions `names` in a text, in the template's marks or not; None if there is none.

    Arguments in a string, as OpenAI's interface has them, and `parameters`, as some models call them, are taken too.
    """
    for found in _objects(text):
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str):
            arguments = read_answer(arguments)
        if found.get("name") in names and isinstance(arguments, dict):
            return {"name": found["name"], "arguments": arguments}
    return None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    at = text.find("{")
    while at >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
            yield found
        except ValueError:
            end = at + 1
        at = text.find("{", end)
