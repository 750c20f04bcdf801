from __future__ import annotations

from dataclasses import dataclass, replace

from skydraft.config import DEFAULT_K, mode_spec, parse_k
from skydraft.errors import OptionError
from skydraft.gating.gates import START, GateSpec, parse_gate
from skydraft.gating.hand_back import HandBack, parse_hand_back
from skydraft.types import WRITE_ALL


@dataclass(frozen=True, slots=True)
class Plan:
    """How a text is decoded. `mode` names the preset, if any.

    `k` is the block length. With None the target writes and the draft model drafts ahead of it. If both share a
    processor, it drafts blocks while these pay. A plan that does not draft uses the target alone. With `ends_early` a
    block ends where the gate escalates. With `streams` the draft model writes only if the target is lost. `make_plan`
    makes plans whose parts fit.
    """

    gate: GateSpec
    k: int | None = DEFAULT_K
    drafts: bool = True
    ends_early: bool = False
    mode: str = ""
    hand_back: HandBack | None = HandBack()  # noqa: RUF009 (it is frozen)
    streams: bool = False

    def __post_init__(self) -> None:
        if self.k is not None:
            parse_k(self.k)
        assert self.drafts or self.gate.kind == "always"

    @property
    def back(self) -> HandBack:
        return self.hand_back or HandBack()

    @property
    def verifies(self) -> bool:
        return self.gate.kind != "never"

    @property
    def is_gated(self) -> bool:
        """Whether blocks may be skipped while there is a target."""
        return self.gate.kind not in ("always", "never")

    @property
    def may_go_alone(self) -> bool:
        """Whether the draft model continues if the target is lost."""
        return self.drafts and self.verifies

    def streaming(self) -> Plan:
        """Return this plan with the target writing from the start, in as few calls as possible."""
        return replace(self, k=DEFAULT_K, hand_back=HandBack(WRITE_ALL), streams=True)

    @property
    def is_lossy(self) -> bool:
        """Whether the plan may commit a token that the target would not have written."""
        return self.gate.kind != "always"

    def checking_start(self) -> Plan:
        """Return this plan with a check of how a text begins, if its gate may skip blocks."""
        if not self.gate.needs_signals or START in self.gate.content_rules:
            return self
        return replace(self, gate=replace(self.gate, content_rules=(START, *self.gate.content_rules)))


def make_plan(
    mode: str | None = None, gate: str | None = None, k: int | str | None = None, hand_back: str | int | None = None
) -> Plan:  # fmt: skip
    """Return the plan of a mode; `gate`, `k` and `hand_back` override the mode's own. Without a mode it is `lossless`,
    or the gate alone if given. Modes with one model ignore `k` and `hand_back`. Raises OptionError for an unknown name,
    a value out of range, or a gate that contradicts the mode."""
    name = mode or ("lossless" if gate is None else "")
    given_k = parse_k(k) if k is not None else DEFAULT_K
    given_back = parse_hand_back(0 if hand_back is None else hand_back)
    if not name:
        return Plan(parse_gate(gate or "always"), given_k, hand_back=given_back)
    spec = mode_spec(name)
    if spec.k is None and gate is not None:
        hint = "Remove it, or choose --mode quality."
        raise OptionError(f"--gate does not apply in mode {name}, where one model works alone.", hint=hint)
    if spec.k is None:
        return Plan(parse_gate(spec.gate), 1, drafts=name != "cloud", mode=name)
    if name == "lossless" and gate and parse_gate(gate).kind != "always":
        hint = "Use --mode quality, or give --gate (--gate always to check every block) and no --mode."
        raise OptionError(f"--gate {gate} is lossy, and mode lossless is not.", hint=hint)
    chosen_gate = parse_gate(gate or spec.gate)
    back = parse_hand_back(spec.hand_back) if hand_back is None and chosen_gate.kind != "never" else given_back
    if spec.k == "auto" and k is None and hand_back is None:
        return Plan(chosen_gate, None, mode=name, hand_back=None)
    chosen_k = given_k if k is not None or spec.k == "auto" else spec.k
    return Plan(chosen_gate, chosen_k, True, spec.ends_early and chosen_gate.needs_signals, name, back)
