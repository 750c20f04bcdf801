"""OpenAI's own SDK against a running gateway: what it parses is what we said.

Log-probabilities, token ids, and branches that begin with tokens that are given.
"""

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.decoding.accounts.scoring import prompt_scores
from skydraft.engines.toy import open_toy
from skydraft.gateway.answers import text_logprobs, token_logprobs
from skydraft.gateway.pair import Pair
from skydraft.gateway.requests import Defaults
from skydraft.prompts.messages import Message
from skydraft.prompts.pair import read_prompt
from skydraft.types import Prompt, Score

from ..later import later
from ..serving import serving
from ..thinking.scripts import thinking_toy
from ..toys import EOS, IDS, VOCAB
from .interfaces import ALL_WHOLE, events_of
from .interfaces import QUESTION as ASKED
from .running import Running, gateway, over

openai = later("openai")
TEXT = "语速快慢我"
NUM_TOKENS = 24
DRAFT, TARGET = "toy:drift=0.2", "toy"
SIDES = {"edge": {"draft"}, "cloud": {"target"}, "lossless": {"draft", "target"}, "quality": {"draft", "target"}}


def expected(mode: str, prompt: Any = ASKED, **params: Any) -> Any:
    pair: Any = {"edge": open_toy("toy:drift=0.2"), "cloud": open_toy("toy")}
    return skydraft.generate(messages=prompt, **pair, plan=make_plan(mode), params=DecodingParams(**params)).run()


@pytest.fixture(scope="module", params=["local", "remote"])
def asked(request: pytest.FixtureRequest) -> Iterator[Running]:
    if request.param == "local":
        with gateway() as running:
            yield running
        return
    # A busy machine is slow.
    with serving(open_toy(TARGET)) as server, over(skydraft.connect(server.address, require=True)) as running:
        yield running


def post(served: Running, path: str, **body: Any) -> Any:
    return served.client.post(f"{served.url}/{path}", json=body)


