"""Calls as Qwen3-Coder and later models write them: where one ends, and what it says, by the schema of its tool.

<function=get_weather>
<parameter=city>
上海
</parameter>
</function>

Models leave out ends, and values hold marks. A value ends at the last end of a parameter before what follows it.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

Tools: TypeAlias = Mapping[str, Any]  # parameters by name
FUNCTION = "<function="
_FUNCTION_END, _PARAMETER, _PARAMETER_END = "</function>", "<parameter=", "</parameter>"
_NAME = r"[^<>\n]+"
_MARKS = re.compile(rf"{_FUNCTION_END}|</?tool_call>|{FUNCTION}")  # the end of a function, and what may follow it
_LONGEST = len("</tool_call>")
_TYPES = {str: "string", type(None): "null"}  # of values that a schema names; others are read as JSON


def end_of(text: str, start: int, at: int) -> tuple[int, bool]:
    """Where the function that begins at `start` ends, and True; or else from where to read on, once there is more.

    It ends at its mark after the end of a parameter. Elsewhere that mark may be in a value, unless a mark follows.
    """
    while mark := _MARKS.search(text, max(at, start + 1)):
        before, is_own = text[start : mark.start()].rstrip(), mark[0] == _FUNCTION_END
        has_none = mark[0][1] == "/" and _PARAMETER not in before
        if has_none or before.endswith(_PARAMETER_END if is_own else (_PARAMETER_END, _FUNCTION_END)):
            return mark.end() if is_own else mark.start(), True
        at = mark.end()
    return max(at, len(text) - _LONGEST), False


def call_of(text: str, tools: Tools) -> dict[str, Any]:
    """Raises ValueError for what is more than parameters, and other errors for schemas that are none."""
    name, _, rest = text.removeprefix(FUNCTION).rstrip().removesuffix(_FUNCTION_END).partition(">")
    known = (tools.get(name) or {}).get("properties") or {}
    names = "|".join(map(re.escape, known)) or _NAME
    # What follows a value without an end is the end of the call, or a parameter of the tool.
    rests = rf"{_PARAMETER_END}\s*(?={_PARAMETER}|\Z)|(?={_PARAMETER}(?!\1>)(?:{names})>|\Z)"
    parameters = [*re.finditer(rf"\s*{_PARAMETER}({_NAME})>\n?(.*?)\n?(?:{rests})", rest, re.DOTALL)]
    if "".join(each[0] for each in parameters).strip() != rest.strip():
        raise ValueError
    arguments = dict[str, Any]()
    for key, said in map(re.Match.groups, parameters):
        kinds = _kinds(known.get(key))
        value = _value(said, kinds)
        if value is not None or not kinds or "null" in kinds:
            arguments[key] = value
    return {"name": name, "arguments": arguments}


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names, by its values and parts, too. Empty if it names none."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type", [])
    kinds = {*map(str, given if isinstance(given, list) else [given]), *(["null"] if schema.get("nullable") else [])}
    kinds |= {_TYPES.get(type(each), "other") for each in schema.get("enum") or ()}
    return kinds.union(*(_kinds(part) for name in ("anyOf", "oneOf", "allOf") for part in schema.get(name) or ()))


def _value(said: str, kinds: set[str]) -> Any:
    """A text where a parameter may be one, else what it says as JSON. None where it says that there is no value."""
    if "string" in kinds:
        return None if "null" in kinds and said in ("null", "None") else said
    if kinds and said.strip().lower() in ("", "none"):
        return None
    for form in (said, said.lower()):  # some templates show "True"
        with suppress(ValueError):
            return json.loads(form)
    return said
