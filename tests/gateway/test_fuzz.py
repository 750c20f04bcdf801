"""Requests that nobody wrote by hand do no harm; and what clients say is characters to the models, never a mark."""

import http.client
import json
from collections.abc import Callable, Iterator
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
from .apart import TOYS, Apart, apart
from .interfaces import plain
from .running import Running, over
from .test_fields import FOLLOWED, FOLLOWED_IN

TEMPLATE = (Path(__file__).parents[1] / "prompts" / "templates" / "qwen2.5.jinja").read_text("utf-8")
Served = tuple[Fake, Running]


@pytest.fixture(scope="module", params=["vllm", "llama-server", "sglang"])
def served_by(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A gateway over each kind of server that is sent token ids."""
    draft, target = engine_with(TEMPLATE), engine_with(TEMPLATE)
    with fake(request.param, target) as far, over(skydraft.connect(far.url, require=True), draft) as running:
        yield far, running


def chat(text: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({text: text})}}
    parameters = {"type": "object", "properties": {text: {"type": "string", "description": text, "enum": [text]}}}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": parameters}}
    talk = [
        {"role": "system", "content": text}, {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": text}, {"role": "user", "content": text},
    ]  # fmt: skip
    return {"messages": talk, "tools": [tool]}


def results_alone(text: str) -> dict[str, Any]:
    return {"messages": chat(text)["messages"][:4]}


def responses(text: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
    tool = {"type": "function", "name": "f", "description": text, "parameters": parameters}
    talk = [
        {"role": "user", "content": [{"type": "input_text", "text": text}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": json.dumps({text: text})},
        {"type": "function_call_output", "call_id": "1", "output": text},
        {"role": "assistant", "content": [{"type": "output_text", "text": text}]}, {"role": "user", "content": text},
    ]  # fmt: skip
    return {"instructions": text, "input": talk, "tools": [tool]}


def messages(text: str) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": text}]}
    tool = {"name": "f", "description": text, "input_schema": {"type": "object", "properties": {text: {}}}}
    talk = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {text: text}}]},
        {"role": "user", "content": [result, {"type": "text", "text": text}]},
    ]
    return {"max_tokens": 2, "system": [{"type": "text", "text": text}], "messages": talk, "tools": [tool]}


TALKS = {"chat/completions": chat, "responses": responses, "messages": messages}
PATHS = [*TALKS.items(), ("chat/completions", results_alone)]


@pytest.mark.parametrize(("path", "body_of"), PATHS)
@given(text=texts)
@law(5)
def test_a_server_of_ids_gets_no_mark(served_by: Served, path: str, body_of: Callable[[str], Any], text: str) -> None:
    far, served = served_by
    more = {"model": "skydraft-cloud", "max_output_tokens" if path == "responses" else "max_tokens": 1}
    read = []
    for given_text in (text, "x"):
        num_asked = len(far.model.asked)
        answer = served.post(path, **body_of(given_text) | more)
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
    talk = TALKS.get(name)
    fields = {key: value for key, value in (FOLLOWED | FOLLOWED_IN[name]).items() if rng.random() < 0.1}
    ours = rng.sample(list(OURS), rng.choice([0, 1, 3]))
    fields |= {"skydraft": {key: rng.choice(OURS[key]) for key in ours}}
    body = plain(name, text, rng.choice([1, 4, 9]), model=model)
    return body | (talk(text) if talk and rng.random() < 0.5 else {}) | fields


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
        before = running.resident_mib
        running.forget_peak()
        with running.watched() as seen:
            several = [islice(requests(seed), 80) for seed in (1, 2, 3)]
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda each: ask(running, each, wrong), several))
        assert not wrong, "\n".join(wrong[:3])
        assert not seen.wrong and seen.worst_s < LATE_S
        assert running.peak_mib - before < MUCH_MIB
    assert '"level": "error"' not in running.printed