def complete(served: Running, prompt: Any, **more: Any) -> Any:
    """As lm-eval asks for log-likelihoods."""
    body = {"model": "skydraft-cloud", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    return post(served, "v1/completions", **body | more).json()


def chat(served: Running, mode: str, temperature: float = 0, most: int = NUM_TOKENS, **ours: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"model": f"skydraft-{mode}", "temperature": temperature, "seed": 7, "max_tokens": most}
    fixed = {"lossless": {"k": 4}, "quality": {"hand_back": 0}}.get(mode, {})  # else times decide, over a link
    reply = served.chat(**options, skydraft={"token_ids": True} | fixed | ours)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def alone(model: str, token_ids: list[int], num_best: int) -> list[dict[str, Any]]:
    """What a model says of these tokens after the question, where it reads them all as one prompt."""
    engine = open_toy(model)
    prompt = read_prompt(engine, [Message("user", "语速")]).edge.token_ids
    scores = list(prompt_scores(engine, Prompt((*prompt, *token_ids)), num_best))[len(prompt) :]
    return token_logprobs(engine.vocab, scores)


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


def test_tokens_that_are_no_text_are_spelled_out_and_special_ones_named() -> None:
    half = IDS["员".encode()[:1]]
    scores = [Score(half, None), Score(EOS, float("-inf"), ((half, -1.0),)), Score(IDS["我们".encode()], -0.5)]
    told = text_logprobs(VOCAB, scores, 7)
    assert told["tokens"] == ["bytes:\\xe5", "<eos>", "我们"] and told["token_logprobs"] == [None, -9999.0, -0.5]
    assert told["top_logprobs"][:2] == [None, {"bytes:\\xe5": -1.0, "<eos>": -9999.0}]
    content = token_logprobs(VOCAB, scores[1:])
    assert content[0]["token"] == "<eos>" and content[0]["top_logprobs"][0]["bytes"] == [0xE5]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("mode", list(SIDES))
def test_both_models_say_what_they_say_alone_of_the_same_text(asked: Running, mode: str, temperature: float) -> None:
    plain, told = chat(asked, mode, temperature), chat(asked, mode, temperature, logprobs=5)
    ours, token_ids = told["skydraft"], told["skydraft"]["token_ids"]
    assert told["choices"][0]["message"] == plain["choices"][0]["message"] and "logprobs" not in plain["skydraft"]
    for side, model in (("draft", DRAFT), ("target", TARGET)):
        known = [at for at, each in enumerate(ours["logprobs"][side]) if each]
        assert len(ours["logprobs"][side]) == len(token_ids) and (side in SIDES[mode] or not known)
        want = alone(model, token_ids, 5)
        assert [ours["logprobs"][side][at] for at in known] == [want[at] for at in known]
    written = {"accepted", "recovered", "bonus", "cloud"}
    judged = [at for at, origin in enumerate(ours["origins"]) if origin in written]
    assert all(ours["logprobs"]["target"][at] for at in judged)
    assert mode != "lossless" or sum(map(bool, ours["logprobs"]["draft"])) >= NUM_TOKENS - 1


def test_a_stream_says_them_once_at_its_end_and_openais_field_beside_them(asked: Running) -> None:
    options: Any = {"model": "skydraft-lossless", "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": True}
    options |= {"top_logprobs": 2, "skydraft": {"logprobs": 4, "token_ids": True, "k": 4}}
    whole = asked.chat(**options).json()
    message, content = whole["choices"][0]["message"], whole["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == message["content"]
    assert all(bytes(each["bytes"]).decode() == each["token"] for each in content)
    chunks = events_of(asked.chat(**options, stream=True).text)
    told = [chunk["skydraft"]["logprobs"] for chunk in chunks if "logprobs" in chunk.get("skydraft", {})]
    assert told == [whole["skydraft"]["logprobs"]] and "stats" in chunks[-1]["skydraft"]
    streamed = [chunk["choices"][0].get("logprobs") for chunk in chunks if chunk["choices"]]
    assert [each for run in streamed if run for each in run["content"]] == content
    bare = asked.chat(max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in (*bare, *content)] == [0] * 3 + [2] * NUM_TOKENS
    target = whole["skydraft"]["logprobs"]["target"]
    assert [each["logprob"] for each in content] == [each["logprob"] for each in target]
    assert [each["top_logprobs"] for each in content] == [each["top_logprobs"][:2] for each in target]
    runs = [chunk["skydraft"] for chunk in chunks if "token_chars" in chunk.get("skydraft", {})]
    assert all(len(run["token_chars"]) == len(run["token_ids"]) == run["num_tokens"] for run in runs)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert sum(sum(run["token_chars"]) for run in runs) == len(text)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless"])
def test_a_branch_with_the_token_that_was_there_is_the_same_text(asked: Running, mode: str, temperature: float) -> None:
    first = chat(asked, mode, temperature)
    text, token_ids = first["choices"][0]["message"]["content"], first["skydraft"]["token_ids"]
    for cut in (1, 6, NUM_TOKENS - 1):
        branch = chat(asked, mode, temperature, NUM_TOKENS - cut, continue_ids=token_ids[:cut])
        assert branch["skydraft"]["token_ids"] == token_ids[cut:]
        assert branch["skydraft"]["begins"] + branch["choices"][0]["message"]["content"] == text
        used = branch["usage"]
        assert used["completion_tokens"] == NUM_TOKENS - cut
        assert used["prompt_tokens"] == first["usage"]["prompt_tokens"] + cut
    if mode == "lossless":  # the target judges what follows as it does where it writes alone
        other = [*token_ids[:6], (token_ids[6] + 1) % 250]
        texts = [chat(asked, each, temperature, 9, continue_ids=other) for each in ("lossless", "cloud")]
        assert texts[0]["choices"] == texts[1]["choices"]


def test_one_token_is_asked_with_its_own_probability_and_nothing_is_written(asked: Running) -> None:
    """As the page asks: each model alone, the text before the token as a prompt, and a bias that holds the token."""
    token_ids = chat(asked, "lossless")["skydraft"]["token_ids"]
    for mode, side, model in (("edge", "draft", DRAFT), ("cloud", "target", TARGET)):
        want = alone(model, token_ids, 5)
        for at in (0, 5, NUM_TOKENS - 1):
            ours = {"continue_ids": token_ids[:at], "continue_as_prompt": True, "logprobs": 5, "token_ids": True}
            options: dict[str, Any] = {"model": f"skydraft-{mode}", "temperature": 0, "max_tokens": 1}
            told = asked.chat(**options, logit_bias={str(token_ids[at]): 100}, skydraft=ours).json()["skydraft"]
            assert told["token_ids"] == [token_ids[at]] and told["logprobs"][side] == [want[at]]


def test_the_link_carries_log_probabilities_only_where_they_are_asked_for(asked: Running) -> None:
    options: list[dict[str, Any]] = [{}, {"logprobs": 0}, {"logprobs": 5}]
    plain, bare, told = (chat(asked, "lossless", **each)["skydraft"]["receipt"]["bytes_down"] for each in options)
    if asked.gateway.pair.far is None:
        assert plain == bare == told == 0
    else:
        assert plain < bare <= plain + 8 * NUM_TOKENS
        assert bare + 20 * NUM_TOKENS <= told <= bare + 40 * NUM_TOKENS, (plain, bare, told)


@pytest.mark.parametrize("more", [{}, {"grammar": "regex:[0-9]{6}"}, {"think_budget": 5}])
def test_a_branch_within_or_after_thinking_is_the_same_text_and_counts_what_it_thinks(more: dict[str, Any]) -> None:
    with gateway(Pair(thinking_toy(0.2, 2), thinking_toy(max_sequences=2))) as running:
        whole = chat(running, "lossless", **more)
        token_ids, thought = whole["skydraft"]["token_ids"], whole["skydraft"]["stats"]["num_reasoning_tokens"]
        for cut in (1, 4, thought, thought + 2):
            branch = chat(running, "lossless", most=NUM_TOKENS - cut, continue_ids=token_ids[:cut], **more)
            assert branch["skydraft"]["token_ids"] == token_ids[cut:]
            told = branch["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert told == max(thought - cut, 0) == branch["skydraft"]["stats"]["num_reasoning_tokens"]
            answer, rest = (ALL_WHOLE["chat/completions"](each) for each in (whole, branch))
            assert answer.thought.endswith(rest.thought) and answer.text.endswith(rest.text)
