"""Folders that hold a thinker: of its own, in a whole checkpoint, in the published configuration, or broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.checkpoints.omni import OmniEngine
from skydraft.engines.registry import open_engine
from skydraft.errors import BrokenModel

from ..later import later
from .tiny_checkpoint import OPTIONS, copy_of
from .tiny_omni import clip, greedy, make_full, spoken

torch = later("torch")
transformers = later("transformers")


def twenty(engine: OmniEngine) -> list[int]:
    prompt, media = spoken(engine, 1, 1.3)
    return greedy(engine.open(prompt, media), prompt[-1], 20)


def test_a_whole_checkpoint_gives_its_thinker_alone(omni: OmniEngine, omni_folder: Path, tmp_path: Path) -> None:
    make_full(copy_of(omni_folder, tmp_path))
    engine = open_engine("whole", tmp_path, OPTIONS)
    assert isinstance(engine, OmniEngine) and twenty(engine) == twenty(omni)
    names = {name.split(".")[0] + "." + name.split(".")[1] for name, _ in engine._model.named_parameters()}
    assert names == {"model.audio_tower", "model.language_model", "lm_head.weight"}


def test_a_folder_without_audio_settings(omni_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="cannot load the audio settings"):
        OmniEngine(copy_of(omni_folder, tmp_path, "preprocessor_config.json"), OPTIONS)


def test_a_missing_weight_is_not_drawn_at_random(omni_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(omni_folder / "model.safetensors")
    del weights["audio_tower.layers.1.fc1.weight"]
    save_file(weights, copy_of(omni_folder, tmp_path) / "model.safetensors", metadata={"format": "pt"})
    make_full(tmp_path)
    with pytest.raises(BrokenModel, match=r"lacks weights of its model: model\.audio_tower\.layers\.1\.fc1\.weight"):
        OmniEngine(tmp_path, OPTIONS)


def test_the_chat_template_of_a_processor(omni_folder: Path, tmp_path: Path) -> None:
    copy_of(omni_folder, tmp_path, "chat_template.jinja")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert OmniEngine(tmp_path, OPTIONS).vocab.chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert OmniEngine(tmp_path, OPTIONS).vocab.chat_template == "{{ messages }}"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(BrokenModel, match="holds no chat template"):
        OmniEngine(tmp_path, OPTIONS)


# thinker_config of config.json in Qwen/Qwen2.5-Omni-3B, in the names of that file. Only widths are smaller:
# hidden_size, intermediate_size, d_model, encoder_ffn_dim, and embed_dim, hidden_size and intermediate_size of vision
# (2048, 11008, 1280, 5120, 1280, 1280, 3420 there); head_dim is written out, which there is 2048 / 16.
# Not read from the file itself: ids and audio from config.json of OpenMOSS-Team/RoboOmni-LIBERO-Object, a fine-tuned
# 3B thinker; the text part from Qwen25Omni/Config.lean of the project Tyr, which cites the file; the sections of M-RoPE
# and the vision part from the defaults of transformers.
PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "published_thinker.json").read_text())
_MARK_NAMES = ("endoftext", "im_start", "im_end", "AUDIO", "audio_bos", "audio_eos")
_MARKS = {f"<|{name}|>": 151643 + at for at, name in enumerate(_MARK_NAMES)}


def save_published(folder: Path) -> Path:
    """A whole checkpoint in the published configuration but for two layers, with as many tokens as Qwen2.5 has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{i}" for i in range(151643 - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [*_MARKS, *(f"<|mark_{i}|>" for i in range(151649, 151665))]
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=300).save_pretrained(folder)
    config = json.loads(json.dumps(PUBLISHED))
    config["text_config"]["num_hidden_layers"] = config["audio_config"]["encoder_layers"] = 2
    config["text_config"].pop("layer_types", None)
    torch.manual_seed(0)
    thinker = transformers.Qwen2_5OmniThinkerConfig(**config)
    transformers.Qwen2_5OmniThinkerForConditionalGeneration(thinker).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    make_full(folder)
    return folder


def test_the_published_configuration(tmp_path: Path) -> None:
    engine = open_engine("Qwen/Qwen2.5-Omni-3B", save_published(tmp_path), OPTIONS)
    assert isinstance(engine, OmniEngine)
    assert engine.vocab.size == 151665 and engine._model.config.text_config.vocab_size == 151936
    assert engine.vocab.end_ids == {151645} and engine.vocab.special_ids == set(range(151643, 151665))
    assert engine.audio_tokens(engine.media(clip(1, 2.7))) == (151647, *[151646] * 67, 151648)
    prompt, media = spoken(engine, 1, 2.7, "b")
    assert engine.open(prompt, media).extend([*prompt[-1:], 5, 6]).shape == (3, 151665)
