"""A server without skydraft gives what its model gives in this process, whatever the gate, the draft and the seed."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.stock.chat import HOSTS
from skydraft.engines.toy import open_toy

from .. import toys
from ..decoding.test_laws import decode as decoded
from ..edge.test_remote import gates
from ..toys import PROMPT, law
from .fakes import GENERATING, fake
from .faults import cut

GATED = [("entropy:2", 4, "0"), ("entropy:2", 6, "4"), ("margin:0.5", 3, "text"), ("entropy:0.5", 1, "1")]
DIALECTS = ("vllm", "llama-server", "sglang")
SEED = 17
plans = st.builds(
    lambda gate, k, back: make_plan(gate=gate, k=k, hand_back=back),
    gates, st.integers(1, 12), st.sampled_from(["0", "1", "4", "text"]),
)  # fmt: skip
sampled = st.builds(
    lambda n, t, k, p, seed: DecodingParams(max_new_tokens=n, temperature=t, top_k=k, top_p=p, seed=seed),
    st.integers(1, 24), st.sampled_from([0.0, 0.7, 1.3]), st.integers(1, 20), st.sampled_from([1.0, 0.8]),
    st.integers(0, 9),
)  # fmt: skip


@pytest.fixture(scope="module")
def clouds() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("skydraft.edge.stock.connection.SAMPLE", PROMPT)  # this vocabulary can read no other text
        servers = {dialect: stack.enter_context(fake(dialect, engine=toys.toy(SEED))) for dialect in DIALECTS}
        yield {
            dialect: stack.enter_context(closing(skydraft.connect(server.url, require=True)))
            for dialect, server in servers.items()
        }


decode = partial(decoded, execution="throughput")


@law(100)
@given(st.sampled_from(DIALECTS), st.sampled_from(toys.DRAFTERS), sampled, plans)
def test_a_stock_server_is_local(
    clouds: dict[str, Any], dialect: str, drafter: tuple[float, int], params: DecodingParams, plan: Any
) -> None:
    edge = toys.toy(SEED, drafter[0], sign=drafter[1])
    far = decode(plan, params, edge, clouds[dialect])
    near = decode(plan, params, edge, toys.toy(SEED))
    assert far.token_ids == near.token_ids
    assert (far.origins, far.finish_reason, far.text) == (near.origins, near.finish_reason, near.text)
    assert [(r.base, r.num_draft, r.num_accepted, r.outcome) for r in far.records] == [
        (r.base, r.num_draft, r.num_accepted, r.outcome) for r in near.records
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("drift", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("options", [{}, {"k": "auto"}, {"k": 3}])
def test_quality_asks_a_stock_server_what_cloud_asks(
    clouds: dict[str, Any], dialect: str, drift: float, options: dict[str, Any]
) -> None:
    params, edge = DecodingParams(max_new_tokens=40), toys.toy(SEED, drift)
    done = decoded(make_plan("quality", **options), params, edge, clouds[dialect])
    alone = decoded(make_plan("cloud"), params, edge, clouds[dialect])
    assert done.token_ids == alone.token_ids and set(done.origins) == {"cloud"}
    assert done.stats.num_requests == alone.stats.num_requests and not any(each.num_draft for each in done.records)


def test_quality_at_a_stock_server_goes_on_alone_and_then_streams_again() -> None:
    params, edge = DecodingParams(max_new_tokens=120, min_new_tokens=120), toys.toy(SEED, 0.1)
    with fake("vllm", engine=toys.toy(SEED)) as server, closing(skydraft.connect(server.url, timeout_s=5)) as cloud:
        server.faults.append(cut(20))
        server.fault_of = lambda path: cut(0) if path in GENERATING else None
        done = skydraft.generate(PROMPT, edge=edge, cloud=cloud, plan=make_plan("quality"), params=params, raw=True)
        for _ in done.rounds():
            if done.origins[-1] == "edge-fallback":
                server.fault_of = lambda path: None
                time.sleep(0.1)  # it is tried again after a while
    alone = done.origins.index("edge-fallback")
    assert len(done.token_ids) == 120 and 0 < alone <= 20 and set(done.origins[:alone]) == {"cloud"}
    assert done.origins[-1] == "cloud" and done.origins.count("cloud") > 40


@pytest.mark.parametrize("dialect", ["vllm", "llama-server", "completions"])
@pytest.mark.parametrize("drift", [0.0, 0.2, 0.8])
def test_quality_at_a_stock_server_fits_a_grammar(dialect: str, drift: float) -> None:
    pattern = "[0-9a-z]{3}-[0-9]{2,8}"
    api = "completions" if dialect == "completions" else "auto"
    params, edge = DecodingParams(max_new_tokens=40, grammar=skydraft.regex(pattern)), open_toy(f"toy:drift={drift}")
    with fake(dialect) as server, closing(skydraft.connect(f"{server.url}/v1", api=api)) as cloud:
        done = skydraft.generate("语速", edge=edge, cloud=cloud, plan=make_plan("quality"), params=params).run()
    assert re.fullmatch(pattern, done.text) and done.finish_reason == "eos"


TEXTS = ("completions", "dashscope", "deepseek", "mistral", "siliconflow")
NAMES = {"dashscope": "aliyuncs", "deepseek": "deepseek", "mistral": "mistral", "siliconflow": "siliconflow"}
APIS = {"completions": "completions"}


@pytest.mark.parametrize("dialect", TEXTS)
def test_a_server_that_gives_text_writes_what_its_model_would_after_that_text(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dialect != "completions":
        monkeypatch.setitem(HOSTS, "127.0.0.1", next(how for host, how in HOSTS.items() if NAMES[dialect] in host))
    edge, target, num_calls = open_toy("toy:drift=0.2"), open_toy("toy"), 0

    def alone(text: str) -> str:
        params = DecodingParams(max_new_tokens=48)
        return skydraft.generate(text, cloud=target, plan=make_plan("cloud"), params=params, raw=True).run().text

    with (
        fake(dialect) as server,
        closing(skydraft.connect(server.url, require=True, api=APIS.get(dialect, "chat"), model="toy")) as cloud,
    ):
        for gate, k, back in (*GATED, (None, None, None)):
            plan = make_plan(gate=gate, k=k, hand_back=back) if gate else make_plan("cloud")
            params = DecodingParams(max_new_tokens=40)
            far = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params).run()
            for begin, end in calls(far):
                before, written = edge.vocab.decode(far.token_ids[:begin]), far.token_ids[begin:end]
                num_calls += 1
                assert alone("语速" + before).startswith(edge.vocab.decode(written))
    assert num_calls > 10


def calls(done: Generation) -> Iterator[tuple[int, int]]:
    """From which to which token each call of the target reaches, with what it wrote on."""
    starts = [r.base for r in done.records if r.outcome == "verified"]
    for start in starts:
        after = [r for r in done.records if r.base >= start]
        end = start
        for record in after:
            if record.base != start and record.outcome != "written":
                break
            end = record.base + record.num_committed
        yield start, end


def test_a_gated_text_that_outgrew_the_servers_context_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is first asked when skipped tokens are beyond its context."""
    monkeypatch.setattr(
        "skydraft.gating.gates.Gate.reason",
        lambda gate, generated, num_seen, block, vocab, place: "uncertain" if len(generated) > 70 else "",
    )
    with fake("vllm", engine=open_toy("toy", 64, 8)) as server, closing(skydraft.connect(server.url)) as cloud:
        plan, params = make_plan(gate="entropy:2", k=6, hand_back="0"), DecodingParams(max_new_tokens=120)
        done = skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=plan, params=params).run()
    assert (done.finish_reason, len(done.token_ids)) == ("length", 120)
    assert set(done.origins[78:]) == {"edge-fallback"}


def test_a_text_ends_where_the_servers_context_does() -> None:
    with fake("vllm", engine=open_toy("toy", 64, 8)) as server, closing(skydraft.connect(server.url)) as cloud:
        params = DecodingParams(max_new_tokens=120)
        done = skydraft.generate(
            "语速", edge=open_toy("toy"), cloud=cloud, plan=make_plan("cloud"), params=params
        ).run()
    assert (done.finish_reason, len(done.token_ids)) == ("length", 64 - done.num_prompt_tokens)
