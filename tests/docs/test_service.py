"""The service of docs/python.md, as it is printed, with toys of one sequence for the demo pair."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import skydraft
from skydraft.engines.toy import open_toy

from ..decoding.test_slots import few
from .pages import NAMES as TOYS
from .pages import blocks_of

pytest.importorskip("starlette")
httpx2 = pytest.importorskip("httpx2")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    (block,) = [each for each in blocks_of("docs/python.md") if each.first_line.startswith("# service.py")]
    assert len(block.text.splitlines()) <= 58
    monkeypatch.setattr(skydraft, "load", lambda name, parallel: few(parallel, spec=TOYS[name]))
    names: dict[str, Any] = {}
    exec(block.text, names)
    yield names
    names["threads"].shutdown()


def test_it_answers_many_at_a_time_each_as_one_alone_and_frees_who_hangs_up(service: dict[str, Any]) -> None:
    plan = skydraft.make_plan("lossless")
    edge, cloud = map(open_toy, TOYS.values())
    questions = [f"你好{number}" for number in range(6)]
    params = skydraft.decoding_params(max_new_tokens=512)
    alone = [skydraft.generate(each, edge=edge, cloud=cloud, plan=plan, params=params).run() for each in questions]

    async def ask() -> tuple[list[str], str, Any]:
        app = service["app"]
        async with app.router.lifespan_context(app) as state:
            where = httpx2.ASGITransport(lambda scope, *rest: app({**scope, "state": dict(state)}, *rest))
            async with httpx2.AsyncClient(transport=where, base_url="http://service") as client:
                answers = await asyncio.gather(*(client.post("/answer", content=each.encode()) for each in questions))
                empty = await client.post("/answer", content="长".encode() * 5000)
            return [each.text for each in answers], empty.text, empty.status_code

    texts, refused, status = asyncio.run(ask())
    cut = ["\n[cut: the limit of tokens]" if each.finish_reason == "length" else "" for each in alone]
    assert any(cut) and texts == [each.text + end for each, end in zip(alone, cut, strict=True)]
    assert status == 400 and "context" in refused
