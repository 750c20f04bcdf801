"""The prompts and the pair that every measurement here uses."""

import json
import platform
from importlib.metadata import version
from pathlib import Path

import skydraft
from skydraft.config import num_cores
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import cpu_model
from skydraft.models import default_pair

PROMPTS_FILE = Path(__file__).parent.parent / "data" / "prompts_zh_dev.jsonl"


def prompts(limit: int | None = None) -> list[str]:
    """The development prompts, in order."""
    lines = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines][:limit]


def load_pair(options: EngineOptions | None = None) -> tuple[skydraft.Engine, skydraft.Engine]:
    """Draft and target of the demo pair."""
    pair = default_pair()
    return skydraft.load(pair.draft, options), skydraft.load(pair.target, options)


def machine(weights: str = "Q4_K_M") -> str:
    """One line that says where a figure was measured."""
    threads = num_cores()  # importing llama_cpp for its version would let llama.cpp log again
    built = f"llama-cpp-python {version('llama-cpp-python')}"
    return f"{cpu_model()}, {threads} threads, {platform.system()}, {built}, {weights}"
