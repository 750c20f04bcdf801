"""Bytes and JSON that somebody damaged, or wrote to do harm: the same ones for the same seed."""

import json
import random
from typing import Any

# What no reader expects in a place: types, sizes, depths and characters.
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e308, -0.0, "", "a", "\0", "\ud800",
    "名" * 50, "x" * 5000, [], {}, [[]], [None] * 3, {"": {}}, [1e999], float("nan"), {"a": [1, "b", None]},
]  # fmt: skip


def mutated(value: Any, rng: random.Random) -> Any:
    """A JSON value with one place in it changed: replaced, removed, renamed or wrapped."""
    places = list(_places(value))
    if not places or rng.random() < 0.05:
        return rng.choice(STRANGE)
    path = rng.choice(places)
    copy = json.loads(json.dumps(value))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    key, how = path[-1], rng.randrange(5)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    elif how == 2:
        holder[key] = [{str(key): holder[key]}] * rng.choice([1, 2, 40])
    else:
        holder[key] = rng.choice(STRANGE)
    return copy


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(inner, (*path, key))


def as_bytes(value: Any, rng: random.Random) -> bytes:
    """JSON with a rare twist in its writing: deep, huge digits, a mark at its beginning, another encoding, cut."""
    data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    how = rng.randrange(14)
    if how < 8:
        return data
    return {
        8: b"\xef\xbb\xbf" + data, 9: data[: rng.randrange(len(data) + 1)], 10: b"[" * 100_000 + data,
        11: data.replace(b"1", b"9" * 5000, 1), 12: data.decode("utf-8", "replace").encode("utf-16"),
        13: flipped(data, rng),
    }[how]  # fmt: skip


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some changed, removed, doubled or cut."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if not changed:
            break
        at, how = rng.randrange(len(changed)), rng.randrange(5)
        if how == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            changed[at : at + 8] = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]).to_bytes(8, "little")
        elif how == 2:
            del changed[at : at + rng.choice([1, 4, 100])]
        elif how == 3:
            changed[at:at] = changed[at : at + rng.choice([1, 8, 64])]
        else:
            del changed[at:]
    return bytes(changed)
