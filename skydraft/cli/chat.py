"""`skydraft chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from skydraft.cli.cloud_options import CloudChoice, cloud_section
from skydraft.cli.generate import caught_interrupt
from skydraft.cli.keep_options import KeepChoice, keep_section
from skydraft.cli.model_options import ModelChoice, models_section
from skydraft.cli.options import (
    DecodingChoice,
    GateChoice,
    OutputChoice,
    as_text,
    decoding_section,
    gate_section,
    open_for_writing,
    read_messages,
)
from skydraft.cli.render import console_for, harmless, is_colored, legend, show_tokens, summary_line
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import TERMINAL
from skydraft.config import MODES, DecodingParams
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import ContextExceeded, OptionError, SkydraftError
from skydraft.models import cache_dir
from skydraft.prompts.messages import Message

_MAX_NEW_TOKENS = 1024  # of an answer, where nothing else is said
_FENCE = '"""'
_HELP = """\
/mode M        another mode from now on: edge, cloud, lossless, fluency, quality, auto
/system TEXT   another system prompt; without TEXT none
/save FILE     write the conversation as JSON; generate --messages reads it too
/load FILE     go on with one that was saved
/retry         answer the last question again, with another seed
/clear         begin anew
/quit          leave; Ctrl-D does so too
Several lines: begin and end with \"\"\". Ctrl-C ends an answer."""


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """How answers are shown."""

    system: str | None
    output: OutputChoice


_chat_section = Section(
    "shown",
    "Chat",
    lambda system, color, quiet: ChatOutput(system, OutputChoice(False, None, color, quiet)),
    [
        option("-s --system", "TEXT", "System prompt.", callback=as_text),
        option(
            "--color", None, "Colour each token by where it came from.",
            type=click.Choice(["auto", "always", "never"]), default="auto",
        ),
        option("-q --quiet", None, "Do not print the line of figures after each answer.", is_flag=True),
    ],
)  # fmt: skip


@dataclass
class Talk:
    """A conversation: what was said, and how the next answer is written."""

    plan: Plan
    params: DecodingParams
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    num_retries: int = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of it, the system prompt first."""
        return (*([Message("system", self.system)] if self.system else []), *self.turns)

    def take(self, messages: tuple[Message, ...]) -> None:
        """Go on with what was said elsewhere."""
        is_system = bool(messages) and messages[0].role == "system"
        self.system = messages[0].content if is_system else None
        self.turns = list(messages[is_system:])

    def question(self) -> bool:
        """Drop the last answer, if there is one; whether a question is left to be answered."""
        while self.turns and self.turns[-1].role != "user":
            self.turns.pop()
        return bool(self.turns)


@click.command(cls=Command)
@_chat_section
@decoding_section
@gate_section("quality")
@cloud_section
@models_section
@keep_section
def chat(
    shown: ChatOutput, decoding: DecodingChoice, gate: GateChoice, cloud: CloudChoice, models: ModelChoice,
    keep: KeepChoice,
) -> None:  # fmt: skip
    """Talk to the pair. What both models have read stays in their caches, so that later answers begin sooner.

    Type /help for what can be done meanwhile. Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    cloud.check(models)
    talk = Talk(gate.plan, decoding.params(max_new_tokens=_MAX_NEW_TOKENS), shown.system)
    models = replace(models, is_quiet=shown.output.quiet)
    with ExitStack() as stack:
        edge, target = stack.enter_context(cloud.whole_pair(models))
        names = f"{edge.name} drafts, {cloud.address or getattr(target, 'name', 'nothing')} verifies"
        click.echo(f"skydraft: {names}; mode {gate.plan.mode or 'of your gate'}. /help says what you can do.", err=True)

        def answer() -> None:
            _answer(talk, GateChoice(talk.plan, gate.execution, gate.calibration), (edge, target), shown.output, keep)

        for line, is_fenced in stack.enter_context(_lines()):
            before = list(talk.turns)
            try:
                if _do(line, talk, is_fenced=is_fenced):
                    answer()
            except _Quit:
                return
            except KeyboardInterrupt:
                talk.turns = before
                click.echo("\nskydraft: not answered.", err=True)
            except SkydraftError as error:
                talk.turns = before  # nothing that was said is lost, and the question can be asked again
                hint = " Begin anew with /clear." if isinstance(error, ContextExceeded) else ""
                TERMINAL.say(f"{error.message if hint else error.line}{hint}")


class _Quit(Exception):
    """The conversation is over."""


def _do(line: str, talk: Talk, *, is_fenced: bool) -> bool:
    """Take a line: a command, or something to say, as all between fences is. Returns whether an answer is due."""
    if is_fenced or not line.startswith("/"):
        talk.num_retries = 0
        talk.turns.append(Message("user", line))
        return True
    name, _, rest = line.partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        raise OptionError(f"There is no command {name}.", hint="Type /help.")
    return bool(command(talk, rest.strip()))


