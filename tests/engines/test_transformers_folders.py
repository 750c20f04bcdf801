"""Folders of checkpoints: whole ones, those of a thinker in each form, and what is incomplete, broken or unfit; and the
vocabulary that is read out of a folder's tokenizer."""

import json
import sys
import unicodedata
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skydraft.engines.base import Engine
from skydraft.engines.checkpoints.engine import failing, read_vocab
from skydraft.engines.checkpoints.omni import OmniEngine
from skydraft.engines.checkpoints.text import TransformersEngine, cache_argument
from skydraft.engines.llama.engine import LlamaCppEngine
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.errors import BrokenModel, EngineError, MissingDependency, OptionError
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import prompt_ids

from ..later import later
from .contract import rows_after
from .tiny_checkpoint import END, OPTIONS, TEMPLATE, TEXT, copy_of, make_full, save_model, spoken

torch = later("torch")
transformers = later("transformers")


def sentence_piece_tokenizer(*, adds_bos: bool) -> Any:
    """A tokenizer built like Llama 2's: `▁` for a space, bytes as <0xNN>, BOS put in front."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "天", "a", "b", "▁a"]
    ids = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(ids, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in pieces[:3]])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(("options", "message"), [
    (EngineOptions(dtype="int3"), "dtype must be one of float32, bfloat16, float16, int8, int4, not 'int3'"),
    (EngineOptions(device="edge=cpu"), "device must be cpu .*here, not 'edge=cpu'"),
    (EngineOptions(device="cuda:99"), "device must be cpu .*here, not 'cuda:99'"),
])  # fmt: skip
def test_options_that_cannot_apply(options: EngineOptions, message: str, folder: Path) -> None:
    with pytest.raises(OptionError, match=message):
        TransformersEngine(folder, options)


@pytest.mark.parametrize("given", ["cuda,edge=cpu", "cloud=cuda", "edge=cpu,cloud=cuda"])
def test_each_model_of_a_pair_has_a_device_and_a_dtype(given: str) -> None:
    sides = [EngineOptions(device=given, dtype="edge=int8").on(side) for side in ("edge", "cloud")]
    assert [(side.device, side.dtype) for side in sides] == [("cpu", "int8"), ("cuda", "float32")]


@pytest.mark.parametrize(("kind", "broken"), [
    *(("text", name) for name in ("config.json", "model.safetensors", "tokenizer.json")),
    ("omni", "preprocessor_config.json"),
])  # fmt: skip
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_incomplete_folder(
    kind: str, broken: str, is_cut: bool, folder: Path, omni_folder: Path, tmp_path: Path
) -> None:
    source, load = (folder, TransformersEngine) if kind == "text" else (omni_folder, OmniEngine)
    copy_of(source, tmp_path, broken)
    if is_cut:
        (tmp_path / broken).write_bytes((source / broken).read_bytes()[:-100])
    with pytest.raises(BrokenModel) as caught:
        load(tmp_path, OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_missing_weight_is_not_drawn_at_random(omni_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(omni_folder / "model.safetensors")
    del weights["audio_tower.layers.1.fc1.weight"]
    save_file(weights, copy_of(omni_folder, tmp_path) / "model.safetensors", metadata={"format": "pt"})
    make_full(tmp_path)
    with pytest.raises(BrokenModel, match=r"lacks weights of its model: model\.audio_tower\.layers\.1\.fc1\.weight"):
        OmniEngine(tmp_path, OPTIONS)


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "Lfm2Config", seed=4, layer_types=["conv", "full_attention"])
    with pytest.raises(EngineError, match="cannot be rolled back: it has layers of the kind LinearAttentionLayer"):
        TransformersEngine(folder, OPTIONS)


@pytest.mark.parametrize(("package", "extra"), [("torch", "transformers"), ("torchao.quantization", "quantized")])
def test_needs_packages(package: str, extra: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Without a package the error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"pip install 'skydraft\[{extra}\]'"):
        TransformersEngine(folder, replace(OPTIONS, dtype="int8"))


@pytest.mark.parametrize("version", ["5.20.0", "5.24.9", "5.25.0"])
def test_a_version_that_may_not_fit_is_named_and_the_model_is_not_blamed(version: str) -> None:
    kind = MissingDependency if version == "5.25.0" else BrokenModel
    says = rf"transformers {version} cannot load m \(no 'kv'\)" if kind is MissingDependency else "Fetch it"
    library = SimpleNamespace(__version__=version)
    with pytest.raises(kind, match=says), failing(library, "cannot load m", BrokenModel, "Fetch it."):
        raise TypeError("no 'kv'")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_given_by_the_name_that_a_version_of_transformers_has_for_it(name: str) -> None:
    assert cache_argument(type("Model", (), {"forward": eval(f"lambda self, {name}=None: None")})) == name


def test_the_chat_template_of_a_processor(omni_folder: Path, tmp_path: Path) -> None:
    copy_of(omni_folder, tmp_path, "chat_template.jinja")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert OmniEngine(tmp_path, OPTIONS).vocab.chat_template == "{{ messages }}"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(BrokenModel, match="holds no chat template"):
        OmniEngine(tmp_path, OPTIONS)


def test_a_whole_checkpoint_gives_its_thinker_alone(omni: OmniEngine, omni_folder: Path, tmp_path: Path) -> None:
    make_full(copy_of(omni_folder, tmp_path))
    engine = open_engine("whole", tmp_path, OPTIONS)
    assert isinstance(engine, OmniEngine)
    prompt, media = spoken(engine, 1, 1.3)
    one, other = (rows_after(each.open(prompt, media), prompt[-1], 20) for each in (engine, omni))
    assert [row.argmax() for row in one] == [row.argmax() for row in other]
    names = {".".join(name.split(".")[:2]) for name, _ in engine._model.named_parameters()}
    assert names == {"model.audio_tower", "model.language_model", "lm_head.weight"}


@given(text=st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=40))
@settings(max_examples=200, deadline=None)
def test_text_survives_the_vocabulary(target: Engine, text: str) -> None:
    """As NFC: Qwen2's tokenizer composes characters before anything else."""
    assume("<|" not in text)  # a special token, which is read and not shown
    assert target.vocab.decode(target.vocab.encode(text)) == unicodedata.normalize("NFC", text)


