"""`skydraft serve --engine vllm` as a command: what it prints, and the one line that each wrong use gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import skydraft
from skydraft.config import decoding_params
from skydraft.engines.options import EngineOptions
from tests.serving import free_port
from tests.vllm.conftest import ARGS, CONTEXT

SERVE = [sys.executable, "-m", "skydraft.cli.main", "serve", "--engine", "vllm", "--context", str(CONTEXT)]
SMALL = [each for arg in ARGS for each in ("--vllm-arg", arg)]


def refusal(*given: str) -> str:
    """The one line on stderr of a start that fails; stdout stays empty."""
    done = subprocess.run([*SERVE, *given], capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2) and not done.stdout, done.stderr
    # What vLLM's libraries say while they are imported is not ours to stop.
    lines = [line for line in done.stderr.splitlines() if line.startswith("skydraft: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--vllm-arg", "block_sise=16"], "no engine argument block_sise. Did you mean block_size?"),
        ([*SMALL, "--vllm-arg", "block_size=many"], "block_size: Input should be"),
        (["--execution", "exact"], "Use --execution throughput"),
        ([*SMALL, "--vllm-arg", "kv_cache_memory_bytes=20000"], "too little memory"),
        (["--vllm-arg", "tensor_parallel_size=2"], "tensor_parallel_size"),
        (["--vllm-arg", "enable_lora=true"], "enable_lora"),
    ],
)
def test_what_cannot_be_served_is_one_line(folders: tuple[Path, Path], given: list[str], says: str) -> None:
    assert says in refusal("--model", str(folders[0]), *given)


def test_a_model_that_is_no_causal_language_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for file in folders[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    assert "is a BertModel" in refusal("--model", str(tmp_path))


def test_it_serves_until_it_is_interrupted(folders: tuple[Path, Path]) -> None:
    port = free_port()
    command = [*SERVE, "--model", str(folders[0]), *SMALL, "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr
    try:
        line = next(line for line in server.stderr if line.startswith("skydraft: "))
        assert "on vllm 0.32.0 (float32)" in line and "throughput" in line
        edge, target = (skydraft.load(folder, EngineOptions(context_len=CONTEXT)) for folder in folders[::-1])
        params = decoding_params(max_new_tokens=20)
        texts = [
            skydraft.generate("你好", edge=edge, cloud=cloud, params=params, raw=True).run().token_ids
            for cloud in (skydraft.connect(f"127.0.0.1:{port}"), target)
        ]
        assert texts[0] == texts[1]
    finally:
        os.kill(server.pid, signal.SIGINT)
        rest = server.communicate(timeout=120)[1]
    assert server.returncode == 0 and "skydraft: stopped." in rest and "Traceback" not in rest
