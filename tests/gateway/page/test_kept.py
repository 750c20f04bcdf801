"""Conversations that the browser keeps: reload, list, rename, export, delete; and questions that are edited."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from .browsing import answered, ask, drawn, expect, settled
from .fake_gateway import FakeGateway, mixed_reply, plain_reply, run, wait_for
from .test_calls import calling

pytestmark = pytest.mark.browser
ANSWER = "The sea turns to copper as the sun sinks."


def kept(page: Any) -> list[str]:
    """Titles in the list, which is opened when the browser holds all that the page shows: it is drawn once."""
    wait_for(lambda: is_all_kept(page))
    page.click("#open-saved")
    page.locator("#saved-list li, #saved-none:not([hidden])").first.wait_for()
    return list(page.locator("#saved-list .entry span").all_inner_texts())


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
    settled(page, 2)
    parts = (".turns", "#figures", "#shares", "#charts")
    drawn(page)
    before = [page.locator(part).inner_html() for part in parts]
    wait_for(lambda: is_all_kept(page))
    page.reload()
    settled(page, 2)
    wait_for(lambda: [page.locator(part).inner_html() for part in parts] == before)
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
    page.reload()
    settled(page, 1, "stopped")
    expect(page.locator(".text")).to_have_text("Half of it")


def test_the_list_opens_renames_and_deletes(page: Any, fake: FakeGateway) -> None:
    answered(page, "<b>First</b>")
    page.click("#new")
    answered(page, "Second")
    assert kept(page) == ["Second", "<b>First</b>"]
    page.locator("#saved-list .entry").nth(1).click()
    expect(page.locator("#saved")).to_be_hidden()
    expect(page.locator(".said p")).to_have_text(["<b>First</b>"])
    answered(page, "More", 2)
    assert [message["content"] for message in fake.bodies[2]["messages"]] == ["<b>First</b>", ANSWER, "More"]
    assert kept(page) == ["<b>First</b>", "Second"]  # the newest comes first
    page.get_by_role("button", name="Rename").first.click()
    page.get_by_label("Title").fill("A sunset")
    page.keyboard.press("Enter")
    expect(page.locator("#saved-list .entry span")).to_have_text(["A sunset", "Second"])
    page.keyboard.press("Escape")
    answered(page, "Even more", 3)
    assert kept(page) == ["A sunset", "Second"]
    page.get_by_role("button", name="Delete").first.click()
    expect(page.locator("#saved-list li")).to_have_count(2)
    page.get_by_role("button", name="Really delete?").click()
    expect(page.locator("#saved-list .entry span")).to_have_text(["Second"])
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    assert kept(page) == ["Second"]
    assert not is_kept(page, "First")


def test_a_conversation_is_exported_as_json_and_as_markdown(page: Any, fake: FakeGateway, tmp_path: Path) -> None:
    fake.replies = [mixed_reply(), calling()]
    answered(page, "日落？")
    answered(page, "Weather?", 2)
    assert kept(page) == ["日落？"]

    def saved(kind: str) -> str:
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save as {kind}").click()
        ending = {"JSON": "json", "Markdown": "md"}[kind]
        assert download.value.suggested_filename == f"日落.{ending}"
        target = tmp_path / ending
        download.value.save_as(target)
        return target.read_text(encoding="utf-8")

    told = json.loads(saved("JSON"))
    assert told["title"] == "日落？"
    first, second = (turn["answers"][0] for turn in told["turns"])
    assert (first["mode"], first["status"], first["content"]) == ("quality", "done", ANSWER)
    assert "".join(part["text"] for part in first["parts"]) == ANSWER
    assert [part["origin"] for part in first["parts"]] == ["skipped", "accepted", "recovered", "accepted", "bonus"]
    assert first["stats"]["tokens_per_s"] == 18.4
    assert second["calls"][0] == {"name": "get_weather", "arguments": '{"city": "上海"}'}
    markdown = saved("Markdown")
    assert markdown.startswith(f"# 日落？\n\n## You\n\n日落？\n\n## quality\n\n{ANSWER}\n\n## You\n\nWeather?")
    assert "get_weather" in markdown


def test_only_so_many_are_kept_and_only_so_much(page: Any) -> None:
    counts = page.evaluate("""async () => {
      const { allHeads, keep } = await import('/page/kept.js');
      for (let at = 0; at < 103; at += 1) await keep({ id: `${at}`, title: `${at}`, changed: at }, []);
      const few = await allHeads();
      await keep({ id: 'big', title: 'big', changed: 1000 }, ['x'.repeat(40e6)]);
      await keep({ id: 'bigger', title: 'bigger', changed: 1001 }, ['x'.repeat(60e6)]);
      return [few.length, few.at(-1).id, (await allHeads()).map(({ id }) => id)];
    }""")
    assert counts == [100, "3", ["bigger"]]


def test_two_tabs_that_go_on_with_one_conversation_lose_nothing(page: Any, fake: FakeGateway) -> None:
    answered(page, "Start")
    wait_for(lambda: is_kept(page, "sinks."))
    other = page.context.new_page()
    other.goto(fake.url)
    other.click("#open-saved")
    other.locator("#saved-list .entry").click()
    expect(other.locator(".turn")).to_have_count(1)
    answered(other, "Left", 2)
    wait_for(lambda: is_kept(other, "Left"))
    answered(page, "Right", 2)
    wait_for(lambda: is_kept(page, "Left", "Right"))
    other.close()


def test_an_edited_question_is_asked_anew_from_its_place(page: Any, fake: FakeGateway) -> None:
    fake.replies = [plain_reply("One."), plain_reply("Two."), plain_reply("Three."), plain_reply("Four.")]
    answered(page, "a")
    answered(page, "b", 2)
    answered(page, "c", 3)
    page.locator(".edit").nth(1).click()
    field = page.locator(".rewrite textarea")
    expect(field).to_have_value("b")
    field.press("Escape")
    expect(page.locator(".said p")).to_have_text(["a", "b", "c"])
    page.locator(".edit").nth(1).click()
    field.fill("B\nand more")
    field.press("Enter")
    expect(page.locator(".text")).to_have_text(["One.", "Four."])
    settled(page, 2)
    assert [message["content"] for message in fake.bodies[3]["messages"]] == ["a", "One.", "B\nand more"]
    wait_for(lambda: is_kept(page, "and more"))
    assert kept(page) == ["a", "a"]  # what followed is not lost
    page.locator("#saved-list .entry").nth(1).click()
    expect(page.locator(".text")).to_have_text(["One.", "Two.", "Three."])
