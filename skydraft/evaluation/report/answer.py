"""What a reader of the report asks first, answered from the summary: which mode, at what price, and what not to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# The agreement that `--mode auto` asks for: the cheapest gated mode that keeps it is the one to name.
KEPT = 0.95
# A category below this is named among what the mode is not for.
_POOR = 0.90

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Sentences: what the named mode keeps, what it takes here, over each link, and what it is not for."""

    mode: str
    kept: str
    here: str
    links: tuple[str, ...]
    avoid: tuple[str, ...]


def answer(summary: Figures) -> Conclusion | None:
    """The answer of a comparison that ran `cloud` and a gated mode, and scored its texts; None without these."""
    here = _settings(summary, None)
    gated = [mode for mode in _gated(summary) if _value(here.get(mode, {}), "target_agreement") is not None]
    if "cloud" not in here or not gated:
        return None
    enough = [mode for mode in gated if _value(here[mode], "target_agreement") >= KEPT]
    if enough:
        chosen = min(enough, key=lambda mode: _value(here[mode], "cloud_calls_per_token"))
    else:
        chosen = max(gated, key=lambda mode: _value(here[mode], "target_agreement"))
    linked = {link: _settings(summary, link) for link in summary["run"]["links"] if link is not None}
    return Conclusion(
        chosen,
        _kept(here[chosen], bool(enough)),
        _here(here[chosen]),
        tuple(_over(link, settings, chosen) for link, settings in linked.items() if chosen in settings),
        tuple(_avoid(summary, chosen, [here, *linked.values()])),
    )


def _settings(summary: Figures, link_ms: float | None) -> dict[str, Figures]:
    return {setting["mode"]: setting for setting in summary["settings"] if setting["link_ms"] == link_ms}


def _drafting(summary: Figures) -> list[str]:
    """Modes in which the target checks drafts, under no style of their own."""
    return [
        mode["name"]
        for mode in summary["run"]["modes"]
        if mode["plan"] and not mode["style"] and mode["plan"]["drafts"] and mode["plan"]["gate"]["kind"] != "never"
    ]


def _gated(summary: Figures) -> list[str]:
    kinds = {mode["name"]: mode["plan"]["gate"]["kind"] for mode in summary["run"]["modes"] if mode["plan"]}
    return [name for name in _drafting(summary) if kinds[name] != "always"]


def _value(setting: Figures, name: str) -> Any:
    """A measure, or None."""
    return setting.get("measures", {}).get(name, {}).get("value")


def _with_interval(figure: Figures, digits: int) -> str:
    value, low, high = (f"{figure[key]:.{digits}f}" for key in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def _kept(setting: Figures, is_enough: bool) -> str:
    measures = setting["measures"]
    calls = _with_interval(measures["cloud_calls_per_token"], 3)
    which = (
        f"it makes the fewest calls of the gated modes that keep {KEPT:g}"
        if is_enough
        else f"no gated mode kept {KEPT:g}, and this one came closest"
    )
    return (
        f"keeps an agreement of {_with_interval(measures['target_agreement'], 3)} with {calls} calls a token, "
        f"where the target alone makes one a token; {which}."
    )


def _here(setting: Figures) -> str:
    rows, speed = _value(setting, "target_rows_per_token"), setting["speed_over"].get("cloud")
    work = f"The target computes {rows:.2f} rows a token, where alone it computes 1: a call checks a whole block."
    if speed is None:
        return work
    return f"{work} Without a link it writes at {_with_interval(speed, 2)} times the speed of the target alone."


def _over(link_ms: float, settings: dict[str, Figures], chosen: str) -> str:
    parts = [
        f"{mode} {_with_interval(settings[mode]['speed_over']['cloud'], 2)}"
        for mode in dict.fromkeys((chosen, "lossless"))
        if mode in settings and "cloud" in settings[mode]["speed_over"]
    ]
    num_prompts = settings[chosen]["num_prompts"]
    speeds = " and ".join(parts) or "not measured against streaming"
    return f"Over a link of {link_ms:g} ms, in units of streaming the target: {speeds} ({num_prompts} prompts)."


def _avoid(summary: Figures, chosen: str, places: Sequence[dict[str, Figures]]) -> list[str]:
    here = places[0]
    found = [_speed(summary, places)]
    same = here[chosen]["measures"].get("same_as_cloud")
    if same and same["value"] < 1:
        found.append(f"texts that have to be the target's own: {same['value']:.0%} of those of {chosen} were, whole.")
    poor = {
        name: figures
        for name, figures in here[chosen].get("categories", {}).items()
        if figures["target_agreement"] is not None and figures["target_agreement"] < _POOR
    }
    if poor:
        named = ", ".join(
            f"{name} ({figures['target_agreement']:.2f} on {figures['num_prompts']} prompts)"
            for name, figures in poor.items()
        )
        found.append(f"categories of prompts in which {chosen} keeps less than {_POOR:g}: {named}.")
    alone = _value(here.get("edge", {}), "target_agreement")
    if alone is not None and alone < _POOR:
        found.append(
            f"leaving the target out: alone, the draft model agrees with it on {alone:.3f} of the tokens (edge)."
        )
    return [line for line in found if line]


def _speed(summary: Figures, places: Sequence[dict[str, Figures]]) -> str:
    """Whether any mode that asks the target was faster than the target alone, interval and all."""
    ratios = [
        (setting, setting["speed_over"]["cloud"])
        for place in places
        for mode, setting in place.items()
        if mode in _drafting(summary) and "cloud" in setting["speed_over"]
    ]
    if not ratios:
        return ""
    faster = [_named(setting) for setting, figure in ratios if figure["low"] > 1]
    if not faster:
        return "speed: no mode that asks the target was faster than the target alone."
    return f"speed, but for {', '.join(faster)}: no other mode that asks the target was faster than the target alone."


def _named(setting: Figures) -> str:
    agreement = _value(setting, "target_agreement")
    kept = "" if agreement is None else f" (agreement {agreement:.2f})"
    return f"{setting['mode']} {_where(setting['link_ms'])}{kept}"


def _where(link_ms: float | None) -> str:
    return "without a link" if link_ms is None else f"over {link_ms:g} ms"