def _mode(talk: Talk, name: str) -> None:
    if not name:
        raise OptionError("/mode needs the name of a mode.", hint=f"Use one of: {', '.join(MODES)}.")
    talk.plan = make_plan(name)
    click.echo(f"skydraft: mode {name} from now on.", err=True)


def _system(talk: Talk, text: str) -> None:
    talk.system = text or None
    click.echo(f"skydraft: {'this' if text else 'no'} system prompt from now on.", err=True)


def _save(talk: Talk, name: str) -> None:
    turns = [{"role": turn.role, "content": turn.content} for turn in talk.messages]
    with open_for_writing(Path(_named(name, "/save"))) as file:
        json.dump(turns, file, ensure_ascii=False, indent=1)
    click.echo(f"skydraft: {len(turns)} messages written to {name}.", err=True)


def _load(talk: Talk, name: str) -> None:
    talk.take(read_messages(_named(name, "/load"), None, None))
    click.echo(f"skydraft: {len(talk.turns)} messages read.", err=True)


def _named(name: str, command: str) -> str:
    if not name or name == "-":
        raise OptionError(f"{command} needs the name of a file.", hint=f"For example: {command} talk.json")
    return name


def _retry(talk: Talk, _: str) -> bool:
    talk.num_retries += 1
    if not talk.question():
        raise OptionError("There is no question to be answered again.", hint="Ask one first.")
    if not talk.params.temperature:
        click.echo("skydraft: at temperature 0 the answer is the same; try --temperature 0.8.", err=True)
    return True


def _clear(talk: Talk, _: str) -> None:
    talk.turns.clear()
    click.echo("skydraft: a new conversation.", err=True)


def _help(talk: Talk, _: str) -> None:
    click.echo(_HELP, err=True)


def _quit(talk: Talk, _: str) -> None:
    raise _Quit


_COMMANDS: dict[str, Callable[[Talk, str], object]] = {
    "/mode": _mode, "/system": _system, "/save": _save, "/load": _load, "/retry": _retry, "/clear": _clear,
    "/help": _help, "/quit": _quit, "/exit": _quit,
}  # fmt: skip


def _answer(talk: Talk, gate: GateChoice, sides: tuple[Any, Any], output: OutputChoice, keep: KeepChoice) -> None:
    """Write the next answer. Ctrl-C ends it: after the round in hand, or while the prompt is being read."""
    seed = (talk.params.seed + talk.num_retries) % 2**64
    request = GenerateRequest(
        talk.messages,
        plan=gate.plan,
        params=DecodingParams(**{**_fields(talk.params), "seed": seed}),
        execution=gate.execution,
        calibration=gate.calibration if gate.plan.gate.kind == "calibrated" else None,
        cache_scope="chat",
    )
    console, figures = console_for(output.color), console_for(output.color, stderr=True)
    edge, target = sides
    with keep.start(request, edge=edge, cloud=target) as generation, caught_interrupt(generation.cancel) as interrupted:
        try:
            for _, tokens in generation.rounds():
                show_tokens(console, tokens)
        except SkydraftError:
            if not interrupted:
                raise
        if interrupted:
            TERMINAL.write(harmless(generation.interrupt(), console))
    TERMINAL.end_line()
    talk.turns.append(Message("assistant", generation.text))
    if not output.quiet:
        if is_colored(figures):
            figures.print(legend(generation.origins))
        figures.print(summary_line(generation), style="dim")


def _fields(params: DecodingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in DecodingParams.__dataclass_fields__}


@contextmanager
def _lines() -> Iterator[Iterator[tuple[str, bool]]]:
    """What is typed, or piped in, a line or a fenced text at a time, and whether it was fenced; on a terminal with a
    history of its own."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no text becomes a mark
    if not sys.stdin.isatty():
        yield _joined(line.rstrip("\n") for line in sys.stdin)
        return
    try:
        import readline
    except ImportError:  # not everywhere
        yield _joined(_typed())
        return
    history = cache_dir() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(history)
    try:
        yield _joined(_typed())
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.set_history_length(1000)
            readline.write_history_file(history)


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            click.echo("\nskydraft: Ctrl-D or /quit leaves.", err=True)
        except EOFError:
            click.echo(err=True)
            return


def _joined(lines: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Lines that say something; what stands between fences is one, and is marked."""
    for line in lines:
        if not line.strip().startswith(_FENCE):
            if line.strip():
                yield line.strip(), False
            continue
        parts = [line.strip().removeprefix(_FENCE)]
        while not parts[-1].rstrip().endswith(_FENCE) and (more := next(lines, None)) is not None:
            parts.append(more)
        text = "\n".join(parts).strip().removesuffix(_FENCE).strip()
        if text:
            yield text, True
