"""Servers of other people, where `make stock` put them: what the fakes say is what these say."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft import DecodingParams, EngineOptions, Generation, make_plan
from skydraft.engines.base import Engine
from skydraft.grammars import json_schema, lark, regex
from tests.engines.tiny_checkpoint import save_model, save_tokenizer
from tests.grammars import PERSON
from tests.stock.conftest import llama_server, vllm_serve
from tests.stock.fakes import fake

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
    """The answer by its status, or the events of a stream, of which [DONE] is none."""
    if body is None:
        return httpx.get(url + path).json()
    response = httpx.post(url + path, json=body, timeout=600.0)  # vLLM compiles at the first request of a kind
    if body.get("stream") and response.status_code == 200:
        return [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    return {str(response.status_code): response.json()}


def assert_told(ours: Any, theirs: Any, where: str = "") -> None:
    """All that the fake says is said by the real one in the same words: it may say more. Lists count by their first
    element, and what is null first may come with the first token of a fast server."""
    if isinstance(ours, dict):
        for name, inner in ours.items():
            assert name in theirs, f"{where}.{name}"
            assert_told(inner, theirs[name], f"{where}.{name}")
    elif isinstance(ours, list) and ours and theirs:
        assert_told(ours[0], theirs[0], f"{where}[0]")
    elif ours is not None:
        assert type(ours) is type(theirs) or {type(ours), type(theirs)} == {int, float}, where


BODY = {"max_tokens": 3, "temperature": 0, "return_token_ids": True, "prompt": [5], "stream": True,
        "stream_options": {"include_usage": True}}  # fmt: skip
LLAMA_BODY = {"n_predict": 3, "temperature": 0, "return_tokens": True, "prompt": [5, 6, 7]}
# (kind, path, what every body has, what is asked there: None without a body)
ASKS: list[tuple[str, str, Any, list[Any]]] = [
    ("vllm", "/v1/models", None, [{}]),
    ("vllm", "/tokenize", {"prompt": "今天", "add_special_tokens": False}, [{}]),
    ("vllm", "/v1/completions", {"max_tokens": 3}, [{"prompt": [99_999]}]),  # too high; a stream tells it in an event
    ("vllm", "/v1/completions", BODY, [
        {}, {"prompt": []}, {"model": "x"}, {"prompt": [5] * 5000}, {"structured_outputs": {"regex": "[0-9]{3}"}},
    ]),
    *(("llama-server", path, None, [{}]) for path in ("/health", "/props", "/v1/models")),
    ("llama-server", "/tokenize", {"content": "今天", "add_special": False}, [{}]),
    ("llama-server", "/completion", LLAMA_BODY, [
        {}, {"stream": True}, {"stream": True, "json_schema": PERSON}, {"response_fields": ["tokens", "timings"]},
        {"prompt": [999_999]}, {"prompt": [5] * 5000},
    ]),
]  # fmt: skip
ROWS = [(kind, path, body and body | more) for kind, path, body, asked in ASKS for more in asked]


@pytest.mark.parametrize(("kind", "path", "body"), ROWS)
def test_a_fake_speaks_as_the_real_one(kind: str, path: str, body: Any, request: Any) -> None:
    with fake(kind) as server:
        ours = ask(server.url, path, body)
    real = request.getfixturevalue("vllm" if kind == "vllm" else "llama")
    assert_told(ours, ask(real, path, body))


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


def written(llama: str, edge: Engine, question: str, mode: str, api: str = "auto", **given: Any) -> Generation:
    """A text that a llama-server writes in one request, unless it asks for the rest of a character."""
    with closing(skydraft.connect(llama, api=api, require=api == "auto")) as cloud:
        plan, params = make_plan(mode), DecodingParams(**given)
        done = skydraft.generate(question, edge=edge, cloud=cloud, plan=plan, params=params).run()
    assert set(done.origins) == {"cloud"} and done.stats.tokens_in > 0
    return done


def test_llama_server_follows_a_schema_by_itself(llama: str, edge: Engine) -> None:
    grammar = json_schema(PERSON)
    done = written(llama, edge, "Who is Ada? Use JSON.", "lossless", max_new_tokens=64, grammar=grammar)
    assert json.loads(done.text).keys() == {"name", "age"} and done.receipt.calls == 1


@pytest.mark.parametrize("mode", ["cloud", "lossless"])
@pytest.mark.parametrize("question", ["写出五个表情符号。", "What is a prime number?"])
def test_the_chat_of_a_llama_server_is_a_target(llama: str, edge: Engine, mode: str, question: str) -> None:
    """Its text becomes the tokens that our tokenizer would make of the whole."""
    done = written(llama, edge, question, mode, "chat", max_new_tokens=48)
    own = [each for each in done.token_ids if each not in edge.vocab.end_ids]
    assert len(own) > 8 and tuple(own) == edge.vocab.encode(done.text) and done.receipt.calls == 1


def test_no_token_of_a_llama_server_is_lost_within_a_character(llama: str, edge: Engine) -> None:
    """It tells no token that ends within a character in a stream: an emoji is two or three tokens."""
    done = written(llama, edge, "写出五个表情符号。", "cloud", max_new_tokens=24)
    assert "\ufffd" not in done.text.rstrip("\ufffd") and sum(each.link.num_requests for each in done.records) > 1
