"""The options of a request: parsed once, checked once, frozen. All defaults are in this file."""

import difflib
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from skydraft.errors import OptionError
from skydraft.grammars import check_grammar

MAX_K = 32
Execution = Literal["exact", "throughput"]
# The question about a recording if the user asks none. The embedded speech models were trained with it.
CAPTION_PROMPT = "请用一句话描述说话人的语速、音调、音量、停顿和说话人的特点。"
DEFAULT_K = 5
OPENING = 16  # tokens of the first block, if the gate checks how a text begins
MIN_CALL_PROB = 0.73  # if calling a tool is optional
_INT32_MAX = 2**31 - 1
_LOWEST_TEMPERATURE = 1e-6  # below it logits / temperature could overflow


@dataclass(frozen=True, slots=True)
class Option:
    """The range of a field (both ends allowed), and its help. With `metavar` None it is no command line option."""

    low: float
    high: float
    metavar: str | None
    help: str


def _option(default: Any, low: float, high: float, metavar: str | None, text: str) -> Any:
    return field(default=default, metadata={"option": Option(low, high, metavar, text)})


@dataclass(frozen=True, slots=True)
class DecodingParams:
    """The parameters that choose the next token and end the text, the same on both sides.

    A field is an option of the command line and a field of the protocol; CONTRIBUTING.md says how to add one.
    As in transformers, prompt included: `repetition_penalty`, `no_repeat_ngram_size`, `min_new_tokens` (a text may end
    earlier if it has all `sentences`). As in OpenAI's interface: `frequency_penalty` and `presence_penalty` over the
    generated part, and `logit_bias`, pairs of (token id, number added to its logit), ids rising.
    All penalties look at the last `penalty_window` tokens, if it is not 0.
    A text begins as a tool call only with at least the probability `min_call_prob`, by raw logits at temperature 1.
    For Chinese, over the generated part: `content_penalty` lowers CJK content tokens that occurred;
    `content_ngram_size` bans repeated n-grams of them, ignoring punctuation. `comma_gap` bans comma-like tokens until
    that many CJK characters follow the last punctuation. `full_stop_gap` shifts full-stop-like tokens, and the end,
    until that many follow the last sentence.
    `grammar` has the form that `skydraft.json_schema` and `skydraft.regex` write. `stop_token_ids` (rising) end a text.
    With a `think_end` the text may begin with thinking, which ends there. It begins with `think_start`, unless that is
    "". A chat template's own tags replace both. `min_new_tokens`, `sentences`, `grammar`, `min_call_prob` and the
    Chinese rules begin with the answer.
    """

    max_new_tokens: int = _option(
        128, 1, _INT32_MAX, "N", "Stop after N tokens (default: 128; generate 512, chat 1024, compare 64)."
    )
    min_new_tokens: int = _option(0, 0, _INT32_MAX, "N", "Do not stop before N tokens, unless --sentences are written.")
    sentences: int = _option(0, 0, _INT32_MAX, "N", "Stop after N sentences; 0 is no limit.")
    stop: tuple[str, ...] = _option((), 0, 0, "TEXT", "Stop before TEXT; can be repeated.")
    stop_token_ids: tuple[int, ...] = _option((), 0, _INT32_MAX, None, "")
    temperature: float = _option(0.0, 0, 100, "T", "How random choices are; 0 always takes the likeliest token.")
    top_k: int = _option(0, 0, _INT32_MAX, "K", "Choose among the K likeliest tokens; 0 is all.")
    top_p: float = _option(1.0, 1e-9, 1, "P", "Choose among the likeliest tokens of probability P together; 1 is all.")
    min_p: float = _option(0.0, 0, 1, "P", "Choose among tokens at least P times as likely as the likeliest; 0 is all.")
    seed: int = _option(0, 0, 2**64 - 1, "N", "Seed of the random choices.")
    repetition_penalty: float = _option(1.0, 1e-6, 1e6, "X", "Make tokens less likely once they occurred; 1 is off.")
    no_repeat_ngram_size: int = _option(0, 0, 1024, "N", "Never write the same N tokens in a row again; 0 is off.")
    frequency_penalty: float = _option(0.0, -2, 2, "X", "Take X off a logit for each time it was written; 0 is off.")
    presence_penalty: float = _option(0.0, -2, 2, "X", "Take X off the logits of tokens written before; 0 is off.")
    penalty_window: int = _option(0, 0, _INT32_MAX, "N", "Let penalties look at the last N tokens alone; 0 is all.")
    logit_bias: tuple[tuple[int, float], ...] = _option((), -100, 100, None, "")
    min_call_prob: float = _option(0.0, 0, 1, None, "")
    content_penalty: float = _option(1.0, 1e-6, 1e6, "X", "Make Chinese words less likely once written; 1 is off.")
    content_ngram_size: int = _option(0, 0, 1024, "N", "Never write the same N Chinese words in a row again; 0 is off.")
    no_adjacent_repeat: bool = _option(False, 0, 1, "", "No Chinese character twice in a row, except in words.")
    comma_gap: int = _option(0, 0, 1024, "N", "No comma for N Chinese characters, except in lists; 0 is off.")
    full_stop_gap: int = _option(
        0, 0, 1024, "N", "Make full stop and end unlikely in the first N Chinese characters of a sentence."
    )
    full_stop_shift: float = _option(-8.0, -1e6, 0, "X", "Add X to these logits; -8 by default.")
    grammar: str = _option("", 0, 0, "G", "Follow a grammar: json_schema:JSON, json_object:, regex:R or lark:TEXT.")
    think_budget: int = _option(0, 0, _INT32_MAX, "N", "End thinking after N tokens; 0 is no limit.")
    think_start: str = _option("", 0, 0, None, "")
    think_end: str = _option("", 0, 0, None, "")

    def __post_init__(self) -> None:
        for known in fields(self):
            value, option = getattr(self, known.name), known.metadata["option"]
            biases = [bias for _, bias in value] if known.name == "logit_bias" else []
            name = "--" + known.name.replace("_", "-")
            kind = {int: Integral, float: Real}.get(type(known.default), object)
            if not isinstance(value, kind):
                raise OptionError(f"{name} must be a {'whole ' if kind is Integral else ''}number, not {value!r}.")
            for number in [value] if isinstance(value, Real) else biases:
                if not option.low <= number <= option.high:  # also refuses NaN
                    raise OptionError(f"{name} must be between {option.low:.12g} and {option.high:.12g}, not {number}.")
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            raise OptionError(f"--temperature must be 0 (not random) or at least {_LOWEST_TEMPERATURE:g}.")
        if isinstance(self.stop, str) or not all(self.stop):
            raise OptionError("--stop must be texts, none of them empty.")
        biased = [token_id for token_id, _ in self.logit_bias]
        for name, ids in (("--logit-bias", biased), ("--stop-token-ids", list(self.stop_token_ids))):
            if ids != sorted(set(ids)) or min(ids, default=0) < 0:
                raise OptionError(f"The ids of {name} must be token ids, each given once.")
        if self.think_start and not self.think_end:
            raise OptionError("think_start needs a think_end, the tag that ends the thinking.")
        if self.grammar:
            check_grammar(self.grammar)
            if self.sentences:
                says = "--sentences does not apply to a grammar, because the grammar decides where the text ends."
                raise OptionError(says, hint="Leave out --sentences, and any --style that sets it.")

    @property
    def shapes_chinese(self) -> bool:
        off = DecodingParams()
        return any(getattr(self, name) != getattr(off, name) for name in _ZH)


