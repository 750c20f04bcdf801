"""The page as a browser sees it: no error, no request, every prompt, Chinese and Latin in glyphs."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ..comparing import PROMPTS, compared, generations

CHROMIUM = Path("/usr/bin/chromium")
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--v=0",
]  # fmt: skip

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no Chromium")]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modes = "edge,cloud,lossless,quality,gate=entropy:1.5;k=4;eager"
    return compared(tmp_path_factory.mktemp("page"), modes=modes, tokens=40)


@pytest.fixture(scope="module")
def page(out: Path) -> Path:
    return out / "report.html"


def browse(page: Path, profile: Path, *args: str) -> tuple[str, list[str]]:
    """(what the browser prints, lines of its console); the profile is a new one each time."""
    command = [str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", *args, page.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    finally:
        shutil.rmtree(profile, ignore_errors=True)
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if ":CONSOLE" in line]
    return done.stdout.decode(), console


class Shown(HTMLParser):
    """The text of a page, scripts and styles apart, and the kinds of its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._hidden = tag in ("script", "style", "title")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data


def letters(text: str) -> str:
    """What is left without spaces, marks, and the control characters that toys write."""
    return "".join(filter(str.isalnum, text))


def requests_of(page: str) -> list[str]:
    """Addresses that a browser would ask: what is in src, href, url() and @import, data and anchors apart."""
    found = re.findall(r"""(?:\bsrc|\bsrcset|\bhref|\bdata|\baction)\s*=\s*["']?([^"'\s>]+)""", page)
    found += re.findall(r"""url\(\s*["']?([^"')]+)""", page) + re.findall(r"""@import\s+["']([^"']+)""", page)
    return [address for address in found if not address.startswith(("data:", "#"))]


def test_the_console_is_silent_and_every_text_is_there(page: Path, out: Path, tmp_path: Path) -> None:
    dom, console = browse(page, tmp_path / "profile", "--dump-dom")
    assert console == []
    shown = Shown(dom)
    for prompt in PROMPTS:
        assert prompt["prompt"] in shown.text
    together = letters(shown.text)
    for line in generations(out):
        assert letters("".join(line["pieces"])) in together
    assert {"svg", "table", "details"} <= set(shown.tags)
    assert "script" not in shown.tags and "b" in shown.tags


def test_the_page_asks_no_network(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    assert requests_of(content) == []
    # What else begins with http are names of XML kinds, which nobody fetches.
    named = re.sub(r"""(?:xmlns(:\w+)?|rdf:resource)="https?://[^"]+\"""", "", content)
    assert "://" not in named


def test_chinese_and_latin_are_drawn_as_glyphs(page: Path, tmp_path: Path) -> None:
    """A text without a font is drawn as boxes, all alike: so two texts of one length give two pictures."""
    fonts = subprocess.run(["fc-list", ":lang=zh"], capture_output=True, text=True, check=False).stdout
    if not fonts.strip():
        pytest.skip("no font on this machine has Chinese characters")
    style = re.search(r"<style>.*?</style>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert style
    pictures = set()
    for name, text in enumerate(["温柔语速", "公园天气", "Speculate", "Xylophone", "\U000e1234" * 4]):
        sample, picture = tmp_path / f"{name}.html", tmp_path / f"{name}.png"
        sample.write_text(f"<meta charset=utf-8>{style.group()}<p>{text}", encoding="utf-8")
        browse(sample, tmp_path / "profile", f"--screenshot={picture}", "--window-size=600,400")
        pictures.add(picture.read_bytes())
    assert len(pictures) == 5


def test_the_whole_page_can_be_drawn(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    _, console = browse(page, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1200,3000")
    assert console == []
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 50_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["toys", "published"])
def test_a_phone_needs_no_sideways_scrolling_and_words_stand_out(page: Path, scheme: str, which: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    shown = page if which == "toys" else Path(__file__).parents[2] / "docs" / "report-zh-dev" / "report.html"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 360, "height": 800}, color_scheme=scheme)
        tab.goto(shown.as_uri())
        widths = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        colours = tab.evaluate(_COLOURS)
        browser.close()
    assert widths == [360, 360]
    paper = luminance(colours[0][1])
    assert (paper < 0.05) == (scheme == "dark")
    for ink, ground in colours:
        assert contrast(ink, ground) >= 4.5, (ink, ground)


# Ink and paper of the page, the answer, quiet words, heads and first columns of tables, and each origin of a token.
_COLOURS = """
[...document.querySelectorAll("body, .answer p, .quiet, thead th, td:first-child, .legend i")].map(element => {
  const ground = from => { const colour = getComputedStyle(from).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && from.parentElement ? ground(from.parentElement) : colour; };
  return [getComputedStyle(element).color, ground(element)]; })"""


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it, of rgb(r, g, b)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
