"""Conversation, origins, modes, settings, figures: what is sent, and what is shown of the answer; and the words."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from skydraft.gateway import app
from skydraft.origins import LOOKS

from .browsing import answered, ask, expect, grave, settled
from .fake_gateway import MODES, FakeGateway, finish, mixed_reply, plain_reply, record, run, wait_for

pytestmark = pytest.mark.browser
PAGE = Path(app.__file__).parent / "page"
ORIGINS = list(LOOKS)
ANSWER = "The sea turns to copper as the sun sinks."


def test_the_whole_history_is_sent_and_mode_and_settings_are_remembered(page: Any, fake: FakeGateway) -> None:
    fake.replies = [mixed_reply(), plain_reply("Yes.")]
    assert page.locator("#mode option").evaluate_all("all => all.map((one) => one.value)") == list(MODES)
    answered(page, "Describe a sunset.")
    page.select_option("#mode", "edge")
    answered(page, "Was that\nall?", 2)
    first, second = fake.bodies
    assert first["messages"] == [{"role": "user", "content": "Describe a sunset."}]
    said = {"role": "assistant", "content": ANSWER}
    assert second["messages"] == [*first["messages"], said, {"role": "user", "content": "Was that\nall?"}]
    assert first["stream"] is True and first["stream_options"] == {"include_usage": True}
    assert first["model"] == "skydraft-quality" and isinstance(first["seed"], int)
    assert second["model"] == "skydraft-edge"
    expect(page.locator(".text")).to_have_text([ANSWER, "Yes."])
    expect(page.locator(".name")).to_have_text(["quality", "edge"])
    page.click("#open-settings")
    page.fill("#temperature", "1.2")
    page.fill("#max-tokens", "77")
    page.fill("#system", "Be brief.")
    page.click("#close-settings")
    page.reload()
    expect(page.locator("#mode")).to_have_value("edge")
    page.click("#new")
    expect(page.locator("#welcome")).to_be_visible()
    answered(page, "Hello")
    page.uncheck("#coloured")
    assert (fake.bodies[2]["temperature"], fake.bodies[2]["max_tokens"]) == (1.2, 77)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert fake.bodies[2]["messages"] == messages  # a new conversation knows nothing of the old
    assert page.locator(".text .run").first.evaluate("span => getComputedStyle(span).textDecorationLine") == "none"


def test_each_origin_has_a_title_a_colour_and_a_line_of_its_own_and_arrows_tell_them(
    page: Any, fake: FakeGateway
) -> None:
    fake.replies = [[run(f"{origin} ", origin, 3, reason="uncertain") for origin in ORIGINS] + [finish()]]
    answered(page, "Hello")
    spans = page.locator(".text .run")
    assert spans.evaluate_all("spans => spans.map((span) => span.dataset.origin)") == ORIGINS
    titles = spans.evaluate_all("spans => spans.map((span) => span.title)")
    assert titles[0] == "accepted. Round 3. Sent to the large model: the draft was unsure."
    assert len(set(titles)) == 7 and all("Round 3" in title for title in titles)
    look = """spans => spans.map((span) => {
        const { color, textDecorationLine, textDecorationStyle, textDecorationThickness } = getComputedStyle(span);
        return [color, textDecorationLine === 'none' ? 'none' : textDecorationStyle + textDecorationThickness];
    })"""
    colours, lines = zip(*spans.evaluate_all(look), strict=True)
    assert len(set(colours)) == 7
    assert len(set(lines)) == 7
    expect(page.locator("#legend dd")).to_have_count(7)
    legend = page.locator("#legend .run").evaluate_all(look)
    assert [tuple(entry) for entry in legend] == list(zip(colours, lines, strict=True))
    assert page.locator('.text .run[tabindex="0"]').count() == 1
    spans.first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_have_text(titles[1])
    expect(spans.nth(1)).to_be_focused()


def test_the_answer_is_shown_while_it_comes_and_announced_once(page: Any, fake: FakeGateway) -> None:
    first, rest = threading.Event(), threading.Event()
    fake.replies = [
        [first, run("Half ", "skipped", 0, tokens=2, record=record(0, "skipped")), rest, *plain_reply("done.")]
    ]
    ask(page, "Hello")
    expect(page.locator(".state")).to_have_text("Waiting for the first token …")
    first.set()
    expect(page.locator(".text")).to_have_text("Half")
    expect(page.locator("#announce")).to_have_text("")
    expect(page.locator('[data-figure="tokens"]').first).to_have_text("2")
    rest.set()
    settled(page, 1)
    expect(page.locator("#announce")).to_have_text("Answer ready, 5 tokens.")


def test_the_strip_adds_up(page: Any, fake: FakeGateway) -> None:
    uncounted = [run("Yes.", "accepted", 0, tokens=3, record=record(0, num_audited=2, num_agreed=1)), finish()]
    fake.replies = [mixed_reply(), uncounted]
    answered(page, "Hello")

    def figures(name: str) -> list[str]:
        return list(page.locator(f'[data-figure="{name}"]').all_inner_texts())

    expect(page.locator('[data-figure="speed"]').first).to_have_text("18.4")
    assert figures("written") == ["20%"] * 2
    assert (figures("calls"), figures("agreement"), figures("tokens")) == (["0.20"] * 2, ["90% (9/10)"] * 2, ["10"] * 2)
    shares = "Share of tokens by origin: accepted 60%, recovered 10%, bonus 10%, skipped 20%."
    expect(page.locator("#shares .bar")).to_have_attribute("aria-label", shares)
    kinds = page.locator("#charts .round").evaluate_all("bars => bars.map((bar) => bar.classList[1])")
    assert kinds == ["skipped", "verified", "verified"]
    heights = page.locator("#charts .round").evaluate_all("bars => bars.map((bar) => bar.getBBox().height)")
    assert heights[1] == heights[2] > heights[0]
    fills = page.locator("#outcomes .round").evaluate_all("bars => bars.map((bar) => getComputedStyle(bar).fill)")
    assert len(set(fills)) == len(fills) == 4
    answered(page, "And?", 2)
    expect(page.locator('[data-figure="tokens"]')).to_have_text(["3", "13"])
    assert (figures("calls"), figures("agreement")) == (["0.33", "0.23"], ["50% (1/2)", "83% (10/12)"])
    assert figures("written") == ["33%", "23%"]


def test_a_receipt_says_what_the_cloud_has_seen_and_marks_it(page: Any, fake: FakeGateway) -> None:
    end = finish()
    seen = [{"tokens": (1, 3), "chars": (3, 6)}]  # characters, of which the face is one and two units of JavaScript
    end["skydraft"]["receipt"] = {"servers": ["box:7373"], "prompt_tokens": 9, "seen": seen, "calls": 1, "cost": None,
                                  "rejected": [{"at": 3, "token_id": 5, "text": "x"}], "bytes_up": 1234}  # fmt: skip
    here = {"servers": [], "prompt_tokens": 0, "seen": [], "calls": 1, "cost": None, "rejected": [], "bytes_up": 0}
    own = finish()
    own["skydraft"]["receipt"] = here
    fake.replies = [[run("🙂a *", "skipped", 0), run("bc* d", "accepted", 1), end], [run("a", "edge", 0), own]]
    answered(page, "Hello")
    told = "box:7373 saw 9 prompt tokens, 2 tokens of this answer and 1 of rejected drafts (1.2 kB)"
    expect(page.locator(".meta")).to_contain_text(told)
    marks = "all => all.map((span) => [span.textContent, span.classList.contains('seen')])"
    assert page.locator(".text .run").evaluate_all(marks) == [["🙂a ", False], ["bc", True], [" d", False]]
    page.check("#seen")
    paper = "all => all.map((span) => getComputedStyle(span).backgroundColor)"
    clear, marked, also_clear = page.locator(".text .run").evaluate_all(paper)
    assert clear == also_clear != marked
    assert not grave(page)
    answered(page, "And?", 2)
    expect(page.locator(".meta").nth(1)).to_contain_text("nothing left this device")


@pytest.mark.parametrize(
    ("tokens_in", "cost", "says"),
    [(90, 0.0021, "wrote 4 tokens for 0, the cloud 2 for 0.00210 (it read 90, 30 of them cached, and wrote 3)"),
     (90, None, "this device wrote 4 tokens, the cloud 2 (it read 90"), (0, None, None)],
)  # fmt: skip
def test_the_page_says_what_each_model_wrote_and_cost(
    page: Any, fake: FakeGateway, tokens_in: int, cost: float | None, says: str | None
) -> None:
    end = finish()
    cloud = {"completion_tokens": 2, "tokens_in": tokens_in, "tokens_hit": 30, "tokens_out": 3, "cost": cost}
    end["skydraft"]["usage"] = {"edge": {"completion_tokens": 4, "cost": 0}, "cloud": cloud}
    fake.replies = [[run("a", "skipped", 0), end]]
    answered(page, "Hello")
    meta = expect(page.locator(".meta"))
    meta.to_contain_text(says) if says else meta.not_to_contain_text("this device wrote")


def test_two_modes_at_once_and_going_on_with_one(page: Any, fake: FakeGateway) -> None:
    go = threading.Event()
    fake.by_model = {
        "skydraft-quality": [go, *plain_reply("Left.", "accepted")],
        "skydraft-cloud": [go, *plain_reply("Right.", "cloud")],
    }
    page.click("#compare")
    page.select_option("#second-mode", "cloud")
    ask(page, "Hello")
    wait_for(lambda: len(fake.bodies) == 2)  # neither has been answered yet
    go.set()
    settled(page, 2)
    assert fake.bodies[0]["seed"] == fake.bodies[1]["seed"]
    assert fake.bodies[0]["messages"] == fake.bodies[1]["messages"]
    expect(page.locator(".text")).to_have_text(["Left.", "Right."])
    expect(page.locator("#figures thead th")).to_have_text(["quality", "cloud"])
    left, right = (answer.bounding_box() for answer in page.locator(".answer").all())
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    page.set_viewport_size({"width": 360, "height": 740})
    left, right = (answer.bounding_box() for answer in page.locator(".answer").all())
    assert left["x"] == right["x"] and left["y"] + left["height"] <= right["y"]
    page.locator(".choose").nth(1).click()
    page.click("#compare")
    answered(page, "And?", 3)
    assert fake.bodies[2]["messages"][1] == {"role": "assistant", "content": "Right."}


def test_every_word_of_the_markup_is_known_in_both_languages(page: Any) -> None:
    words = page.evaluate("import('/page/words.js').then((module) => module.WORDS)")
    assert words["en"].keys() == words["zh"].keys()
    for key, english in words["en"].items():
        assert english and words["zh"][key]
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", words["zh"][key])), key
    markup = (PAGE / "index.html").read_text(encoding="utf-8")
    marked = set(re.findall(r'data-word(?:-\w+)?="([^"]+)"', markup))
    assert marked and marked <= words["en"].keys()


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function|document\.write", text), (
            path.name
        )
    markup = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", markup)
