"""Pictures of the chat page, at a gateway over the demo pair.

    python -m bench.screenshots FOLDER [--threads N]

Wants Debian's packages chromium and fonts-noto-cjk.
"""

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright

import skydraft
from bench.gateway import gateway
from skydraft import EngineOptions
from skydraft.gateway.pair import Pair
from skydraft.models import default_pair

_FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
_QUESTIONS = ("请用一句话描述海边日落的景色。", "Write a Python function that reverses a linked list.")
_SETTINGS = '{"maxTokens": 160, "temperature": 0}'
# Width, height, scheme of colours, language; each shows the same conversation.
_VIEWS = {
    "chat": (1280, 800, "light", "en"),
    "chat-dark-zh": (1280, 800, "dark", "zh-CN"),
    "chat-phone": (360, 740, "light", "zh-CN"),
}


def load(num_threads: int) -> Pair:
    pair, options = default_pair(), EngineOptions(max_sequences=2, context_len=2048, num_threads=num_threads)
    return Pair(skydraft.load(pair.draft, options), skydraft.load(pair.target, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with gateway(load(args.threads)) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
        page = browser.new_context(locale="en-US").new_page()
        page.add_init_script(f"localStorage['skydraft.settings'] ??= '{_SETTINGS}'")
        page.goto(url.removesuffix("/v1/chat/completions"))
        for number, question in enumerate(_QUESTIONS):
            page.fill("#question", question)
            page.press("#question", "Enter")
            page.locator('.answer[data-status="done"]').nth(number).wait_for(timeout=300_000)
        for name, (width, height, scheme, language) in _VIEWS.items():
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=scheme)
            if page.locator("html").get_attribute("lang") != language:
                page.click("#language")
            page.locator(".turn").last.evaluate("turn => turn.scrollIntoView()")
            page.screenshot(path=str(args.folder / f"{name}.png"))
        browser.close()


if __name__ == "__main__":
    main()
