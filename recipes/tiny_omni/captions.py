"""One fluent Chinese sentence about a speaker, from the attributes of a clip; and back from sentence to attributes."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from recipes.tiny_omni.attributes import CLASSES, Attributes
from recipes.tiny_omni.wording import FRAMES, WORDINGS

DEFAULT_PROMPT = "请用一句话描述说话人的语速、音调、音量、停顿和说话人的特点。"
PROMPTS = (
    DEFAULT_PROMPT,
    "请描述这段语音。",
    "说话人的声音有什么特点？",
    "这段录音听起来怎么样？请用一句话回答。",
    "请用一句话描述说话人。",
)
MIN_CHARS, MAX_CHARS = 25, 60
MIN_COMMA_GAP = 4  # characters between two commas

_USUAL_ORDER = ("speaker", "rate", "pitch", "loudness", "pauses")
_USUAL_ORDER_SHARE = 0.5
_FAVOURITE_FRAME = 0.6
_FAVOURITE_WORDING = {"speaker": 0.5, "rate": 0.2, "pitch": 0.2, "loudness": 0.2, "pauses": 0.2}


@dataclass(frozen=True, slots=True)
class Statement:
    """What a caption says about one attribute, and the index of the character at which the class is decided."""

    value: str
    start: int


def caption(attributes: Attributes, seed: int) -> str:
    """A sentence that states all five attributes and keeps the rules of `is_fluent`; a pure function of both."""
    rng = random.Random(seed)
    while not is_fluent(text := _compose(attributes, rng)):
        pass
    return text


def _compose(attributes: Attributes, rng: random.Random) -> str:
    order = list(_USUAL_ORDER)
    if rng.random() >= _USUAL_ORDER_SHARE:
        rng.shuffle(order)
    return "，".join(_clause(name, getattr(attributes, name), rng) for name in order) + "。"


def _clause(name: str, value: str, rng: random.Random) -> str:
    frame = _pick(FRAMES[name], _FAVOURITE_FRAME, rng)
    return frame.format(_pick(WORDINGS[name, value], _FAVOURITE_WORDING[name], rng))


def _pick(choices: Sequence[str], favourite: float, rng: random.Random) -> str:
    """The first with probability `favourite`, else any of the others evenly."""
    return choices[0] if rng.random() < favourite else rng.choice(choices[1:])


def wording_shares(name: str, value: str) -> dict[str, float]:
    """How often each wording of a class is chosen. The shares add up to 1."""
    wordings, favourite = WORDINGS[name, value], _FAVOURITE_WORDING[name]
    return {wordings[0]: favourite} | dict.fromkeys(wordings[1:], (1 - favourite) / (len(wordings) - 1))


def is_fluent(text: str) -> bool:
    """Whether a caption keeps the house rules.

    25 to 60 characters, one full stop, at the end; at least 4 characters between commas; and, punctuation left
    out, no character twice in a row and no pair of neighbouring characters said twice.
    """
    clauses = text.removesuffix("。").split("，")
    content = "".join(clauses)
    pairs = list(pairwise(content))
    return (
        MIN_CHARS <= len(text) <= MAX_CHARS
        and text.endswith("。")
        and content.isalnum()
        and all(len(clause) >= MIN_COMMA_GAP for clause in clauses)
        and all(left != right for left, right in pairs)
        and len(set(pairs)) == len(pairs)
    )


def _statement_pattern(name: str) -> re.Pattern[str]:
    """Matches what leads up to an attribute and then one group per class."""
    lead_ins = [frame.partition("{")[0] for frame in FRAMES[name]]
    groups = (f"(?P<{value}>{_any_of(WORDINGS[name, value])})" for value in CLASSES[name])
    return re.compile(f"(?:{_any_of(lead_ins)})(?:{'|'.join(groups)})")


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


_PATTERNS = {name: _statement_pattern(name) for name in CLASSES}


def find_statements(text: str) -> dict[str, Statement]:
    """The first statement about each attribute that `text` says anything about."""
    found: dict[str, Statement] = {}
    for name, pattern in _PATTERNS.items():
        if match := pattern.search(text):
            value = match.lastgroup or ""
            found[name] = Statement(value, match.start(value))
    return found


def read_attributes(text: str) -> dict[str, str | None]:
    """The class that `text` states for each attribute, None where it states none. Knows every wording of `caption`."""
    found = find_statements(text)
    return {name: found[name].value if name in found else None for name in CLASSES}
