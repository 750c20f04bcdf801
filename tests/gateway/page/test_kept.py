"""What fails or is stopped, and what the browser keeps: reload, list, delete, questions that are edited."""

import threading
from contextlib import closing
from typing import Any

import pytest

from .browsing import Pages, answered, ask, drawn, expect, reload, settled, wired
from .fake_gateway import CUT, FakeGateway, Refusal, finish, mistake, mixed_reply, plain_reply, record, run, wait_for
from .test_conversation_and_speech import ANSWER, calling

pytestmark = pytest.mark.browser
GONE = "The cloud at localhost:7373 was lost; going on without it."


def test_an_answer_is_shown_while_it_comes_and_the_cloud_dies_and_comes_back(page: Any, fake: FakeGateway) -> None:
    first, dead, back = (threading.Event() for _ in range(3))
    fake.replies = [[
        first, run("One ", "accepted", 0, tokens=2, record=record(0)), dead,
        run("two ", "edge-fallback", 1, reason="uncertain", record=record(1, "fallback"), notice=GONE), back,
        run("three.", "accepted", 2, record=record(2), notice="The cloud is back."), finish(),
    ]]  # fmt: skip
    text, link, announced = page.locator(".text"), page.locator("#link"), page.locator("#announce")
    expect(link).to_have_text("Cloud connected")
    ask(page, "Count")
    expect(page.locator(".state")).to_have_text("Waiting …")
    first.set()
    expect(text).to_have_text("One")
    expect(page.locator('[data-figure="tokens"]').first).to_have_text("2")
    fake.cloud = "down"
    dead.set()
    expect(page.locator(".notices li")).to_have_text([GONE])
    expect(page.locator(".notices")).to_have_attribute("role", "status")
    expect(link).to_have_text("Cloud lost; the small model continues where the mode allows it")
    lost = page.locator(".run.edge-fallback").first
    assert lost.evaluate("span => getComputedStyle(span).textDecorationStyle") == "dashed"
    expect(announced).to_have_text("")
    fake.cloud = "up"
    back.set()
    settled(page, 1)
    expect(text).to_have_text("One two three.")
    expect(link).to_have_text("Cloud connected")
    expect(announced).to_have_text("Answer ready, 4 tokens.")  # once


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


def test_an_answer_that_fails_can_be_tried_again_until_it_comes(
    page: Any, fake: FakeGateway, expected: list[str]
) -> None:
    expected += ["400", "ERR_INTERNET_DISCONNECTED"]
    half, lost = run("Half", "edge", 0), mistake("The cloud was lost for good.", "cloud_lost")
    refusal = Refusal(400, "Too long for 4096 tokens.")
    fake.replies = [refusal, [half, lost], [half, CUT], plain_reply("Whole."), plain_reply("Then.")]
    failure, text = page.locator(".failure"), page.locator(".text")
    answered(page, "A long story", 1, "failed")
    expect(failure).to_have_text(refusal.message)
    expect(failure).to_have_attribute("role", "alert")
    expect(page.locator(".said p")).to_have_text(["A long story"])
    for words in ("The cloud was lost for good.", "The connection broke off before the answer was complete."):
        page.click(".again")
        expect(failure).to_have_text(words)
        expect(text).to_have_text("Half")
    page.context.set_offline(True)
    page.click(".again")
    expect(failure).to_have_text("The gateway cannot be reached.")
    page.context.set_offline(False)
    page.click(".again")
    settled(page, 1)
    expect(text).to_have_text("Whole.")
    expect(failure).to_be_hidden()
    assert len(fake.bodies) == 4 and all(body == fake.bodies[0] for body in fake.bodies)
    answered(page, "And?", 2)
    assert fake.bodies[4]["messages"][1] == {"role": "assistant", "content": "Whole."}


def test_the_key_is_asked_for_and_kept_for_this_tab(open_page: Pages, fake: FakeGateway, expected: list[str]) -> None:
    expected.append("401")
    fake.key = "s3cret"
    page = open_page()
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    for key, why in (("wrong", "The gateway refused that key."), ("s3cret", "")):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        if why:
            expect(page.locator("#key-why")).to_have_text(why)
    expect(dialog).to_be_hidden()
    answered(page, "Hello")
    stored = "[sessionStorage, localStorage].map((each) => JSON.stringify(each).includes('s3cret'))"
    assert page.evaluate(stored) == [True, False]
    reload(page)
    expect(page.locator("#mode")).to_have_value("quality")
    expect(dialog).to_be_hidden()


def lists(page: Any, *titles: str) -> None:
    """Opens the list, when the browser holds all that the page shows, and waits for these titles in it."""
    wait_for(lambda: is_all_kept(page))
    page.click("#open-saved")
    expect(page.locator("#saved-list .entry span")).to_have_text(titles)  # rows of an earlier look stay for a moment


def is_kept(page: Any, *texts: str) -> bool:
    stored = page.evaluate("""async () => {
      const { allHeads, turnsOf } = await import('/page/kept.js');
      return Promise.all((await allHeads()).map(async ({ id }) => JSON.stringify(await turnsOf(id))));
    }""")
    return all(text in " ".join(stored) for text in texts)


