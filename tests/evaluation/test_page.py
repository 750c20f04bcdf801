"""The page as a browser sees it: no error, no request, every prompt, and room for a phone."""

import csv
import html
import re
from pathlib import Path
from typing import Any

import pytest

from skydraft.characters import visible

from ..gateway.page.browsing import chromium, grave, is_too_wide  # noqa: F401
from .pairs import PROMPTS, compare_toys, generations

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modes = "edge,cloud,lossless,quality,gate=entropy:1.5;k=4"
    return compare_toys(tmp_path_factory.mktemp("page"), modes=modes, tokens=40)


def letters(text: str) -> str:
    """What is left without spaces and marks, where the control characters that toys write are written out."""
    return "".join(filter(str.isalnum, visible(text)))


def test_every_text_is_there_and_nothing_is_asked_or_complained_of(out: Path, chromium: Any) -> None:  # noqa: F811
    page, told = (out / "report.html").as_uri(), list[str]()
    tab = chromium.new_page()
    for event, what in (("console", "text"), ("pageerror", "message"), ("request", "url")):
        tab.on(event, lambda found, what=what: told.append(getattr(found, what)))
    tab.goto(page)
    assert [each for each in told if not each.startswith("data:")] == [page]
    dom = tab.content()
    shown = html.unescape(re.sub("<[^>]*>", "", dom))
    assert all(f"<{tag}" in dom for tag in ("svg", "table", "details"))
    assert all(prompt["prompt"] in shown for prompt in PROMPTS)
    assert all(letters("".join(line["pieces"])) in letters(shown) for line in generations(out))


def test_a_blind_vote_hides_the_modes_until_it_is_counted(out: Path, chromium: Any) -> None:  # noqa: F811
    texts = {(line["prompt"], line["mode"]): letters("".join(line["pieces"])) for line in generations(out)}
    tab, shown = chromium.new_page(), []
    tab.goto((out / "report.html").as_uri())
    tab.select_option("#other", "gate=entropy:1.5;k=4")
    tab.click("#show")
    assert tab.locator(".pair .text").count() == 2 * len(PROMPTS)
    tab.click("#blind")
    for vote in "1120":
        assert not re.search(r"edge|gate|entropy", tab.inner_text("body"))
        shown.append([letters(box[1:]) for box in tab.locator(".pair .text").all_inner_texts()])
        tab.keyboard.press(vote)
    for pressed in ("text=Back", "text=2 is better", "text=End here"):
        tab.click(pressed)
    head, *votes = csv.reader(tab.input_value("#votes").split())
    assert head == ["vote", "left", "right", "seed", "prompt"]
    assert [vote[0] for vote in votes] == ["left", "left", "right", "right"]
    assert len({vote[1] for vote in votes}) == 2  # which side a mode is on changes
    assert shown == [[texts[prompt, left], texts[prompt, right]] for _, left, right, _, prompt in votes]
    tab.fill("#votes", "left,edge,cloud,1,a\n" * 7 + "right,edge,cloud,2,b\nsame,edge,cloud,1,c\nleft,cloud,edge,9,d")
    found = tab.inner_text("#result")
    assert "cloud better: 2. edge better: 7. The same: 1. Equal texts: 0." in found and "p = 0.180" in found


@pytest.mark.parametrize(("which", "scheme"), [("toys", "light"), ("toys", "dark"), ("published", "light")])
def test_a_phone_has_room(out: Path, chromium: Any, scheme: str, which: str) -> None:  # noqa: F811
    folder = out if which == "toys" else Path(__file__).parents[2] / "docs" / "report-zh-dev"
    tab = chromium.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
    tab.goto((folder / "report.html").as_uri())
    assert not is_too_wide(tab)
    if which == "toys":  # 62 prompts take half a minute, and have the same marks
        assert grave(tab) == []
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 100) == (scheme == "dark")
