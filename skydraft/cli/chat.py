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

from skydraft import api
from skydraft.cli.generate import caught_interrupt
from skydraft.cli.options import (
    Color,
    DecodingChoice,
    GateChoice,
    KeepChoice,
    OutputChoice,
    as_text,
    decoding_section,
    gate_section,
    keep_section,
    open_for_writing,
    read_messages,
)
from skydraft.cli.pair_options import CloudChoice, ModelChoice, cloud_section, models_section
from skydraft.cli.sections import Command, Section, option
from skydraft.cli.terminal import TERMINAL, console_for, harmless, show_summary, show_tokens
from skydraft.config import MODES, DecodingParams
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import ContextExceeded, OptionError, SkydraftError
from skydraft.models import cache_dir
from skydraft.prompts.messages import Message

_MAX_NEW_TOKENS = 1024  # of an answer, by default
_FENCE = '"""'
_HELP = """\
/mode M        another mode from now on: edge, cloud, lossless, fluency, quality, answers, auto
/system TEXT   another system prompt; without TEXT none
/save FILE     write the conversation as JSON; generate --messages reads it too
/load FILE     continue a saved conversation
/retry         answer the last question again, with another seed
/history on    keep typed lines in a file for the arrow keys, or not any more: /history off
/clear         start a new conversation
/quit          leave; Ctrl-D does so too
Several lines: begin and end with \"\"\". Ctrl-C ends an answer."""


_system_section = Section("system", "Chat", lambda system: system, [
    option("-s --system", "TEXT", "System prompt.", callback=as_text),
])  # fmt: skip
_output_section = Section("output", "Chat", OutputChoice, [
    option("--color", None, "Colour each token by its origin.", type=Color, default="auto"),
    option("-q --quiet", None, "Do not print the line of figures after each answer.", is_flag=True),
])  # fmt: skip


@dataclass
class Talk:
    """A conversation: its messages, and the settings of the next answer."""

    plan: Plan
    params: DecodingParams
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    num_retries: int = 0
    answered: tuple[Plan, str | None] | None = None  # the settings of the last answer
    history: Path | None = None  # the file of typed lines; None: there is none, as without a terminal
    keeps_history: bool = True

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*([Message("system", self.system)] if self.system else []), *self.turns)


