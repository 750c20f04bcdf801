"""report.html: figures, plots and texts on one page that needs no network and no model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2

from skydraft.config import DecodingParams
from skydraft.errors import OptionError
from skydraft.evaluation.findings import Findings
from skydraft.evaluation.intervals import cell
from skydraft.evaluation.measures import BY_NAME, MEASURES
from skydraft.evaluation.modes import Mode
from skydraft.evaluation.records import PromptEntry, Records
from skydraft.evaluation.report.answer import answer
from skydraft.evaluation.report.coloured import ORIGIN_MARKS, Coloured, coloured
from skydraft.evaluation.report.plots import calls_against_written, speed_against_rtt
from skydraft.evaluation.report.task_sections import section
from skydraft.evaluation.summary import CategoryFigures, SettingFigures, Summary, summarize
from skydraft.origins import LOOKS

# The columns of each table.
HEADLINE = (
    "task_score", "target_agreement", "cloud_calls_per_token", "target_written_per_token", "target_rows_per_token",
    "acceptance_rate", "mean_acceptance_length", "tokens_per_s", "ttft_ms", "itl_ms", "target_nll",
)  # fmt: skip
LINKED = (
    "cloud_calls_per_token", "target_written_per_token", "mean_acceptance_length", "bytes_per_token", "tokens_per_s",
    "ttft_ms", "itl_ms", "same_as_cloud",
)  # fmt: skip
TEXTS = (
    "punctuation_density", "repeat_rate_2", "repeat_rate_3", "adjacent_repeat", "ends_sentence", "cycles",
    "same_as_cloud",
)  # fmt: skip
MORE = tuple(measure.name for measure in MEASURES if measure.name not in HEADLINE + TEXTS + LINKED)
SPEED = "speed, cloud = 1"
GATES = {
    "entropy": "with a token whose entropy under the draft model is above {} nats",
    "margin": "with a token whose two likeliest choices are less than {} apart",
    "prob": "with a token whose likeliest choice has a probability below {}",
    "calibrated": "where the risks that the target disagrees add up to more than an agreement of {} allows",
}


def write_report(records: Records, folder: Path) -> Path:
    """Write summary.json and report.html into `folder`; returns the page. Raises OptionError if that fails."""
    findings = Findings(records)
    summary = summarize(findings)
    page = render(findings, summary)
    try:
        content = json.dumps(summary.model_dump(mode="json", by_alias=True), ensure_ascii=False, indent=1)
        folder.joinpath("summary.json").write_text(content + "\n", encoding="utf-8")
        target = folder / "report.html"
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"{folder} cannot be written: {error.strerror}.",
            hint="Check its permissions, or choose another folder with --out.",
        ) from error
    return target


def render(findings: Findings, summary: Summary) -> str:
    """The page as text."""
    loader = jinja2.PackageLoader("skydraft.evaluation", "report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    here = [setting for setting in summary.settings if setting.link_ms is None]
    linked = [setting for setting in summary.settings if setting.link_ms is not None]
    return environment.get_template("page.html.j2").render(
        run=findings.run,
        changed=_changed(findings),
        num_prompts=max((len(setting.cases) for setting in findings.settings), default=0),
        summary=summary,
        answer=answer(summary),
        modes=[(mode.name, _described(mode)) for mode in findings.run.modes],
        categories=_categories(here),
        tables=[
            ("What it is worth", "worth", _table(here, HEADLINE, with_speed=True)),
            ("Over the link", "link", _table(linked, LINKED, with_speed=True)),
            ("What the texts look like", "texts", _table(here, TEXTS)),
            ("Where the time goes, and the rest", "rest", _table(here, MORE)),
        ],
        plane=calls_against_written(findings, summary.study),
        speed=speed_against_rtt(findings),
        tasks=[section(of, findings) for of in summary.tasks],
        texts=list(_texts(findings)),
        marks=ORIGIN_MARKS,
        looks=LOOKS,
    )


def _changed(findings: Findings) -> dict[str, Any]:
    """Parameters with one common value, not the default, in all modes without a style of their own."""
    default, modes = DecodingParams(), findings.run.modes
    names = [field.name for field in fields(DecodingParams)]
    values = {name: {getattr(mode.params, name) for mode in modes if not mode.style} for name in names}
    return {
        name: next(iter(each)) for name, each in values.items() if len(each) == 1 and each != {getattr(default, name)}
    }


def _table(settings: Sequence[SettingFigures], names: Sequence[str], *, with_speed: bool = False) -> dict[str, Any]:
    """Rows of modes, columns of measures; a column without values is left out."""
    used = [BY_NAME[name] for name in names if any(name in setting.measures for setting in settings)]
    heads = [(measure.label, measure.unit) for measure in used]
    terms = [(measure.label, measure.convention) for measure in used]
    rows = [
        (setting.name, [cell(setting.measures.get(measure.name), measure.digits) for measure in used])
        for setting in settings
    ]
    if with_speed and any("cloud" in setting.speed_over for setting in settings):
        heads.append((SPEED, ""))
        terms.append((SPEED, "tokens/s over tokens/s of mode cloud on the same link and prompts"))
        for (_, cells), setting in zip(rows, settings, strict=True):
            cells.append(cell(setting.speed_over.get("cloud"), 2))
    return {"heads": heads, "rows": rows, "terms": terms}


def _categories(settings: Sequence[SettingFigures]) -> dict[str, Any] | None:
    """Agreement by category of prompts, with calls below; None for fewer than two categories."""
    known = settings[0].categories if settings else {}
    if len(known) < 2 or all(figures.target_agreement is None for figures in known.values()):
        return None

    def shown(figures: CategoryFigures) -> tuple[str, str]:
        agreement, calls = figures.target_agreement, figures.cloud_calls_per_token
        return "" if agreement is None else f"{agreement:.3f}", "" if calls is None else f"{calls:.3f} calls"

    heads = [(name, f"{figures.num_prompts} prompts") for name, figures in known.items()]
    rows = [(setting.name, [shown(setting.categories[name]) for name in known]) for setting in settings]
    return {"heads": heads, "rows": rows, "terms": []}


def _described(mode: Mode) -> str:
    plan, style = mode.plan, f"; style {mode.style}" if mode.style else ""
    if not plan.drafts:
        return f"the target alone, streamed{style}"
    if not plan.verifies:
        return f"the draft model alone{style}"
    length = "as many tokens as measured costs suggest" if plan.k is None else f"{plan.k} tokens"
    if plan.gate.kind == "always":
        return f"the draft model drafts {length}, the target checks every block: the target's own text{style}"
    gate = GATES[plan.gate.kind].format(f"{plan.gate.threshold:g}")
    ends = ", or fewer: a block ends there" if plan.eager else ""
    rules = "".join(f", and where there are {rule}" for rule in plan.gate.content_rules)
    return f"the draft model drafts up to {length}{ends}; the target checks a block {gate}{rules}{style}"


def _texts(findings: Findings) -> Iterator[tuple[PromptEntry, list[Coloured]]]:
    """Each prompt with its texts in process: (mode, how it ended, tokens)."""
    shown = [setting for setting in findings.settings if setting.link_ms is None]
    for number, cases in enumerate(shown[0].cases if shown else ()):
        if cases[0].prompt.task is None:  # of tasks only the examples are shown
            yield cases[0].prompt, [coloured(setting.mode.name, setting.cases[number][0]) for setting in shown]
