"""Words and files of the page: both languages say the same things, and nothing is said in vain."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .browsing import expect
from .fake_gateway import PAGE

pytestmark = pytest.mark.browser


@pytest.fixture
def words(page: Any) -> dict[str, dict[str, str]]:
    return dict(page.evaluate("import('/page/words.js').then((module) => module.WORDS)"))


def test_both_languages_have_the_same_keys(words: dict[str, dict[str, str]]) -> None:
    assert words["en"].keys() == words["zh"].keys()
    for key, english in words["en"].items():
        assert english and words["zh"][key]
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", words["zh"][key])), key


def test_every_word_of_the_markup_is_known_and_every_known_word_is_used(words: dict[str, dict[str, str]]) -> None:
    sources = {
        path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir() if path.suffix in (".js", ".html")
    }
    marked = set(re.findall(r'data-word(?:-\w+)?="([^"]+)"', sources["index.html"]))
    assert marked and marked <= words["en"].keys()
    del sources["words.js"]
    text = "\n".join(sources.values())
    built = ("mode.", "about.", "origin.", "meaning.", "reason.", "outcome.", "link.", "example.", "figure.")
    unused = [
        key
        for key in words["en"]
        if not key.startswith(built) and not re.search(rf"""['"]{re.escape(key)}['"]""", text)
    ]
    assert [key for key in unused if key not in ("copy", "regenerate", "choose")] == []


def test_no_element_is_left_without_its_words(page: Any) -> None:
    expect(page.locator("#mode")).to_have_value("quality")
    empty = "[...document.querySelectorAll('[data-word]')].filter((e) => !e.textContent).map((e) => e.dataset.word)"
    assert page.evaluate(empty) == []
    bare = "[...document.querySelectorAll('[data-word-label]')].filter((e) => !e.getAttribute('aria-label')).length"
    assert page.evaluate(bare) == 0


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function|document\.write", text), (
            path.name
        )
    markup = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", markup)
