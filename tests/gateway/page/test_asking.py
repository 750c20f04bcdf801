"""A token that is asked, and the branch that begins at another one: over toys, by the keyboard alone."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

import skydraft
from skydraft.engines.toy import open_toy
from skydraft.gateway.pair import Pair

from ...serving import serving
from ...thinking.scripts import thinking_toy
from ..running import gateway as running_gateway
from ..running import over, toy_pair
from .browsing import Pages, answered, expect, grave, is_too_wide, reload, settled, wired
from .fake_gateway import wait_for
from .test_kept import is_all_kept

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with running_gateway(toy_pair()) as running:
        yield running.url


def written(page: Any, mode: str, temperature: float = 0, **more: Any) -> str:
    """The text of an answer of 24 tokens."""
    values = json.dumps({"mode": mode, "temperature": temperature, "maxTokens": 24, "rendered": False} | more)
    page.evaluate("values => localStorage.setItem('skydraft.settings', values)", values)
    reload(page)
    page.locator("#mode option").first.wait_for(state="attached")
    answered(page, "语速")
    return str(page.locator(".text").inner_text())


def go_to(page: Any, at: int, key: str = "Enter") -> None:
    """Open a token of the first answer by keys alone."""
    page.locator(".text").first.focus()
    page.keyboard.press("Tab")
    focused = page.locator(".text .run:focus")
    steps = at - int(focused.get_attribute("data-token"))  # the arrows begin where they were
    for _ in range(abs(steps)):
        page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")
    expect(focused).to_have_attribute("data-token", str(at))
    expect(focused).to_have_attribute("role", "button")
    page.keyboard.press(key)
    expect(page.locator("#token-title")).to_be_focused()


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_token_that_was_there_gives_the_same_text_and_another_gives_a_branch_that_is_kept(
    page: Any, temperature: float
) -> None:
    text = written(page, "lossless", temperature)
    go_to(page, 5)
    own = page.locator("#token-target button", has_text="stands here")
    expect(own).to_have_count(1)
    own.focus()
    page.keyboard.press("Enter")
    settled(page, 2)
    texts = page.locator(".text")
    assert texts.all_inner_texts() == [text, text]
    expect(texts.nth(1).locator(".run")).to_have_count(texts.first.locator(".run").count())
    assert texts.nth(1).locator(".chosen").count() == 1
    go_to(page, 5)
    other = page.locator("#token-draft button").filter(has_not_text="stands here").first
    shown = other.locator(".mono").inner_text()
    other.focus()
    page.keyboard.press("Enter")
    settled(page, 3)
    before = texts.all_inner_texts()
    assert before[:2] == [text, text] and before[2] != text and before[2].startswith(text[:5] + shown[:1])
    expect(page.locator(".name").nth(2)).to_have_text(f"lossless, going on from {shown}")
    expect(page.locator(".is-chosen .name")).to_have_text(f"lossless, going on from {shown}")
    wait_for(lambda: is_all_kept(page))
    reload(page)
    settled(page, 3)
    assert texts.all_inner_texts() == before
    answered(page, "快", 4)  # what follows goes on from the branch
    expect(page.locator(".said p")).to_have_text(["语速", "快"])


def test_who_wrote_it_and_what_it_cost_is_told_and_where_the_target_says_nothing(
    open_page: Pages, expected: list[str]
) -> None:
    page, facts = open_page(), "#token-facts"
    with serving(open_toy("toy")) as server, over(skydraft.connect(server.address, require=True)) as remote:
        expected.append(remote.url)
        page.goto(remote.url)
        wired(page)
        written(page, "lossless")
        go_to(page, 0)  # with its own call: what follows may come without one
        for told in ("Round ", "bytes sent"):
            expect(page.locator(facts)).to_contain_text(told)
        expect(page.locator("#token-target button")).not_to_have_count(0)
        page.keyboard.press("Escape")
        expect(page.locator('.text .run[data-token="0"]')).to_be_focused()
        page.click("#new")
        written(page, "edge")
        go_to(page, 2)
        expect(page.locator(facts)).to_contain_text("Written by the small model alone.")
        expect(page.locator("#token-target")).to_have_text(
            "The large model did not check this token. It is not asked now, so that it sees no more of the text."
        )
        page.close()  # before its gateway


def test_a_target_on_this_machine_is_asked_of_any_token_by_the_mouse_too_and_what_it_refuses_is_told(
    page: Any, expected: list[str]
) -> None:
    expected.append("status of 409")
    written(page, "edge")
    go_to(page, 2)
    expect(page.locator("#token-target button")).not_to_have_count(0)
    page.click("#close-token")
    expect(page.locator("#token")).to_be_hidden()
    refusal = {"error": {"message": "It tells none.", "type": "x", "param": None, "code": None}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=409, json=refusal)
               if "skydraft-cloud" in route.request.post_data else route.continue_())  # fmt: skip
    page.locator('.text .run[data-token="3"]').click()
    expect(page.locator("#token-target")).to_have_text("Unknown: It tells none.")
    expect(page.locator("#token-draft .likely")).to_be_visible()


def test_on_a_small_phone_it_is_sound_and_fits_and_a_branch_is_brought_into_view(open_page: Pages) -> None:
    page = open_page(color_scheme="dark", locale="zh-CN", viewport={"width": 360, "height": 740})
    written(page, "quality", language="", maxTokens=400)
    go_to(page, 3)
    expect(page.locator("#token-draft .likely")).to_be_visible()
    expect(page.locator("#close-token")).to_be_in_viewport(ratio=1)  # though the list is longer than the screen
    assert grave(page) == [] and not is_too_wide(page)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    settled(page, 2)
    tops = page.locator(".answer").evaluate_all("all => all.map(each => each.getBoundingClientRect().top)")
    assert tops[0] < tops[1] < 370, "it is in the upper half, or it is longer and its end is shown"
    assert grave(page) == [] and not is_too_wide(page)


def test_after_a_thought_the_text_goes_on_with_the_same_thought(open_page: Pages, expected: list[str]) -> None:
    page = open_page()
    with running_gateway(Pair(thinking_toy(0.2, 6), thinking_toy(max_sequences=6))) as thinking:
        expected.append(thinking.url)
        page.goto(thinking.url)
        wired(page)
        text = written(page, "lossless")
        thought = page.locator(".thought-text").text_content()
        for count, answer, place in ((2, 0, 6), (3, 1, 8)):  # a branch of the branch too
            page.locator(".text").nth(answer).locator(".run").nth(place).click()
            page.locator("#token-target button", has_text="stands here").click()
            settled(page, count)
        wait_for(lambda: is_all_kept(page))
        reload(page)
        settled(page, 3)
        assert thought and page.locator(".thought-text").all_text_contents() == [thought] * 3
        assert page.locator(".text").all_inner_texts() == [text] * 3
        page.close()  # before its gateway


def test_a_part_of_a_character_is_chosen_and_what_it_completes_is_asked(page: Any) -> None:
    """Its text comes with the tokens after it; each token after it is still asked with all ids before it."""
    written(page, "edge")
    part = {"id": open_toy("toy").vocab.encode("🙂")[0], "token": "bytes:\\xf0", "logprob": -1.0, "top_logprobs": []}
    told = {"skydraft": {"logprobs": {"draft": [part]}}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(json=told), times=1)
    go_to(page, 3)
    page.locator("#token-draft button").first.click()
    settled(page, 2)
    with page.expect_request(lambda request: request.method == "POST") as asked:
        page.locator(".text").nth(1).locator('.run[data-token="6"]').click()
    ids = asked.value.post_data_json["skydraft"]["continue_ids"]
    assert len(ids) == 6 and ids[3] == part["id"]


def test_where_tools_may_be_called_no_token_can_be_asked(page: Any) -> None:
    written(page, "edge", tools='[{"name": "look"}]')
    assert page.locator(".text .run").count() and not page.locator(".text .run[data-token]").count()
