"""Write to the terminal: answers, notices, tokens coloured by origin, and figures."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
import numpy as np
from rich.cells import set_cell_size
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from skydraft.characters import json_line, one_line, rounded, visible
from skydraft.decoding.accounts.audits import Auditor
from skydraft.decoding.accounts.stats import AuditFigures
from skydraft.decoding.generation import Generation
from skydraft.gating.gates import is_copying
from skydraft.origins import LOOKS
from skydraft.types import Origin, Round, Token


class Terminal:
    """Write text to stdout, notices and states to stderr. On a terminal both share one screen."""

    def __init__(self) -> None:
        self._is_open = False  # the last line has text and no line break yet
        self._is_thought = False  # the last text was a thought
        self._clear: Callable[[], object] = lambda: None  # removes the shown state, if any

    def write(self, text: str, *, is_thought: bool = False) -> None:
        """Write a text, with an empty line between thoughts and the answer."""
        if text and self._is_thought and not is_thought:
            text = f"\n\n{text}" if text.strip() else text
        self._is_thought = is_thought if text else self._is_thought
        sys.stdout.write(text)
        sys.stdout.flush()
        self._is_open = not text.endswith("\n") if text else self._is_open

    def say(self, message: str) -> None:
        """Write a notice to stderr on its own line. It replaces a shown state."""
        self._clear()
        is_one_screen = sys.stdout.isatty() and sys.stderr.isatty()
        begin = "\n" if self._is_open and is_one_screen else ""
        self._is_open = self._is_open and not is_one_screen
        click.echo(f"{begin}skydraft: {one_line(message)}", err=True)

    @contextmanager
    def state(self, what: str, *, quiet: bool = False) -> Iterator[Callable[[], None]]:
        """Show a state on a terminal during the block. Yield a function that removes it sooner."""
        console = Console(stderr=True)
        if quiet or not sys.stderr.isatty() or console.is_dumb_terminal:
            yield lambda: None
            return

        def clear() -> None:
            if self._clear is clear:
                self._clear = lambda: None
                click.echo("\r\x1b[K", err=True, nl=False)

        self._clear = clear
        # `clear` can remove only one line.
        click.echo(set_cell_size(one_line(what), console.width - 1).rstrip(), err=True, nl=False)
        try:
            yield clear
        finally:
            clear()


TERMINAL = Terminal()


def console_for(color: str, *, stderr: bool = False) -> Console:
    """Return a console. `color` is auto, always or never; NO_COLOR and TERM=dumb affect only auto."""
    given: dict[str, Any] = {"color_system": None} if color == "never" else {}
    if color == "always":
        given = {"color_system": "standard", "force_terminal": True, "no_color": False}
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, **given)


def show_tokens(console: Console, tokens: Sequence[Token]) -> None:
    """Write the text of tokens at once, with unchanged tabs, coloured on a terminal.

    Thoughts are written only on a terminal, dimmed.
    """
    for token in tokens:
        if token.reasoning and console.is_terminal:
            TERMINAL.write(_styled(token.reasoning, console, "dim"), is_thought=True)
        TERMINAL.write(_styled(token.text, console, LOOKS[token.origin].terminal))


def _styled(text: str, console: Console, style: str) -> str:
    text = harmless(text, console)
    if not text or not is_colored(console):
        return text
    # Do not colour a line break: terminals would colour the rest of its line.
    parsed = Style.parse(style)
    return "\n".join(parsed.render(line, color_system=ColorSystem.STANDARD) for line in text.split("\n"))


def is_colored(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def harmless(text: str, console: Console) -> str:
    """Make a text safe for a terminal, where it must not move the cursor. Elsewhere return it unchanged."""
    return visible(text) if console.is_terminal else text


def legend(origins: Sequence[Origin]) -> Text:
    return Text("  ").join(Text(name, style=look.terminal) for name, look in LOOKS.items() if name in origins)


def show_summary(
    generation: Generation, color: str, auditor: Auditor | None = None, *, style: str | None = None
) -> None:
    """Print one line of figures to stderr, after a legend if colours are shown."""
    console = console_for(color, stderr=True)
    if is_colored(console):
        console.print(legend(generation.origins))
    console.print(_summary(generation, auditor.figures_of(generation) if auditor else None), style=style)


def _summary(generation: Generation, audits: AuditFigures | None) -> str:
    stats, calls = generation.stats, generation.stats.num_escalated
    speed = stats.tokens_per_s
    shown = "–" if speed is None else f"{speed:.3g}" if speed < 100 else f"{speed:.0f}"
    written, cached = stats.target_written_per_token, max(stats.cached_tokens.edge, stats.cached_tokens.cloud)
    ended = f"ended by {generation.finish_reason}"
    if generation.finish_reason == "length":
        is_loop = is_copying(np.array(generation.token_ids, np.int32))
        ended += ", repeating itself" if is_loop else " (-n allows more)"
    parts = (
        f"{stats.num_tokens} tokens", f"{shown} tokens/s", "one call" if calls == 1 else f"{calls or 'no'} calls",
        written and f"large model wrote {100 * written:.0f} %",
        stats.num_draft_tokens and f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} checked drafts right",
        stats.num_fallback_tokens and f"{stats.num_fallback_tokens} tokens without the cloud",
        stats.num_reasoning_tokens and f"{stats.num_reasoning_tokens} of them thinking",
        cached and f"{cached} of {generation.num_prompt_tokens} prompt tokens cached",
        stats.adapter and f"drafted with {stats.adapter}",
        stats.cost is not None and f"cost {stats.cost:.3g}",
        audits and f"audited agreement {audits.agreement:.2f} over {audits.num_answers}",
        ended,
    )  # fmt: skip
    return " · ".join(str(part) for part in parts if part)


def trace_line(done: Round, tokens: Sequence[Token]) -> str:
    """Return a round as a line of JSON: its record, its draft with signals, and the committed tokens."""
    line = dataclasses.asdict(done.record) | {
        "overhead_ms": done.record.overhead_ms, "ended_by": done.block.ended_by,
        "draft_token_ids": done.block.token_ids, "token_ids": done.token_ids, "origins": done.origins,
        "text": "".join(token.text for token in tokens), "audit": done.audit,
        "signals": [dataclasses.asdict(signals) for signals in done.block.signals],
    }  # fmt: skip
    return json_line(rounded(line, 4))
