"""What a request asks of the loop: mode, gate, k and accept rule, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass

from skydraft.config import DEFAULT_K, mode_spec, parse_accept, parse_k
from skydraft.decoding.gates import Gate, parse_gate
from skydraft.errors import OptionError


@dataclass(frozen=True, slots=True)
class Plan:
    """How to decode. `k` None means adaptive; `top` 0 means exact acceptance."""

    gate: Gate
    k: int | None
    drafts: bool
    verifies: bool
    top: int = 0
    eager: bool = False


def make_plan(
    mode: str | None = None,
    gate: str | None = None,
    k: int | str | None = None,
    accept: str | None = None,
    eager: bool = False,
) -> Plan:
    """The plan of a mode, with gate, k and accept rule overriding it where that makes sense.

    No mode means `lossless`, or just the gate if one is given. Raises OptionError for an unknown name, a value out of
    range, and an option that cannot apply.
    """
    name = mode or ("lossless" if gate is None else None)
    parsed_k = parse_k(k) if k is not None else DEFAULT_K
    top = parse_accept(accept) if accept is not None else 0
    if name is None:
        parsed_gate = parse_gate(gate or "always")
    else:
        spec = mode_spec(name)
        _check_overrides(name, spec.k is None, gate, k, top, eager)
        parsed_gate = parse_gate(gate or spec.gate)
        parsed_k = parsed_k if k is not None else spec.k or 1
        eager = eager or spec.eager
    if eager and not parsed_gate.needs_signals:
        raise OptionError(
            f"--eager ends a block at the first unsure token, which the gate {parsed_gate.kind} never sees."
        )
    if top and parsed_gate.kind == "never":
        raise OptionError("--accept says how to verify; the gate never does not verify.")
    if k == "auto" and parsed_gate.kind == "calibrated":
        raise OptionError(
            "--k auto weighs time; a calibrated gate keeps an agreement, and its limit is for a length of blocks.",
            hint="Use --mode auto, whose blocks end where the gate is passed, or a number.",
        )
    if k == "auto" and parsed_gate.kind == "never":
        raise OptionError("--k auto weighs drafting against verifying; the gate never does not verify.")
    return Plan(
        parsed_gate,
        parsed_k,
        drafts=name != "cloud",
        verifies=parsed_gate.kind != "never",
        top=top,
        eager=eager,
    )


def _check_overrides(name: str, one_model: bool, gate: str | None, k: int | str | None, top: int, eager: bool) -> None:
    given = {"--gate": gate is not None, "--k": k is not None, "--accept": top > 0, "--eager": eager}
    if one_model:
        if unfit := [option for option, is_given in given.items() if is_given]:
            raise OptionError(f"{unfit[0]} cannot apply in mode {name}: one model works alone there.")
    elif name == "lossless" and (top or (gate is not None and parse_gate(gate).kind != "always")):
        option = "--accept top" if top else f"--gate {gate}"
        raise OptionError(
            f"{option} is lossy, and mode lossless is not.",
            hint="Use --mode quality, or give --gate (--gate always to check every block) and no --mode.",
        )
