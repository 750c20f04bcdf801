"""Adapters: a model with one is the model whose weights were changed, in both engines; and what is none is refused."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.engines.adapter import Adapter, digest, read_adapter, write_adapter
from skydraft.engines.base import Engine
from skydraft.engines.registry import open_engine
from skydraft.engines.toy import open_toy
from skydraft.errors import EngineError, OptionError, RecordsError, SkydraftError

from ..later import later
from .adapters import change
from .contract import one_by_one
from .tiny_checkpoint import OPTIONS, copy_of, to_gguf

gguf = later("gguf")
later("peft")
IN_TORCH = {"attn_q": "self_attn.q_proj", "attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj"}
TEXT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 264, 33, 83, 27, 95]


@pytest.fixture(params=["folder", "tiny_gguf"])
def base(request: pytest.FixtureRequest, folder: Path) -> Path:
    return Path(request.getfixturevalue(request.param))


def merged(folder: Path, adapter: Adapter, out: Path) -> Path:
    """The checkpoint with the changes in its weights."""
    from safetensors.numpy import load_file, save_file

    out.mkdir()
    copy_of(folder, out)
    weights = load_file(folder / "model.safetensors")
    for name, (low, high) in adapter.pairs.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + adapter.alpha / adapter.rank * (high @ low)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def opened(path: Path) -> Engine:
    return open_engine(path.name, path, replace(OPTIONS, max_sequences=4))


def rows(engine: Engine) -> Any:
    """Logits along the text, first token by token, then all at once."""
    with engine.floor, closing(engine.open(TEXT[:1])) as sequence:
        return np.concatenate([one_by_one(engine, TEXT), sequence.extend(TEXT)])


def test_an_adapter_is_the_model_with_its_weights_changed(folder: Path, base: Path, tmp_path: Path) -> None:
    with opened(base) as bare:
        before, fingerprint, name = rows(bare), bare.fingerprint, bare.name
    shapes = {"attn_q": (32, 32), "attn_v": (16, 32), "ffn_down": (32, 64)}
    in_torch = change(fingerprint, {f"model.layers.1.{IN_TORCH[part]}": shape for part, shape in shapes.items()})
    pairs = dict(zip([f"blk.1.{part}.weight" for part in shapes], in_torch.pairs.values(), strict=True))
    one = in_torch if base == folder else replace(in_torch, pairs=pairs)
    whole = merged(folder, in_torch, tmp_path / "merged")
    write_adapter(tmp_path / "one.gguf", one)
    write_adapter(tmp_path / "other.gguf", replace(one, alpha=5.0))
    with opened(whole if base == folder else to_gguf(whole, tmp_path / "merged.gguf")) as engine:
        expected = rows(engine)
    with opened(base) as engine:
        adapted, other = (engine.adapters.choose(str(tmp_path / f"{each}.gguf"), ()) for each in ("one", "other"))
        found = rows(adapted)
        assert np.abs(found - expected).max() < 1e-3 < np.abs(found - before).max()
        assert (found.argmax(1) == expected.argmax(1)).all() and (found.argmax(1) != before.argmax(1)).any()
        assert len({fingerprint, adapted.fingerprint, other.fingerprint}) == 3
        # in turn and at once, each is what it is alone, to the bit, and so is the model without one
        differs = rows(other)
        assert np.abs(differs - found).max() > 1e-3
        for each, alone in ((engine, before), (adapted, found), (other, differs)):
            assert np.array_equal(rows(each), alone)
        with ThreadPoolExecutor(3) as pool:
            at_once = [pool.submit(rows, each) for each in (engine, adapted, other) * 4]
            for given, alone in zip(at_once, (before, found, differs) * 4, strict=True):
                assert np.array_equal(given.result(), alone)
        pairs = {name.replace("1", "7"): pair for name, pair in one.pairs.items()}
        write_adapter(tmp_path / "strange.gguf", replace(one, pairs=pairs))
        with pytest.raises(RecordsError, match=rf"strange\.gguf does not fit {name}"):
            engine.adapters.choose(str(tmp_path / "strange.gguf"), ())
        assert np.array_equal(rows(engine), before)
    for each in (engine, adapted, other):
        with pytest.raises(EngineError, match="is closed"):
            each.open(TEXT)


def test_adapters_are_chosen_by_prompt_and_renewed(base: Path, tmp_path: Path) -> None:
    matrix = "model.layers.1.self_attn.q_proj" if base.is_dir() else "blk.1.attn_q.weight"
    home = tmp_path / "adapters"

    def write(name: str, seed: int, beginning_len: int, base: str) -> None:
        made, path = change(base, {matrix: (32, 32)}, seed), home / name / "adapter.gguf"
        known = {"beginning_len": beginning_len, "beginning": digest(TEXT[:beginning_len])}
        write_adapter(path, replace(made, card=made.card.model_copy(update=known)))
        os.utime(path, (1e9, 1e9))  # as a copy that keeps times; those of one rank have one size

    with opened(base) as engine:
        assert engine.adapters.choose("auto", TEXT) is engine  # there is no folder
        engine.adapters.folder = home
        for seed, (name, length) in enumerate({"short": 3, "long": 6, "all": len(TEXT), "named": 0}.items()):
            write(name, seed, length, engine.fingerprint)
        write("strange", 5, 7, "f" * 32)
        (home / "damaged").mkdir()
        (home / "damaged" / "adapter.gguf").write_bytes(b"GGUF")
        choose = engine.adapters.choose
        for wanted, prompt, name in (
            (None, TEXT, "long"), ("auto", TEXT[:6], "short"), ("auto", TEXT[:3], ""), ("auto", [1, *TEXT], ""),
            ("none", TEXT, ""), ("named", TEXT, "named"), ("short", [1, 2], "short"),
        ):  # fmt: skip
            assert choose(wanted, prompt).name == engine.name + (name and f"+{name}"), (wanted, prompt)
        for wanted, says in (
            ("nobody", "has no adapter 'nobody'; it has: all, damaged, long, named, short, strange"),
            ("strange", r"was trained for draft \(ffffffff\), not for"),
            ("damaged", "is not an adapter"), ("../all", "has no adapter"),
        ):  # fmt: skip
            with pytest.raises(SkydraftError, match=says):
                choose(wanted, TEXT)
        before = choose("named", TEXT)
        assert choose("named", TEXT) is before  # it is read once
        with closing(before.open(TEXT)) as sequence:
            write("named", 6, 0, engine.fingerprint)
            after = choose("named", TEXT)
            assert after is not before and after.fingerprint != before.fingerprint
            assert sequence.extend([1]).shape[0] == 1  # the text that was under way goes on
        choose("named", TEXT)
        before.open(TEXT).close()  # as does one that was chosen for it, and waited for a seat
        engine.adapters.wait_s = 0.0
        choose("named", TEXT)
        with pytest.raises(EngineError, match="is closed"):
            before.open(TEXT)
        (home / "named" / "adapter.gguf").unlink()  # as `learn revert` does
        assert choose(None, [1]) is choose(None, [1]) is engine
        with pytest.raises(EngineError, match="is closed"):
            after.open(TEXT)


def test_an_engine_that_takes_none_refuses(tmp_path: Path) -> None:
    engine = open_toy("toy")
    write_adapter(tmp_path / "a.gguf", change(engine.fingerprint, {"one": (32, 32)}))
    with pytest.raises(OptionError, match="toy takes no adapters"):
        engine.adapters.choose(str(tmp_path / "a.gguf"), ())
    with pytest.raises(RecordsError, match="it is not a file"):
        read_adapter(tmp_path)


HOSTILE = {
    "cut": lambda whole: whole[:-50], "a model": lambda whole: whole.replace(b"adapter", b"another"),
    "an array without end": lambda whole: whole.replace(
        b"lora.alpha\x06\0\0\0", b"lora.alpha\x09\0\0\0\0\0\0\0" + (2**60).to_bytes(8, "little")
    ),
    "type of alpha": lambda whole: whole.replace(b"lora.alpha\x06\0\0\0", b"lora.alpha\x04\0\0\0"),
    "nan": lambda whole: whole[:-4] + np.float32("nan").tobytes(),
    "name": lambda whole: whole.replace(b"lora_b", b"lora_c"),
    "card": lambda whole: whole.replace(b'"base"', b'"bass"'),
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_files_are_no_adapters(tmp_path: Path, how: str) -> None:
    write_adapter(tmp_path / "whole", change("f" * 32, {"blk.0.attn_q.weight": (64, 96)}))
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "file").write_bytes(HOSTILE[how](whole))
    assert (tmp_path / "file").read_bytes() != whole
    with pytest.raises(RecordsError, match="is not an adapter"):
        read_adapter(tmp_path / "file")


def test_a_full_disk_is_an_error_and_no_cut_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes the tensors says nothing of it: the trained adapter was there, damaged."""
    before = change("f" * 32, {"blk.0.attn_q.weight": (64, 96)})
    write_adapter(tmp_path / "one.gguf", before)
    close = gguf.GGUFWriter.close

    def cut(writer: Any) -> None:
        (path,) = tmp_path.glob(".one.gguf-*/adapter")
        close(writer)
        os.truncate(path, path.stat().st_size - 1)

    monkeypatch.setattr(gguf.GGUFWriter, "close", cut)
    with pytest.raises(OSError, match="No space left on device"):
        write_adapter(tmp_path / "one.gguf", replace(before, alpha=5.0))
    (kept,) = tmp_path.iterdir()
    again = read_adapter(kept)
    assert again.fingerprint == before.fingerprint and again.card == before.card and kept.stat().st_mode & 0o077 == 0


def test_no_two_adapters_have_one_fingerprint() -> None:
    """Whatever differs: a number of a matrix, the name of a matrix, the strength, the base."""
    shapes = {"blk.0.attn_q.weight": (64, 96), "blk.1.attn_q.weight": (64, 96)}
    one = change("f" * 32, shapes)
    first, second = one.pairs.items()
    changed = first[1][0] + np.eye(2, 96, 95, np.float32)
    others = [
        replace(one, pairs={first[0]: (changed, first[1][1]), second[0]: second[1]}),
        replace(one, pairs={first[0]: second[1], second[0]: first[1]}), replace(one, pairs={first[0]: first[1]}),
        replace(one, alpha=5.0), change("e" * 32, shapes), change("f" * 32, shapes, seed=2),
    ]  # fmt: skip
    assert len({each.fingerprint for each in (one, *others)}) == 1 + len(others)
    assert change("f" * 32, shapes).fingerprint == one.fingerprint