@click.command(cls=Command)
@_system_section
@_output_section
@decoding_section
@gate_section
@cloud_section
@models_section
@keep_section
def chat(
    system: str | None, output: OutputChoice, decoding: DecodingChoice, gate: GateChoice, cloud: CloudChoice,
    models: ModelChoice, keep: KeepChoice,
) -> None:  # fmt: skip
    """Talk to the pair. The conversation stays in both models' caches, so that later answers begin sooner.

    Type /help for the commands. Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    cloud.check(models)
    talk = Talk(gate.plan, decoding.params(max_new_tokens=_MAX_NEW_TOKENS), system)
    models = replace(models, is_quiet=output.quiet)
    with ExitStack() as stack:
        edge, target = stack.enter_context(cloud.sides(models, plan=None))
        assert edge is not None
        names = f"{edge.name} drafts, {cloud.address or getattr(target, 'name', 'nothing')} checks"
        click.echo(f"skydraft: {names}; mode {gate.plan.mode or 'of your gate'}. /help lists the commands.", err=True)

        for line, is_fenced in stack.enter_context(_lines(talk)):
            before = list(talk.turns)
            try:
                if _do(line, talk, is_fenced=is_fenced):
                    _answer(talk, replace(gate, plan=talk.plan), (edge, target), output, keep)
            except _Quit:
                return
            except KeyboardInterrupt:
                talk.turns = before
                click.echo("\nskydraft: not answered.", err=True)
            except SkydraftError as error:
                talk.turns = before  # the conversation is as before, and the question can be asked again
                hint = " Start a new conversation with /clear." if isinstance(error, ContextExceeded) else ""
                TERMINAL.say(f"{error.message if hint else error.line}{hint}")


class _Quit(Exception): ...


def _do(line: str, talk: Talk, *, is_fenced: bool) -> bool:
    """Run a command, or add a user message (always, if fenced). Returns whether an answer is due."""
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
    messages = read_messages(_named(name, "/load"), None, None)
    is_system = bool(messages) and messages[0].role == "system"
    talk.system = messages[0].content if is_system else None
    talk.turns, talk.answered = list(messages[is_system:]), None
    click.echo(f"skydraft: {len(talk.turns)} messages read.", err=True)


def _named(name: str, command: str) -> str:
    if not name or name == "-":
        raise OptionError(f"{command} needs the name of a file.", hint=f"For example: {command} talk.json")
    return name


def _retry(talk: Talk, _: str) -> bool:
    talk.num_retries += 1
    while talk.turns and talk.turns[-1].role != "user":
        talk.turns.pop()
    if not talk.turns:
        raise OptionError("There is no question to answer again.", hint="Ask one first.")
    if not talk.params.temperature and talk.answered == (talk.plan, talk.system):
        TERMINAL.say("at temperature 0 a seed changes nothing: expect the same answer. chat --temperature 0.8 varies.")
    return True


def _history(talk: Talk, word: str) -> None:
    if word not in ("", "on", "off"):
        raise OptionError("/history takes on or off.")
    if talk.history is None:
        raise OptionError("Typed lines are kept only on a terminal, so there is no history here.")
    if word:
        import readline  # there is a file, so there is this

        talk.keeps_history = word == "on"
        readline.set_auto_history(talk.keeps_history)
    TERMINAL.say(_about_history(talk))


def _about_history(talk: Talk) -> str:
    if talk.keeps_history:
        return f"history on: typed lines are kept in {talk.history}. /history off ends that."
    return f"history off: lines are not kept from now on. Earlier ones are in {talk.history}."


def _clear(talk: Talk, _: str) -> None:
    talk.turns.clear()
    click.echo("skydraft: a new conversation.", err=True)


def _quit(talk: Talk, _: str) -> None:
    raise _Quit


_COMMANDS: dict[str, Callable[[Talk, str], object]] = {
    "/mode": _mode, "/system": _system, "/save": _save, "/load": _load, "/retry": _retry, "/clear": _clear,
    "/history": _history, "/help": lambda *_: click.echo(_HELP, err=True), "/quit": _quit, "/exit": _quit,
}  # fmt: skip


def _answer(talk: Talk, gate: GateChoice, sides: tuple[Any, Any], output: OutputChoice, keep: KeepChoice) -> None:
    """Write the next answer. Ctrl-C ends it after the current round, or during the prefill."""
    seed = (talk.params.seed + talk.num_retries) % 2**64
    request = GenerateRequest(
        talk.messages,
        plan=gate.plan,
        params=replace(talk.params, seed=seed),
        execution=gate.execution,
        calibration=gate.calibration if gate.plan.gate.kind == "calibrated" else None,
        cache_scope="chat",
    )
    console = console_for(output.color)
    edge, target = sides
    with (
        api.start(request, edge=edge, cloud=target, observers=keep.observers) as generation,
        caught_interrupt(generation.cancel) as interrupted,
    ):
        try:
            for _, tokens in generation.rounds():
                show_tokens(console, tokens)
        except SkydraftError:
            if not interrupted:
                raise
        if interrupted:
            TERMINAL.write(harmless(generation.interrupt(), console))
    TERMINAL.write("\n")
    talk.turns.append(Message("assistant", generation.text))
    talk.answered = (talk.plan, talk.system)
    if not output.quiet:
        show_summary(generation, output.color, style="dim")


@contextmanager
def _lines(talk: Talk) -> Iterator[Iterator[tuple[str, bool]]]:
    """Lines or fenced texts from stdin, each with whether it was fenced; a terminal gets line editing with a
    history."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # an invalid byte becomes a replacement character
    if not sys.stdin.isatty():
        yield _joined(line.rstrip("\n") for line in sys.stdin)
        return
    try:
        import readline
    except ImportError:  # not on every system
        yield _joined(_typed())
        return
    talk.history = history = cache_dir() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(history)
    TERMINAL.say(_about_history(talk))
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
            click.echo("\nskydraft: leave with Ctrl-D or /quit.", err=True)
        except EOFError:
            click.echo(err=True)
            return


def _joined(lines: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Non-empty lines; the lines between fences are joined to one text, with a mark."""
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