def test_special_tokens_are_read_and_not_shown(target: Engine) -> None:
    vocab = target.vocab
    token_ids = vocab.encode(f"<|im_start|>今天{END}")
    assert token_ids[0] == 1 and token_ids[-1] == 0 and vocab.special_ids == {0, 1}
    assert vocab.decode(token_ids) == "今天"
    assert (vocab.end_ids, vocab.eos_text, vocab.bos_text, vocab.chat_template) == ({0}, END, "", TEMPLATE)
    assert vocab.decode(vocab.encode("".join(TEXT) * 200)) == "".join(TEXT) * 200
    assert "天" in {vocab.pieces[i].decode(errors="ignore") for i in np.flatnonzero(vocab.classes.content)}


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_sentencepiece_vocabulary(adds_bos: bool) -> None:
    tokenizer = sentence_piece_tokenizer(adds_bos=adds_bos)
    tokenizer.chat_template = {"default": "chat", "tool_use": "tools"}
    vocab = read_vocab(tokenizer, SimpleNamespace(eos_token_id=[2, 262]))
    assert (vocab.chat_template, vocab.tool_template) == ("chat", "tools")
    tokenizer.chat_template = {"tool_use": "tools"}
    assert read_vocab(tokenizer, None).chat_template == "tools"
    text = "天 a b员\n"
    assert vocab.decode(vocab.encode(text)) == text and vocab.size == 264
    assert vocab.encode("<s>a")[0] == 1 and vocab.special_ids == {0, 1, 2} and vocab.end_ids == {2, 262}
    assert vocab.bos_text == ("<s>" if adds_bos else "")


@pytest.mark.parametrize("puts_spaces", ["never", "first", "always"])
@pytest.mark.parametrize("text", ["a</s>b", "<s>天</s><unk> a", "a <</s>> b"])
def test_marks_in_a_message_are_characters_of_a_sentencepiece_vocabulary(puts_spaces: str, text: str) -> None:
    """Also where the tokenizer puts a space before the first word of what it is given."""
    from tokenizers import pre_tokenizers

    tokenizer = sentence_piece_tokenizer(adds_bos=False)
    backend = tokenizer.backend_tokenizer
    if puts_spaces != "never":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=puts_spaces)
    tokenizer.chat_template = "<s>{% for m in messages %}a{{ m['content'] }}</s>{% endfor %}"
    vocab = read_vocab(tokenizer, None)
    ids = prompt_ids(vocab, asked(text))
    assert [each for each in ids if each in vocab.special_ids] == [1, 2]
    assert vocab.decode(ids).lstrip() == f"a{text}"


def test_a_vocabulary_of_unknown_bytes_is_refused() -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(BrokenModel, match="its bytes are unknown"):
        read_vocab(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer), None)


@pytest.mark.long
@pytest.mark.model
def test_the_fingerprint_is_that_of_the_gguf(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model's tokenizer out of its GGUF, made into what the checkpoint on the hub has."""
    pytest.importorskip("gguf")
    # As a plain array, which is the same, and from which gguf reads its pieces in a third of the time.
    mapped = np.memmap
    monkeypatch.setattr(np, "memmap", lambda file, **how: mapped(file, **how).view(np.ndarray))
    folder, name = gguf_path.parent, gguf_path.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    parts = json.loads(file.read_text())
    # The GGUF pads the vocabulary to the size of the head; on the hub these are no special tokens, either.
    parts["model"]["vocab"] = {p: i for p, i in parts["model"]["vocab"].items() if not p.startswith("[PAD")}
    for token in parts["added_tokens"]:
        token["special"] = token["id"] < 151657
    file.write_text(json.dumps(parts))
    ours = read_vocab(transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|im_end|>"), None)
    with closing(LlamaCppEngine(gguf_path, EngineOptions(context_len=64, num_threads=1))) as engine:
        assert ours.size == engine.vocab.size and ours.fingerprint == engine.vocab.fingerprint
        assert ours.special_ids != engine.vocab.special_ids
        for text in [*TEXT, "def f(x):\n\treturn  x**2  # 平方\n", "<|im_start|>你好", "👩‍👩‍👧é\u0301 １２３"]:
            assert ours.encode(text) == engine.vocab.encode(text)
