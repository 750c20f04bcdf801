"""What a comparison calls a mode: a preset, a plan spelled out, or a peer. Resolved: records keep its meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from skydraft.config import MODES, DecodingParams
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError

Peer = Literal["hf-assisted", "hf-target"]
PEERS: tuple[Peer, ...] = ("hf-target", "hf-assisted")
_KEYS = ("mode", "gate", "k", "accept", "style")


@dataclass(frozen=True, slots=True)
class Mode:
    """One column of a comparison: what it meant when it was run, whatever presets say later.

    `plan` is None for a peer, which is another program. `style` names where a part of `params` came from.
    """

    name: str
    plan: Plan | None
    params: DecodingParams = field(default_factory=DecodingParams)
    style: str | None = None
    peer: Peer | None = None

    @property
    def uses_link(self) -> bool:
        """Whether anything of it crosses the link."""
        return self.plan is not None and self.plan.verifies

    @property
    def is_target_alone(self) -> bool:
        """Whether the target answers without a draft model."""
        return self.plan is not None and not self.plan.drafts


Resolve = Callable[[str | None], DecodingParams]  # a mode's own style, if it names one, to its parameters


def parse_mode(text: str, resolve: Resolve) -> Mode:
    """`quality`, `gate=entropy:2;k=8;eager`, `edge;style=zh-short`, `hf-assisted`. Raises OptionError."""
    text = text.strip()
    if text in PEERS:
        params = resolve(None)
        if params != DecodingParams(max_new_tokens=params.max_new_tokens):
            raise OptionError("hf-target and hf-assisted are compared greedily and without a style.")
        return Mode(text, None, params, peer=PEERS[PEERS.index(text)])
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
                f"'{text}' is not a mode: {part.strip() or 'a part of it'} does not fit.",
                hint=f"Use {', '.join(MODES)}, {', '.join(PEERS)}, or such as gate=entropy:2;k=8;eager;style=zh-short.",
            )
        given[key] = value
    style = given.pop("style", None)
    return Mode(text, make_plan(**given, eager=eager), resolve(style), style)


def parse_modes(text: str, resolve: Resolve) -> tuple[Mode, ...]:
    """Several modes, separated by commas; each once. Raises OptionError."""
    modes = tuple(parse_mode(part, resolve) for part in text.split(",") if part.strip())
    if not modes:
        raise OptionError("No mode was named.", hint=f"For example --modes {','.join(MODES)}.")
    names = [mode.name for mode in modes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"The mode {twice[0]} was named twice.", hint="For more runs of each use --repetitions.")
    return modes
