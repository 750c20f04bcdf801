"""Conversation, calls, origins, modes, settings, figures: what is sent, and what is shown of the answer.

Speech: shown only where the gateway takes it; files by drop or choice, recordings as WAV.
"""

import base64
import io
import json
import threading
import wave
from array import array
from typing import Any

import pytest

from skydraft.origins import LOOKS

from .browsing import Pages, answered, ask, expect, grave, is_too_wide, reload, settled
from .fake_gateway import MODES, FakeGateway, finish, mixed_reply, plain_reply, record, run, wait_for

pytestmark = pytest.mark.browser
ANSWER = "The sea turns to copper as the sun sinks."
BOXES = "all => all.map((one) => one.getBoundingClientRect().toJSON())"
DROP = """([name, bytes]) => {
  const files = new DataTransfer();
  files.items.add(new File([new Uint8Array(bytes)], name));
  for (const type of ['dragover', 'drop']) {
    const event = new DragEvent(type, { dataTransfer: files, bubbles: true, cancelable: true });
    document.body.dispatchEvent(event);
  }
}"""


def silence() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(bytes(3200))
    return file.getvalue()


def ended(**more: Any) -> dict[str, Any]:
    """The last event, with something about the cloud."""
    end = finish()
    end["skydraft"] |= more
    return end


def piece(text: str, origin: str, index: int, arguments: str, name: str = "") -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    call = {"index": index, "function": function} | ({"id": f"call_{index}", "type": "function"} if name else {})
    chunk = run("", origin, 0)
    chunk["choices"][0]["delta"] = {"tool_calls": [call]}
    chunk["skydraft"]["text"] = text
    return chunk


def calling() -> list[Any]:
    return [
        run("Looking.", "edge", 0),
        piece('<tool_call>\n{"name": "get_weather", "arguments": {"ci', "skipped", 0, '{"ci', "get_weather"),
        piece('ty": "上海"}}', "accepted", 0, 'ty": "上海"}'),
        piece("\n</tool_call> …", "recovered", 1, "{}", "<b>time</b>"),
        finish("tool_calls"),
    ]


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
    assert (first["model"], second["model"]) == ("skydraft-quality", "skydraft-edge")
    assert isinstance(first["seed"], int)
    expect(page.locator(".text")).to_have_text([ANSWER, "Yes."])
    expect(page.locator(".name")).to_have_text(["quality", "edge"])
    page.click("#open-settings")
    page.fill("#temperature", "1.2")
    page.fill("#maxTokens", "77")
    page.fill("#system", "Be brief.")
    page.click("#close-settings")
    reload(page)
    expect(page.locator("#mode")).to_have_value("edge")
    page.click("#new")
    expect(page.locator("#welcome")).to_be_visible()
    answered(page, "Hello")
    page.uncheck("#coloured")
    assert (fake.bodies[2]["temperature"], fake.bodies[2]["max_tokens"]) == (1.2, 77)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert fake.bodies[2]["messages"] == messages  # a new conversation knows nothing of the old
    assert page.locator(".text .run").first.evaluate("span => getComputedStyle(span).textDecorationLine") == "none"


def test_each_origin_has_a_title_of_its_own_and_arrows_tell_them(page: Any, fake: FakeGateway) -> None:
    """That each has a colour and a line of its own is in tests/test_types.py."""
    fake.replies = [[run(f"{origin} ", origin, 3, reason="uncertain") for origin in LOOKS] + [finish()]]
    answered(page, "Hello")
    spans = page.locator(".text .run")
    told = spans.evaluate_all("spans => spans.map(({ dataset, title }) => [dataset.origin, title])")
    assert told == [[origin, f"{origin}: {look.meaning}"] for origin, look in LOOKS.items()]
    expect(page.locator("#legend dd")).to_have_count(len(LOOKS))
    assert page.locator('.text .run[tabindex="0"]').count() == 1
    spans.first.focus()
    page.keyboard.press("ArrowRight")
    expect(spans.nth(1)).to_be_focused()


