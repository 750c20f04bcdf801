"""How a generation looks: text coloured by origin, one line of figures, a table of several runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from skydraft.characters import json_line, visible
from skydraft.cli.speech_options import Speech
from skydraft.cli.terminal import TERMINAL
from skydraft.decoding.generation import Generation
from skydraft.decoding.stats import CachedTokens, Stats
from skydraft.types import Origin, Round, Token

# Told apart by brightness and underline as well as by hue, for eyes and terminals that see few colours.
ORIGIN_STYLES: dict[Origin, str] = {
    "accepted": "green",
    "recovered": "bold underline yellow",
    "bonus": "bold cyan",
    "skipped": "default",
    "edge": "default",
    "cloud": "bold blue",
    "edge-fallback": "reverse",
}


def console_for(color: str, *, stderr: bool = False) -> Console:
    """A console for stdout or stderr; `color` is auto, always or never. NO_COLOR and TERM=dumb rule auto alone."""
    systems: dict[str, Literal["auto", "standard"] | None] = {"always": "standard", "never": None, "auto": "auto"}
    return Console(
        stderr=stderr,
        force_terminal=True if color == "always" else None,
        no_color=False if color == "always" else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
        color_system=systems[color],
    )


def show_tokens(console: Console, tokens: Sequence[Token]) -> None:
    """Write the text of tokens at once and as it is, tabs and all; coloured on a terminal."""
    for token in tokens:
        style, text = Style.parse(ORIGIN_STYLES[token.origin]), harmless(token.text, console)
        TERMINAL.write(style.render(text, color_system=ColorSystem.STANDARD) if is_colored(console) else text)


def is_colored(console: Console) -> bool:
    """Whether colours are shown there."""
    return console.color_system is not None and not console.no_color


def harmless(text: str, console: Console) -> str:
    """A text as a terminal may show it: what a model writes must not move the cursor. Elsewhere it is as it is."""
    return visible(text) if console.is_terminal else text


def legend(origins: Sequence[Origin]) -> Text:
    """The colours that were used, by name."""
    names = [origin for origin in ORIGIN_STYLES if origin in origins]
    return Text("  ").join(Text(name, style=ORIGIN_STYLES[name]) for name in names)


def summary_line(generation: Generation) -> str:
    """One line about a finished generation."""
    stats = generation.stats
    parts = [f"{stats.num_tokens} tokens", f"{_number(stats.tokens_per_s)} tokens/s"]
    parts += [f"{stats.num_rounds} rounds", f"{stats.num_escalated} escalated"]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of drafts accepted")
    if stats.num_fallback_tokens:
        parts.append(f"{stats.num_fallback_tokens} tokens without the cloud")
    if cached := max(stats.cached_tokens.edge, stats.cached_tokens.cloud):
        parts.append(f"{cached} of {generation.num_prompt_tokens} prompt tokens cached")
    parts += [f"{_number(stats.cloud_calls_per_token)} calls/token", f"ended by {generation.finish_reason}"]
    return " · ".join(parts)


def as_json(generation: Generation, speech: Speech | None = None) -> dict[str, Any]:
    """The object that `--json` prints; with `audio` where there was speech."""
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "origins": generation.origins,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.num_prompt_tokens,
        "stats": dataclasses.asdict(generation.stats),
    } | ({"audio": dataclasses.asdict(speech)} if speech else {})


def trace_line(done: Round, tokens: Sequence[Token]) -> str:
    """One round as a line of JSON: its record, the draft with its signals, and what was committed."""
    line = dataclasses.asdict(done.record)
    line |= {"overhead_ms": done.record.overhead_ms, "ended_by": done.block.ended_by}
    line |= {"draft_token_ids": done.block.token_ids, "token_ids": done.token_ids, "origins": done.origins}
    line |= {"text": "".join(token.text for token in tokens), "audit": done.audit, "audit_ranks": done.audit_ranks}
    line["signals"] = [dataclasses.asdict(signals) for signals in done.block.signals]
    return json_line(_rounded(line))


def stats_table(runs: Mapping[str, Stats]) -> Table:
    """The figures of several runs: a row each figure that is not 0 in all of them, a column each run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for field in dataclasses.fields(Stats):
        values = [getattr(stats, field.name) for stats in runs.values()]
        if isinstance(values[0], CachedTokens) or not any(values):  # nothing is cached for a single question
            continue
        table.add_row(field.name, *map(_number, values))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value
