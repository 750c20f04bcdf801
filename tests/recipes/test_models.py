"""The embedded pair: it loads without missing weights, is small, and its tokenizer can write any text."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ..later import later
from ..starting import ROOT

transformers = later("transformers")
torch = later("torch")

from recipes.tiny_omni.batches import NO_DECISION, caption_ids  # noqa: E402
from recipes.tiny_omni.tokenizer import SPECIAL, build_tokenizer  # noqa: E402
from skydraft.engines.checkpoints.text import read_vocab  # noqa: E402
from skydraft.engines.vocab import check_chinese  # noqa: E402
from skydraft.prompts.chat_template import render  # noqa: E402
from skydraft.prompts.messages import asked  # noqa: E402

MODELS = ROOT / "skydraft" / "models" / "tiny_omni"
SIDES = ("edge", "cloud")
CAPTION = "这段录音里说话的是一位男士，语速听起来飞快。"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODELS / "edge")


@pytest.fixture(scope="module", params=SIDES)
def model(request: pytest.FixtureRequest) -> Any:
    kind = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    loaded, info = kind.from_pretrained(MODELS / request.param, output_loading_info=True)
    assert not any(info.values()), info
    return loaded.eval()


def test_the_models_are_small_and_share_the_tokenizer_of_the_recipe(tokenizer: Any) -> None:
    assert sum(file.stat().st_size for file in MODELS.rglob("*.safetensors")) <= 20e6
    assert len({(MODELS / side / "tokenizer.json").read_bytes() for side in SIDES}) == 1
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_ids_in_the_configuration_are_those_of_the_tokenizer(model: Any, tokenizer: Any) -> None:
    names = ("audio", "audio_start", "audio_end", "vision_start", "vision_end", "image", "video")
    ids = [getattr(model.config, f"{name}_token_id") for name in names]
    assert tokenizer.convert_ids_to_tokens(ids) == list(SPECIAL[3:])
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id


def test_the_package_reads_tokenizer_and_template(model: Any, tokenizer: Any) -> None:
    parts = [{"type": "audio"}, {"type": "text", "text": "说"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text == "<|im_start|>user\n<|audio_bos|><|AUDIO|><|audio_eos|>说<|im_end|>\n"  # no system message
    vocab = read_vocab(tokenizer, model.generation_config)
    check_chinese(vocab)
    text = render(vocab, asked("说", system="听"))
    assert text == ("<|im_start|>system\n听<|im_end|>\n<|im_start|>user\n说<|im_end|>\n<|im_start|>assistant\n")
    assert vocab.encode(text) == tuple(tokenizer.encode(text))


def test_the_class_is_decided_at_one_token(tokenizer: Any) -> None:
    ids, decided = caption_ids(tokenizer, CAPTION)
    deciding = [token_id for token_id, decision in zip(ids, decided, strict=True) if decision != NO_DECISION]
    assert tokenizer.convert_ids_to_tokens(deciding) == tokenizer.tokenize("男飞")
    assert ids[-1] == tokenizer.eos_token_id


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_survives(tokenizer: Any, text: str) -> None:
    composed = unicodedata.normalize("NFC", text)
    assume(not any(token in composed for token in SPECIAL))
    assert tokenizer.decode(tokenizer.encode(text)) == composed


def test_the_card_states_what_was_measured() -> None:
    card = (ROOT / "recipes" / "tiny_omni" / "MODEL_CARD.md").read_text("utf-8")
    for side in SIDES:
        assert (MODELS / side / "README.md").read_text("utf-8") == card
        measured = json.loads((MODELS / side / "results.json").read_text("utf-8"))
        assert f"{measured['accuracy_all']:.3f}" in card
