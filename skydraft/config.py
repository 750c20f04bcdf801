"""What a request may ask for: parsed once, checked once, frozen. Every default of the project stands here."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from skydraft.errors import OptionError

MAX_K = 32
# What is asked about a recording where the user asks nothing; the embedded speech models were trained with it.
CAPTION_PROMPT = "请用一句话描述说话人的语速、音调、音量、停顿和说话人的特点。"
DEFAULT_K = 5
_INT32_MAX = 2**31 - 1
_LOWEST_TEMPERATURE = 1e-6  # below it logits / temperature could overflow

# name: (lowest, highest) that makes sense; both ends allowed
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, _INT32_MAX),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "seed": (0, 2**64 - 1),
    "repetition_penalty": (1e-6, 1e6),
    "no_repeat_ngram_size": (0, 1024),
    "content_penalty": (1e-6, 1e6),
    "content_ngram_size": (0, 1024),
    "comma_gap": (0, 1024),
    "full_stop_gap": (0, 1024),
    "full_stop_shift": (-1e6, 0),
    "sentences": (0, _INT32_MAX),
    "min_new_tokens": (0, _INT32_MAX),
    "max_new_tokens": (1, _INT32_MAX),
}


@dataclass(frozen=True, slots=True)
class DecodingParams:
    """All that decides which token comes next and when to stop. Both sides use the same.

    Sampling: `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off; `seed` seeds the noise.
    Constraints with the semantics of transformers, prompt included: `repetition_penalty` (1 is off),
    `no_repeat_ngram_size` (0 is off), `min_new_tokens` (no end token before; with `sentences`, unless they are said).
    Constraints for Chinese text, over the generated part: `content_penalty` multiplies down CJK content tokens
    that occurred; `content_ngram_size` bans n-grams of content tokens seen before, punctuation left out;
    `no_adjacent_repeat` bans a content token that begins with the character just written; `comma_gap` and
    `full_stop_gap` count CJK characters since the last punctuation, before which comma-like tokens are banned
    and full-stop-like ones shifted by `full_stop_shift`.
    Stopping: `sentences` (0 is off), `stop` strings, `max_new_tokens`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    content_penalty: float = 1.0
    content_ngram_size: int = 0
    no_adjacent_repeat: bool = False
    comma_gap: int = 0
    full_stop_gap: int = 0
    full_stop_shift: float = -8.0
    sentences: int = 0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses NaN
                option = "--" + name.replace("_", "-")
                raise OptionError(f"{option} must lie between {low:g} and {high:g}, not {value}.")
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            raise OptionError(f"--temperature must be 0, which is greedy, or at least {_LOWEST_TEMPERATURE:g}.")
        if isinstance(self.stop, str) or not all(self.stop):
            raise OptionError("Stop strings come as a tuple of texts, none of them empty.")

    @property
    def shapes_chinese(self) -> bool:
        """Whether any constraint is on that needs the token classes of a Chinese vocabulary."""
        off = DecodingParams()
        names = ("content_penalty", "content_ngram_size", "no_adjacent_repeat", "comma_gap", "full_stop_gap")
        return any(getattr(self, name) != getattr(off, name) for name in names)


_ZH_SHORT = {
    "content_penalty": 1.22,
    "content_ngram_size": 2,
    "no_adjacent_repeat": True,
    "comma_gap": 4,
    "full_stop_gap": 8,
    "sentences": 1,
    "min_new_tokens": 16,
}
STYLES: dict[str, dict[str, Any]] = {
    "zh-short": _ZH_SHORT,
    "zh-detailed": {**_ZH_SHORT, "sentences": 2, "min_new_tokens": 32},
}


def decoding_params(style: str | None = None, **given: Any) -> DecodingParams:
    """Parameters of a style (or none), each changed by what is given and not None. Raises OptionError."""
    if style is not None and style not in STYLES:
        raise OptionError(f"There is no style '{style}'.", hint=f"Choose one of: {', '.join(STYLES)}.")
    known = {field.name for field in fields(DecodingParams)}
    if unknown := sorted(given.keys() - known):
        raise OptionError(f"Unknown decoding option: {', '.join(unknown)}.")
    chosen = {name: value for name, value in given.items() if value is not None}
    if "stop" in chosen:
        chosen["stop"] = tuple(chosen["stop"])
    return replace(DecodingParams(), **{**(STYLES[style] if style else {}), **chosen})


@dataclass(frozen=True, slots=True)
class ModeSpec:
    """A named preset: the gate, k (None where one model works alone), whether a block ends where the gate is passed."""

    gate: str
    k: int | None
    eager: bool = False


MODES: dict[str, ModeSpec] = {
    "edge": ModeSpec("never", None),
    "cloud": ModeSpec("always", None),
    "lossless": ModeSpec("always", DEFAULT_K),
    "fluency": ModeSpec("entropy:5.5", 4),
    "quality": ModeSpec("entropy:3.25", 6),
    "auto": ModeSpec("calibrated:0.95", 12, eager=True),
}


def mode_spec(mode: str) -> ModeSpec:
    """The preset of that name. Raises OptionError."""
    if mode not in MODES:
        raise OptionError(f"There is no mode '{mode}'.", hint=f"Choose one of: {', '.join(MODES)}.")
    return MODES[mode]


def parse_k(text: str | int) -> int | None:
    """The block length: 1 to MAX_K, or None for `auto`. Raises OptionError."""
    if text == "auto":
        return None
    try:
        k = int(text)
    except ValueError:
        k = -1
    if not 1 <= k <= MAX_K:
        raise OptionError(
            f"--k must be a whole number from 1 to {MAX_K}, or auto, not {text}.",
            hint="To draft nothing, use --mode cloud.",
        )
    return k


def parse_accept(text: str) -> int:
    """The accept rule as a rank: `exact` is 0, `top:R` is R. Raises OptionError."""
    if text == "exact":
        return 0
    name, _, rank = text.partition(":")
    if name != "top" or not rank.isdecimal() or int(rank) < 1:
        raise OptionError(f"'{text}' is no accept rule.", hint="Use exact (the default), or top:R such as top:5.")
    return int(rank)
