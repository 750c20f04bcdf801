"""vLLM for real, on a processor, with a tiny checkpoint. `make test-vllm` runs this; elsewhere it is skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skydraft.cloud.limits import Limits
from skydraft.cloud.server import ServeOptions
from skydraft.engines.options import EngineOptions
from tests.engines.tiny_checkpoint import save_model
from tests.serving import Serving

CONTEXT = 256
# Without a compiler it starts in seconds; 5 % of the memory is plenty for a tiny model.
ARGS = ("enforce_eager=true", "gpu_memory_utilization=0.05")
SHAPE: dict[str, Any] = {  # heads of 32: vLLM has no kernels for smaller ones on a processor
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128,
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed; make test-vllm installs it"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target's checkpoint and one that drafts for it."""
    target = save_model(tmp_path_factory.mktemp("target"), "Qwen2Config", seed=1, **SHAPE)
    return target, save_model(tmp_path_factory.mktemp("draft"), "Qwen2Config", seed=2, like=target, **SHAPE)


@contextmanager
def on_vllm(
    folder: Path, *args: str, dtype: str = "float32", health: list[bool] | None = None, **limits: Any
) -> Iterator[Serving]:
    """A server over vLLM; what it says of its health goes to `health`."""
    from skydraft.cloud.vllm.engine import VllmEngine
    from skydraft.cloud.vllm.judge import VllmJudge
    from skydraft.cloud.vllm.launch import VllmOptions

    chosen = Limits(**limits)
    judge = VllmJudge(VllmEngine(VllmOptions("tiny", folder, CONTEXT, dtype, args=(*ARGS, *args))), chosen)
    judge.start()
    try:
        running = Serving(judge, ServeOptions(port=0, execution="throughput", limits=chosen))
        hear = judge.on_health
        judge.on_health = lambda is_well: (health is not None and health.append(is_well), hear(is_well))[1]  # type: ignore[func-returns-value]
        try:
            yield running
        finally:
            running.stop()
    finally:
        judge.close()


@pytest.fixture(scope="session")
def server(folders: tuple[Path, Path]) -> Iterator[Serving]:
    """The target on vLLM, for whoever leaves it as it was."""
    with on_vllm(folders[0]) as running:
        yield running


@pytest.fixture(scope="session")
def load(folders: tuple[Path, Path]) -> Callable[[int], Any]:
    """The target (0) or the draft model (1) on transformers."""
    import skydraft

    return lambda which: skydraft.load(folders[which], EngineOptions(context_len=CONTEXT, num_threads=1))
