"""The conclusion at the top of the report, from the summary: which mode, and what it costs here and over each link."""

from skydraft.evaluation.records import RunLine
from skydraft.evaluation.summary import SettingFigures, Summary

# The agreement that `--mode auto` asks for: the report recommends a gated mode that keeps it.
KEPT = 0.95


def answer(run: RunLine, summary: Summary) -> tuple[str, list[str]] | None:
    """The recommended mode, and sentences about it, the first of which goes on from its name. None for a comparison
    without scores, without `cloud`, or without a gated mode."""
    here, *linked = ({s.mode: s for s in summary.settings if s.link_ms == link} for link in run.links)
    gated = [mode.name for mode in run.modes if mode.plan.may_go_alone and not mode.style and mode.name in here]
    known = {name: value for name in gated if (value := here[name].value("target_agreement")) is not None}
    if "cloud" not in here or not known:
        return None
    speeds = {name: figure for name in known if (figure := here[name].speed_over.get("cloud"))}
    enough = [name for name, value in known.items() if value >= KEPT]
    # A few prompts tell only some speeds apart: of modes that may be the fastest, the one that keeps most.
    fastest = max((speeds[name].value for name in enough if name in speeds), default=0.0)
    near = [name for name in enough if name in speeds and max(speeds[name].value, speeds[name].high) >= fastest]
    mode = max(near or enough or known, key=lambda name: known[name])
    over = [settings[mode] for settings in linked if mode in settings]
    links = [
        f"Over a link of {each.link_ms:g} ms: {each.speed_over['cloud'].shown(2)} times ({each.num_prompts} prompts)."
        for each in over if "cloud" in each.speed_over
    ]  # fmt: skip
    return mode, [_kept(here[mode], bool(enough)), _here(here[mode]), *links]


def _kept(setting: SettingFigures, is_enough: bool) -> str:
    names = ("target_agreement", "cloud_calls_per_token", "target_written_per_token")
    agreement, calls, written = (setting.measures[name].shown(3) for name in names)
    which = f"No gated mode kept {KEPT:g}; this one came closest."
    if is_enough:
        which = f"No gated mode that keeps {KEPT:g} is clearly faster."
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
