"""Pictures of the chat page, at a gateway over the demo pair.

    python -m bench screenshots FOLDER [--threads N]

Wants Debian's packages chromium and fonts-noto-cjk.
"""

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import skydraft
from skydraft import DecodingParams, EngineOptions
from skydraft.gateway.app import Gateway, GatewayOptions
from skydraft.gateway.pair import Pair
from skydraft.gateway.requests import Defaults
from skydraft.gateway.server import Entrance, ListenOptions, listen, server_of
from skydraft.models import default_pair

_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
_QUESTIONS = ("请用一句话描述海边日落的景色。", "What is the difference between TCP and UDP?")
_SHORT = "Explain in two sentences why the sky is blue."
_SETTINGS = '{"maxTokens": 160, "temperature": 0, "mode": "quality"}'  # both models' words are in its texts


@contextmanager
def gateway(pair: Pair) -> Iterator[str]:
    """The address of a gateway over `pair`, in this process."""
    made = Gateway(pair, Defaults(DecodingParams()), GatewayOptions())
    listening = listen(ListenOptions(port=0))
    server = server_of(Entrance(made), ListenOptions(port=0))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        made.close()


def load(num_threads: int) -> Pair:
    pair, options = default_pair(), EngineOptions(max_sequences=2, context_len=2048, num_threads=num_threads)
    return Pair(skydraft.load(pair.draft, options), skydraft.load(pair.target, options))


def ask(page: Page, question: str) -> None:
    number = page.locator(".answer").count()
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.locator('.answer[data-status="done"]').nth(number).wait_for(timeout=300_000)


def show_pair(page: Page, folder: Path) -> None:
    """A conversation; then a token of a short answer, and a branch from it."""
    for question in _QUESTIONS:
        ask(page, question)
    page.locator(".turn").last.evaluate("turn => turn.scrollIntoView()")
    page.screenshot(path=folder / "chat.png")
    page.click("#new")
    page.set_viewport_size({"width": 1000, "height": 720})
    ask(page, _SHORT)
    page.locator('.run[data-origin="recovered"]').first.click()
    page.locator("#token-target button").first.wait_for()
    page.locator("#token-draft button").first.wait_for()
    page.screenshot(path=folder / "asking.png")
    page.locator("#token-target button").nth(1).click()
    page.locator('.answer[data-status="done"]').nth(1).wait_for(timeout=300_000)
    page.screenshot(path=folder / "branch.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with gateway(load(args.threads)) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
        page = browser.new_context(locale="en-US", viewport={"width": 1280, "height": 800}).new_page()
        page.add_init_script(f"localStorage['skydraft.settings'] ??= '{_SETTINGS}'")
        page.goto(url)
        show_pair(page, args.folder)
        browser.close()