_ZH = {"content_penalty": 1.22, "content_ngram_size": 4, "no_adjacent_repeat": True, "comma_gap": 4, "full_stop_gap": 8}
STYLES: dict[str, dict[str, Any]] = {
    "zh-short": {**_ZH, "sentences": 1, "min_new_tokens": 16},
    "zh-detailed": {**_ZH, "sentences": 2, "min_new_tokens": 32},
}


def _nearest(name: str, known: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]}?" if near else f"{otherwise}: {', '.join(known)}."


def decoding_params(style: str | None = None, **given: Any) -> DecodingParams:
    """Return the parameters of a style, or the defaults, replaced by the values in `given` that are not None. Raises
    OptionError."""
    if style is not None and style not in STYLES:
        raise OptionError(f"There is no style '{style}'.", hint=f"Choose one of: {', '.join(STYLES)}.")
    known = [field.name for field in fields(DecodingParams)]
    for name in sorted(given.keys() - set(known)):
        raise OptionError(f"decoding_params takes no '{name}'.", hint=_nearest(name, known, "It takes"))
    chosen = {name: value for name, value in given.items() if value is not None}
    if "stop" in chosen:
        chosen["stop"] = (chosen["stop"],) if isinstance(chosen["stop"], str) else tuple(chosen["stop"])
    if "stop_token_ids" in chosen:
        chosen["stop_token_ids"] = tuple(sorted(set(chosen["stop_token_ids"])))
    if isinstance(temperature := chosen.get("temperature"), float) and 0 < temperature < _LOWEST_TEMPERATURE:
        chosen["temperature"] = 0.0
    if "logit_bias" in chosen:
        chosen["logit_bias"] = tuple(sorted((int(token_id), float(bias)) for token_id, bias in chosen["logit_bias"]))
    return replace(DecodingParams(), **{**(STYLES[style] if style else {}), **chosen})


