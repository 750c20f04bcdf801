"""Behind a server without skydraft the keys of a gateway share its prefix cache: none learns what another asked."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft.access.keys import Keyring
from tests.gateway.running import Running, over
from tests.hostile.texts import DRAFT, TARGET
from tests.stock.fakes import Fake, fake
from tests.stock.test_money import DIALECTS

KEYS = {"anna": "a" * 24, "bert": "b" * 24}
SECRET = "语速，" * 24


def shared(server: Fake, *keys: str) -> AbstractContextManager[Running]:
    labels = {f"Bearer {KEYS[name]}": name for name in keys}
    cloud = skydraft.connect(server.url, price="1,10,0")
    return over(cloud, DRAFT, authorize=labels.__getitem__ if len(keys) > 1 else None)


def ask(running: Running, name: str, content: str = SECRET, **body: Any) -> Any:
    given = {"model": "skydraft-cloud", "messages": [{"role": "user", "content": content}], "max_tokens": 4} | body
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    return httpx.post(f"{running.v1}/chat/completions", json=given, headers=headers, timeout=30.0).json()


def told(answer: Any) -> Any:
    stats, receipt = answer["skydraft"]["stats"], answer["skydraft"]["receipt"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, stats["cached_tokens"]["cloud"], stats["tokens_hit"], stats["cost"], receipt["cost"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_key_does_not_learn_what_another_asked(dialect: str) -> None:
    with fake(dialect, TARGET) as server, shared(server, "anna", "bert") as running:
        ask(running, "anna", "速")  # the first text may also ask what the server is
        new = told(ask(running, "anna"))
        assert told(ask(running, "bert")) == new and new[:3] == (0, 0, 0)
        again = told(ask(running, "bert"))
        assert (again == new) == (dialect != "vllm")  # it keeps them apart, so each may know of its own texts
        other = told(ask(running, "anna", SECRET[:-2] + "速语"))
        assert other[0] > 0 if dialect == "vllm" else other == new


@pytest.mark.parametrize("dialect", ["vllm", "llama-server", "sglang", "openai"])
def test_with_one_owner_cached_tokens_are_told(dialect: str) -> None:
    with fake(dialect, TARGET) as server, shared(server, "anna") as running:
        assert told(ask(running, "anna"))[0] == 0
        answer = ask(running, "anna")
        if dialect != "openai":  # this one tells none
            assert 0 < told(answer)[0] <= answer["usage"]["prompt_tokens"] and told(answer)[2] > 0


@pytest.mark.parametrize("dialect", ["vllm", "llama-server", "sglang"])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_usage_is_of_one_prompt_however_often_it_is_sent(dialect: str, path: str) -> None:
    """A gated text sends its prompt with each call; what they cost in all is in the stats."""
    given = {"input": SECRET} if path == "responses" else {"messages": [{"role": "user", "content": SECRET}]}
    how = {"model": "skydraft-quality", "skydraft": {"gate": "entropy:0.3", "k": 2, "hand_back": "0"}}
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    with fake(dialect, TARGET) as server, shared(server) as running:
        for _ in range(2):
            answer = httpx.post(f"{running.v1}/{path}", json={**how, **given, limit: 24}, timeout=30.0).json()
            usage, stats = answer["usage"], answer.get("skydraft", {}).get("stats")
            if path == "messages":
                cached = usage["cache_read_input_tokens"]
                num_read = usage["input_tokens"] + cached
            else:
                details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
                cached, num_read = details["cached_tokens"], usage.get("prompt_tokens") or usage["input_tokens"]
            assert 0 <= cached <= num_read == num_prompt(running)
            if stats:
                assert stats["num_requests"] > 2 and stats["tokens_in"] > 2 * num_prompt(running)


def num_prompt(running: Running) -> int:
    body = {"model": "skydraft", "messages": [{"role": "user", "content": SECRET}]}
    count: int = httpx.post(f"{running.v1}/messages/count_tokens", json=body | {"max_tokens": 1}).json()["input_tokens"]
    return count


def test_a_keyring_knows_whether_it_has_several_owners(tmp_path: Path) -> None:
    path, now = tmp_path / "keys", [0.0]
    path.write_text(f"anna {KEYS['anna']}\nanna {KEYS['bert']}\n")
    path.chmod(0o600)
    keys = Keyring(path, lambda: now[0])
    assert not keys.has_several()
    path.write_text(f"anna {KEYS['anna']}\nbert {KEYS['bert']}\n")
    now[0] = 2.0
    assert keys.label(f"Bearer {KEYS['bert']}") == "bert" and keys.has_several()
    path.write_text(f"bert {KEYS['bert']}\n")
    now[0] = 4.0
    assert keys.label(f"Bearer {KEYS['bert']}") == "bert"
    assert keys.has_several()  # the other's texts are still in the cache
