"""`skydraft gateway`: what it prints, and how it ends."""

import json
import signal

from ..gateway.running import TOYS, Apart, client


def test_it_says_where_it_is_answers_and_stops() -> None:
    running = Apart(*TOYS, "-s", "慢", "--log-prompts")
    assert "toy:drift=0.2 drafts, toy checks (no key is required)" in running.printed
    assert "skydraft-auto" not in running.printed
    body = {"model": "skydraft", "messages": [{"role": "user", "content": "语速"}], "max_tokens": 5}
    status, reply = running.post(json.dumps(body).encode())
    assert status == 200 and json.loads(reply)["usage"]["prompt_tokens"] == 3  # with the system prompt
    with client(running.port, json.dumps(body | {"stream": True, "max_tokens": 4000}).encode()) as reading:
        assert reading.recv(100)  # somebody is still reading
        status, took_s = running.stop(signal.SIGINT)  # as for the others: tests/cli/test_cloud.py
    assert status == 0 and took_s < 15
    assert "stopped" in running.printed and '"prompt": ["慢", "语速"]' in running.printed
    assert "Traceback" not in running.printed
