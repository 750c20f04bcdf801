"""Servers of other people, where `make stock` put them: what the fakes say is what these say."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft import DecodingParams, EngineOptions, make_plan
from skydraft.edge.budget import Budget
from skydraft.edge.channel import Waiting
from skydraft.edge.stock.ledger import Ledger, Request
from skydraft.edge.stock.wire import Events, Pool, Wire, as_json
from skydraft.engines.base import Engine
from skydraft.grammars import json_schema, lark, regex
from tests.engines.tiny_checkpoint import save_model, save_tokenizer
from tests.grammars import PERSON
from tests.stock.fakes import fake
from tests.stock.real import llama_server, vllm_serve

pytestmark = pytest.mark.stock
# Heads of 32: vLLM has no smaller ones on a processor.
SHAPE: Any = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
TEXT = "今天，a<|im_start|>😀"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    # Without rows past the tokenizer: random weights would choose them.
    return save_model(folder, "Qwen2Config", seed=1, vocab_size=len(save_tokenizer(folder)), **SHAPE)


@pytest.fixture(scope="module")
def vllm(tiny: Path) -> Iterator[str]:
    with vllm_serve(tiny, context=640) as url:
        yield url


@pytest.fixture(scope="module")
def llama(gguf_path: Path) -> Iterator[str]:
    with llama_server(gguf_path, context=512) as url:
        yield url


def ask(url: str, path: str, body: Any = None) -> Any:
    if body is None:
        return httpx.get(url + path).json()
    response = httpx.post(url + path, json=body, timeout=600.0)  # vLLM compiles at the first request of a kind
    if body.get("stream") and response.status_code == 200:
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
        return [json.loads(line) if line != "[DONE]" else line for line in lines]
    return response.status_code, response.json()


def shape(value: Any) -> Any:
    """Names and types, lists by their first element; names that are ids or tokens do not count."""
    if isinstance(value, dict):
        if any(name.startswith("token_id:") for name in value):
            return ["token_id:", len(value)]
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def assert_told(ours: Any, theirs: Any, where: str = "") -> None:
    """All that the fake says is said by the real one in the same words: it may say more."""
    if isinstance(ours, dict):
        for name, inner in ours.items():
            assert name in theirs, f"{where}.{name}"
            assert_told(inner, theirs[name], f"{where}.{name}")
    elif isinstance(ours, list) and ours and theirs:
        assert_told(ours[0], theirs[0], f"{where}[0]")
    else:
        assert ours in ("NoneType", theirs), where  # what is null first may come with the first token of a fast server


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BODY = {"max_tokens": 3, "temperature": 0, "return_token_ids": True, **STREAM}
VLLM_ASKS: list[tuple[str, Any]] = [
    ("/v1/models", None), ("/tokenize", {"prompt": "今天", "add_special_tokens": False}),
    ("/v1/completions", {"prompt": [99_999], "max_tokens": 3}),  # an id too high; in a stream it comes as an event
    *(("/v1/completions", {**BODY, **more}) for more in (
        {"prompt": [5]}, {"prompt": []}, {"prompt": [5], "model": "x"}, {"prompt": [5] * 5000},
        {"prompt": [5], "structured_outputs": {"regex": "[0-9]{3}"}},
    )),
]  # fmt: skip


LLAMA_BODY = {"n_predict": 3, "temperature": 0, "return_tokens": True, "prompt": [5, 6, 7]}
LLAMA_ASKS: list[tuple[str, Any]] = [
    *((path, None) for path in ("/health", "/props", "/v1/models")),
    ("/tokenize", {"content": "今天", "add_special": False}),
    *(("/completion", {**LLAMA_BODY, **more}) for more in (
        {}, {"stream": True}, {"stream": True, "json_schema": PERSON}, {"response_fields": ["tokens", "timings"]},
        {"prompt": [999_999]}, {"prompt": [5] * 5000},
    )),
]  # fmt: skip


ROWS = [*(("vllm", "vllm", *row) for row in VLLM_ASKS), *(("llama-server", "llama", *row) for row in LLAMA_ASKS)]


@pytest.mark.parametrize(("kind", "real", "path", "body"), ROWS)
def test_a_fake_speaks_as_the_real_one(kind: str, real: str, path: str, body: Any, request: Any) -> None:
    with fake(kind) as server:
        ours = ask(server.url, path, body)
    assert_told(shape(ours), shape(ask(request.getfixturevalue(real), path, body)))


FOLLOWED: dict[str, dict[str, Any]] = {
    "regex": {"grammar": regex("[0-9]{2}-[0-9]{2}")},
    "lark": {"grammar": lark('start: "<call>" args\nargs: %json {"enum": [1, 22]}')},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "min_new_tokens": 20},
    "a bias": {"logit_bias": ((7, 3.0),)},
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_vllm_follows_what_we_ask_for_by_itself(vllm: str, tiny: Path, name: str) -> None:
    params, plan = DecodingParams(max_new_tokens=24, **FOLLOWED[name]), make_plan("cloud")
    cloud = skydraft.connect(vllm, require=True, timeout_s=300)
    with closing(skydraft.load(str(tiny))) as edge, closing(cloud):
        near = skydraft.generate("今天", cloud=edge, plan=plan, params=params).run()
        done = skydraft.generate("今天", edge=edge, cloud=cloud, plan=plan, params=params).run()
    assert done.token_ids == near.token_ids and done.receipt.calls == 1


@pytest.fixture(scope="module")
def edge(gguf_path: Path) -> Iterator[Engine]:
    with closing(skydraft.load(str(gguf_path), EngineOptions(num_threads=1, context_len=512))) as engine:
        yield engine


def test_llama_server_follows_a_schema_by_itself(llama: str, edge: Engine) -> None:
    params = DecodingParams(max_new_tokens=64, grammar=json_schema(PERSON))
    with closing(skydraft.connect(llama, require=True)) as cloud:
        plan = make_plan("lossless")
        done = skydraft.generate("Who is Ada? Use JSON.", edge=edge, cloud=cloud, plan=plan, params=params).run()
    assert json.loads(done.text).keys() == {"name", "age"}
    assert set(done.origins) == {"cloud"} and done.receipt.calls == 1


@pytest.mark.parametrize("mode", ["cloud", "lossless"])
def test_the_chat_of_a_llama_server_is_a_target(llama: str, edge: Engine, mode: str) -> None:
    """Its text becomes the tokens that our tokenizer would make of the whole."""
    params = DecodingParams(max_new_tokens=48)
    with closing(skydraft.connect(llama, api="chat")) as cloud:
        for question in ("写出五个表情符号。", "What is a prime number?"):
            done = skydraft.generate(question, edge=edge, cloud=cloud, plan=make_plan(mode), params=params).run()
            own = [each for each in done.token_ids if each not in edge.vocab.end_ids]
            assert len(own) > 8 and tuple(own) == edge.vocab.encode(done.text) and set(done.origins) == {"cloud"}
            assert done.receipt.calls == 1 and done.stats.tokens_in > 0


def test_no_token_of_a_llama_server_is_lost_within_a_character(llama: str, edge: Engine) -> None:
    """It tells no token that ends within a character in a stream: an emoji is two or three tokens."""
    params = DecodingParams(max_new_tokens=24)
    with closing(skydraft.connect(llama, require=True)) as cloud:
        plan = make_plan("cloud")
        done = skydraft.generate("写出五个表情符号。", edge=edge, cloud=cloud, plan=plan, params=params).run()
    assert "\ufffd" not in done.text.rstrip("\ufffd") and sum(each.link.num_requests for each in done.records) > 1


def test_no_stream_of_a_llama_server_is_lost_by_a_connection_that_it_closes(llama: str) -> None:
    """It closes one after about ten streams, as the next request comes."""

    async def stream_on() -> None:
        pool = Pool(llama, None, None, is_here=True)
        wire, waiting = Wire(llama, f"{llama}/v1", pool, Ledger(Budget())), Waiting(60.0, 60.0, 60.0)
        for number in range(100):
            body = LLAMA_BODY | {"prompt": [5, number], "stream": True}
            events = Events(wire, Request(wire.ledger, "/completion", as_json(body)), "/health")
            while isinstance(came := await events.next(waiting), bytes):
                pass
            assert came is None
        await pool.close()

    asyncio.run(stream_on())
