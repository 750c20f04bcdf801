"""Modes of a comparison: presets and plans, resolved into full plans, so that records keep their meaning."""

from collections.abc import Callable
from dataclasses import dataclass, field

from skydraft.config import MODES, STYLES, DecodingParams
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError

_KEYS = ("mode", "gate", "k", "hand-back", "style")


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode as it was when it was run. `style` is the name of the style that gave some of `params`."""

    name: str
    plan: Plan
    params: DecodingParams = field(default_factory=DecodingParams)
    style: str | None = None

    def __post_init__(self) -> None:
        if self.style is not None and self.style not in STYLES:  # it names files of the report
            raise OptionError(f"There is no style '{self.style}'.", hint=f"Use one of: {', '.join(STYLES)}.")


Resolve = Callable[[str | None], DecodingParams]  # from a mode's own style, if any, to its parameters


def parse_mode(text: str, resolve: Resolve) -> Mode:
    """`quality`, `gate=entropy:2;k=8`, `edge;style=zh-short`. Raises OptionError."""
    text = text.strip()
    given: dict[str, str] = {}
    for part in text.split(";"):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            key, value = "mode", key
        if key not in _KEYS or not value or key in given:
            hint = f"Use {', '.join(MODES)}, or such as gate=entropy:2;k=8;style=zh-short."
            raise OptionError(f"'{text}' is not a mode: {part.strip() or 'a part of it'} does not fit.", hint=hint)
        given[key] = value
    style = given.pop("style", None)
    plan = {key.replace("-", "_"): value for key, value in given.items()}
    return Mode(text, make_plan(**plan), resolve(style), style)


def parse_modes(text: str, resolve: Resolve) -> tuple[Mode, ...]:
    """Several distinct modes, separated by commas; a repeated one counts once. Raises OptionError."""
    modes = {mode.name: mode for part in text.split(",") if part.strip() for mode in [parse_mode(part, resolve)]}
    if not modes:
        raise OptionError("No mode was named.", hint=f"For example --modes {','.join(MODES)}.")
    return tuple(modes.values())
