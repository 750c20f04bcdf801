"""Speech: shown only where the gateway takes it; files by drop or choice, recordings as WAV."""

import base64
import io
import wave
from array import array

import pytest

from .browsing import Pages, answered, expect
from .fake_gateway import FakeGateway, wait_for

pytestmark = pytest.mark.browser
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
