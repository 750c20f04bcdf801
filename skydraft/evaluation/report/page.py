"""report.html: figures, plots and texts on one page that needs no network and no model."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from skydraft.errors import OptionError, telling
from skydraft.evaluation.findings import Findings
from skydraft.evaluation.intervals import cell
from skydraft.evaluation.measures import BY_NAME, MEASURES, Case
from skydraft.evaluation.modes import Mode
from skydraft.evaluation.records import PromptEntry
from skydraft.evaluation.report.plots import against_cost
from skydraft.evaluation.report.task_sections import section
from skydraft.evaluation.summary import SettingFigures, Summary, summarize
from skydraft.origins import LOOKS

# The columns of each table.
HEADLINE = (
    "task_score", "target_agreement", "cloud_calls_per_token", "target_written_per_token", "target_rows_per_token",
    "acceptance_rate", "mean_acceptance_length", "tokens_per_s", "ttft_ms", "itl_ms", "target_nll",
)  # fmt: skip
MORE = tuple(measure.name for measure in MEASURES if measure.name not in HEADLINE)
SPEED = "speed, cloud = 1"
_NUM_TASKS = 6  # whose texts are shown
_ORIGIN_MARKS = {
    "accepted": "a", "recovered": "r", "bonus": "b", "skipped": "s", "edge": "e", "cloud": "c", "edge-fallback": "f",
}  # fmt: skip
# The mode and the verdict, how the text ended, and of each token its classes, its tooltip and its text. The classes are
# that of its origin, x where the target disagrees, and n where it begins with a line break.
Coloured = tuple[str, str, list[tuple[str, str, str]]]


def write_report(findings: Findings, folder: Path) -> Summary:
    """Write summary.json and report.html into `folder`; returns the summary. Raises OptionError."""
    summary = summarize(findings)
    hint = "Check its permissions, or choose another folder with --out."
    with telling(OptionError, f"{folder} cannot be written", hint):
        content = json.dumps(summary.model_dump(mode="json", by_alias=True), ensure_ascii=False, indent=1)
        folder.joinpath("summary.json").write_text(content + "\n", encoding="utf-8")
        folder.joinpath("report.html").write_text(render(findings, summary), encoding="utf-8")
    return summary


def render(findings: Findings, summary: Summary) -> str:
    loader = jinja2.PackageLoader("skydraft.evaluation", "report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.j2").render(
        run=findings.run,
        num_prompts=max((len(setting.cases) for setting in findings.settings), default=0),
        summary=summary,
        modes=[(mode.name, _described(mode)) for mode in findings.run.modes],
        tables=[
            ("What it is worth", "worth", _table(summary.settings, HEADLINE, with_speed=True)),
            ("Where the time goes, and the rest", "rest", _table(summary.settings, MORE)),
        ],
        plane=_plane(summary.settings),
        tasks=[section(of) for of in summary.tasks],
        texts=list(_texts(findings)),
        marks=_ORIGIN_MARKS,
        looks=LOOKS,
    )


def _table(settings: Sequence[SettingFigures], names: Sequence[str], *, with_speed: bool = False) -> dict[str, Any]:
    """Rows of modes, columns of measures; a column without values is left out."""
    used = [BY_NAME[name] for name in names if any(name in setting.measures for setting in settings)]
    heads = [(measure.label, measure.unit) for measure in used]
    terms = [(measure.label, measure.convention) for measure in used]
    rows = [
        (setting.mode, [cell(setting.measures.get(measure.name), measure.digits) for measure in used])
        for setting in settings
    ]
    if with_speed and any("cloud" in setting.speed_over for setting in settings):
        heads.append((SPEED, ""))
        terms.append((SPEED, "tokens/s over tokens/s of mode cloud on the same prompts"))
        for (_, cells), setting in zip(rows, settings, strict=True):
            cells.append(cell(setting.speed_over.get("cloud"), 2))
    return {"heads": heads, "rows": rows, "terms": terms}


def _plane(settings: Sequence[SettingFigures]) -> str:
    names = ("target_agreement", "cloud_calls_per_token", "target_written_per_token")
    scored = [setting for setting in settings if names[0] in setting.measures]
    points = {setting.mode: [setting.measures[name] for name in names] for setting in scored}
    return against_cost("agreement with the target", points) if points else ""


def _described(mode: Mode) -> str:
    plan, style = mode.plan, f"; style {mode.style}" if mode.style else ""
    if not plan.drafts:
        return f"the target alone, streamed{style}"
    if not plan.verifies:
        return f"the draft model alone{style}"
    length = "as many tokens as measured costs suggest" if plan.k is None else f"{plan.k} tokens"
    if plan.gate.kind == "always":
        return f"the draft model drafts {length}, the target checks every block: the target's own text{style}"
    ends = ", and ends a block there" if plan.ends_early else ""
    return f"the draft model drafts up to {length}; the target checks where the gate {plan.gate} says so{ends}{style}"


def _texts(findings: Findings) -> Iterator[tuple[PromptEntry, list[Coloured]]]:
    """Each prompt with its texts; of tasks a few that not all modes got right."""
    num_tasks = 0
    for by_mode in zip(*(setting.cases for setting in findings.settings), strict=True):
        cases = [repetitions[0] for repetitions in by_mode]
        if cases[0].prompt.task:
            if num_tasks == _NUM_TASKS or len({case.verdict and case.verdict.score for case in cases}) == 1:
                continue
            num_tasks += 1
        yield cases[0].prompt, [_coloured(case.generation.mode, case) for case in cases]


def _coloured(mode: str, case: Case) -> Coloured:
    rounds = [record.round for record in case.generation.records for _ in range(record.num_committed)]
    verdict = case.verdict
    said = {0.0: ": wrong", 1.0: ": right"}.get(verdict.score, f": {verdict.score:.0%}") if verdict else ""
    return mode + said, case.generation.finish, [_piece(case, index, rounds) for index in range(case.num_tokens)]


def _visible(text: str) -> str:
    """The text with symbols for control characters; line breaks and tabs stay."""
    return "".join(chr(0x2400 + ord(char)) if ord(char) < 32 and char not in "\n\t" else char for char in text)


def _piece(case: Case, index: int, rounds: Sequence[int]) -> tuple[str, str, str]:
    line, score = case.generation, case.score
    text = _visible(line.pieces[index])
    tells = [line.origins[index], f"round {rounds[index]}"]
    classes = _ORIGIN_MARKS[line.origins[index]] + " n" * text.startswith("\n")
    if score:
        disagrees = score.choices[index] != line.token_ids[index]
        classes += " x" * disagrees
        choice = _visible(score.choice_pieces[index]).replace("\n", "↵")
        tells += [f"entropy {score.signals[index][0]:.2f} nats", f"target: {choice}" if disagrees else "target agrees"]
    return classes, " · ".join(tells), text
