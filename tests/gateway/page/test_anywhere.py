"""What holds of the page before any gateway that answers: it asks only for `gateway`, its address."""

from typing import Any

import pytest

from .browsing import Pages, answered, expect, grave, is_too_wide, reload
from .fake_gateway import wait_for

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("theme", "locale"), [("light", "en-US"), ("dark", "zh-CN")])
def test_axe_finds_nothing_grave_and_nothing_is_wider_than_a_small_phone(
    open_page: Pages, theme: str, locale: str
) -> None:
    page = open_page(color_scheme=theme, locale=locale)
    wide = page.viewport_size

    def is_sound() -> bool:
        found = grave(page)
        page.set_viewport_size({"width": 360, "height": 740})
        fits = not is_too_wide(page)
        page.set_viewport_size(wide)
        return found == [] and fits

    assert is_sound()
    answered(page, "Hello")
    page.select_option("#secondMode", "edge")
    answered(page, "x" * 200, 3)
    assert is_sound()
    for opens in ("#open-saved", "#open-settings"):
        page.click(opens)
        assert is_sound()
        page.keyboard.press("Escape")
    page.set_viewport_size({"width": 360, "height": 740})
    page.click("#strip-line")
    expect(page.locator("#figures")).to_be_visible()
    assert not is_too_wide(page)


@pytest.mark.parametrize(("locale", "lang", "other"), [("en-GB", "en", "zh-CN"), ("zh-TW", "zh-CN", "en")])
def test_the_language_of_the_browser_and_the_other(open_page: Pages, locale: str, lang: str, other: str) -> None:
    page = open_page(locale=locale)
    shown = page.locator("html")
    expect(shown).to_have_attribute("lang", lang)
    before = page.locator("body").inner_text()
    page.click("#language")
    expect(shown).to_have_attribute("lang", other)
    assert page.locator("body").inner_text() != before
    reload(page)
    expect(shown).to_have_attribute("lang", other)


def test_the_keyboard_reaches_every_control_in_sight(page: Any) -> None:
    page.evaluate("document.activeElement.blur()")
    focused = "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
    reached = {}
    for _ in range(20):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(focused)
        reached[name] = outline
    del reached["question"]  # its box has the outline
    controls = ["new", "open-saved", "language", "theme", "open-settings", "mode", "secondMode", "send"]
    assert [reached.get(name, "not reached") for name in controls] == ["solid"] * len(controls)


def test_enter_that_takes_a_candidate_does_not_send(page: Any) -> None:
    page.focus("#question")
    keyboard = page.context.new_cdp_session(page)
    keyboard.send("Input.imeSetComposition", {"text": "ni hao", "selectionStart": 6, "selectionEnd": 6})
    seen = "document.addEventListener('keydown', (event) => { window.composing = event.isComposing; })"
    page.evaluate(seen)
    page.keyboard.press("Enter")
    assert page.evaluate("window.composing") is True
    expect(page.locator(".turn")).to_have_count(0)
    page.fill("#question", "你好")
    page.keyboard.press("Enter")
    assert page.evaluate("window.composing") is False
    expect(page.locator(".turn")).to_have_count(1)


def test_what_is_forbidden_would_be_noticed(page: Any, problems: list[str], expected: list[str]) -> None:
    parts = ["style-src", "require-trusted-types-for", "connect-src", "loud"]
    expected += [*parts, "TrustedHTML", "127.0.0.2:9"]
    page.evaluate("document.body.setAttribute('style', 'color: red')")
    page.evaluate("try { document.body.innerHTML = '<p>'; } catch {}")
    page.evaluate("fetch('http://127.0.0.2:9/').catch(() => {})")
    page.evaluate("console.error('loud')")

    def is_noticed() -> bool:
        page.evaluate("0")  # lets what the page says be heard
        return all(any(part in each for each in problems) for part in parts)

    wait_for(is_noticed)
