"""Merging: the merged model is the trained one, and what was not changed keeps its bytes."""

from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.engines.transformers_text import TransformersEngine
from skydraft.errors import ModelFilesError, NotEnoughDisk, OptionError, RecordsError
from skydraft.learning.adapter import Adapter, AdapterCard, merge, open_learned, read_adapter
from skydraft.models.adapted import Applied, applied, set_applied
from tests.engines.tiny_checkpoint import OPTIONS

from ..later import later

gguf = later("gguf")
NAME = "model.layers.1.self_attn.q_proj"


def adapter_for(fingerprint: str, shape: tuple[int, int], size: float = 0.3, name: str = NAME) -> Adapter:
    card = AdapterCard(
        base=fingerprint, base_name="draft", vocab="v", target="t", scale=2.0, num_trained=1, held_out=(0, 0),
        guard=(0, 0),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    low, high = rng.normal(0, size, (2, shape[1])), rng.normal(0, size, (shape[0], 2))
    return Adapter(card, {name: (low.astype(np.float32), high.astype(np.float32))})


def test_a_folder_is_its_base_and_the_change_and_nothing_else(pair: tuple[Any, Any], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    draft = pair[0]
    adapter = adapter_for(draft.fingerprint, (32, 32))
    out = merge(draft.path, draft.fingerprint, "draft", adapter, tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (draft.path, out))
    assert before.keys() == after.keys()
    assert np.allclose(after[f"{NAME}.weight"], before[f"{NAME}.weight"] + adapter.change(NAME))
    assert all(np.array_equal(before[key], after[key]) for key in before if key != f"{NAME}.weight")
    engine = TransformersEngine(out, OPTIONS)
    assert engine.fingerprint not in (draft.fingerprint, adapter.fingerprint)
    assert engine.vocab.fingerprint == draft.vocab.fingerprint
    assert merge(draft.path, draft.fingerprint, "draft", adapter, tmp_path) == out
    other = merge(draft.path, draft.fingerprint, "draft", adapter_for(draft.fingerprint, (32, 32), 0.31), tmp_path)
    assert TransformersEngine(other, OPTIONS).fingerprint != engine.fingerprint


def test_an_adapter_of_another_base_is_refused(pair: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="was trained for draft"):
        merge(pair[1].path, pair[1].fingerprint, "target", adapter_for(pair[0].fingerprint, (32, 32)), tmp_path)
    strange = adapter_for(pair[0].fingerprint, (32, 32), name="model.layers.7.self_attn.q_proj")
    with pytest.raises(OptionError, match="has no matrix"):
        merge(pair[0].path, pair[0].fingerprint, "draft", strange, tmp_path)
    assert not list((tmp_path / "adapted").iterdir())


KINDS = {"attn_q": "Q5_0", "ffn_up": "Q4_0", "ffn_down": "Q8_0", "attn_k": "F16"}


def small_gguf(path: Path, architecture: str = "qwen2") -> Path:
    """Two layers of a few matrices in several types, and strings in the header."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.name", "三")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "中"])
    rng = np.random.default_rng(0)
    for layer in range(2):
        for part, kind in KINDS.items():
            weights = rng.normal(0, 1, (64, 96)).astype(np.float32)
            quantization = gguf.GGMLQuantizationType[kind]
            data = gguf.quants.quantize(weights, quantization)
            raw = {} if kind == "F16" else {"raw_dtype": quantization}
            writer.add_tensor(f"blk.{layer}.{part}.weight", data, **raw)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(5, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_gguf_file_keeps_every_byte_but_those_of_the_change(tmp_path: Path, part: str) -> None:
    base = small_gguf(tmp_path / "base.gguf")
    # smaller than half a step of 4 bits, at which it would be lost
    adapter = adapter_for("f" * 32, (64, 96), 0.08, name=f"model.layers.1.{part}")
    out = merge(base, "f" * 32, "base", adapter, tmp_path / "home")
    before, after = gguf.GGUFReader(base), gguf.GGUFReader(out)
    assert [each.name for each in before.tensors] == [each.name for each in after.tensors]
    changed = []
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert list(old.shape) == list(new.shape)
        if old.tensor_type == new.tensor_type and np.array_equal(old.data, new.data):
            continue
        changed.append(new.name)
        assert new.tensor_type.name == ("F16" if part == "self_attn.k_proj" else "Q8_0")
        read = [gguf.quants.dequantize(each.data, each.tensor_type).reshape(64, 96) for each in (old, new)]
        change = adapter.change(f"model.layers.1.{part}")
        assert np.abs(read[1] - read[0] - change).max() <= np.abs(read[0] + change).max() / 250
        assert np.corrcoef((read[1] - read[0]).ravel(), change.ravel())[0, 1] > 0.9  # 0.3 in 4 or 5 bits
    assert len(changed) == 1
    assert changed[0].startswith("blk.1.")
    for key, field in before.fields.items():
        if not key.startswith("GGUF."):
            assert after.fields[key].contents() == field.contents()
    assert after.fields["skydraft.base"].contents().strip() == "f" * 32
    assert after.fields["skydraft.adapter"].contents().strip() == adapter.fingerprint


def test_files_that_cannot_be_changed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_for("f" * 32, (64, 96))
    with pytest.raises(OptionError, match="is a llama"):
        merge(small_gguf(tmp_path / "l.gguf", "llama"), "f" * 32, "l", adapter, tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("skydraft.engines.trainable._changed", full)
    with pytest.raises(NotEnoughDisk, match="No space left"):
        merge(small_gguf(tmp_path / "q.gguf"), "f" * 32, "q", adapter, tmp_path)
    assert not list((tmp_path / "adapted").iterdir())


def test_two_merges_at_once_publish_one_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skydraft.engines import trainable

    base, adapter = small_gguf(tmp_path / "base.gguf"), adapter_for("f" * 32, (64, 96))
    whole = merge(base, "f" * 32, "base", adapter, tmp_path / "alone").read_bytes()
    changed, others, num_begun = trainable._changed, threading.Event(), 0

    def slow(*args: Any) -> bytes:
        """Write, and wait in the middle until the other merge has begun to write too, where it does."""
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            others.wait(0.5)
        others.set()
        return changed(*args)

    monkeypatch.setattr(trainable, "_changed", slow)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(merge, base, "f" * 32, "base", adapter, tmp_path / "home") for _ in range(2)]
        (out,) = {each.result() for each in both}
    assert out.read_bytes() == whole
    assert [path.name for path in out.parent.iterdir() if not path.name.startswith(".")] == [out.name]


def test_a_merged_model_that_was_cut_is_named_and_made_again(tmp_path: Path) -> None:
    base, adapter = small_gguf(tmp_path / "base.gguf"), adapter_for("f" * 32, (64, 96))
    out = merge(base, "f" * 32, "base", adapter, tmp_path)
    whole = out.read_bytes()
    out.write_bytes(whole[:-100])
    with pytest.raises(ModelFilesError, match="gone or damaged"):
        open_learned("base", Applied("a.safetensors", str(out)), pytest.fail, tmp_path)
    assert merge(base, "f" * 32, "base", adapter, tmp_path) == out and out.read_bytes() == whole


def test_models_that_are_applied_at_once_are_all_noted(tmp_path: Path) -> None:
    given = {f"model-{number}": Applied("a", f"m{number}") for number in range(8)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: set_applied(tmp_path, name, given[name]), given))
    assert applied(tmp_path) == given


@pytest.mark.parametrize("how", ["empty", "text", "cut", "header", "nan", "shape"])
def test_hostile_files_are_no_adapters(tmp_path: Path, how: str) -> None:
    from safetensors.numpy import save

    adapter = adapter_for("f" * 32, (64, 96))
    card = {"skydraft-adapter": adapter.card.model_dump_json(by_alias=True)}
    low, high = adapter.pairs[NAME]
    whole = save({f"{NAME}.lora_A": low, f"{NAME}.lora_B": high}, card)
    data = {
        "empty": b"",
        "text": b"an adapter",
        "cut": whole[:-50],
        "header": (1 << 62).to_bytes(8, "little") + whole[8:],
        "nan": save({f"{NAME}.lora_A": low * np.nan, f"{NAME}.lora_B": high}, card),
        "shape": save({f"{NAME}.lora_A": low, f"{NAME}.lora_B": high.T.copy()}, card),
    }[how]
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(RecordsError, match="is not an adapter"):
        read_adapter(tmp_path / "file")
    (tmp_path / "whole").write_bytes(whole)
    assert read_adapter(tmp_path / "whole").fingerprint == adapter.fingerprint
    other = json.loads(card["skydraft-adapter"]) | {"schema": 2}
    newer = save({f"{NAME}.lora_A": low, f"{NAME}.lora_B": high}, {"skydraft-adapter": json.dumps(other)})
    (tmp_path / "newer").write_bytes(newer)
    with pytest.raises(RecordsError):
        read_adapter(tmp_path / "newer")
