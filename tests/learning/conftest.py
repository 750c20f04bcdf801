"""A tiny pair whose draft model differs from its target in the last layer, and what the target taught it; and lessons
made up, with folders of them.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.lab.learning.collect import Collector
from skydraft.lab.learning.lessons import Lesson, Store
from skydraft.prompts.messages import asked
from tests.engines.tiny_checkpoint import OPTIONS, save_model

_WORDS = ["今天", "天气", "我们", "公园", "孩子们", "语音", "音调", "The", "model", "drafts", "tokens", "checks"]
ORIGIN = {"draft": "d" * 32, "target": "t" * 32, "vocab": "v" * 32}


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target's checkpoint, draft model's checkpoint)."""
    import torch
    import transformers

    target = save_model(tmp_path_factory.mktemp("target"), "Qwen2Config", seed=1)
    draft = save_model(tmp_path_factory.mktemp("draft"), "Qwen2Config", seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(draft)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.model.layers[1].named_parameters():
            if "down_proj" in name or "o_proj" in name:
                one, other = (torch.randn(size, generator=generator) for size in value.shape)
                value.add_(0.5 * torch.outer(one, other))
    model.save_pretrained(draft)
    return target, draft


@pytest.fixture(scope="session")
def pair(pair_folders: tuple[Path, Path]) -> tuple[Any, Any]:
    """(draft, target) engines."""
    from skydraft.engines.checkpoints.text import TransformersEngine

    target, draft = pair_folders
    return TransformersEngine(draft, OPTIONS, name="draft"), TransformersEngine(target, OPTIONS, name="target")


def prompts(number: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(_WORDS, 4)) + str(index) for index in range(number)]


def collected(pair: tuple[Any, Any], folder: Path, plan: Plan, number: int, max_new_tokens: int) -> Path:
    collector = Collector(folder)
    for prompt in prompts(number):
        request = GenerateRequest(asked(prompt), plan=plan, params=DecodingParams(max_new_tokens=max_new_tokens))
        skydraft.start(request, edge=pair[0], cloud=pair[1], observers=[collector]).run()
    return folder


@pytest.fixture(scope="session")
def taught(pair: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of lessons, collected lossless."""
    return collected(pair, tmp_path_factory.mktemp("taught"), make_plan(k=3), 96, 12)


@pytest.fixture(scope="session")
def written_on(pair: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of lessons, collected with a gate and a target that writes on."""
    plan = make_plan(gate="prob:0.1", k=3, hand_back="agree:3")
    return collected(pair, tmp_path_factory.mktemp("written"), plan, 60, 20)


def lesson(number: int = 0, **changes: Any) -> Lesson:
    """A lesson of four tokens; `number` makes it another one."""
    given: dict[str, Any] = {"prompt_ids": (1, 2, number), "token_ids": (3, 4, 5, 6), "marks": "acw-"}
    return Lesson(**ORIGIN | given | changes)


def filled(folder: Path, *lessons: Lesson) -> Store:
    store = Store(folder)
    for each in lessons:
        store.add(each)
    return store


def read(folder: Path) -> tuple[list[Lesson], Counter[str]]:
    """(lessons, what was skipped)"""
    skipped = Counter[str]()
    return list(Store(folder).lessons(skipped)), skipped
