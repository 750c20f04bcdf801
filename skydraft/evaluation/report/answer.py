"""The conclusion at the top of the report, from the summary: which mode, its costs, and when not to use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    here, *linked = ({s.mode: s for s in summary.settings if s.link_ms == link} for link in summary.run.links)
    plain = [mode for mode in summary.run.modes if not mode.style]
    agreements = {m.name: here[m.name].value("target_agreement") for m in plain if m.plan.is_gated and m.name in here}
    known = {mode: value for mode, value in agreements.items() if value is not None}
    if "cloud" not in here or not known:
        return None
    speeds = {mode: figure.value for mode in known if (figure := here[mode].speed_over.get("cloud"))}
    enough = [mode for mode, value in known.items() if value >= KEPT]
    mode = max(enough, key=lambda name: speeds.get(name, 0.0)) if enough else max(known, key=lambda name: known[name])
    drafting = {mode.name for mode in plain if mode.plan.drafts and mode.plan.verifies}
    return Conclusion(
        mode,
        _kept(here[mode], bool(enough)),
        _here(here[mode]),
        tuple(_over(settings, mode) for settings in linked if mode in settings),
        tuple(_avoid(here[mode], here.get("edge"), [each for each in summary.settings if each.mode in drafting])),
    )


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


def _over(settings: dict[str, SettingFigures], mode: str) -> str:
    """A sentence about a mode over a link, and about lossless beside it."""
    parts = [
        f"{name} {settings[name].speed_over['cloud'].shown(2)}"
        for name in dict.fromkeys((mode, "lossless"))
        if name in settings and "cloud" in settings[name].speed_over
    ]
    speeds = " and ".join(parts) or "not measured against streaming"
    link_ms, num_prompts = settings[mode].link_ms, settings[mode].num_prompts
    return f"Over a link of {link_ms:g} ms, relative to streaming the target: {speeds} ({num_prompts} prompts)."


def _avoid(chosen: SettingFigures, edge: SettingFigures | None, drafting: Sequence[SettingFigures]) -> Iterator[str]:
    measured = [(setting, speed) for setting in drafting if (speed := setting.speed_over.get("cloud"))]
    faster = [_named(setting) for setting, speed in measured if speed.low > 1]  # over its whole interval
    if faster:
        others = "no other mode that asks the target was faster than the target alone."
        yield f"speed, but for {', '.join(faster)}: {others}"
    elif measured:
        yield "speed: no mode that asks the target was faster than the target alone."
    same = chosen.value("same_as_cloud")
    if same is not None and same < 1:
        yield f"texts that have to be the target's own: {same:.0%} of those of {chosen.mode} were, whole."
    poor = [
        f"{name} ({figures.target_agreement:.2f} on {figures.num_prompts} prompts)"
        for name, figures in chosen.categories.items()
        if figures.target_agreement is not None and figures.target_agreement < _POOR
    ]
    if poor:
        yield f"categories of prompts in which {chosen.mode} keeps less than {_POOR:g}: {', '.join(poor)}."
    alone = edge.value("target_agreement") if edge else None
    if alone is not None and alone < _POOR:
        yield f"leaving the target out: alone, the draft model agrees with it on {alone:.3f} of the tokens (edge)."


def _named(setting: SettingFigures) -> str:
    agreement = setting.value("target_agreement")
    kept = "" if agreement is None else f" (agreement {agreement:.2f})"
    where = "without a link" if setting.link_ms is None else f"over {setting.link_ms:g} ms"
    return f"{setting.mode} {where}{kept}"
