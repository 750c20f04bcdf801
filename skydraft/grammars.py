"""Grammars as text: one string has kind and content, so that it crosses the wire like any other option.

    json_schema:{"type": "object", ...}   JSON that fits the schema
    json_object:                          any JSON object
    regex:[0-9]{4}-[0-9]{2}               text that the pattern matches from end to end
    lark:start: "yes" | "no"              text of a Lark grammar, in llguidance's dialect

The checks here need no library; `choosing.grammar` compiles grammars.
"""

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any
from urllib.parse import quote

from skydraft.errors import GrammarRefused

KINDS = ("json_schema", "json_object", "regex", "lark")
MAX_BYTES = 65_536
MAX_DEPTH = 64  # brackets inside each other
_OPEN, _CLOSE = "([{", ")]}"
# Schema keywords that change no answer.
_ABOUT = {"description", "title", "examples", "example", "default", "$comment", "deprecated", "readOnly", "writeOnly",
          "contentEncoding", "contentMediaType", "contentSchema", "$dynamicAnchor"}  # fmt: skip
# Keywords that llguidance does not know. With the values here they change nothing; with others they narrow the answer.
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}), "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}), "uniqueItems": (False,), "contains": (), "minContains": (), "maxContains": (),
    "not": (False,), "if": (), "then": (), "else": (), "dependentRequired": ({},), "dependentSchemas": ({},),
    "dependencies": ({},),
}  # fmt: skip
_FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"]
_COMPOSED = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}
_NAMES, _VALUES = {"properties", "patternProperties", "$defs", "definitions"}, {"const", "enum"}
_PLAIN = re.compile(r"\\[^bBk1-9]|\[(?:\\.|[^\]\\])*\]")  # escapes and classes, which never look around
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_QUOTED = re.compile(r'\\.|"(?:\\.|[^"\\])*"?', re.DOTALL)  # or escaped
_LOOKS = re.compile(r"\\[bBk1-9]|\(\?<?[=!]")


def json_schema(schema: Mapping[str, Any] | str) -> str:
    """Return the grammar of JSON that fits a schema. Raises OptionError."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return check_grammar(f"json_schema:{text}")


def regex(pattern: str) -> str:
    """Return the grammar of text that `pattern` matches from end to end. Raises OptionError."""
    return check_grammar(f"regex:{pattern}")


def lark(grammar: str) -> str:
    """Return the grammar of text that follows a Lark grammar from its rule `start`. Raises OptionError."""
    return check_grammar(f"lark:{grammar}")


def followable(schema: Any, left_out: set[str]) -> Any:
    """Return a JSON schema without keywords that change no answer, and without keywords that llguidance does not know.

    The latter only narrow the answer; they are added to `left_out`.
    """
    if isinstance(schema, list):
        return [followable(each, left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    if schema.get("unevaluatedProperties") is False and not _COMPOSED & schema.keys():  # then both mean the same
        schema = {"additionalProperties": False, **schema, "unevaluatedProperties": True}
    for key, value in schema.items():
        is_other = (key == "format" and value not in _FORMATS) or (key == "pattern" and _looks(value))
        if key in _ABOUT or value in _UNKNOWN.get(key, ()):
            continue
        if is_other or key in _UNKNOWN:
            left_out.add(key)
        elif key in _NAMES and isinstance(value, dict):
            known = {name: each for name, each in value.items() if key != "patternProperties" or not _looks(name)}
            left_out |= {key} if len(known) < len(value) else set()
            kept[key] = {name: followable(each, left_out) for name, each in known.items()}
        else:
            kept[key] = value if key in _VALUES else followable(value, left_out)
    return kept


def _looks(pattern: Any) -> bool:
    """Whether a pattern uses lookaround or back references, which no grammar can follow."""
    return isinstance(pattern, str) and _LOOKS.search(_PLAIN.sub(" ", pattern)) is not None


def parts(text: str) -> tuple[str, str]:
    """Return kind and content of a checked grammar; json_object becomes a json_schema."""
    kind, _, content = text.partition(":")
    return ("json_schema", '{"type":"object"}') if kind == "json_object" else (kind, content)


def with_ascii_refs(schema: str) -> Any:
    """Parse a JSON schema and escape references as llguidance reads them (RFC 3986); pydantic writes "#/$defs/站"."""
    return json.loads(schema, object_hook=_with_ascii_ref)


def _with_ascii_ref(part: dict[str, Any]) -> dict[str, Any]:
    refers = isinstance(part.get("$ref"), str) and not part["$ref"].isascii()
    return {**part, "$ref": quote(part["$ref"], safe="%/#:?&=+$,;@!*'()~")} if refers else part


def check_grammar(text: str) -> str:
    """Return `text`. Raises GrammarRefused for an unknown kind, too many bytes or brackets, or an invalid schema."""
    kind, colon, content = text.partition(":")
    if kind not in KINDS or not colon:
        known = ", ".join(f"{kind}:" for kind in KINDS)
        raise GrammarRefused(f"A grammar begins with its kind: {known}.", hint="For example regex:[0-9]+.")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarRefused("The grammar is not valid Unicode.") from error
    if num_bytes > MAX_BYTES:
        raise GrammarRefused(f"The grammar has {num_bytes} bytes; it may have {MAX_BYTES}.")
    if bool(content.strip()) == (kind == "json_object"):
        raise GrammarRefused("A grammar needs text after its kind, but json_object: takes none.")
    if _depth(content, in_json=kind == "json_schema") > MAX_DEPTH:
        raise GrammarRefused(f"The grammar has more than {MAX_DEPTH} brackets inside each other.")
    if kind == "json_schema":
        try:
            schema = json.loads(content, parse_constant=int)  # int() refuses NaN and Infinity
        except (ValueError, RecursionError) as error:
            raise GrammarRefused(f"The JSON schema is not JSON: {error}.") from error
        if not isinstance(schema, dict):
            raise GrammarRefused("A JSON schema must be an object.", hint='For example {"type": "object"}.')
    return text


def _depth(text: str, *, in_json: bool) -> int:
    """Return the most brackets open at once. Escaped brackets and, in JSON, quoted ones do not count."""
    bare = (_QUOTED if in_json else _ESCAPED).sub("", text)
    steps = ((char in _OPEN) - (char in _CLOSE) for char in bare)
    return max(accumulate(steps, lambda depth, step: max(depth + step, 0), initial=0))
