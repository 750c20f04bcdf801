"""The cloud dies, the gateway refuses, the connection breaks, the user stops: what is shown, what is kept."""

import threading
from typing import Any

import pytest

from .browsing import Pages, answered, ask, expect, settled
from .fake_gateway import CUT, FakeGateway, Refusal, Step, finish, mistake, plain_reply, record, run, wait_for

pytestmark = pytest.mark.browser
GONE = "The cloud at localhost:7373 is gone; going on alone."


def test_the_cloud_dies_and_comes_back(page: Any, fake: FakeGateway) -> None:
    dead, back = threading.Event(), threading.Event()
    fake.replies = [[
        run("One ", "accepted", 0, record=record(0)), dead,
        run("two ", "edge-fallback", 1, reason="uncertain", record=record(1, "fallback"), notice=GONE), back,
        run("three.", "accepted", 2, record=record(2), notice="The cloud is back."), finish(),
    ]]  # fmt: skip
    expect(page.locator("#link")).to_have_text("Cloud connected")
    ask(page, "Count")
    expect(page.locator(".text")).to_have_text("One")
    fake.cloud = "down"
    dead.set()
    expect(page.locator(".notices li")).to_have_text([GONE])
    expect(page.locator(".notices")).to_have_attribute("role", "status")
    expect(page.locator("#link")).to_have_text("Cloud gone; gated modes go on alone")
    lost = page.locator(".run.edge-fallback").first
    meaning = "edge-fallback: Drafted by the small model while the cloud was gone. Not checked."
    expect(lost).to_have_attribute("title", meaning)
    assert lost.evaluate("span => getComputedStyle(span).textDecorationStyle") == "dashed"
    fake.cloud = "up"
    back.set()
    settled(page, 1)
    expect(page.locator(".text")).to_have_text("One two three.")
    expect(page.locator("#link")).to_have_text("Cloud connected")


def test_stop_closes_the_connection(page: Any, fake: FakeGateway) -> None:
    for number, stop in enumerate((lambda: page.click("#send"), lambda: page.keyboard.press("Escape"))):
        fake.replies = [[run("Endless", "edge", 0), threading.Event()]]
        ask(page, "Hello")
        expect(page.locator(".text").nth(number)).to_have_text("Endless")
        assert number not in fake.deserted
        expect(page.locator("#send")).to_have_text("Stop")
        stop()
        settled(page, number + 1, "stopped")
        wait_for(lambda number=number: number in fake.deserted)
        expect(page.locator("#send")).to_have_text("Send")


@pytest.mark.parametrize("end, words", [
    (mistake("The cloud was lost for good.", "cloud_lost"), "The cloud was lost for good."),
    (CUT, "The connection broke off before the answer was complete."),
])  # fmt: skip
def test_an_answer_that_breaks_off_can_be_tried_again(page: Any, fake: FakeGateway, end: Step, words: str) -> None:
    fake.replies = [[run("Half", "edge", 0), end], plain_reply("Whole.")]
    answered(page, "Hello", 1, "failed")
    expect(page.locator(".failure")).to_have_text(words)
    expect(page.locator(".text")).to_have_text("Half")
    page.click(".again")
    settled(page, 1)
    expect(page.locator(".text")).to_have_text("Whole.")
    expect(page.locator(".failure")).to_be_hidden()
    assert fake.bodies[0] == fake.bodies[1]
    answered(page, "And?", 2)
    assert fake.bodies[2]["messages"][1] == {"role": "assistant", "content": "Whole."}


def test_a_refused_question_is_kept_and_can_be_tried_again(page: Any, fake: FakeGateway, expected: list[str]) -> None:
    expected += ["400", "ERR_INTERNET_DISCONNECTED"]
    fake.replies = [Refusal(400, "Too long for 4096 tokens."), Refusal(400, "Still too long."), plain_reply("Now.")]
    answered(page, "A long story", 1, "failed")
    expect(page.locator(".failure")).to_have_text("Too long for 4096 tokens.")
    expect(page.locator(".failure")).to_have_attribute("role", "alert")
    expect(page.locator(".said p")).to_have_text(["A long story"])
    page.click(".again")
    expect(page.locator(".failure")).to_have_text("Still too long.")
    page.context.set_offline(True)
    page.click(".again")
    expect(page.locator(".failure")).to_have_text("The gateway cannot be reached.")
    page.context.set_offline(False)
    page.click(".again")
    settled(page, 1)
    assert {body["messages"][0]["content"] for body in fake.bodies} == {"A long story"}


def test_the_key_is_asked_for_and_kept_for_this_tab(open_page: Pages, fake: FakeGateway, expected: list[str]) -> None:
    expected.append("401")
    fake.key = "s3cret"
    page = open_page()
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-why")).to_have_text("The gateway refused that key.")
    page.fill("#key", "s3cret")
    page.keyboard.press("Enter")
    expect(page.locator("#key-dialog")).to_be_hidden()
    answered(page, "Hello")
    assert page.evaluate(
        "[JSON.stringify(sessionStorage), JSON.stringify(localStorage)].map((s) => s.includes('s3cret'))"
    ) == [True, False]
    page.reload()
    expect(page.locator("#mode")).to_have_value("quality")
    expect(page.locator("#key-dialog")).to_be_hidden()
