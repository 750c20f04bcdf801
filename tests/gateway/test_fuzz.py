"""Requests that nobody wrote by hand: the gateway answers all of them, stays quick and small, and logs no traceback."""

import http.client
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from random import Random
from typing import Any

from . import test_literal as conversations
from .apart import TOYS, Apart, apart
from .interfaces import plain
from .test_fields import FOLLOWED, FOLLOWED_IN

LATE_S, MUCH_MIB = 2.0, 250.0
EXPECTED = {200, 400, 404, 413}
PATHS = (*FOLLOWED_IN, "responses/input_tokens")
MODELS = ["skydraft", *(f"skydraft-{mode}" for mode in ("edge", "cloud", "lossless", "fluency", "quality", "answers"))]
OURS: dict[str, list[Any]] = {
    "gate": ["entropy:1", "always"], "mode": ["edge", "cloud", "quality"], "k": [3],
    "hand_back": [8, "agree:2"], "grammar": ["regex:[0-9]+", "json_object:", 'lark:start: "a"+'], "token_ids": [True],
    "style": ["zh-short"], "local_only": [True], "break_loops": [False], "no_repeat_ngram_size": [3],
}  # fmt: skip
TEXTS = [
    "a", "语速", "a b\n", "b", "我 们", "c", "", "\0", "\x7f", "\u2028", "\udfff\ud800", "😀", "e\u0301", "\u202e",
    "<tool_call>", "</tool_call>", "{{ 7 }}", "{% for", "<|im_end|>", "%s%n", "../../etc/passwd", "null", "\\ud800",
]  # fmt: skip
NUMBERS: list[float] = [0, -1, 1, 2, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf]
ANY = [None, True, False, *TEXTS[:4], *NUMBERS[:4], [], {}, [[]], [None], {"a": 1}, {"type": "text"}, [{}]]


class Fuzzer:
    """Endless requests, (path, body), by a seed. `most` bounds what is repeated or lengthened."""

    def __init__(self, seed: int, most: int) -> None:
        self._random, self._most = Random(seed), most

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        choose = self._random
        while True:
            path = choose.choice(PATHS)
            body = self._sound(path)
            for _ in range(choose.choice([0, 1, 1, 1, 2, 5])):
                body = self._changed(body)
            data = json.dumps(body, ensure_ascii=choose.random() < 0.7).encode("utf-8", "surrogatepass")
            yield f"/v1/{path}", self._spoilt(data) if choose.random() < 0.1 else data

    def _sound(self, path: str) -> dict[str, Any]:
        choose = self._random
        name, text = path.removesuffix("/input_tokens"), choose.choice(TEXTS[:6])
        talk = conversations.TALKS.get(name)
        fields = {key: value for key, value in (FOLLOWED | FOLLOWED_IN[name]).items() if choose.random() < 0.1}
        ours = choose.sample(list(OURS), choose.choice([0, 1, 3]))
        fields |= {"skydraft": {key: choose.choice(OURS[key]) for key in ours}}
        body = plain(name, text, choose.choice([1, 4, 9]), model=choose.choice(MODELS))
        return body | (talk(text) if talk and choose.random() < 0.5 else {}) | fields

    def _changed(self, body: Any) -> Any:
        """The body with a change at any place of it."""
        body = json.loads(json.dumps(body))  # whose parts are shared with nothing
        places = [place for place in _places(body) if place[1] != "model" or self._random.random() < 0.1]
        if not places:
            return self._random.choice(ANY)
        holder, key = self._random.choice(places)
        match self._random.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[self._random.choice([*FOLLOWED, *TEXTS])] = holder[key]
            case 1:
                holder *= self._times(holder)
            case _:
                holder[key] = self._other(holder[key])
        return body

    def _other(self, value: Any) -> Any:
        choose = self._random
        match choose.randrange(6):
            case 0:
                return [value] * self._times(value)
            case 1:
                return {f"{choose.choice(TEXTS)}{number}": value for number in range(self._times(value))}
            case 2:
                return choose.choice(NUMBERS)
            case 3:
                for _ in range(choose.choice([1, 20, 90])):
                    value = choose.choice([[value], {"a": value}])
                return value
            case 4 if isinstance(value, str):
                return choose.choice([value + choose.choice(TEXTS), (value or "a") * self._times(value)])
        return choose.choice([*ANY, *TEXTS])

    def _times(self, value: Any = "") -> int:
        """How often to repeat a value: often a few times, and never so that it has more than ten times `most` bytes."""
        return min(int(self._most ** self._random.random()), 10 * self._most // len(json.dumps(value)) + 1)

    def _spoilt(self, data: bytes) -> bytes:
        choose = self._random
        at = choose.randrange(len(data))
        more = choose.choice([b"[", b"{", b'"', b"\\", b",", b"9"]) * self._times()
        utf_16 = data.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass")
        noise = choose.randbytes(choose.randint(1, 9))
        both = [data[:at] + each + data[at:] for each in (noise, more)]
        return choose.choice([data[:at], utf_16, data + data, *both])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each list and object in the value with each of its keys; of long ones, the first."""
    if isinstance(value, dict | list):
        for key in list(value)[:20] if isinstance(value, dict) else range(min(len(value), 20)):
            yield value, key
            yield from _places(value[key])


def ask(running: Apart, requests: Iterator[tuple[str, bytes]], wrong: list[str]) -> None:
    for path, body in requests:
        try:
            status, reply = running.post(body, path)
        except (OSError, http.client.HTTPException) as error:
            wrong.append(f"{error!r} {path} {body[:2000]!r}")
            continue
        if status not in EXPECTED or (status != 200 and not json.loads(reply)["error"]["message"]):
            wrong.append(f"{status} {reply[:300]!r} {path} {body[:2000]!r}")


def test_no_request_does_harm() -> None:
    wrong: list[str] = []
    with apart(*TOYS, "--context", "256", "-n", "8") as running:
        running.health()
        before = running.resident_mib
        running.forget_peak()
        with running.watched() as seen:
            several = [islice(Fuzzer(seed, 10_000), 80) for seed in (1, 2, 3)]
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda requests: ask(running, requests, wrong), several))
        assert not wrong, "\n".join(wrong[:3])
        assert not seen.wrong and seen.worst_s < LATE_S
        assert running.peak_mib - before < MUCH_MIB
    assert '"level": "error"' not in running.printed
