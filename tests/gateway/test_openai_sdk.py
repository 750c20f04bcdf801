"""OpenAI's own SDK against a running gateway: what it parses is what we said."""

from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.engines.toy import open_toy
from skydraft.gateway.requests import Defaults

from ..later import later
from .interfaces import QUESTION as ASKED
from .running import Running, gateway

openai = later("openai")


def expected(mode: str, prompt: Any = ASKED, **params: Any) -> Any:
    pair: Any = {"edge": open_toy("toy:drift=0.2"), "cloud": open_toy("toy")}
    return skydraft.generate(messages=prompt, **pair, plan=make_plan(mode), params=DecodingParams(**params)).run()


def test_models_are_listed_and_looked_up(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == "skydraft" and {"skydraft-lossless", "skydraft-edge", "skydraft-quality"} < set(names)
    assert "skydraft-auto" not in names  # this pair has no calibration
    assert client.models.retrieve("skydraft-lossless").owned_by == "skydraft"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_a_stream_is_the_same_answer_in_chunks(client: openai.OpenAI) -> None:
    want = expected("quality", max_new_tokens=30)
    stream = client.chat.completions.create(
        model="skydraft-quality", messages=ASKED, max_tokens=30, stream=True, stream_options={"include_usage": True},
        extra_body={"skydraft": {"token_ids": True}},
    )  # fmt: skip
    first, *chunks = list(stream)
    *runs, last, usage = chunks
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in (first, *runs, last))
    assert first.choices[0].delta.to_dict() == {"role": "assistant", "content": ""}
    assert all(chunk.choices[0].delta.role is None and chunk.choices[0].finish_reason is None for chunk in runs)
    assert "".join(chunk.choices[0].delta.content for chunk in runs) == want.text
    ours = [chunk.model_extra["skydraft"] for chunk in runs]
    assert [token_id for each in ours for token_id in each["token_ids"]] == list(want.token_ids)
    assert [each["origin"] for each in ours for _ in each["token_ids"]] == list(want.origins)
    records = [each["record"] for each in ours if "record" in each]
    assert [record["num_committed"] for record in records] == [record.num_committed for record in want.records]
    assert last.choices[0].finish_reason == "length" and not last.choices[0].delta.content
    assert last.model_extra["skydraft"]["stats"]["num_rounds"] == len(want.records)
    assert usage.choices == [] and usage.usage.completion_tokens == 30
    assert usage.usage.total_tokens == want.num_prompt_tokens + 30
    assert len({chunk.id for chunk in (first, *chunks)}) == 1


def test_without_the_extension_nothing_of_ours_is_said(client: openai.OpenAI) -> None:
    options: Any = {"model": "skydraft", "messages": ASKED, "max_tokens": 8}
    options["extra_body"] = {"skydraft": {"extension": False}}
    assert "skydraft" not in client.chat.completions.create(**options).model_extra
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert all("skydraft" not in chunk.model_extra for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks) and all(chunk.choices for chunk in chunks)  # nobody asked


def test_several_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    options: Any = {"model": "skydraft-quality", "messages": ASKED, "max_tokens": 20, "temperature": 0.9, "seed": 3}
    got = client.chat.completions.create(**options, n=3)
    texts = [choice.message.content for choice in got.choices]
    assert texts == [expected("quality", max_new_tokens=20, temperature=0.9, seed=3 + n).text for n in range(3)]
    assert [choice.index for choice in got.choices] == [0, 1, 2] and got.usage.completion_tokens == 60
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_text_completions_continue_a_text_and_repeat_it(client: openai.OpenAI) -> None:
    options: Any = {"model": "skydraft-lossless", "prompt": "语速", "max_tokens": 12, "echo": True}
    want = "语速" + expected("lossless", max_new_tokens=12).text  # the toy's template is the bare text
    assert client.completions.create(**options).choices[0].text == want
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == want
    several = client.completions.create(**options | {"prompt": ["情绪", "语速"]}).choices
    assert several[1].text == want and several[0].text.startswith("情绪")
    assert len(client.completions.create(model="skydraft", prompt="语速").choices[0].text) <= 16


def test_a_full_queue_is_503_and_the_sdk_tries_again() -> None:
    given = {"model": "skydraft-edge", "messages": ASKED, "max_tokens": 4000, "stream": True}
    with gateway(max_running=1, max_waiting=1) as running:
        with httpx.stream("POST", f"{running.v1}/chat/completions", json=given):
            with pytest.raises(openai.InternalServerError) as raised:
                impatient = openai.OpenAI(base_url=running.v1, api_key="none", max_retries=0)
                impatient.chat.completions.create(model="skydraft", messages=ASKED, n=2)
            assert raised.value.status_code == 503 and raised.value.response.headers["retry-after"]
            patient = openai.OpenAI(base_url=running.v1, api_key="none", max_retries=5)
            answer = patient.chat.completions.create(model="skydraft-edge", messages=ASKED, max_tokens=4)
            assert answer.choices[0].message.content
        running.wait_until_idle()


def test_what_old_and_other_clients_send_is_read_as_it_is_meant(served: Running) -> None:
    plain = served.chat().json()["choices"]
    assert served.chat(stop="", n=None).json()["choices"] == served.chat(stop=["", ""]).json()["choices"] == plain


def test_what_the_gateway_was_started_with_holds_where_a_client_says_nothing() -> None:
    params = DecodingParams(max_new_tokens=7, seed=5, temperature=0.9, sentences=3)
    chosen = Defaults(params, "慢", frozenset({"max_new_tokens", "seed", "temperature", "sentences"}))
    with gateway(defaults=chosen) as running:

        def said(system: str = "", **body: Any) -> Any:
            turns = [{"role": "system", "content": system}] if system else []
            answer = running.post("chat/completions", model="skydraft-lossless", messages=[*turns, *ASKED], **body)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]["content"]

        messages = [{"role": "system", "content": "慢"}, *ASKED]
        assert said() == expected("lossless", messages, max_new_tokens=7, seed=5, temperature=0.9, sentences=3).text
        own = {"max_tokens": 9, "seed": 6, "temperature": 0.4}
        messages = [{"role": "system", "content": "快"}, *ASKED]
        want = expected("lossless", messages, max_new_tokens=9, seed=6, temperature=0.4)
        assert said("快", skydraft={"sentences": 0}, **own) == want.text
        said("快", response_format={"type": "json_object"}, **own)  # which decides where it ends


def test_a_prediction_is_drafted_and_changes_no_token(client: openai.OpenAI) -> None:
    options = {"model": "skydraft-lossless", "messages": ASKED, "max_tokens": 60}
    plain = client.chat.completions.create(**options)
    text = plain.choices[0].message.content
    for content in (text, [{"type": "text", "text": text[:40]}, {"type": "text", "text": text[40:]}]):
        done = client.chat.completions.create(**options, prediction={"type": "content", "content": content})
        details = done.usage.completion_tokens_details
        assert done.choices[0].message.content == text and details.accepted_prediction_tokens > 20
        assert details.rejected_prediction_tokens >= 0
