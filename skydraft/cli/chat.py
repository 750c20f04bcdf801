import io
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from skydraft import api
from skydraft.cli.generate import caught_interrupt
from skydraft.cli.options.decoding import (
    SHOWN,
    DecodingChoice,
    GateChoice,
    KeepChoice,
    OutputChoice,
    as_text,
    decoding_section,
    gate_section,
    keep_section,
    open_for_writing,
)
from skydraft.cli.options.pair import CloudChoice, ModelChoice, cloud_section, models_section
from skydraft.cli.options.sections import Command, loose, option, section
from skydraft.cli.terminal import TERMINAL, console_for, harmless, show_summary, show_tokens
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import ContextExceeded, OptionError, SkydraftError
from skydraft.prompts.messages import Message
from skydraft.prompts.thinking import REASONING

_MAX_NEW_TOKENS = 1024  # of an answer, by default
_HELP = """\
/mode M        change the mode: edge, cloud, lossless, fluency, quality, answers, auto
/system TEXT   change the system prompt; without TEXT remove it
/save FILE     write the conversation as JSON
/clear         start a new conversation
/quit          leave, like Ctrl-D
Ctrl-C ends an answer.
Colours: plain: the small model wrote it and was sure; green: the large one confirmed it; yellow, cyan, blue: the large
one wrote it; magenta: the cloud was lost, so the text is unchecked."""


@dataclass
class Talk:
    gate: GateChoice
    decoding: DecodingChoice
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*([Message("system", self.system)] if self.system else []), *self.turns)


@click.command(cls=Command)
@gate_section
@loose("Chat", [option("-s --system", "TEXT", "System prompt.", callback=as_text)])
@section("output", "Output", OutputChoice, SHOWN)
@decoding_section
@cloud_section
@models_section
@keep_section
def chat(
    system: str | None, output: OutputChoice, decoding: DecodingChoice, gate: GateChoice,
    cloud: CloudChoice, models: ModelChoice, keep: KeepChoice,
) -> None:  # fmt: skip
    """Chat with the pair. Both models keep the conversation in memory, so later answers start sooner.

    Type /help for the commands. Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    talk = Talk(gate, decoding, system)
    models = replace(models, is_quiet=output.quiet)
    with cloud.sides(models, None, audits=keep.audit_share > 0) as (edge, target), keep.watching(edge, target) as keep:
        assert edge is not None
        names = f"{edge.name} drafts, {cloud.address or getattr(target, 'name', 'nothing')} checks"
        TERMINAL.say(f"{names}; mode {gate.plan.mode or 'of your gate'}. /help lists the commands.")
        for line in filter(None, map(str.strip, _lines())):
            if line in ("/quit", "/exit"):
                return
            before = list(talk.turns)
            try:
                if _do(line, talk):
                    _answer(talk, edge, target, output, keep)
            except KeyboardInterrupt:
                talk.turns = before
                click.echo("\nskydraft: not answered.", err=True)
            except SkydraftError as error:
                talk.turns = before  # the question can be asked again
                hint = " Start a new conversation with /clear." if isinstance(error, ContextExceeded) else ""
                TERMINAL.say(f"{error.message if hint else error.line}{hint}")


def _do(line: str, talk: Talk) -> bool:
    """Run a command, or add a user message. Return whether to answer."""
    if not line.startswith("/"):
        talk.turns.append(Message("user", line))
        return True
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/mode" | "/save" if rest in ("", "-"):
            raise OptionError(f"{name} needs a name after it.", hint="Type /help.")
        case "/mode":
            talk.gate = replace(talk.gate, plan=make_plan(rest))
            TERMINAL.say(f"mode {rest} from now on.")
        case "/system":
            talk.system = rest or None
            TERMINAL.say(f"{'this' if rest else 'no'} system prompt from now on.")
        case "/save":
            _save(talk, rest)
        case "/clear":
            talk.turns.clear()
            TERMINAL.say("a new conversation.")
        case "/help":
            click.echo(_HELP, err=True)
        case _:
            raise OptionError(f"There is no command {name}.", hint="Type /help.")
    return False


def _save(talk: Talk, name: str) -> None:
    turns = [{"role": turn.role, "content": turn.content, **dict(turn.more)} for turn in talk.messages]
    with open_for_writing(Path(name)) as file:
        json.dump(turns, file, ensure_ascii=False, indent=1)
    TERMINAL.say(f"{len(turns)} messages written to {name}, as JSON.")


def _answer(talk: Talk, edge: Any, target: Any, output: OutputChoice, keep: KeepChoice) -> None:
    """Write the next answer. Ctrl-C ends it after the current round, or while the prompt is read."""
    request = GenerateRequest(
        talk.messages, talk.gate.plan, talk.decoding.params(max_new_tokens=_MAX_NEW_TOKENS), think=talk.decoding.think,
        execution=talk.gate.execution, breaks_loops=True, cache_scope="chat",
    )  # fmt: skip
    console = console_for(output.color)
    with (
        api.start(request, edge=edge, cloud=target, observers=keep.observers) as generation,
        caught_interrupt(generation.cancel) as interrupted,
    ):
        for _, tokens in generation.rounds():
            show_tokens(console, tokens)
        if interrupted:
            TERMINAL.write(harmless(generation.interrupt(), console))
    TERMINAL.write("\n")
    thought = ((REASONING, generation.reasoning),) if generation.reasoning else ()
    talk.turns.append(Message("assistant", generation.text, thought))
    if not output.quiet:
        show_summary(generation, output.color, keep.auditor, style="dim")


def _lines() -> Iterator[str]:
    """Yield lines of stdin. On a terminal they can be edited, and arrow keys recall earlier ones."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # an invalid byte becomes a replacement character
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):  # some systems lack it
        import readline  # noqa: F401  input() uses it
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            click.echo("\nskydraft: leave with Ctrl-D or /quit.", err=True)
        except EOFError:
            click.echo(err=True)
            return
