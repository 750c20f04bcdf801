"""What holds of the page before any gateway that answers: its tests ask only for `gateway`, its address.

Markdown in answers: what it becomes, that each letter keeps its origin, and that hostile text does nothing.
"""

import re
from typing import Any

import pytest

from .browsing import Pages, answered, expect, grave, is_too_wide, reload
from .fake_gateway import FakeGateway, finish, plain_reply, run, wait_for

pytestmark = pytest.mark.browser
LONG = r"""# Reversing a list

A **linked list** is reversed by *turning each pointer*: see [the article](https://example.org/list "x") or https://example.org/a_b，然后继续。

```python
def reverse(head):
    return [*head][::-1]  # **not bold**, and a comment that is much too long for the width of a small phone
```

| step | pointer | cost |
|:-----|:-------:|-----:|
| one | `next` | 1 |
| two | | $O(n)$ |

3. First, keep `previous`.
   - nested *item*
   - [x] done
4. Then move on.

> **注意：**请先保存。他说**“重要”**的话。
> second line

The cost is $a_1 * b_2 * c$ and \(x^2_i\), $5 or $6. A &amp; B, \*not\* arr[i], ~~gone~~.

\[
\sum_{i=1}^{n} x_i * y_i
= b
\]

---
Done."""


HOSTILE = (
    "<img src=/x onerror=alert(1)> & <b>bold</b> <script>alert(2)</script>\n\n[click](javascript:alert(3)) "
    '[too](JaVa\tScript:alert(4)) ![pic](http://evil.example/x.png)\n\n```x"onclick="alert(5)\n<script>alert(6)</script>\n'
)


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


def test_letters_are_shown_in_their_order_do_nothing_and_growing_changes_nothing(page: Any) -> None:
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    assert page.evaluate(_LAW, 400) == []


# Texts made of what means something in Markdown: each becomes harmless elements, its letters in their order, the same
# whether the text was there at once or grew in steps. Returns texts that break this.
_LAW = r"""async (count) => {
  const { Markdown } = await import('/page/markdown.js');
  const bits = [
    '*', '**', '_', '`', '```', '```py\n', '~~', '#', '# ', '> ', '- ', '1. ', '[ ] ', '[', '](', ')', '![', '<', '>',
    '<b>', '<!--', '&amp;', '&#0;', '\\', '$', '$$', '\\(', '\\]', '\n', '\n\n', '\n    ', ' ', '\t', '|', '|-|-|\n',
    '---\n', '===', 'a', 'b c', '中', '，', '“', '🙂', 'https://a.b/c', 'javascript:x', 'x@y.z', 'www.a.b',
    '<img src=/x onerror=alert(1)>', '<a href=javascript:alert(2) id=settings>', '<script>alert(3)</script>', '<style>',
    '<iframe src=//a>', '<svg/onload=alert(4)>', '<math><mi//xlink:href="data:x">', '<form id=settings><input name=x>',
    '[a](javascript:alert(5))', '[a](JaVa\tScript:x)', '[a](java&#115;cript:x)', '![](javascript:x)', '[a](<data:x>)',
    '![a](http://a.b/x.png)', "[a](http://a.b 'x\" onmouseover=\"alert(6)')", '\n```x" onclick="alert(7)\n'];
  let state = 1;
  const random = (below) => { state = (state * 48271) % 2147483647; return state % below; };
  const written = (steps) => {
    const body = document.createElement('div');
    const places = [];
    const markdown = new Markdown(body, (element, at, letters) => {
      places.push(at);
      element.append(letters);
    });
    for (const text of steps) { places.length = 0; markdown.show(text, true); }
    return [body, places];
  };
  const broken = [];
  for (let at = 0; at < count; at += 1) {
    const text = Array.from({ length: 2 + random(40) }, () => bits[random(bits.length)]).join('');
    const [whole, places] = written([text]);
    const isOrdered = places.every((place, at) => place >= (places[at - 1] ?? 0) && place < text.length);
    const cuts = [random(text.length + 1), random(text.length + 1)].sort((a, b) => a - b);
    const [grown] = written([...cuts.map((cut) => text.slice(0, cut)), text]);
    const kinds = 'img, script, style, iframe, b, i, svg:not(.icon), math, form, input, '
      + 'a:not([href^="https:"], [href^="http:"], [href^="mailto:"])';
    const names = [...whole.querySelectorAll('*')].flatMap((each) => each.getAttributeNames());
    const isQuiet = !names.some((name) => /^(on.*|id|src|style|name)$/.test(name)) && !whole.querySelector(kinds);
    if (!isOrdered || grown.innerHTML !== whole.innerHTML || !isQuiet) broken.push(text);
  }
  return broken;
}"""


