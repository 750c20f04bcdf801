"""`skydraft gateway`: what it prints, and how it ends."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from ..starting import command

TOYS = ["--edge-model", "toy:drift=0.2", "--cloud-model", "toy"]


def test_it_says_where_it_is_answers_and_stops(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [command(), "gateway", *TOYS, "--port", "0", "-s", "慢", "--log-prompts"],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"SKYDRAFT_HOME": str(tmp_path)},
    )  # fmt: skip
    assert child.stderr is not None
    printed = ""
    while "Ctrl-C stops." not in printed:
        line = child.stderr.readline()
        assert line, printed
        printed += line
    url = re.search(r"http://localhost:\d+", printed)
    assert url and "toy:drift=0.2 drafts, toy checks (no key is required)" in printed and "skydraft-auto" not in printed
    chats = f"{url.group()}/v1/chat/completions"
    body = {"model": "skydraft", "messages": [{"role": "user", "content": "语速"}], "max_tokens": 5}
    with urllib.request.urlopen(chats, json.dumps(body).encode(), timeout=30) as reply:
        assert json.load(reply)["usage"]["prompt_tokens"] == 3  # with the system prompt
    long = json.dumps(body | {"stream": True, "max_tokens": 4000}).encode()
    with urllib.request.urlopen(chats, long, timeout=30) as reply:  # somebody is still reading
        reply.readline()
        began = time.monotonic()
        child.send_signal(signal.SIGINT)  # as for the others: tests/cli/test_cloud.py
        assert child.wait(20) == 0 and time.monotonic() - began < 15
    rest = child.stderr.read()
    child.stderr.close()
    assert "stopped" in rest and '"prompt": ["慢", "语速"]' in rest and "Traceback" not in rest