def test_figures_receipts_and_costs_are_those_of_each_answer(page: Any, fake: FakeGateway) -> None:
    uncounted = [run("Yes.", "accepted", 0, tokens=3, record=record(0, num_audited=2, num_agreed=1)), finish()]
    fake.replies = [mixed_reply(), uncounted]
    figures = page.locator("#figures td")
    answered(page, "Hello")
    expect(figures).to_have_text(["0.20", "20%", "90% (9/10)", "18.4", "10"])
    expect(page.locator("#legend dt")).to_have_text(["accepted60%", "recovered10%", "bonus10%", "skipped20%"])
    answered(page, "And?", 2)
    expect(page.locator('[data-figure="tokens"]')).to_have_text("3")
    assert [figures.nth(at).inner_text() for at in (0, 1, 2)] == ["0.33", "33%", "50% (1/2)"]
    here = {"servers": [], "prompt_tokens": 0, "seen": [], "calls": 1, "cost": None, "rejected": [], "bytes_up": 0}
    there = {"servers": ["box:7373"], "prompt_tokens": 9, "seen": [{"tokens": (1, 3), "chars": (3, 6)}],
             "rejected": [{"at": 3, "token_id": 5, "text": "x"}], "bytes_up": 1234}  # fmt: skip
    cloud = {"completion_tokens": 2, "tokens_in": 90, "tokens_hit": 30, "tokens_out": 3}
    wrote = "this device wrote 4 tokens, the cloud 2 (read 90, 30 of them cached; wrote 3)"
    saw = "box:7373 saw 9 prompt tokens, 2 of the answer and 1 of rejected drafts (1.2 kB)"
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"receipt": here | there}, saw, ""),
        ({"receipt": here}, "nothing left this device", ""),
        ({"usage": cloud | {"cost": 0.0021}}, f"{wrote}the cloud cost 0.00210, this device 0", ""),
        ({"usage": cloud | {"cost": None}}, wrote, "cost"),
        ({"usage": cloud | {"cost": None, "tokens_in": 0}}, "", "this device wrote"),
    ]  # fmt: skip
    for number, (told, says, says_not) in enumerate(cases, 3):
        if "usage" in told:
            told = {"usage": {"edge": {"completion_tokens": 4, "cost": 0}, "cloud": told["usage"]}}
        fake.replies = [[run("🙂a *", "skipped", 0), run("bc* d", "accepted", 1), ended(**told)]]
        answered(page, "And?", number)
        expect(page.locator(".meta").last).to_contain_text(says)
        assert not says_not or says_not not in page.locator(".meta").last.inner_text()


def test_two_modes_at_once_and_going_on_with_one(page: Any, fake: FakeGateway) -> None:
    go = threading.Event()
    fake.by_model = {
        "skydraft-quality": [go, *plain_reply("Left.", "accepted")],
        "skydraft-cloud": [go, *plain_reply("Right.", "cloud")],
    }
    page.select_option("#secondMode", "cloud")
    ask(page, "Hello")
    wait_for(lambda: len(fake.bodies) == 2)  # neither has been answered yet
    go.set()
    settled(page, 2)
    assert len({(body["seed"], str(body["messages"])) for body in fake.bodies}) == 1
    expect(page.locator(".text")).to_have_text(["Left.", "Right."])
    expect(page.locator('#figures [scope="col"]')).to_have_text(["quality", "cloud"])
    left, right = page.locator(".answer").evaluate_all(BOXES)  # at once: it may be scrolling
    assert left["right"] <= right["left"] and left["top"] == right["top"]
    page.set_viewport_size({"width": 360, "height": 740})
    left, right = page.locator(".answer").evaluate_all(BOXES)
    assert left["left"] == right["left"] and left["bottom"] <= right["top"]
    page.locator(".choose").nth(1).click()
    page.select_option("#secondMode", "")
    answered(page, "And?", 3)
    assert fake.bodies[2]["messages"][1] == {"role": "assistant", "content": "Right."}


