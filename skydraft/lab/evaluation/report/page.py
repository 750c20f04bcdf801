"""Write report.html: figures, plots and texts on one page that needs no network and no model. Beside it, write the
figures as a table and as JSON, the plots as files, and all tokens."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from skydraft.characters import visible
from skydraft.errors import OptionError, telling
from skydraft.intervals import Figure, cell
from skydraft.lab.evaluation.findings import TOKEN_COLUMNS, Findings, token_rows
from skydraft.lab.evaluation.measures import BY_NAME, INDICATORS, MEASURES, Case, Measure
from skydraft.lab.evaluation.records import PromptEntry
from skydraft.lab.evaluation.report.plots import against_cost, side_by_side
from skydraft.lab.evaluation.report.task_sections import Column, section
from skydraft.lab.evaluation.summary import Summary, summarize
from skydraft.origins import LOOKS

# The columns of each table.
HEADLINE = [BY_NAME[name] for name in (
    "task_score", "target_agreement", "cloud_calls_per_token", "target_written_per_token", "target_rows_per_token",
    "acceptance_rate", "blocks_sent", "mean_acceptance_length", "tokens_per_s", "ttft_ms", "itl_ms",
)]  # fmt: skip
MORE = [measure for measure in MEASURES if measure not in (*HEADLINE, *INDICATORS)]
_OVER = "tokens/s over tokens/s of mode cloud on the same prompts"
SPEED = Measure("cloud", "speed, cloud = 1", "", _OVER, digits=2)
_SIDE_BY_SIDE = [*INDICATORS, BY_NAME["cloud_calls_per_token"], BY_NAME["acceptance_rate"]]
_PLANE = ("target_agreement", "cloud_calls_per_token", "target_written_per_token")
_HINT = "Check its permissions, or choose another folder with --out."
_NUM_TASKS = 6  # number of tasks whose texts are shown
_ORIGIN_MARKS = {origin: origin.removeprefix("edge-")[0] for origin in LOOKS}
# A text, and (CSS classes, tooltip, text) of each token. The classes are its origin's mark, x if the target disagrees,
# and n if it begins with a line break.
Coloured = tuple[Case, list[tuple[str, str, str]]]


def write_report(findings: Findings, folder: Path) -> Summary:
    """Write report.html, summary.json, the tables and the plots into `folder`. Return the summary. Raises
    OptionError."""
    summary = summarize(findings)
    tokens = (row for setting in findings.settings for case in setting.all_cases for row in token_rows(case))
    planes = _planes(findings, summary)
    texts = {of.mode: [of.measures.get(each.name) for each in _SIDE_BY_SIDE] for of in summary.settings}
    content = json.dumps(summary.model_dump(mode="json", by_alias=True), ensure_ascii=False, indent=1)
    whole = {"summary": summary, "columns": _columns(summary, MEASURES) + _columns(summary, [SPEED], "speed_over")}
    files = {
        "summary.json": content + "\n", "report.html": render(findings, summary, planes),
        "tokens.csv": _csv(tokens), "table.md": _filled("table.md.j2", **whole),
        "indicators.svg": side_by_side([f"{each.label}{each.unit}" for each in _SIDE_BY_SIDE], texts),
        **{f"plane-{style}.svg" if style else "plane.svg": svg for style, svg in planes.items()},
    }  # fmt: skip
    with telling(OptionError, f"{folder} cannot be written", _HINT):
        for name, text in files.items():
            if text:
                folder.joinpath(name).write_text(text, encoding="utf-8", newline="\n")
    return summary


def render(findings: Findings, summary: Summary, planes: Mapping[str, str]) -> str:
    tables = [
        ("What it is worth", "worth", _columns(summary, HEADLINE) + _columns(summary, [SPEED], "speed_over")),
        ("Punctuation and repeats", "texts", _columns(summary, INDICATORS)),
        ("Where the time goes, and the rest", "rest", _columns(summary, MORE)),
    ]
    return _filled(
        "page.html.j2", run=findings.run, summary=summary, tables=tables,
        num_prompts=max((len(setting.cases) for setting in findings.settings), default=0),
        differences=_columns(summary, MEASURES, "differences", "+"),
        planes={style: svg for style, svg in planes.items() if svg},
        tasks=[section(of) for of in summary.tasks], texts=list(_texts(findings)), marks=_ORIGIN_MARKS, looks=LOOKS,
    )  # fmt: skip


def _filled(template: str, **given: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("skydraft.lab.evaluation", "report"), autoescape=template.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template(template).render(**given)


def _columns(summary: Summary, measures: Iterable[Measure], of: str = "measures", sign: str = "") -> list[Column]:
    """Return the columns that have a value in at least one mode."""
    figures = [getattr(setting, of) for setting in summary.settings]
    used = [each for each in measures if any(each.name in of_mode for of_mode in figures)]
    return [(each, [cell(of_mode.get(each.name), each.digits, sign) for of_mode in figures]) for each in used]


def _csv(tokens: Iterable[dict[str, Any]]) -> str:
    target = io.StringIO()
    # Quote each text: a token may be a line break.
    writer = csv.DictWriter(target, TOKEN_COLUMNS, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(tokens)
    return target.getvalue()


def _planes(findings: Findings, summary: Summary) -> dict[str, str]:
    """Make a plot for each style ("" for modes without one), because agreement depends on the style's constraints."""
    planes: dict[str, dict[str, list[Figure]]] = {}
    for mode, setting in zip(findings.run.modes, summary.settings, strict=False):
        if _PLANE[0] in setting.measures:
            name = mode.name.replace(f";style={mode.style}", "")
            planes.setdefault(mode.style or "", {})[name] = [setting.measures[name] for name in _PLANE]
    return {style: against_cost("agreement with the target", points) for style, points in planes.items()}


def _texts(findings: Findings) -> Iterator[tuple[PromptEntry, list[Coloured]]]:
    """Yield each prompt with its texts; only a few tasks, on which the modes score differently."""
    num_tasks = 0
    for by_mode in zip(*(setting.cases for setting in findings.settings), strict=True):
        cases = [repetitions[0] for repetitions in by_mode]
        if cases[0].prompt.task:
            if num_tasks == _NUM_TASKS or len({case.verdict and case.verdict.score for case in cases}) == 1:
                continue
            num_tasks += 1
        yield cases[0].prompt, [_coloured(case) for case in cases]


def _coloured(case: Case) -> Coloured:
    rounds = [record.round for record in case.generation.records for _ in range(record.num_committed)]
    return case, [_piece(case, index, rounds) for index in range(case.num_tokens)]


def _piece(case: Case, index: int, rounds: Sequence[int]) -> tuple[str, str, str]:
    line, score = case.generation, case.score
    text = visible(line.pieces[index])
    tells = [line.origins[index], f"round {rounds[index]}"]
    classes = _ORIGIN_MARKS[line.origins[index]] + " n" * text.startswith("\n")
    if score:
        disagrees = score.choices[index] != line.token_ids[index]
        classes += " x" * disagrees
        choice = visible(score.choice_pieces[index]).replace("\n", "↵")
        tells += [f"entropy {score.signals[index][0]:.2f} nats", f"target: {choice}" if disagrees else "target agrees"]
    return classes, " · ".join(tells), text
