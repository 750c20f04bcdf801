"""Modes of a comparison. They are stored as full plans, so that records stay valid when presets change."""

from collections.abc import Callable
from dataclasses import dataclass, field

from skydraft.config import MODES, STYLES, DecodingParams
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError

_KEYS = ("mode", "gate", "k", "hand-back", "style")


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode as it was run. `style` names the style that set some of `params`."""

    name: str
    plan: Plan
    params: DecodingParams = field(default_factory=DecodingParams)
    style: str | None = None

    def __post_init__(self) -> None:
        if self.style is not None and self.style not in STYLES:  # also because it becomes part of file names
            raise OptionError(f"There is no style '{self.style}'.", hint=f"Use one of: {', '.join(STYLES)}.")


Resolve = Callable[[str | None], DecodingParams]  # makes parameters from a mode's own style, if any


def parse_mode(text: str, resolve: Resolve) -> Mode:
    """Parse a mode such as `quality`, `gate=entropy:2;k=8` or `edge;style=zh-short`. Raises OptionError."""
    text = text.strip()
    given: dict[str, str] = {}
    for part in text.split(";"):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            key, value = "mode", key
        if key not in _KEYS or not value or key in given:
            hint = f"Use {', '.join(MODES)}, or for example gate=entropy:2;k=8;style=zh-short."
            raise OptionError(f"'{text}' is not a mode: {part.strip() or 'a part of it'} does not fit.", hint=hint)
        given[key] = value
    style = given.pop("style", None)
    plan = {key.replace("-", "_"): value for key, value in given.items()}
    return Mode(text, make_plan(**plan), resolve(style), style)


def parse_modes(text: str, resolve: Resolve) -> tuple[Mode, ...]:
    """Parse modes separated by commas. A repeated mode counts once. Raises OptionError."""
    modes = {mode.name: mode for part in text.split(",") if part.strip() for mode in [parse_mode(part, resolve)]}
    if not modes:
        raise OptionError("No mode was named.", hint=f"For example --modes {','.join(MODES)}.")
    return tuple(modes.values())