def is_all_kept(page: Any) -> bool:
    """Whether the browser holds the page's conversation with the end of each answer, or the page keeps nothing."""
    return bool(
        page.evaluate("""async () => {
      const { headOf, turnsOf } = await import('/page/kept.js');
      const id = sessionStorage.getItem('skydraft.open');
      const ends = [...document.querySelectorAll('.answer')]
        .map(({ dataset: { status } }) => (status === 'busy' ? 'stopped' : status)); // as it is kept
      if (!ends.length || !window.indexedDB) return true;
      const turns = (await headOf(id)) ? await turnsOf(id) : [];
      return `${turns.flatMap(({ answers }) => answers.map(({ status }) => status))}` === `${ends}`;
    }""")
    )


def test_a_reload_shows_all_again_and_the_conversation_goes_on(page: Any, fake: FakeGateway) -> None:
    fake.replies = [mixed_reply(), calling(), plain_reply("Then.")]
    answered(page, "Sunset?")
    answered(page, "Weather?", 2)
    drawn(page)

    def shown() -> list[str]:
        return [page.locator(part).inner_html() for part in (".turns", "#figures", "#legend")]

    before = shown()
    wait_for(lambda: is_all_kept(page))
    reload(page)
    settled(page, 2)
    wait_for(lambda: shown() == before)
    answered(page, "And now?", 3)
    said = fake.bodies[2]["messages"]
    assert [message["role"] for message in said] == ["user", "assistant", "user", "assistant", "user"]
    assert said[1]["content"] == ANSWER and said[3]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_an_answer_that_a_reload_cut_off_is_kept_as_far_as_it_came(page: Any, fake: FakeGateway) -> None:
    is_begun = threading.Event()
    goes_on = [0.25, run("", "edge", 0)] * 200  # it is kept every two seconds, while something comes
    fake.replies = [[run("Half", "edge", 0), is_begun, run(" of it", "edge", 0), *goes_on, threading.Event()]]
    ask(page, "Hello")
    wait_for(lambda: is_kept(page, "Hello"))  # as it was at the beginning
    is_begun.set()
    expect(page.locator(".text")).to_have_text("Half of it")
    wait_for(lambda: is_kept(page, "of it"))
    reload(page)
    settled(page, 1, "stopped")
    expect(page.locator(".text")).to_have_text("Half of it")


def test_the_list_opens_and_deletes(page: Any, fake: FakeGateway) -> None:
    answered(page, "<b>First</b>")
    page.click("#new")
    answered(page, "Second")
    lists(page, "Second", "<b>First</b>")
    page.locator("#saved-list .entry").nth(1).click()
    expect(page.locator("#saved")).to_be_hidden()
    expect(page.locator(".said p")).to_have_text(["<b>First</b>"])
    answered(page, "More", 2)
    assert [message["content"] for message in fake.bodies[2]["messages"]] == ["<b>First</b>", ANSWER, "More"]
    lists(page, "<b>First</b>", "Second")  # the newest comes first
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Delete").first.click()
    expect(page.locator("#saved-list li")).to_have_count(2)
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").first.click()
    expect(page.locator("#saved-list .entry span")).to_have_text(["Second"])
    expect(page.locator(".turn")).to_have_count(0)
    reload(page)
    lists(page, "Second")
    assert not is_kept(page, "First")


def test_two_tabs_that_go_on_with_one_conversation_lose_nothing(page: Any, fake: FakeGateway) -> None:
    answered(page, "Start")
    wait_for(lambda: is_kept(page, "sinks."))
    with closing(page.context.new_page()) as other:
        other.goto(fake.url)
        wired(other)
        other.click("#open-saved")
        other.locator("#saved-list .entry").click()
        expect(other.locator(".turn")).to_have_count(1)
        answered(other, "Left", 2)
        wait_for(lambda: is_kept(other, "Left"))
        answered(page, "Right", 2)
        wait_for(lambda: is_kept(page, "Left", "Right"))


def test_an_edited_question_is_asked_anew_from_its_place(page: Any, fake: FakeGateway) -> None:
    fake.replies = [plain_reply(f"Answer {number}") for number in range(1, 5)]
    for number, question in enumerate("abc", 1):
        answered(page, question, number)
    field = page.locator(".rewrite")
    page.locator(".edit").nth(1).click()
    expect(field).to_have_value("b")
    field.press("Escape")
    expect(page.locator(".said p")).to_have_text(["a", "b", "c"])
    page.locator(".edit").nth(1).click()
    field.fill("B\nand more")
    field.press("Enter")
    expect(page.locator(".text")).to_have_text(["Answer 1", "Answer 4"])
    settled(page, 2)
    assert [message["content"] for message in fake.bodies[3]["messages"]] == ["a", "Answer 1", "B\nand more"]
    wait_for(lambda: is_kept(page, "and more"))
    lists(page, "a", "a")  # what followed is not lost
    page.locator("#saved-list .entry").nth(1).click()
    expect(page.locator(".text")).to_have_text([f"Answer {number}" for number in (1, 2, 3)])
