"""The fakes themselves: each dialect writes what its model writes, remembers what it read, and fails as it is told."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.toy import open_toy
from tests.serving import PATIENCE_S
from tests.stock import faults
from tests.stock.fakes import Fake, fake

TOY = open_toy("toy", 4096, 8)
PROMPT = list(TOY.vocab.encode("语速"))
WRITTEN = list(
    skydraft.generate("语速", cloud=TOY, plan=make_plan("cloud"), params=DecodingParams(max_new_tokens=12), raw=True)
    .run()
    .token_ids
)
WRITES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}),
    "llama-server": ("/completion", {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "return_tokens": True}),
    "sglang": ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}),
}


def ids_in(dialect: str, answer: Any) -> list[Any]:
    if dialect == "vllm":
        return [i for choice in answer["choices"] for i in choice.get("token_ids") or []]
    return list(answer["tokens" if dialect == "llama-server" else "output_ids"])


def post(server: Fake, path: str, body: Any, **more: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body | more, timeout=PATIENCE_S)


def events(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("dialect", WRITES)
@pytest.mark.parametrize("burst", [1, 5])
def test_a_dialect_writes_what_its_model_writes_whole_and_as_a_stream(dialect: str, burst: int) -> None:
    path, body = WRITES[dialect]
    with fake(dialect, burst=burst) as server:
        assert ids_in(dialect, post(server, path, body).json()) == WRITTEN
        streamed = [ids_in(dialect, part) for part in events(post(server, path, body, stream=True))]
        assert (streamed[-1] if dialect == "sglang" else [i for part in streamed for i in part]) == WRITTEN
        assert server.model.num_written == 24
        assert server.model.num_prompt_tokens == 2 * len(PROMPT)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_fan_out_gives_the_token_after_each_prompt_in_order(dialect: str) -> None:
    several = [PROMPT + WRITTEN[:i] for i in range(5)]
    with fake(dialect) as server:
        if dialect == "vllm":
            answer = post(server, "/v1/completions", {"prompt": several, "max_tokens": 1, "return_token_ids": True,
                                                      "temperature": 0}).json()  # fmt: skip
            assert [choice["token_ids"] for choice in answer["choices"]] == [[i] for i in WRITTEN[:5]]
            assert answer["usage"]["prompt_tokens"] == sum(map(len, several))
        else:
            given = {"max_new_tokens": 1, "temperature": 0}
            answer = post(server, "/generate", {"input_ids": several, "sampling_params": given}).json()
            assert [one["output_ids"] for one in answer] == [[i] for i in WRITTEN[:5]]


def test_sglang_scores_a_draft_as_published() -> None:
    """Entry 0 has no value; entry i says what d_i cost, and beside it what the target would have written."""
    draft = [*WRITTEN[:3], 7]
    given = {"max_new_tokens": 1, "temperature": 0}
    asked = {"input_ids": PROMPT + draft, "sampling_params": given, "return_logprob": True, "top_logprobs_num": 1,
             "logprob_start_len": len(PROMPT) - 1}  # fmt: skip
    with fake("sglang") as server:
        meta = post(server, "/generate", asked).json()["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [PROMPT[-1], *draft]
    assert meta["input_token_logprobs"][0][0] is None is meta["input_top_logprobs"][0]
    assert [top[0][1] for top in meta["input_top_logprobs"][1:]] == WRITTEN[:4]


def test_a_prompt_that_was_read_before_is_in_the_cache_in_whole_blocks() -> None:
    long = PROMPT * 30
    body = {"prompt": long, "max_tokens": 1, "temperature": 0}
    with fake("vllm") as server:
        cached = [post(server, "/v1/completions", body).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert cached == [{"cached_tokens": 0}, {"cached_tokens": (len(long) - 1) // 16 * 16}]
    with fake("llama-server") as server:
        body = {"prompt": long, "n_predict": 1}
        assert [post(server, "/completion", body).json()["timings"]["cache_n"] for _ in "ab"] == [0, len(long) - 1]


def test_the_best_log_probabilities_are_those_of_raw_logits() -> None:
    vllm = {"prompt": PROMPT, "max_tokens": 1, "logprobs": 20, "return_tokens_as_token_ids": True, "temperature": 0.5}
    llama = {"prompt": PROMPT, "n_predict": 1, "n_probs": 20, "temperature": 0.8, "top_k": 2}
    with fake("vllm") as server:
        top = post(server, "/v1/completions", vllm).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    ours = {int(name.removeprefix("token_id:")): value for name, value in top.items()}
    with fake("llama-server") as server:
        chances = post(server, "/completion", llama).json()["completion_probabilities"][0]["top_logprobs"]
        after = post(server, "/completion", llama, post_sampling_probs=True).json()["completion_probabilities"][0]
    theirs = {entry["id"]: entry["logprob"] for entry in chances}
    assert {i: ours[i] for i in theirs} == theirs and max(ours, key=lambda i: ours[i]) == WRITTEN[0]
    assert len(theirs) == 20 and len(after["top_probs"]) == 2
    assert sum(entry["prob"] for entry in after["top_probs"]) == pytest.approx(1)


CONTINUES = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "llama-server": {}, "dashscope": {"partial": True}, "deepseek": {"prefix": True}, "mistral": {"prefix": True},
    "siliconflow": {"prefix": "音"},
}  # fmt: skip


@pytest.mark.parametrize("dialect", CONTINUES)
def test_a_chat_goes_on_from_the_assistants_last_message_only_when_it_is_asked_to(dialect: str) -> None:
    asks = CONTINUES[dialect]
    user, last = {"role": "user", "content": "语速"}, {"role": "assistant", "content": "音"}
    if dialect == "siliconflow":
        messages, beside = [user], asks
    elif dialect in ("vllm", "llama-server"):
        messages, beside = [user, last], asks
    else:
        messages, beside = [user, last | asks], {}
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    with fake(dialect) as server:
        said = post(server, "/v1/chat/completions", body | beside).json()["choices"][0]["message"]["content"]
        parts = events(post(server, "/v1/chat/completions", body | beside, stream=True))
        if dialect != "llama-server":
            other = body | {"messages": [user, last]}
            assert post(server, "/v1/chat/completions", other).json()["choices"][0]["message"]["content"] != said
    on = skydraft.generate(
        "语速音", cloud=TOY, plan=make_plan("cloud"), params=DecodingParams(max_new_tokens=8), raw=True
    )
    assert said.removeprefix("音" if dialect in ("llama-server", "mistral") else "") == on.run().text
    streamed = "".join(part["choices"][0]["delta"]["content"] for part in parts)
    assert streamed == said.removeprefix("音" if dialect == "llama-server" else "")


def test_a_client_that_hangs_up_stops_the_writing() -> None:
    with fake("vllm", token_s=0.002) as server:
        body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        server.wait_until_idle()
        assert server.model.num_written < 1500


# --- Faults


def outcome(server: Fake, dialect: str, timeout_s: float = PATIENCE_S, **more: Any) -> Any:
    """What a plain client makes of the next answer."""
    path, body = WRITES[dialect]
    try:
        response = httpx.post(server.url + path, json=body | more, timeout=timeout_s)
    except httpx.HTTPError as error:
        return type(error).__name__
    if response.status_code != 200:
        return response.status_code, response.headers.get("retry-after") or response.headers.get("location")
    try:
        return ids_in(dialect, response.json())
    except ValueError:
        return response.text[:6]


@pytest.mark.parametrize("dialect", WRITES)
def test_a_fault_is_what_the_next_request_gets_and_no_other(dialect: str) -> None:
    expected: list[tuple[faults.Fault, Any]] = [
        (faults.refuses(429, Retry_After="7"), (429, "7")),
        (faults.refuses(503), (503, None)),
        (faults.redirects("http://127.0.0.1:1/"), (307, "http://127.0.0.1:1/")),
        (faults.says(b"<html>"), "<html>"),
        (faults.silent(), "ReadTimeout"),
        (faults.slow(0.6), "ReadTimeout"),
        (faults.cut(0, 9), "RemoteProtocolError"),
        (faults.calls_it(lambda token_id: -1), [-1] * 12),
        (faults.calls_it(str), [str(i) for i in WRITTEN]),
    ]
    with fake(dialect) as server:
        server.faults.extend(fault for fault, _ in expected)
        for _, wanted in expected:
            assert outcome(server, dialect, 0.5 if wanted == "ReadTimeout" else PATIENCE_S) == wanted
        assert outcome(server, dialect) == WRITTEN


def test_a_stream_is_cut_stalls_or_never_ends() -> None:
    path, body = WRITES["vllm"]
    with fake("vllm") as server:
        for fault, error, timeout_s in (
            (faults.cut(3), httpx.RemoteProtocolError, PATIENCE_S), (faults.stalls(3), httpx.ReadTimeout, 2.5)
        ):  # fmt: skip
            server.faults.append(fault)
            lines: list[str] = []
            with (
                pytest.raises(error),
                httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=timeout_s) as response,
            ):
                lines.extend(line for line in response.iter_lines() if line)
            assert len(lines) == 3
        server.faults.extend([faults.ENDLESS, faults.floods(b"data: {}\n\n" * 1000)])
        for at_least in (100, 10_000):  # both would go on
            with httpx.stream("POST", server.url + path, json=body | {"stream": True}, timeout=PATIENCE_S) as response:
                assert (
                    len([line for line, _ in zip(response.iter_lines(), range(2 * at_least), strict=False)]) > at_least
                )
        server.wait_until_idle()


def test_choices_are_swapped_or_missing_and_a_bomb_is_small_on_the_wire() -> None:
    body = {"prompt": [PROMPT, PROMPT + WRITTEN[:1]], "max_tokens": 1, "temperature": 0}
    with fake("vllm") as server:
        server.faults.extend([faults.answers(lambda given: given[::-1]), faults.answers(lambda given: given[:1])])
        got = [[one["index"] for one in post(server, "/v1/completions", body).json()["choices"]] for _ in "ab"]
        assert got == [[1, 0], [0]]
        server.faults.append(faults.gzip_bomb(1 << 25))
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            raw = b"".join(response.iter_raw())
        assert len(raw) < 1 << 16 and len(gzip.decompress(raw)) == 1 << 25


def test_it_can_be_killed_and_come_back_as_another_model() -> None:
    path, body = WRITES["vllm"]
    with fake("vllm") as server:
        server.kill()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/v1/models")
        server.become(open_toy("toy:drift=0.9"), "other")
        server.start()
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "other"
        assert ids_in("vllm", post(server, path, body).json()) != WRITTEN
