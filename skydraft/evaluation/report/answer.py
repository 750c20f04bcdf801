"""The conclusion at the top of the report, from the summary: which mode, its costs, and when not to use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skydraft.evaluation.summary import SettingFigures, Summary

# The agreement that `--mode auto` asks for: the report recommends the fastest gated mode that keeps it.
KEPT = 0.95
# The report advises against the mode for categories below this agreement.
_POOR = 0.90


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Sentences about the recommended mode: agreement, costs here and over each link, and when not to use it."""

    mode: str
    kept: str
    here: str
    links: tuple[str, ...]
    avoid: tuple[str, ...]


def answer(summary: Summary) -> Conclusion | None:
    """The conclusion of a comparison with scores, of `cloud` and a gated mode at least; None without these."""
    here = _settings(summary, None)
    agreements = {mode: here[mode].value("target_agreement") for mode in _gated(summary) if mode in here}
    known = {mode: value for mode, value in agreements.items() if value is not None}
    if "cloud" not in here or not known:
        return None
    enough = [mode for mode, value in known.items() if value >= KEPT]
    chosen = max(enough, key=lambda mode: _speed_of(here[mode])) if enough else max(known, key=lambda mode: known[mode])
    linked = {link: _settings(summary, link) for link in summary.run.links if link is not None}
    return Conclusion(
        chosen,
        _kept(here[chosen], bool(enough)),
        _here(here[chosen]),
        tuple(_over(link, settings, chosen) for link, settings in linked.items() if chosen in settings),
        tuple(_avoid(summary, chosen, [here, *linked.values()])),
    )


def _settings(summary: Summary, link_ms: float | None) -> dict[str, SettingFigures]:
    return {setting.mode: setting for setting in summary.settings if setting.link_ms == link_ms}


def _drafting(summary: Summary) -> list[str]:
    """Modes in which the target checks drafts, without a style of their own."""
    return [mode.name for mode in summary.run.modes if not mode.style and mode.plan.drafts and mode.plan.verifies]


def _gated(summary: Summary) -> list[str]:
    return [mode.name for mode in summary.run.modes if not mode.style and mode.plan.is_gated]


def _speed_of(setting: SettingFigures) -> float:
    speed = setting.speed_over.get("cloud")
    return speed.value if speed else 0.0


def _kept(setting: SettingFigures, is_enough: bool) -> str:
    names = ("target_agreement", "cloud_calls_per_token", "target_written_per_token")
    agreement, calls, written = (setting.measures[name].shown(3) for name in names)
    which = (
        f"It is the fastest of the gated modes that keep {KEPT:g}."
        if is_enough
        else f"No gated mode kept {KEPT:g}; this one came closest."
    )
    return (
        f"keeps an agreement of {agreement} with {calls} calls a token. The target writes {written} of the tokens. "
        f"Alone, it would write all of them, in one call. {which}"
    )


def _here(setting: SettingFigures) -> str:
    rows, speed = setting.value("target_rows_per_token"), setting.speed_over.get("cloud")
    work = f"The target computes {rows:.2f} rows a token, where alone it computes 1: a call checks a whole block."
    if speed is None:
        return work
    return f"{work} Without a link it writes at {speed.shown(2)} times the speed of the target alone."


def _over(link_ms: float, settings: dict[str, SettingFigures], chosen: str) -> str:
    parts = [
        f"{mode} {settings[mode].speed_over['cloud'].shown(2)}"
        for mode in dict.fromkeys((chosen, "lossless"))
        if mode in settings and "cloud" in settings[mode].speed_over
    ]
    num_prompts = settings[chosen].num_prompts
    speeds = " and ".join(parts) or "not measured against streaming"
    return f"Over a link of {link_ms:g} ms, relative to streaming the target: {speeds} ({num_prompts} prompts)."


def _avoid(summary: Summary, chosen: str, places: Sequence[dict[str, SettingFigures]]) -> list[str]:
    here = places[0]
    reasons = [_speed(summary, places)]
    same = here[chosen].value("same_as_cloud")
    if same is not None and same < 1:
        reasons.append(f"texts that have to be the target's own: {same:.0%} of those of {chosen} were, whole.")
    poor = [
        f"{name} ({figures.target_agreement:.2f} on {figures.num_prompts} prompts)"
        for name, figures in here[chosen].categories.items()
        if figures.target_agreement is not None and figures.target_agreement < _POOR
    ]
    if poor:
        reasons.append(f"categories of prompts in which {chosen} keeps less than {_POOR:g}: {', '.join(poor)}.")
    alone = here["edge"].value("target_agreement") if "edge" in here else None
    if alone is not None and alone < _POOR:
        reasons.append(
            f"leaving the target out: alone, the draft model agrees with it on {alone:.3f} of the tokens (edge)."
        )
    return [line for line in reasons if line]


def _speed(summary: Summary, places: Sequence[dict[str, SettingFigures]]) -> str:
    """A sentence about the modes that were faster than the target alone, over their whole interval."""
    ratios = [
        (setting, setting.speed_over["cloud"])
        for place in places
        for mode, setting in place.items()
        if mode in _drafting(summary) and "cloud" in setting.speed_over
    ]
    if not ratios:
        return ""
    faster = [_named(setting) for setting, figure in ratios if figure.low > 1]
    if not faster:
        return "speed: no mode that asks the target was faster than the target alone."
    return f"speed, but for {', '.join(faster)}: no other mode that asks the target was faster than the target alone."


def _named(setting: SettingFigures) -> str:
    agreement = setting.value("target_agreement")
    kept = "" if agreement is None else f" (agreement {agreement:.2f})"
    return f"{setting.mode} {_where(setting.link_ms)}{kept}"


def _where(link_ms: float | None) -> str:
    return "without a link" if link_ms is None else f"over {link_ms:g} ms"