def test_what_markdown_becomes_and_that_each_word_keeps_its_token(page: Any, fake: FakeGateway) -> None:
    """Every word of the text is a token of its own; marks, addresses and markers of lists belong to words too."""
    words = re.findall(r"\s*\S+", LONG)
    runs = [run(word, "edge", at, token_ids=[at], token_chars=[len(word)]) for at, word in enumerate(words)]
    fake.replies = [[*runs, finish()]]
    answered(page, "Hello")
    text = page.locator(".text")
    told = text.locator(".run").evaluate_all("all => all.map((run) => [run.dataset.token, run.textContent])")
    assert len(told) > 80
    assert [[at, shown] for at, shown in told if shown.strip() not in words[int(at)] and shown != "☑"] == []
    expect(text.locator("h4")).to_have_text("Reversing a list")
    expect(text.locator("strong")).to_have_text(["linked list", "注意：", "“重要”"])
    expect(text.locator("em")).to_have_text(["turning each pointer", "item"])
    expect(text.locator("del")).to_have_text("gone")
    expect(text.locator("pre code")).to_have_text(LONG[LONG.index("def") : LONG.index("\n```\n\n|")])
    expect(text.locator("th")).to_have_text(["step", "pointer", "cost"])
    expect(text.locator("td")).to_have_text(["one", "next", "1", "two", "", "$O(n)$"])
    sides = text.locator("th").evaluate_all("all => all.map((cell) => getComputedStyle(cell).textAlign)")
    assert [side.removeprefix("-webkit-") for side in sides] == ["left", "center", "right"]
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.locator("ol")).to_have_attribute("start", "3")
    expect(text.locator("ol ul li")).to_have_text(["nested item", "☑ done"])
    expect(text.locator("blockquote p")).to_contain_text("second line")
    expect(text).to_contain_text(r"$a_1 * b_2 * c$ and \(x^2_i\), $5 or $6. A & B, *not* arr[i]")
    expect(text).to_contain_text("\\[ \\sum_{i=1}^{n} x_i * y_i = b \\]")
    links = text.locator("a").evaluate_all("all => all.map((a) => [a.href, a.textContent, a.target, a.rel])")
    safe = ["_blank", "noopener noreferrer"]
    assert links == [
        ["https://example.org/list", "the article", *safe],
        ["https://example.org/a_b", "https://example.org/a_b", *safe],
    ]
    expect(text.locator("hr")).to_have_count(1)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text.get_by_role("button", name="Copy").click()
    expect(text.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").startswith("def reverse(head):\n    return [*head]")
    assert not grave(page)
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 360, "height": 740})
    assert not grave(page) and not is_too_wide(page)


def test_hostile_text_is_shown_and_does_nothing(page: Any, fake: FakeGateway) -> None:
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    fake.replies = [plain_reply(HOSTILE)]
    answered(page, "<i>Hello</i> **there**")
    expect(page.locator(".said p")).to_have_text("<i>Hello</i> **there**")
    for part in ("<img src=/x onerror=alert(1)> & <b>bold</b> <script>alert(2)</script>", "click [too]"):
        expect(page.locator(".text")).to_contain_text(part)
    hrefs = page.locator(".text a").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert hrefs == ["http://evil.example/x.png"]  # the picture is a link
    expect(page.locator(".text pre")).to_have_text("<script>alert(6)</script>")  # in a fence that is still open


_HARD = (">", "- ", "[", "*a ", "`", "$", "\\(", "<!--", "|-")


def test_text_that_is_hard_to_read_is_read_in_time(page: Any, fake: FakeGateway) -> None:
    for number, text in enumerate((*(part * 3000 for part in _HARD), "|" * 3000 + "\n" + "|-" * 3000), 1):
        fake.replies = [plain_reply(text + "\n\nthe **end**")]
        answered(page, "Hello", number)
        expect(page.locator(".text").last).to_contain_text("the")
