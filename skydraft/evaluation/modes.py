"""What a comparison calls a mode: a preset, a plan spelled out, or a peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from skydraft.config import MODES, decoding_params
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError

Peer = Literal["hf-assisted", "hf-target"]
PEERS: tuple[Peer, ...] = ("hf-target", "hf-assisted")
_KEYS = ("mode", "gate", "k", "accept", "style")


@dataclass(frozen=True, slots=True)
class Mode:
    """One column of a comparison. `plan` is None for a peer, which is another program; `style` adds constraints."""

    name: str
    plan: Plan | None
    style: str | None = None
    peer: Peer | None = None

    @property
    def uses_link(self) -> bool:
        """Whether anything of it crosses the link."""
        return self.plan is not None and self.plan.verifies


def parse_mode(text: str) -> Mode:
    """`quality`, `gate=entropy:2;k=8;eager`, `edge;style=zh-short`, `hf-assisted`. Raises OptionError."""
    text = text.strip()
    if text in PEERS:
        return Mode(text, None, peer=PEERS[PEERS.index(text)])
    given: dict[str, str] = {}
    eager = False
    for part in text.split(";"):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if part.strip() == "eager":
            eager = True
            continue
        if not equals:
            key, value = "mode", key
        if key not in _KEYS or not value or key in given:
            raise OptionError(
                f"'{text}' is no mode to compare: {part.strip() or 'a part of it'} does not fit.",
                hint=f"Use {', '.join(MODES)}, {', '.join(PEERS)}, or such as gate=entropy:2;k=8;eager;style=zh-short.",
            )
        given[key] = value
    style = given.pop("style", None)
    decoding_params(style)  # refuses a style that does not exist
    return Mode(text, make_plan(**given, eager=eager), style)


def parse_modes(text: str) -> tuple[Mode, ...]:
    """Several modes, separated by commas; each once. Raises OptionError."""
    modes = tuple(parse_mode(part) for part in text.split(",") if part.strip())
    if not modes:
        raise OptionError("No mode was named.", hint=f"For example --modes {','.join(MODES)}.")
    names = [mode.name for mode in modes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"The mode {twice[0]} was named twice.", hint="For more runs of each use --repetitions.")
    return modes
