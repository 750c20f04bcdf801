"""Speech: shown only where the gateway takes it; files by drop or choice, recordings as WAV."""

import base64
import io
import wave
from typing import Any

import pytest

from .browsing import Pages, answered, expect
from .fake_gateway import FakeGateway, wait_for

pytestmark = pytest.mark.browser
DROP = """([name, bytes]) => {
  const files = new DataTransfer();
  files.items.add(new File([new Uint8Array(bytes)], name));
  for (const type of ['dragover', 'drop']) {
    const event = new DragEvent(type, { dataTransfer: files, bubbles: true, cancelable: true });
    document.querySelector('#composer').dispatchEvent(event);
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


# What the page hears of a recording: how many samples, how many in a second, and whether one of them is a sound.
HEARD = """() => {
  window.heard = { samples: 0, rate: 0, isLoud: false };
  window.AudioWorkletNode = class extends AudioWorkletNode {
    constructor(context, name) {
      super(context, name);
      heard.rate = context.sampleRate;
      this.port.addEventListener('message', ({ data }) => {
        heard.samples += data.length;
        heard.isLoud ||= data.some(Boolean);
      });
    }
  };
}"""


@pytest.fixture
def page(open_page: Pages, fake: FakeGateway) -> Any:
    fake.takes_audio = True
    page = open_page(permissions=["microphone"])
    page.locator("#mode option").first.wait_for(state="attached")
    return page


def test_no_speech_where_the_models_take_none(open_page: Pages) -> None:
    page = open_page()
    expect(page.locator("#mode")).to_have_value("quality")
    expect(page.locator("#speech")).to_be_hidden()
    page.evaluate(DROP, ["a.wav", list(silence())])
    expect(page.locator("#attached")).to_be_hidden()


def test_a_dropped_file_is_sent(page: Any, fake: FakeGateway) -> None:
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


def test_a_recording_is_a_wav_of_one_channel(page: Any, fake: FakeGateway) -> None:
    page.evaluate(HEARD)
    page.click("#record")
    expect(page.locator("#record")).to_have_attribute("aria-label", "Stop recording")
    wait_for(lambda: bool(page.evaluate("heard.isLoud && heard.samples > heard.rate / 2")))
    least_s = page.evaluate("heard.samples / heard.rate")
    page.click("#record")
    expect(page.locator("#attached figcaption")).to_have_text("Recording")
    page.click("#send")
    wait_for(lambda: len(fake.bodies) == 1)
    (heard,) = fake.bodies[0]["messages"][0]["content"]
    with wave.open(io.BytesIO(base64.b64decode(heard["input_audio"]["data"]))) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 16_000)
        assert least_s <= sound.getnframes() / 16_000 <= page.evaluate("heard.samples / heard.rate") + 0.001
        assert any(sound.readframes(sound.getnframes()))  # Chromium's false microphone beeps
