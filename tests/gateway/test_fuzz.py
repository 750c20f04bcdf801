"""Requests that nobody wrote by hand do no harm; and what clients say is characters to the models, never a mark."""

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given

import skydraft

from ..mutating import as_bytes, mutated
from ..reading_marks import engine_with, num_special, texts
from ..stock.fakes import Fake, fake
from ..toys import law
from .interfaces import plain
from .running import TOYS, Apart, Running, apart, over
from .test_fields import FOLLOWED, FOLLOWED_IN
from .test_interfaces import CONVERSATION, SAME

TEMPLATE = (Path(__file__).parents[1] / "prompts" / "templates" / "qwen2.5.jinja").read_text("utf-8")
Served = tuple[Fake, Running]


@pytest.fixture(scope="module", params=["vllm", "llama-server", "sglang"])
def served_by(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A gateway over each kind of server that is sent token ids."""
    draft, target = engine_with(TEMPLATE), engine_with(TEMPLATE)
    with fake(request.param, target) as far, over(skydraft.connect(far.url, require=True), draft) as running:
        yield far, running


# Requests of all interfaces with tools, calls and results.
TALKS = [(path, body) for path, body, _ in SAME.values() if "tools" in body] + [("chat/completions", CONVERSATION)]
TALKS += [("chat/completions", CONVERSATION | {"messages": CONVERSATION["messages"][:5]})]  # it ends with results


def saying(value: Any, text: str) -> Any:
    """A body with this text in place of each that a client has written: those of SAME are Chinese."""
    if isinstance(value, list):
        return [saying(each, text) for each in value]
    if isinstance(value, dict):
        arguments = value.get("arguments")
        if isinstance(arguments, str):
            value = value | {"arguments": json.dumps(saying(json.loads(arguments), text))}
        return {text if key == "city" else key: saying(each, text) for key, each in value.items()}
    return text if isinstance(value, str) and not value.isascii() and value != "天气" else value


@pytest.mark.parametrize("talk", range(len(TALKS)))
@given(text=texts)
@law(5)
def test_a_server_of_ids_gets_no_mark(served_by: Served, talk: int, text: str) -> None:
    (far, served), (path, body) = served_by, TALKS[talk]
    read = []
    for given_text in (text, "x"):
        num_asked = len(far.model.asked)
        answer = served.post(path, **plain(path, limit=1, model="skydraft-cloud") | saying(body, given_text))
        assert answer.status_code == 200, answer.text
        prompts = [prompt for asked in far.model.asked[num_asked:] for prompt in asked.prompts]
        read.append(set(map(num_special, prompts)) - {0})  # what a server is measured with has none
    assert read[0] == read[1] and len(read[0]) == 1


LATE_S, MUCH_MIB = 2.0, 250.0
EXPECTED = {200, 400, 404, 413}
FUZZED = (*FOLLOWED_IN, "responses/input_tokens")
MODELS = ["skydraft", *(f"skydraft-{mode}" for mode in ("edge", "cloud", "lossless", "fluency", "quality", "answers"))]
OURS: dict[str, list[Any]] = {
    "gate": ["entropy:1", "always"], "mode": ["edge", "cloud", "quality"], "k": [3],
    "hand_back": [8, "agree:2"], "grammar": ["regex:[0-9]+", "json_object:", 'lark:start: "a"+'], "token_ids": [True],
    "style": ["zh-short"], "local_only": [True], "break_loops": [False], "no_repeat_ngram_size": [3],
}  # fmt: skip
TEXTS = ["a", "语速", "a b\n", "我 们", "c", ""]


def requests(seed: int) -> Iterator[tuple[str, bytes]]:
    """Endless requests, (path, body), most with some damage."""
    rng = Random(seed)
    while True:
        path, model = rng.choice(FUZZED), rng.choice(MODELS)
        body: Any = _sound(path, model, rng)
        for _ in range(rng.choice([0, 1, 1, 1, 2, 5])):
            body = mutated(body, rng)
        if isinstance(body, dict) and rng.random() < 0.9:
            body["model"] = model
        yield f"/v1/{path}", as_bytes(body, rng)


def _sound(path: str, model: str, rng: Random) -> dict[str, Any]:
    name, text = path.removesuffix("/input_tokens"), rng.choice(TEXTS)
    talks = [talk for path, talk in TALKS if path == name and rng.random() < 0.5]
    fields = {key: value for key, value in (FOLLOWED | FOLLOWED_IN[name]).items() if rng.random() < 0.1}
    ours = rng.sample(list(OURS), rng.choice([0, 1, 3]))
    fields |= {"skydraft": {key: rng.choice(OURS[key]) for key in ours}}
    body = plain(name, text, rng.choice([1, 4, 9]), model=model)
    return body | (saying(rng.choice(talks), text) if talks else {}) | fields


def ask(running: Apart, asked: Iterator[tuple[str, bytes]], wrong: list[str]) -> None:
    for path, body in asked:
        try:
            status, reply = running.post(body, path)
        except (OSError, http.client.HTTPException) as error:
            wrong.append(f"{error!r} {path} {body[:2000]!r}")
            continue
        if status not in EXPECTED or (status != 200 and not json.loads(reply)["error"]["message"]):
            wrong.append(f"{status} {reply[:300]!r} {path} {body[:2000]!r}")


def test_no_request_does_harm() -> None:
    wrong: list[str] = []
    with apart(*TOYS, "--context", "256", "-n", "8") as running:
        running.health()
        with running.watched() as seen:
            several = [islice(requests(seed), 80) for seed in (1, 2, 3)]
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda each: ask(running, each, wrong), several))
        assert not wrong, "\n".join(wrong[:3])
        assert not seen.wrong and seen.worst_s < LATE_S and seen.grew_mib < MUCH_MIB
    assert '"level": "error"' not in running.printed
