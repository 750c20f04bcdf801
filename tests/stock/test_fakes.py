"""The fakes themselves, where no other test would notice: an answer that we could not run, a host that repeats what it
goes on from, and failures, without which the hostile tests would test nothing."""

from __future__ import annotations

import gzip
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


def test_sglang_scores_a_draft_as_published() -> None:
    """Entry 0 has no value; entry i says what d_i cost, and beside it what the target would have written."""
    draft = [*WRITTEN[:3], 7]
    given = {"max_new_tokens": 1, "temperature": 0}
    asked = {"input_ids": PROMPT + draft, "sampling_params": given, "return_logprob": True, "top_logprobs_num": 1,
             "logprob_start_len": len(PROMPT) - 1}  # fmt: skip
    with fake("sglang") as server:
        meta = httpx.post(f"{server.url}/generate", json=asked, timeout=10.0).json()["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [PROMPT[-1], *draft]
    assert meta["input_token_logprobs"][0][0] is None is meta["input_top_logprobs"][0]
    assert [top[0][1] for top in meta["input_top_logprobs"][1:]] == WRITTEN[:4]


def outcome(server: Fake, dialect: str, timeout_s: float = PATIENCE_S) -> Any:
    """What a plain client makes of the next answer."""
    path, body = WRITES[dialect]
    try:
        response = httpx.post(server.url + path, json=body, timeout=timeout_s)
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


def test_a_bomb_is_small_on_the_wire() -> None:
    path, body = WRITES["vllm"]
    with fake("vllm") as server:
        server.faults.append(faults.gzip_bomb(1 << 25))
        with httpx.stream("POST", server.url + path, json=body) as response:
            raw = b"".join(response.iter_raw())
        assert len(raw) < 1 << 16 and len(gzip.decompress(raw)) == 1 << 25


@pytest.mark.parametrize("dialect", ["mistral", "deepseek"])
def test_of_two_hosts_that_go_on_one_repeats_what_it_goes_on_from(dialect: str) -> None:
    """Ours has to read both; a host that stopped repeating would not be noticed by it."""
    user, last = {"role": "user", "content": "语速"}, {"role": "assistant", "content": "音", "prefix": True}
    body = {"messages": [user, last], "max_tokens": 8, "temperature": 0}
    with fake(dialect) as server:
        whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=10.0).json()
        streamed = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"stream": True}, timeout=10.0).text
    repeats = dialect == "mistral"
    assert whole["choices"][0]["message"]["content"].startswith("音") == repeats == ('"content": "音"' in streamed)
