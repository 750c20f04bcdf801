"""A real vLLM that takes drafts: fewer steps, the same text and the same distribution, and no device can end it."""

import json
import random
import re
import struct
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2 as httpx
import numpy as np
import pytest

import skydraft
from skydraft import DecodingParams, EngineOptions, make_plan
from skydraft.engines.base import Engine
from skydraft.grammars import regex
from tests import reference
from tests.choosing.test_distribution import SIGNIFICANCE, p_value
from tests.serving import free_port
from tests.starting import ROOT
from tests.stock.conftest import vllm_serve
from tests.stock.test_drafts_port import Phone
from tests.stock.test_real import tiny  # noqa: F401

pytestmark = pytest.mark.stock
MENDED = Path(__file__).parent / "mended"
LENGTH, NUM_TEXTS = 60, 400


@contextmanager
def serving_drafts(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """The addresses of a vLLM with this class, and of its port for drafts."""
    port = free_port()
    speculation = json.dumps({"method": "custom_class", "model": name, "num_speculative_tokens": 7})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'skydraft-vllm'}:{MENDED}")
        patch.setenv("SKYDRAFT_DRAFTS_PORT", str(port))
        with vllm_serve(folder, "--speculative-config", speculation, context=640) as url:
            yield url, f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[tuple[str, str]]:  # noqa: F811
    with serving_drafts(tiny, "skydraft_vllm.Drafts") as found:
        yield found


@pytest.fixture(scope="module")
def twin(tiny: Path) -> Iterator[Engine]:  # noqa: F811
    """A draft model that knows all that the target says."""
    with closing(skydraft.load(str(tiny), EngineOptions(context_len=640))) as engine:
        yield engine


def metric(url: str, name: str) -> float:
    found = re.findall(rf"^vllm:{name}(?:_total)?{{.*}} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def asked(url: str, prompt: list[int], **more: Any) -> Any:
    body = {"model": "stock", "prompt": prompt, "temperature": 0, "return_token_ids": True, "ignore_eos": True, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300.0).raise_for_status().json()["choices"][0]


def drafted(url: str, phone: Phone, number: int, prompt: list[int], drafts: list[int], **more: Any) -> list[int]:
    """What vLLM writes while it has these drafts, from its first token on."""
    name = uuid4().hex
    phone.text(number, name, prompt)
    phone.draft(number, 0, drafts)
    return list(asked(url, prompt, vllm_xargs={"skydraft": name}, **more)["token_ids"])


def test_right_drafts_are_accepted_and_wrong_ones_change_nothing(served: tuple[str, str]) -> None:
    (url, port), prompt = served, [*range(5, 25)]
    plain = asked(url, prompt, max_tokens=LENGTH)["token_ids"]
    with Phone(port) as phone:
        assert phone.hello == {"version": 1, "drafts": 7, "names": True}
        for number, drafts in enumerate([plain, [each ^ 1 for each in plain], plain[:20] + [3] * 20]):
            before = metric(url, "spec_decode_num_accepted_tokens")
            assert drafted(url, phone, number, prompt, drafts, max_tokens=LENGTH) == plain
            accepted = metric(url, "spec_decode_num_accepted_tokens") - before
            assert [accepted > 0.7 * LENGTH, accepted == 0, 10 < accepted < 20][number], accepted


PLAIN = DecodingParams(max_new_tokens=LENGTH, min_new_tokens=LENGTH)
GRAMMAR = DecodingParams(max_new_tokens=80, grammar=regex("[a-z]{12}, [0-9]{12}"))


@pytest.mark.parametrize("params", [PLAIN, GRAMMAR])
def test_a_device_writes_what_vllm_writes(served: tuple[str, str], twin: Engine, params: DecodingParams) -> None:
    url, port = served

    def write(number: int, cloud: Any, mode: str) -> str:
        plan, prompt = make_plan(mode), f"{number}" * 30
        return skydraft.generate(prompt, edge=twin, cloud=cloud, plan=plan, params=params, raw=True).run().text

    with (
        closing(skydraft.connect(url, drafts=port, require=True)) as one,
        closing(skydraft.connect(url, drafts=port, require=True)) as other,
        ThreadPoolExecutor(8) as pool,
    ):
        plain = [write(number, one, "cloud") for number in range(8)]
        jobs = [pool.submit(write, number, [one, other][number % 2], "lossless") for number in range(8)]
        assert [job.result() for job in jobs] == plain
    assert not params.grammar or all(re.fullmatch("[a-z]{12}, [0-9]{12}", text) for text in plain)


def test_drafts_leave_the_distribution_as_it_is(tiny: Path, twin: Engine) -> None:  # noqa: F811
    """Texts of three tokens at temperature 0.8, each one of two, with drafts that may be right."""
    prompt, two, temperature = [*range(5, 25)], (30, 31), 0.8
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = dict[tuple[int, ...], float]()
        for text, chance in expected.items():
            row = reference.row_after(twin, [*prompt, *text])[list(two)].astype(np.float64)
            chances = reference.probabilities(row / temperature)
            longer |= {(*text, each): chance * share for each, share in zip(two, chances, strict=True)}
        expected = longer
    how: dict[str, Any] = {"temperature": temperature, "max_tokens": 3, "allowed_token_ids": two}
    likely = list(max(expected, key=lambda text: expected[text]))
    with serving_drafts(tiny, "mended_drafts.Drafts") as (url, port), Phone(port) as phone:
        found = Counter(
            tuple(drafted(url, phone, number, prompt, likely, seed=number, **how)) for number in range(NUM_TEXTS)
        )
        assert metric(url, "spec_decode_num_accepted_tokens") > NUM_TEXTS / 8
    assert found.keys() <= expected.keys()
    counts = np.array([found[text] for text in expected], float)
    assert p_value(counts, np.array([*expected.values()])) > SIGNIFICANCE


def test_no_device_ends_a_vllm(served: tuple[str, str]) -> None:
    (url, port), prompt, noise = served, [*range(5, 25)], random.Random(0)
    plain = asked(url, prompt, max_tokens=LENGTH)["token_ids"]
    for number in range(40):
        with Phone(port) as phone:
            name = uuid4().hex
            phone.text(1, name, prompt)
            kinds: list[tuple[bytes, bytes]] = [
                (b"D", struct.pack("<II", 1, 0) + np.array([2**31 - 1, -1], "<i4").tobytes()),
                (b"D", struct.pack("<II", 1, 2**32 - 1) + np.array(plain, "<i4").tobytes()),
                (b"T", struct.pack("<I16sI", 1, bytes(16), 2**32 - 1)), (b"X", noise.randbytes(50)), (b"D", b""),
                (b"D", struct.pack("<II", 1, 0) + np.array(plain * 4, "<i4").tobytes()),
            ]  # fmt: skip
            phone.draft(1, 0, plain[:30])
            try:
                phone.send(*kinds[number % len(kinds)])
                phone.socket.sendall(noise.randbytes(1000))
            except OSError:
                pass
            assert asked(url, prompt, max_tokens=LENGTH, vllm_xargs={"skydraft": name})["token_ids"] == plain
