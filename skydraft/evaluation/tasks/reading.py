r"""Reads the answer out of a text as models write it: a number, one of several choices, or a line.

A mark says where it stands: "answer" or "答案" with ":" or "is" (be, 是, 为, 选) after it, that word alone on a line,
"####", or "\boxed{". The last mark counts that has a number or a choice on its line, or on the next line where its own
is empty. Without one it is what the text calls correct, else the last in the text. What a text denies ("not A", "A is
wrong") is no answer, and two answers in one breath ("A or B") are none.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TypeAlias

READING = 2  # raised with each change by which another answer may be read out of the same text
EDGES = " \t\r\n.,;:!?\"'`*$。，；：！？“”‘’（）()[]【】{}\\"
_THOUGHTS = re.compile(r"\A.*</think>|<think>.*", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*```[\w+-]*[ \t]*$", re.MULTILINE)
_POWER = re.compile(r"[⁰¹²³⁴-⁹⁻]+")
_APART = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])|(?=[①-⑳])|(?<=[①-⑳])")  # "1½" would become 11/2
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|\\[,!]|,\\!|['’_\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"(\d?)\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")

_WORD = (
    r"(?:(?<!\bto )(?<!\bwill )(?<!\bcan )(?<!\bme )(?<!\bis the )(?<!\bis the correct )(?<!\bis the right )"
    r"\bans(?:wer)?\b(?!\s+(?:choice|option)s)|\b(?:correct|right|best)\s+(?:option|choice)\b|答案|正确的?选项)"
)
_REMARK = r"\s+(?:not\s+)?(?:right|correct|wrong|incorrect|helpful|clear)\b"  # "if this answer is right"
_MARK = re.compile(
    rf"{_WORD}(?:[^\n:.!?。]|\.(?=\d)){{0,100}}?"
    rf"(?:\bis\b(?!{_REMARK})|(?<!n't )(?<!not )\bbe\b|为|(?<!不)是|(?<!不)选|=|(?=[:】]))[:】]?"
    rf"|(?P<heading>^[ #*_]*(?:(?:final|correct)\s+)?{_WORD}[ #*_]*$)"
    r"|####(?!#|\s*\d+[.)][ \t]+\S)(?=[^\n]*\s*\Z|\s*[^\w\s]*\d|\s*\(?[A-Z]\)?[\s.]*$)"
    r"|\\(?:boxed|fbox)\s*\{",
    re.IGNORECASE | re.MULTILINE,
)
_DENIED = re.compile(
    r"(?:\bnot|n't|\bnor|\brather than|\binstead of|\bunlike|不|非|排除)\s*(?:是|选)?\s*"
    r"(?:(?:be|option|choice|exactly)\s+)?[^\w\n]{0,3}\Z",
    re.IGNORECASE,
)
_UNDECIDED = re.compile(r"\b(?:none of|neither|whether)\b[^.;\n]*\Z", re.IGNORECASE)
_REFUTED = re.compile(
    r"[^\w\n]{0,3}\s*(?:is|are|was)(?:n't|\s+not|\s+wrong|\s+incorrect|\s+false)\b|(?:选项)?(?:是?错|不对|不正确|不是)"
)
_AFFIRMED = re.compile(
    r"(?:\s[^\W\d]+)?[^\w\n]{0,3}\s*is\s+(?:(?:the|clearly|indeed|final|only)\s+)*(?:correct|right|best|answer)\b"
    r"|(?:选项)?是?(?:正确|对的)",
    re.IGNORECASE,
)
_BOTH = re.compile(
    r"[\s$*_()]*,?\s*(?:or(?:\s+maybe)?|and|&|/|或者?|和|还是|、)[\s$*_()]*(?:option|choice)?[\s$*_()]*", re.IGNORECASE
)

_DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.^])(?<![\^_]\{)(?P<minus>-|\bnegative\s+|(?<!\d\s)\bminus\s+|负)?[$€£¥]?"
    rf"(?:(?P<whole>\d+)\s(?=\d+/\d))?(?P<digits>{_DIGITS})"
    r"(?:[eE](?P<exponent>[+-]?\d{1,3})(?![A-Za-z0-9])|\s?(?:×|\*|x|\\times)\s?10\^\{?(?P<power>[+-]?\d{1,3})"
    r"|\s?/\s?(?P<below>\d+)(?![\d/.]))?"
)
_CLAUSE = re.compile(r"[。;!?]|\.(?=\W|$)|\b(?:because|since|as|which)\b|因为|\s\(")
_EQUALS = re.compile(r"=|≈|\\approx|\bis\b|\bare\b|\bequals\b|是|为")
_GOES_ON = re.compile(r"(?:\s*[^\W\d_]+)?[\s*$]*(?:=|(?:[-+×÷·⋅*/^]|\\times|\\div|\\cdot)[\s$(]*\d)")
_VERBS = (
    "is|was|isn't|are|and|or|but|because|since|as|has|have|would|could|should|must|may|might|can|cannot|does|did|will|"
    "seems?|looks?|makes?|gives?|fits|matches|states|says|for|with|in|to|if|then|by|at|on|from|than|over|while|not|so"
)
_ARTICLE = rf"(?![Aa]\s+(?!(?:{_VERBS})\b)[a-z]|I(?:['’]|\s+(?!is\b)[a-z]))"  # A and I where they are words
_CHOSEN = re.compile(
    r"(?:\b(?:choose|chose|pick|select|go with)|选)\s*(?:择|项|(?:option|choice|answer)\b)?[^\w\n]{0,4}\Z",
    re.IGNORECASE,
)
_SET_OFF = re.compile(r"[*_]*(?:[).:,;\n]|\Z|\s+(?:because|since|as)\b|因为)")
_LISTED = re.compile(r"(?:\A|[.!?。\n])[\s*_(]*\Z")
_MAX_MARKS, _MAX_PART = 200, 1_000  # characters; the answer does not stand behind more


@dataclass(frozen=True, slots=True)
class Found:
    """An answer as the text says it, its place in the part that was read, and whether another stands beside it."""

    said: str
    start: int
    end: int
    is_one_of_several: bool = False


Find: TypeAlias = Callable[[str], list[Found]]


def narrow(text: str) -> str:
    """The text without thoughts and fences, with narrow characters, and with numbers of LaTeX as plain ones."""
    text = _APART.sub(" ", _GROUPED.sub("", _THOUGHTS.sub("", text)))
    text = _POWER.sub(lambda power: f"^{power[0]}", text)
    text = unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2013: "-", 0x2044: "/"})
    text = _WRAPPED.sub(r"\1", _FENCE.sub("", text))
    return _FRACTION.sub(lambda part: f"{part[1]}{' ' * len(part[1])}{part[2]}/{part[3]}", text)


def line_of(text: str, *, last: bool = False) -> str:
    """The line after the last mark with ":", else after any mark; else the first or last line of the text."""
    text = narrow(text)
    parts = list(_parts(text))
    marked = [part for part, is_plain in parts if is_plain] or [part for part, _ in parts]
    lines = marked[:1] or [line for line in text.splitlines() if line.strip(EDGES)] or [""]
    return lines[-1 if last else 0].strip(EDGES)


def number_of(text: str) -> Found | None:
    """The number that is the answer, without signs for thousands and units: "-1234.5", "1e3", "1/2", "1 1/2"."""
    text = narrow(text)
    for part, _ in _parts(text):
        for clause in _CLAUSE.split(part):
            if numbers := _numbers(clause):
                return _number_in(clause, numbers)
    return _last(text, _numbers(text))


def value_of(said: str) -> Decimal:
    """The value of what `number_of` read. Raises ArithmeticError."""
    sign, whole = (-1 if said.startswith("-") else 1), Decimal(0)
    if " " in said:
        first, said = said.split(" ")
        whole = abs(Decimal(first))
    above, _, below = said.removeprefix("-").partition("/")
    return sign * (whole + Decimal(above) / Decimal(below or 1))


def choice_of(text: str, choices: Seq[str]) -> Found | None:
    """The choice that the text names. Single letters match in their case, and in the other in brackets or alone."""
    text, find = narrow(text), _finder(choices)
    for part, _ in _parts(text):
        if found := find(part):
            return _first(part, found)
    found = find(text)
    if not found or any(_AFFIRMED.match(text, each.end) for each in found):
        return _last(text, found)
    chosen = [each for each in found if _CHOSEN.search(text[max(each.start - 25, 0) : each.start])]
    return (chosen or ([found[0]] if _begins(text, found) else found))[-1]


def _begins(text: str, found: list[Found]) -> bool:
    """Whether a text begins with a choice that it goes on to explain, and does not go through all of them."""
    listed = [
        each for each in found
        if _LISTED.search(text[max(each.start - 8, 0) : each.start]) and _SET_OFF.match(text, each.end)
    ]  # fmt: skip
    is_first = listed[:1] == found[:1] and not re.search(r"\w", text[: found[0].start])
    return is_first and len({each.said.casefold() for each in listed}) == 1


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """What follows each mark, the last first, and whether the mark is more than "is", which any sentence may have."""
    for mark in reversed(list(_MARK.finditer(text))[-_MAX_MARKS:]):
        rest = text[mark.end() : mark.end() + _MAX_PART]
        lines = [_in_braces(rest)] if mark[0].endswith("{") else rest.split("\n")
        part = next((line for line in lines if line.strip(EDGES)), "")
        if part:
            yield part, mark["heading"] is not None or mark[0][-1] in ":】#{"


def _in_braces(rest: str) -> str:
    depth = 1
    for at, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            return rest[:at]
    return rest.partition("\n")[0]


def _stands(text: str, start: int, end: int) -> bool:
    """Whether what stands there is not denied."""
    return not _DENIED.search(text[max(start - 40, 0) : start]) and not _REFUTED.match(text, end)


def _last(text: str, found: list[Found]) -> Found | None:
    """What is called correct, else the last."""
    affirmed = [each for each in found if _AFFIRMED.match(text, each.end)]
    return next(reversed(affirmed or found), None)


def _first(part: str, found: list[Found]) -> Found:
    """The first, and whether another one stands beside it."""
    first, *others = found
    is_rival = bool(others) and _sense(others[0].said) != _sense(first.said)
    return replace(first, is_one_of_several=is_rival and bool(_BOTH.fullmatch(part[first.end : others[0].start])))


def _sense(said: str) -> Decimal | str:
    """The same for 1/2 and 0.5, and for a letter in both cases."""
    try:
        return value_of(said)
    except (ArithmeticError, ValueError):
        return said.casefold()


def _numbers(text: str) -> list[Found]:
    found = []
    for match in _NUMBER.finditer(text):
        tens, below = match["exponent"] or match["power"], match["below"]
        said = match["digits"].replace(",", "") + (f"e{tens}" if tens else f"/{below}" if below else "")
        said = f"{'-' if match['minus'] else ''}{match['whole'] + ' ' if match['whole'] else ''}{said}"
        if _stands(text, match.start(), match.end()):
            found.append(Found(said, match.start(), match.end()))
    return found


def _number_in(clause: str, numbers: list[Found]) -> Found:
    """The number that the clause begins with, if it is no calculation; else the one after the last "=" or "is"."""
    begins = not re.search(r"\w", clause[: numbers[0].start])
    joints = () if begins and not _GOES_ON.match(clause, numbers[0].end) else _EQUALS.finditer(clause)
    for joint in reversed(list(joints)):
        after = [each for each in numbers if each.start >= joint.end()]
        if after and not _GOES_ON.match(clause, after[0].end):
            return _first(clause, after)
    return _first(clause, numbers)


def _finder(choices: Seq[str]) -> Find:
    names = {unicodedata.normalize("NFKC", choice) for choice in choices}
    single = {name for name in names if len(name) == 1 and name.isascii() and name.isalpha()}
    letters, words = "".join(single), "|".join(map(re.escape, sorted(names - single, key=len, reverse=True)))
    patterns = [rf"(?<![A-Za-z0-9])(?i:{words})(?![A-Za-z0-9])"] if words else []
    if letters:
        patterns += [
            rf"(?<![A-Za-z0-9])(?<![A-Za-z]['’.-]){_ARTICLE}[{letters}](?![A-Za-z0-9]|['’-][A-Za-z]|\+\+|#)",
            rf"(?<=[(\[{{*])(?i:[{letters}])(?=[)\]}}*])",
            rf"\A[\s*_(\[\"'$:]*(?P<alone>(?i:[{letters}]))(?=[\s*_)\].\"'$!]*\Z|[.):]\s)",
        ]
    pattern = re.compile("|".join(patterns))

    def find(text: str) -> list[Found]:
        found = []
        for match in pattern.finditer(text):
            said = match.groupdict().get("alone") or match[0]
            start = match.end() - len(said)
            if _stands(text, start, match.end()) and not _UNDECIDED.search(text[max(start - 200, 0) : start]):
                found.append(Found(said, start, match.end()))
        return found

    return find
