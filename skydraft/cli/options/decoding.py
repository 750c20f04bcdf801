"""The sections that several commands share: decoding, gate, output, and observers."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TextIO

import click

from skydraft import grammars
from skydraft.cli.options.sections import option, section, with_default
from skydraft.cli.terminal import TERMINAL
from skydraft.config import DEFAULT_MODE, MODES, STYLES, DecodingParams, Execution, decoding_params
from skydraft.decoding.accounts.audits import Auditor
from skydraft.decoding.generation import Observer
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.target import target_of
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.errors import OptionError, telling
from skydraft.files import read_file
from skydraft.gating.gates import SIGNALS
from skydraft.lab.learning.collect import Collector
from skydraft.prompts.thinking import Think

Color = Literal["auto", "always", "never"]


def as_text(context: click.Context, param: click.Parameter, value: Any) -> Any:
    """Return the given text or texts, checked to be UTF-8. As an argument, - means all of stdin."""
    try:
        text = sys.stdin.read() if isinstance(param, click.Argument) and value == "-" else value
        "".join(text or "").encode()  # bytes that are not UTF-8 arrive as lone surrogates
    except UnicodeError as error:
        raise click.BadParameter("it is not valid UTF-8; convert it first, for example with iconv.") from error
    return text


@dataclass(frozen=True, slots=True)
class DecodingChoice:
    """A style, or "none", and the given fields of DecodingParams. Raises OptionError for invalid values."""

    style: str | None
    values: Mapping[str, Any]
    think: Think = "auto"

    def __post_init__(self) -> None:
        self.params()

    def params(self, *, style: str | None = None, default_style: str | None = None, **defaults: Any) -> DecodingParams:
        """Return all parameters. `style` overrides the given style, which overrides `default_style`."""
        chosen = style or self.style or default_style
        return decoding_params(None if chosen == "none" else chosen, **{**defaults, **self.values})


def _decoding(
    style: str | None, json_schema: str | None, regex: str | None, think: Think, **values: Any
) -> DecodingChoice:
    given = {name: value for name, value in values.items() if value not in (None, ())}
    texts = {"--grammar": given.get("grammar"), "--json-schema": json_schema, "--regex": regex}
    if len(flags := [flag for flag, text in texts.items() if text is not None]) > 1:
        raise OptionError(f"{flags[-1]} does not apply beside another grammar.", hint="Give only one of them.")
    if json_schema is not None:
        given["grammar"] = grammars.json_schema(_read_schema(json_schema))
    if regex is not None:
        given["grammar"] = grammars.regex(regex)
    return DecodingChoice(style, MappingProxyType(given), think)


def _read_schema(name: str) -> str:
    if name.lstrip().startswith("{"):
        return name
    with telling(OptionError, f"The schema {name} cannot be read", "Give a file, or the JSON."):
        return read_file(Path(name)).decode()


def _decoding_option(known: Field[Any]) -> click.Option:
    """Make the option of a field of DecodingParams. Its default is None, so that a style can set the field."""
    about, flag = known.metadata["option"], f"--{known.name.replace('_', '-')}"
    if isinstance(known.default, tuple):
        return option(flag, about.metavar, about.help, multiple=True, callback=as_text)
    if isinstance(known.default, str):
        return option(flag, about.metavar, about.help, callback=as_text)
    if isinstance(known.default, bool):
        off = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        return option(f"{flag}/{off}", None, about.help, default=None)
    short = {"max_new_tokens": "-n"}.get(known.name, "")
    return option(f"{short} {flag}", about.metavar, with_default(about.help, known.default), type=type(known.default))


_RARELY = (  # needed
    "min_new_tokens", "min_p", "no_repeat_ngram_size", "frequency_penalty", "presence_penalty",
    "content_penalty", "content_ngram_size", "no_adjacent_repeat", "comma_gap", "full_stop_gap", "full_stop_shift",
    "think_budget", "execution", "penalty_window",
)  # fmt: skip
decoding_section = section("decoding", "Decoding", _decoding, [
    option("--style", "S", f"Ready-made settings: {', '.join(STYLES)}; or none (default; speech: zh-short)."),
    *(_decoding_option(known) for known in fields(DecodingParams) if known.metadata["option"].metavar is not None),
    option("--json-schema", "FILE", "Write JSON that fits a schema: a file, or the JSON itself.", callback=as_text),
    option("--regex", "R", "Write text that matches the whole pattern R.", callback=as_text),
    option("--think", None, "Whether a model that can think does so before it answers; auto: its chat template "
           "decides.", type=Think, default="auto"),
], _RARELY)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GateChoice:
    plan: Plan
    execution: Execution | None


def _gate(execution: Execution | None, mode: str | None, gate: str | None, **plan: Any) -> GateChoice:
    return GateChoice(make_plan(mode or (None if gate else DEFAULT_MODE), gate, **plan), execution)


gate_section = section("gate", "Gate", _gate, [
    option("-m --mode", "M",
           "lossless: the large model's text, sped up by the small model, which continues if the cloud is lost. auto: "
           "the large model checks where the small one is unsure. edge: only the small model. cloud: only the large "
           "model. fluency, quality: like auto, with fixed limits. answers: like quality, and also checks numbers and "
           f"JSON (default: {DEFAULT_MODE}, or only the gate if one is given).",
           shell_complete=lambda context, param, begun: [mode for mode in MODES if mode.startswith(begun)]),
    option("--gate", "G", "Which blocks the target checks: always, never, or by a threshold, for example "
           f"{', '.join(f'{kind}:{known.example}' for kind, known in SIGNALS.items())}. Append +start, "
           "+digits, +dates or +values (of JSON) to check these, too."),
    option("--k", "N", "Draft N tokens at a time. In lossless: wait for the verdict on each block."),
    option("--hand-back", "H", "How long the target keeps writing after a correction: 0 (not at all), N (N tokens), "
           "agree:M (until the draft model would have written the last M tokens itself) or text (to its end). With "
           "agree:M, gated texts may differ between runs over a link (default: the mode's; without a mode 0)."),
    option("--execution", None, "exact: the numbers of one token at a time. throughput: a block in one forward, which "
           "may change near ties (default: exact for GGUF, throughput for checkpoints).", type=Execution),
], _RARELY)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputChoice:
    color: Color
    quiet: bool
    json: bool = False
    trace: Path | None = None


SHOWN = [
    option("--color", None, "Colour each token by its origin.", type=Color, default="auto"),
    option("-q --quiet", None, "Do not print the line of figures after an answer.", is_flag=True),
]
output_section = section("output", "Output", OutputChoice, [
    option("--json", None, "Print one JSON object at the end instead of text.", is_flag=True),
    option("--trace", "FILE", "Write one line of JSON to FILE for each round.", type=Path),
    *SHOWN,
])  # fmt: skip


def open_for_writing(path: Path, mode: Literal["w", "a"] = "w") -> TextIO:
    """Open a text file to overwrite it, or to add to it. Raises OptionError."""
    with telling(OptionError, f"{path} cannot be written", "Choose another file."):
        return path.open(mode, encoding="utf-8", newline="")


@dataclass(frozen=True, slots=True)
class KeepChoice:
    """Optional observers of each generation: a collector of corrections, and an auditor of a share of the answers."""

    collector: Collector | None = None
    audit_share: float = 0.0
    auditor: Auditor | None = None  # set inside `watching`

    @property
    def observers(self) -> tuple[Observer, ...]:
        return tuple(filter(None, (self.collector, self.auditor)))

    def check(self, *, verifies: bool) -> None:
        """Raise OptionError for --learn if nothing can be learned."""
        if self.collector and not (verifies or self.audit_share):
            says = "--learn does not apply here: only the draft model writes, and nothing is checked."
            raise OptionError(says, hint="Choose a mode that checks, for example --mode quality.")

    @contextmanager
    def watching(self, edge: Engine | None, target: Engine | Cloud | None) -> Iterator["KeepChoice"]:
        """Yield a copy with an auditor, if there are audits. Raises OptionError."""
        if not self.audit_share:
            yield self
            return
        assert edge and target  # `CloudChoice.sides` returns both for audits
        reader = target_of(target if isinstance(target, Engine) else target.in_background())
        kept = (self.collector.keep,) if self.collector else ()
        with closing(Auditor(edge, reader, self.audit_share, TERMINAL.say, *kept)) as auditor:
            yield replace(self, auditor=auditor)


def _keep(learn: Path | None, audit_share: float | None) -> KeepChoice:
    collector = None
    if audit_share is not None and not 0 < audit_share <= 1:  # also refuses NaN
        raise OptionError(f"--audit-share must be above 0 and at most 1, not {audit_share:g}.")
    if learn:
        collector = Collector(learn, notify=TERMINAL.say)
        click.get_current_context().call_on_close(collector.close)
        TERMINAL.say(
            f"learning: prompts, answers and corrections are kept in {learn}, only on this machine. "
            f"To delete them: skydraft learn forget {learn}"
        )
    return KeepChoice(collector, audit_share or 0.0)


keep_section = section("keep", "Learning", _keep, [
    option("--learn", "DIR", "Keep prompts, answers and the target's corrections in DIR, to train the draft model "
           "(see: skydraft learn).", type=Path),
    option("--audit-share", "X", "Let the target check this share of the finished answers in the background (0.05: one "
           "in 20). A line warns you if they agree with it less than you asked for.",
           type=float),
])  # fmt: skip
