"""Log-probabilities, token ids and tokens, as the clients of OpenAI, llama.cpp and vLLM ask for them."""

from typing import Any

import pytest

from skydraft.decoding.accounts.scoring import prompt_scores
from skydraft.engines.toy import open_toy
from skydraft.gateway.answers import text_logprobs, token_logprobs
from skydraft.types import Prompt, Score

from ..toys import EOS, IDS, VOCAB
from .running import Running
from .test_openai_sdk import ASKED, expected, openai

TEXT = "语速快慢我"


def post(served: Running, path: str, **body: Any) -> Any:
    return served.client.post(f"{served.url}/{path}", json=body)


def complete(served: Running, prompt: Any, **more: Any) -> Any:
    """As lm-eval asks for log-likelihoods."""
    body = {"model": "skydraft-cloud", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    return post(served, "v1/completions", **body | more).json()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_has_the_log_likelihoods_of_its_model(served: Running, max_tokens: int) -> None:
    vocab, token_ids = open_toy("toy").vocab, open_toy("toy").vocab.encode(TEXT)
    for model, name in (("skydraft-cloud", "toy"), ("skydraft-edge", "toy:drift=0.2")):
        want = list(prompt_scores(open_toy(name), Prompt(token_ids), 1))
        for prompt in (TEXT, list(token_ids)):
            answer = complete(served, prompt, model=model, max_tokens=max_tokens)
            (choice,) = answer["choices"]
            told = choice["logprobs"]
            assert told["token_logprobs"][: len(want)] == [each.logprob for each in want]
            assert told["tokens"][: len(want)] == list(TEXT) and told["top_logprobs"][0] is None
            for score, top in zip(want[1:], told["top_logprobs"][1:], strict=False):
                assert max(top.values()) == score.best[0][1] and score.logprob in top.values()
            assert len(told["tokens"]) == len(want) + max_tokens == answer["usage"]["total_tokens"]
            assert choice["text"][: len(TEXT)] == TEXT and told["text_offset"][: len(want)] == list(range(len(want)))
    assert vocab.decode(token_ids) == TEXT


def test_a_stream_has_the_same_log_probabilities(served: Running, client: openai.OpenAI) -> None:
    options: Any = {"model": "skydraft-lossless", "prompt": TEXT, "max_tokens": 12, "logprobs": 2, "echo": True}
    whole = client.completions.create(**options).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs]
        assert len(parts) > 2 and [each for part in parts for each in part] == getattr(whole.logprobs, name)


@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless", "quality"])
def test_a_chat_has_those_of_its_tokens(client: openai.OpenAI, mode: str) -> None:
    options: Any = {"model": f"skydraft-{mode}", "messages": ASKED, "max_tokens": 20, "logprobs": True}
    want = expected(mode, max_new_tokens=20)
    whole = client.chat.completions.create(**options, top_logprobs=3).choices[0]
    assert "".join(token.token for token in whole.logprobs.content) == whole.message.content == want.text
    for token in whole.logprobs.content:
        assert bytes(token.bytes).decode() == token.token and len(token.top_logprobs) == 3
        assert token.logprob <= token.top_logprobs[0].logprob <= 0
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, top_logprobs=3, stream=True)]
    assert [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.content] == whole.logprobs.content
    plain = client.chat.completions.create(**options).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in plain) and len(plain) == 20


def test_tokens_that_are_no_text_are_spelled_out_and_special_ones_named() -> None:
    half = IDS["员".encode()[:1]]
    scores = [Score(half, None), Score(EOS, float("-inf"), ((half, -1.0),)), Score(IDS["我们".encode()], -0.5)]
    told = text_logprobs(VOCAB, scores, 7)
    assert told["tokens"] == ["bytes:\\xe5", "<eos>", "我们"] and told["token_logprobs"] == [None, -9999.0, -0.5]
    assert told["top_logprobs"][:2] == [None, {"bytes:\\xe5": -1.0, "<eos>": -9999.0}]
    content = token_logprobs(VOCAB, scores[1:])
    assert content[0]["token"] == "<eos>" and content[0]["top_logprobs"][0]["bytes"] == [0xE5]
