"""The sections that several commands share: what to write, decoding, gate and output.

A section becomes one frozen value, which the command is called with. What is out of range is refused when it is built.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TextIO, get_args

import click

from skydraft import grammars
from skydraft.cli.sections import Section, option, with_default
from skydraft.config import CAPTION_PROMPT, STYLES, DecodingParams, Execution, decoding_params
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError, PromptError
from skydraft.gating.calibration import Calibration, read_calibration
from skydraft.gating.gates import SIGNALS
from skydraft.prompts.audio import load_audio
from skydraft.prompts.messages import Message, asked, conversation

Color = Literal["auto", "always", "never"]


def as_text(context: click.Context, param: click.Parameter, value: Any) -> Any:
    """The text, or texts, that were given, checked to be UTF-8; for an argument, - stands for all of stdin."""
    try:
        text = sys.stdin.read() if isinstance(param, click.Argument) and value == "-" else value
        "".join(text or "").encode()  # bytes that are not UTF-8 arrive as lone surrogates
    except UnicodeError as error:
        raise click.BadParameter("it is not valid UTF-8; convert it first, for example with iconv.") from error
    return text


def _as_biases(context: click.Context, param: click.Parameter, value: Any) -> tuple[tuple[int, float], ...]:
    """The pairs in texts such as 42:-1.5."""
    try:
        return tuple((int(token_id), float(bias)) for token_id, _, bias in (text.partition(":") for text in value))
    except ValueError as error:
        raise click.BadParameter("write a token id, a colon and a number, for example 42:-1.5.") from error


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """How the prompt reaches the model: after a system prompt or earlier messages, or `raw`, without the template."""

    system: str | None
    raw: bool
    earlier: str | None

    def may_be_piped(self, prompt: str | None, *, has_audio: bool) -> bool:
        """Whether stdin is free, and something to be asked is wanted from it."""
        return self.earlier != "-" and (prompt is not None or (self.earlier is None and not has_audio))

    def messages(self, prompt: str | None, *, has_audio: bool = False) -> tuple[Message, ...]:
        """The conversation that is answered. A recording without a prompt gets the question about its speaker."""
        if self.earlier is not None:
            return read_messages(self.earlier, self.system, prompt)
        question = CAPTION_PROMPT if prompt is None and has_audio else prompt
        return () if question is None else asked(question, self.system)


def read_messages(name: str, system: str | None, prompt: str | None) -> tuple[Message, ...]:
    """The conversation in a file, with a system prompt before and a question after it. Raises PromptError."""
    folder = Path() if name == "-" else Path(name).parent
    try:
        found = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise PromptError(f"{name} cannot be read: {error.strerror}.", hint="Check its name.") from error
    except ValueError as error:
        hint = 'Write [{"role": "user", "content": "..."}].'
        raise PromptError(f"{name} is not a JSON list of messages: {error}.", hint=hint) from error
    begin = (Message("system", system),) if system is not None else ()
    if isinstance(found, list):
        found = [_with_audio(each, folder) for each in found]
    return (*begin, *conversation(found), *(asked(prompt) if prompt is not None else ()))


def _with_audio(message: Any, folder: Path) -> Any:
    """A message whose recording is read where it names a file."""
    if isinstance(message, dict) and isinstance(file := message.get("audio"), str):
        return message | {"audio": load_audio(folder / file)}
    return message


prompt_section = Section(
    "writing",
    "What to write",
    PromptChoice,
    [
        option("-s --system", "TEXT", "System prompt.", callback=as_text),
        option(
            "--messages earlier",
            "FILE",
            "Answer a conversation: a JSON list of messages with role and content, those of a user also with audio, "
            "the name of a recording; - is stdin. PROMPT, if given, is asked after them.",
        ),
        option("--raw", None, "Continue PROMPT as it is, without the model's chat template.", is_flag=True),
    ],
)


@dataclass(frozen=True, slots=True)
class DecodingChoice:
    """A style, or "none", and the fields of DecodingParams that were given. Raises OptionError for what is wrong."""

    style: str | None
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.params()

    def params(self, *, style: str | None = None, default_style: str | None = None, **defaults: Any) -> DecodingParams:
        """All parameters. `style` goes before the style that was given, `default_style` and `defaults` come after."""
        chosen = style or self.style or default_style
        return decoding_params(None if chosen == "none" else chosen, **{**defaults, **self.values})


def _decoding(style: str | None, json_schema: str | None, regex: str | None, **values: Any) -> DecodingChoice:
    given = {name: value for name, value in values.items() if value not in (None, ())}
    if json_schema is not None:
        _add_grammar(given, "--json-schema", grammars.json_schema(_read_schema(json_schema)))
    if regex is not None:
        _add_grammar(given, "--regex", grammars.regex(regex))
    return DecodingChoice(style, MappingProxyType(given))


def _add_grammar(given: dict[str, Any], flag: str, grammar: str) -> None:
    if "grammar" in given:
        raise OptionError(f"{flag} does not apply beside another grammar.", hint="Give one of them.")
    given["grammar"] = grammar


def _read_schema(name: str) -> str:
    """A JSON schema, or what the file of that name holds."""
    if name.lstrip().startswith("{"):
        return name
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OptionError(f"The schema {name} cannot be read: {reason}.", hint="Give a file, or the JSON.") from error


def _decoding_option(known: Field[Any]) -> click.Option:
    """The option of a field of DecodingParams. What is not given is None, so that a style shows through."""
    about, flag = known.metadata["option"], f"--{known.name.replace('_', '-')}"
    if known.name == "stop":
        return option(flag, about.metavar, about.help, multiple=True, callback=as_text)
    if known.name == "logit_bias":
        return option(flag, about.metavar, about.help, multiple=True, callback=_as_biases)
    if isinstance(known.default, str):
        return option(flag, about.metavar, about.help, callback=as_text)
    if isinstance(known.default, bool):
        off = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        return option(f"{flag}/{off}", None, about.help, default=None)
    short = {"max_new_tokens": "-n"}.get(known.name, "")
    return option(f"{short} {flag}", about.metavar, with_default(about.help, known.default), type=type(known.default))


decoding_section = Section(
    "decoding",
    "Decoding",
    _decoding,
    [
        option("--style", "S", f"Ready-made settings: {', '.join(STYLES)}; or none (default; speech: zh-short)."),
        *map(_decoding_option, fields(DecodingParams)),
        option("--json-schema", "FILE", "Write JSON that fits a schema: a file, or the JSON itself.", callback=as_text),
        option("--regex", "R", "Write text that the pattern R matches from end to end.", callback=as_text),
    ],
)


@dataclass(frozen=True, slots=True)
class GateChoice:
    """Which blocks the target checks, and how."""

    plan: Plan
    execution: Execution | None
    calibration: Calibration | None


def _gate(execution: Execution | None, calibration: Path | None, **plan: Any) -> GateChoice:
    return GateChoice(make_plan(**plan), execution, read_calibration(calibration) if calibration else None)


def gate_section(mode: str | None = None) -> Section[GateChoice]:
    """The section for a command whose default mode is `mode`; None is lossless, or just the gate if one is given."""
    return Section(
        "gate",
        "Gate",
        _gate,
        [
            option(
                "-m --mode", "M",
                "edge, cloud: one model alone. lossless: the target's text, drafted where that is faster. fluency, "
                f"quality, auto: fewer calls to the target (default: {mode or 'lossless'}).",
                default=mode,
            ),
            option(
                "--gate", "G",
                "Which blocks the target checks: always, never, or by a threshold, for example "
                f"{', '.join(f'{kind}:{known.example}' for kind, known in SIGNALS.items())}. Append +digits or +dates "
                "to check numbers or dates, too.",
            ),
            option("--k", "N", "Draft N tokens at a time; auto follows measured times, so gated texts may vary."),
            option("--accept", "RULE", "exact, or top:R to accept any of the target's R best tokens (default: exact)."),
            option("--eager", None, "End a block at the first token that the draft model is unsure of.", is_flag=True),
            option(
                "--execution", None, "throughput is faster on a GPU, but near ties may differ (default: exact).",
                type=click.Choice(get_args(Execution)),
            ),
            option("--calibration", "FILE", "Calibration of a calibrated gate (default: the pair's own).", type=Path),
        ],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """What is printed besides the text, and how."""

    json: bool
    trace: Path | None
    color: Color
    quiet: bool

    def __post_init__(self) -> None:
        if self.json and self.color == "always":
            raise OptionError("--color always does not apply to --json, which is never coloured.", hint="Remove one.")

    def open_trace(self) -> AbstractContextManager[TextIO | None]:
        """The trace file, if one was asked for. Raises OptionError where it cannot be written."""
        return open_for_writing(self.trace) if self.trace else nullcontext()


output_section = Section(
    "output",
    "Output",
    OutputChoice,
    [
        option("--json", None, "Print one JSON object at the end instead of text.", is_flag=True),
        option("--trace", "FILE", "Write one line of JSON to FILE for each round.", type=Path),
        option(
            "--color", None, "Colour each token by where it came from.",
            type=click.Choice(get_args(Color)), default="auto",
        ),
        option("-q --quiet", None, "Do not print the line of figures on stderr.", is_flag=True),
    ],
)  # fmt: skip


def open_for_writing(path: Path) -> TextIO:
    """Open a text file that is written anew. Raises OptionError where that is not possible."""
    try:
        return path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}.", hint="Choose another file.") from error
