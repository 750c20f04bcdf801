"""Tool calls as Qwen3-Coder and later models write them: where a call ends, and its arguments, by the tool's schema.

<function=get_weather>
<parameter=city>
上海
</parameter>
</function>

Models leave out end marks, and values may contain marks. A value ends at the last end mark before the next parameter
or the end of the call.
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
_MARKS = re.compile(rf"{_FUNCTION_END}|</?tool_call>|{FUNCTION}")  # the end of a function, and marks that may follow
_LONGEST = len("</tool_call>")
_TYPES = {str: "string", type(None): "null"}  # of enum values; other types are read as JSON


def end_of(text: str, start: int, at: int) -> tuple[int, bool]:
    """Find the end of the function that begins at `start`: returns (end, True), or (where to continue later, False).

    A function ends at its end mark after the end of a parameter. Elsewhere that mark may belong to a value, unless
    another mark follows.
    """
    while mark := _MARKS.search(text, max(at, start + 1)):
        before, is_own = text[start : mark.start()].rstrip(), mark[0] == _FUNCTION_END
        has_none = mark[0][1] == "/" and _PARAMETER not in before
        if has_none or before.endswith(_PARAMETER_END if is_own else (_PARAMETER_END, _FUNCTION_END)):
            return mark.end() if is_own else mark.start(), True
        at = mark.end()
    return max(at, len(text) - _LONGEST), False


def call_of(text: str, tools: Tools) -> dict[str, Any]:
    """Return a call's name and arguments. Raises ValueError for text beside the parameters, and other errors for
    invalid schemas."""
    name, _, rest = text.removeprefix(FUNCTION).rstrip().removesuffix(_FUNCTION_END).partition(">")
    known = (tools.get(name) or {}).get("properties") or {}
    names = "|".join(map(re.escape, known)) or _NAME
    # After a value without an end mark comes the end of the call, or a parameter of the tool.
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
    """Return the types that a schema names, also by enum values and subschemas. Empty if it names none."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type", [])
    kinds = {*map(str, given if isinstance(given, list) else [given]), *(["null"] if schema.get("nullable") else [])}
    kinds |= {_TYPES.get(type(each), "other") for each in schema.get("enum") or ()}
    return kinds.union(*(_kinds(part) for name in ("anyOf", "oneOf", "allOf") for part in schema.get(name) or ()))


def _value(said: str, kinds: set[str]) -> Any:
    """Return a value as text if the parameter may be a string, else parsed as JSON; None if it stands for no value."""
    if "string" in kinds:
        return None if "null" in kinds and said in ("null", "None") else said
    if kinds and said.strip().lower() in ("", "none"):
        return None
    for form in (said, said.lower()):  # some templates write "True"
        with suppress(ValueError):
            return json.loads(form)
    return said