@dataclass(frozen=True, slots=True)
class ModeSpec:
    """`k` "auto" lets the block length vary; None means that one model works alone. With `ends_early` a block ends
    where the gate escalates."""

    gate: str
    k: int | Literal["auto"] | None
    ends_early: bool = False
    hand_back: str = "0"


MODES: dict[str, ModeSpec] = {
    "edge": ModeSpec("never", None),
    "cloud": ModeSpec("always", None),
    "lossless": ModeSpec("always", "auto"),
    "fluency": ModeSpec("entropy:5.5", 4, hand_back="agree:4"),
    "quality": ModeSpec("entropy:3.25", 6),
    # Blocks are long, since most are checked in texts full of numbers or JSON.
    "answers": ModeSpec("entropy:3.25+start+digits+dates+values", 16, ends_early=True, hand_back="agree:4"),
    "auto": ModeSpec("calibrated:0.95", 6, ends_early=True, hand_back="agree:4"),
}

DEFAULT_MODE = "lossless"  # for a pair of models


def mode_spec(mode: str) -> ModeSpec:
    if mode not in MODES:
        raise OptionError(f"There is no mode '{mode}'.", hint=_nearest(mode, [*MODES], "Choose one of"))
    return MODES[mode]


def parse_k(text: str | int) -> int:
    """Parse a block length, 1 to MAX_K. Raises OptionError."""
    k = int(text) if is_number(str(text)) else 0
    if not 1 <= k <= MAX_K:
        says = f"--k must be a whole number from 1 to {MAX_K}, not {text}."
        raise OptionError(says, hint="To draft nothing, use --mode cloud.")
    return k


def is_number(text: str) -> bool:
    """Whether `text` is a whole number in ASCII digits, below 10^10."""
    return text.isascii() and text.isdecimal() and len(text) <= 10


def check_execution(execution: str) -> None:
    if execution not in get_args(Execution):
        raise OptionError(f"--execution must be one of {', '.join(get_args(Execution))}, not '{execution}'.")


def num_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the cores that this process may use, at least one. A container often has fewer than the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or no limit
        quota, period = (int(word) for word in (cgroup / "cpu.max").read_text().split())
        cores = max(1, min(cores, math.ceil(quota / period)))
    return cores


def free_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes of memory that this process may still use, None if unknown. A container often has less than the
    machine."""
    free = None
    with suppress(OSError, ValueError, IndexError):
        free = int(proc.read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    with suppress(OSError, ValueError):  # no container, or no limit
        most, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        with suppress(OSError, ValueError, IndexError):  # the kernel drops cached files when memory is short
            used -= int((cgroup / "memory.stat").read_text().partition("\ninactive_file ")[2].split()[0])
        free = max(min(most - used, most if free is None else free), 0)
    return free
