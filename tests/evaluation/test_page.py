"""The page as a browser sees it: no error, no request, every prompt, and room for a phone."""

import html
import re
from pathlib import Path
from typing import Any

import pytest

from ..comparing import PROMPTS, compared, generations
from ..gateway.page.browsing import chromium, grave, is_too_wide  # noqa: F401

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modes = "edge,cloud,lossless,quality,gate=entropy:1.5;k=4"
    return compared(tmp_path_factory.mktemp("page"), modes=modes, tokens=40)


def letters(text: str) -> str:
    """What is left without spaces, marks, and the control characters that toys write."""
    return "".join(filter(str.isalnum, text))


def test_every_text_is_there_and_nothing_is_asked_or_complained_of(out: Path, chromium: Any) -> None:  # noqa: F811
    page, told = (out / "report.html").as_uri(), list[str]()
    tab = chromium.new_page()
    tab.on("console", lambda message: told.append(message.text))
    tab.on("pageerror", lambda error: told.append(str(error)))
    tab.on("request", lambda request: told.append(request.url))
    tab.goto(page)
    assert [each for each in told if not each.startswith("data:")] == [page]
    dom = tab.content()
    assert "<script" not in dom and all(f"<{tag}" in dom for tag in ("svg", "table", "details"))
    shown = html.unescape(re.sub("<[^>]*>", "", dom))
    for prompt in PROMPTS:
        assert prompt["prompt"] in shown
    together = letters(shown)
    for line in generations(out):
        assert letters("".join(line["pieces"])) in together


@pytest.mark.parametrize(("which", "scheme"), [("toys", "light"), ("toys", "dark"), ("published", "light")])
def test_a_phone_needs_no_sideways_scrolling_and_words_stand_out(
    out: Path, chromium: Any, scheme: str, which: str  # noqa: F811
) -> None:  # fmt: skip
    folder = out if which == "toys" else Path(__file__).parents[2] / "docs" / "report-zh-dev"
    tab = chromium.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
    tab.goto((folder / "report.html").as_uri())
    assert not is_too_wide(tab)
    if which == "toys":  # 62 prompts take half a minute, and have the same marks
        assert grave(tab) == []
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 100) == (scheme == "dark")
