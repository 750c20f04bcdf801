"""Figures in README.md and docs/ are those of the files that their commands wrote, and there are no others.

`bench.figures` has the tables of the pages and the sentences that name a figure. What is left of a page without them,
and without code, has no figure but SETTINGS. docs/learning.md has a file and a test of its own.
"""

import json
import re
from dataclasses import fields

import pytest

from bench.figures import TABLES, findings, sentences, texts_of, with_tables
from skydraft.cli.generate import generate
from skydraft.config import DEFAULT_MODE, MODES
from skydraft.decoding.accounts.stats import Stats

from ..starting import ROOT

PAGES = ["README.md", "README.zh-CN.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
HELD_ELSEWHERE = {"docs/cli.md", "docs/learning.md", "docs/architecture.md"}  # generated; below; has none
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)|\b\d+(?:\.\d+)? ?%")
# What nobody measured, in the words around it: versions, sizes, thresholds.
SETTINGS = (
    r"(?:Python|Codex CLI|vLLM|llm|nginx) \(?\d\.\d+", r"Apache-2\.0", r"\d\.\d GB", r"(?:entropy|calibrated):[\d.]+",
    r"agreement of(?: at least)? 0\.95?", r"the second for 0\.9", r"above 3\.25 nats", r"bubblewrap +0\.8",
    r"(?:less than|below) 0\.3",
)  # fmt: skip


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def words(text: str) -> str:
    return " ".join(text.split())


def faults(page: str, text: str) -> list[str]:
    """What a page says otherwise than the files, and figures that no file is known for."""
    try:
        found = [] if with_tables(page, text) == text else ["a table differs: python -m bench figures"]
    except ValueError:
        found = ["a table is gone"]
    for lines in (make() for make in TABLES.get(page, ())):
        text = text.replace("\n".join(lines), "")
    text = words(re.sub(r"(?ms)^```.*?^```|^    .*?$", "", text))
    for sentence in (words(sentence) for of, sentence in sentences() if of == page):
        found += [] if sentence in text else [sentence]
        text = text.replace(sentence, "")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    for setting in SETTINGS:
        text = re.sub(setting, "", text)
    return found + [text[max(match.start() - 40, 0) : match.end() + 20] for match in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", sorted(set(PAGES) - HELD_ELSEWHERE))
def test_a_page_has_the_figures_of_the_files_and_no_others_and_its_lines_wrap(page: str) -> None:
    assert faults(page, text_of(page)) == []
    assert [line for line in text_of(page).splitlines() if len(line) > 120 and line[0] not in "| "] == []


def anchors(page: str) -> set[str]:
    heads = re.findall(r"(?m)^#+ (.*)$", text_of(page))
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_page_and_its_place_leads_there(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("http"):
            continue
        path, _, place = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not place or place in anchors(str(target.resolve().relative_to(ROOT))), link


@pytest.mark.parametrize("page", ["README.md", "docs/modes.md"])
def test_every_option_and_mode_that_a_page_names_exists(page: str) -> None:
    options = {flag for param in generate.params for flag in param.opts} | {"--help"}
    assert set(re.findall(r"`(--[a-z-]+)", text_of(page))) <= options
    assert set(re.findall(r"--mode ([a-z]+)", text_of(page))) <= set(MODES)


def test_the_page_explains_every_figure_of_an_answer() -> None:
    section = text_of("docs/python.md").partition("## Figures of an answer")[2].partition("\n## ")[0]
    assert [each.name for each in fields(Stats) if f"`{each.name}`" not in section] == []


def test_the_presets_are_those_of_the_page() -> None:
    page = text_of("docs/modes.md")
    table = page[page.index("| `--mode` | gate") :].split("\n\n")[0].splitlines()[2:]
    shown = {row.split("`")[1]: [cell.strip() for cell in row.split("|")[2:4]] for row in table}
    assert {mode: gate for mode, (gate, _) in shown.items()} == {mode: spec.gate for mode, spec in MODES.items()}
    for mode, spec in MODES.items():
        assert shown[mode][1].removeprefix("up to ") == (str(spec.k) if isinstance(spec.k, int) else "–"), mode


def test_the_texts_of_the_page_are_those_of_the_report() -> None:
    page = text_of("docs/modes.md")
    (prompt,) = re.findall(r"What the demo pair wrote to “(.*?)”", page)
    rows = re.findall(r"^\| (`[a-z`, ]+`) \| ([^|]*[。等])\s*\|$", page, re.M)
    cases = {s.mode.name: case.generation.text for s in findings().settings for (case,) in s.cases
             if case.prompt.prompt == prompt}  # fmt: skip
    told = {mode: text for modes, text in rows for mode in re.findall(r"[a-z]+", modes)}
    assert set(told) == set(MODES) - {"answers", "quality"} and {mode: cases[mode] for mode in told} == told


def test_what_learning_brings_is_as_measured() -> None:
    page = text_of("docs/learning.md")
    for name, found in json.loads((ROOT / "docs/learned/figures.json").read_text(encoding="utf-8")).items():
        for mode in ("edge", "auto", "answers"):
            before, after = found[mode], found.get(f"{mode}-learned", found[mode])
            assert before["tasks"] == after["tasks"]
            cells = [str(after["tasks"])]
            for column, digits in (("right", 2), ("calls", 3), ("written", 2)):
                old, new = (f"{each[column]['value']:.{digits}f}" for each in (before, after))
                cells.append(f"{old} → {new}" if float(old) or float(new) else "0")
            assert f"| `{name}` | `{mode}` | {' | '.join(cells)} |" in page or before is after
        cloud = found["cloud"]
        assert f"| `{name}` | `cloud` | {cloud['tasks']} | {cloud['right']['value']:.2f} |" in page


def test_the_answers_of_the_default_mode_are_the_targets_own() -> None:
    """As README says, token for token."""
    assert texts_of(DEFAULT_MODE) == texts_of("cloud") and len(texts_of("cloud")) == 62
