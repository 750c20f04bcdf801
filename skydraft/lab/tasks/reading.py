"""Reads the answer out of a text: what its last line `Answer: X` or `答案：X` says.

A text without such a line gives its last number, or, where a line is wanted, its first or last one.
"""

import re
import unicodedata
from collections.abc import Sequence

EDGES = " \t\r\n.,;:!?\"'`*$。，；：！？“”‘’（）()[]【】{}\\"
_THOUGHTS = re.compile(r"\A.*</think>|<think>.*", re.DOTALL)
_MINUS = {0x2212: "-", 0x2013: "-"}
_ANSWER = re.compile(r"^[^\w\n]*(?:final )?(?:answer|答案)[^\w\n:]*:(.*\w.*)$", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"(?<![A-Za-z\d_.^])(?:(?<!\))-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def narrow(text: str) -> str:
    """The text without thoughts, in the plain forms of its characters."""
    return unicodedata.normalize("NFKC", _THOUGHTS.sub("", text)).translate(_MINUS)


def line_of(text: str, *, last: bool = False) -> str:
    """What the answer's line says, else the first or last line of the text, without what stands at its edges."""
    text = narrow(text)
    lines: list[str] = _ANSWER.findall(text)[-1:] or [line for line in text.splitlines() if line.strip(EDGES)] or [""]
    return lines[-1 if last else 0].strip(EDGES)


def number_of(text: str) -> str:
    """The last number of the answer's line, else of the text; "" if there is none."""
    text = narrow(text)
    numbers = _NUMBER.findall((_ANSWER.findall(text) or [text])[-1])
    return numbers[-1].replace(",", "") if numbers else ""


def choice_of(text: str, choices: Sequence[str]) -> str:
    """The one of `choices` that the line names; "" if it names none or several. Its case counts for single characters
    within other words."""
    line, names = line_of(text), {narrow(each).casefold(): each for each in choices}
    if line.casefold() in names:
        return names[line.casefold()]
    pattern = "|".join(re.escape(narrow(each)) for each in sorted(choices, key=len, reverse=True))
    flags = re.IGNORECASE if min(map(len, choices)) > 1 else re.NOFLAG
    found = re.findall(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", line, flags)
    named = {each.casefold() for each in found}
    return names[named.pop()] if len(named) == 1 else ""