def test_a_call_is_shown_answered_and_sent_back(page: Any, fake: FakeGateway) -> None:
    fake.replies = [calling(), plain_reply("25 degrees.")]
    answered(page, "Weather?")
    expect(page.locator(".call h4")).to_have_text(["Calls get_weather", "Calls <b>time</b>"])
    assert page.locator(".call pre").first.text_content() == '{\n  "city": "上海"\n}'
    page.set_viewport_size({"width": 360, "height": 740})
    assert not is_too_wide(page)
    results = {"get_weather": "晴，25度", "<b>time</b>": "12:00"}
    for name, result in results.items():
        page.get_by_label(f"Result of {name}").fill(result)
    page.get_by_role("button", name="Send results").click()
    settled(page, 2)
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(zip(results, ('{"city": "上海"}', "{}"), strict=True))
    ]
    assert fake.bodies[1]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Looking.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": f"call_{at}", "content": each} for at, each in enumerate(results.values())),
    ]
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)  # to calls of earlier answers
    assert not grave(page)


def test_tools_and_a_schema_are_sent_and_what_is_no_json_is_said_and_left_out(page: Any, fake: FakeGateway) -> None:
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    cases = [(json.dumps([tool]), '{"type": "obj', "schema"), ("{}", '{"type": "object"}', "tools")]
    for number, (tools, schema, wrong) in enumerate(cases, 1):
        page.locator("#open-settings").click()
        page.locator("#tools").fill(tools)
        page.locator("#schema").fill(schema)
        for name in ("tools", "schema"):
            expect(page.locator(f"#{name}-note")).to_be_visible(visible=name == wrong)
        assert not grave(page)
        page.locator("#close-settings").click()
        answered(page, "Hello", number)
    first, second = fake.bodies
    assert first["tools"] == [{"type": "function", "function": tool}]
    assert "response_format" not in first and "tools" not in second
    assert second["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_no_speech_where_the_models_take_none(open_page: Pages) -> None:
    page = open_page()
    expect(page.locator("#mode")).to_have_value("quality")
    expect(page.locator("#speech")).to_be_hidden()
    page.evaluate(DROP, ["a.wav", list(silence())])
    expect(page.locator("#attached")).to_be_hidden()


def test_dropped_files_and_a_recording_are_sent(open_page: Pages, fake: FakeGateway) -> None:
    fake.takes_audio = True
    page = open_page(permissions=["microphone"])
    expect(page.locator("#mode")).to_have_value("quality")
    for number, (name, kind) in enumerate({"a.wav": "wav", "b.MP3": "mp3", "c.flac": "flac", "d.ogg": "ogg"}.items()):
        page.evaluate(DROP, [name, list(silence())])
        expect(page.locator("#attached figcaption")).to_have_text(name)
        answered(page, "Who speaks?", number + 1)
        text, heard = fake.bodies[number]["messages"][-1]["content"]
        assert text == {"type": "text", "text": "Who speaks?"}
        assert heard["type"] == "input_audio" and heard["input_audio"]["format"] == kind
        assert base64.b64decode(heard["input_audio"]["data"]) == silence()
        expect(page.locator(".said audio")).to_have_count(number + 1)
        expect(page.locator("#attached")).to_be_hidden()
    assert fake.bodies[1]["messages"][0] == fake.bodies[0]["messages"][0]  # what was heard stays in the history
    page.click("#record")
    expect(page.locator("#record")).to_have_attribute("title", "Stop recording")
    page.wait_for_timeout(1500)  # Chromium's false microphone beeps once a second
    page.click("#record")
    expect(page.locator("#attached figcaption")).to_have_text("Recording")
    page.click("#send")
    wait_for(lambda: len(fake.bodies) == 5)
    (heard,) = fake.bodies[4]["messages"][-1]["content"]
    with wave.open(io.BytesIO(base64.b64decode(heard["input_audio"]["data"]))) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 16_000)
        assert sound.getnframes() > 16_000
        assert any(abs(sample) > 1000 for sample in array("h", sound.readframes(sound.getnframes())))
