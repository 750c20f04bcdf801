"""Read the answer in a text: the X of its last line `Answer: X` or `答案：X`.

Without such a line the answer is the text's last number, or its first or last line.
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
    """Return the text without thoughts, with characters in their normal forms (NFKC)."""
    return unicodedata.normalize("NFKC", _THOUGHTS.sub("", text)).translate(_MINUS)


def line_of(text: str, *, last: bool = False) -> str:
    """Return the answer's line, else the text's first or last line, without spaces and punctuation at its ends."""
    text = narrow(text)
    lines: list[str] = _ANSWER.findall(text)[-1:] or [line for line in text.splitlines() if line.strip(EDGES)] or [""]
    return lines[-1 if last else 0].strip(EDGES)


def number_of(text: str) -> str:
    """Return the last number of the answer's line, else of the text; "" if there is none."""
    text = narrow(text)
    numbers = _NUMBER.findall((_ANSWER.findall(text) or [text])[-1])
    return numbers[-1].replace(",", "") if numbers else ""


def choice_of(text: str, choices: Sequence[str]) -> str:
    """Return the one of `choices` that the line names; "" if it names none or several. Case counts only if a choice is
    a single character and the line has more words."""
    line, names = line_of(text), {narrow(each).casefold(): each for each in choices}
    if line.casefold() in names:
        return names[line.casefold()]
    pattern = "|".join(re.escape(narrow(each)) for each in sorted(choices, key=len, reverse=True))
    flags = re.IGNORECASE if min(map(len, choices)) > 1 else re.NOFLAG
    found = re.findall(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", line, flags)
    named = {each.casefold() for each in found}
    return names[named.pop()] if len(named) == 1 else ""
