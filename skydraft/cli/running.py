"""What a comparison says about itself: machine, versions, models, parameters."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from skydraft.cli.options import load_engine, target_name
from skydraft.config import DecodingParams, decoding_params
from skydraft.decoding.calibration import Calibration
from skydraft.engines.base import Engine, EngineOptions
from skydraft.engines.probe import cpu_model
from skydraft.engines.vocab import check_same
from skydraft.evaluation.modes import Mode
from skydraft.evaluation.records import ModelEntry, PromptEntry, RunLine
from skydraft.evaluation.workloads import Workload

_RUN_OPTIONS = ("context_len", "num_threads", "gpu_layers", "device", "dtype", "quantization")
_PACKAGES = ("skydraft", "llama-cpp-python", "torch", "transformers", "numpy", "grpcio")


def load_pair(given: dict[str, Any], options: EngineOptions, *, offline: bool) -> tuple[Engine, Engine]:
    """Draft and target model in this process. Raises VocabularyMismatch, or what loading raises."""
    edge = load_engine(given["edge_model"], options, offline=offline)
    cloud = load_engine(target_name(given), options, offline=offline)
    check_same(edge.vocab, cloud.vocab)
    return edge, cloud


def given_overrides(given: dict[str, Any], *, max_new_tokens: int, style: str | None = None) -> dict[str, Any]:
    """Take the decoding options that were given out of `given`, the style among them; `style` is the default one.

    The style none is no style. Raises OptionError.
    """
    names = [field.name for field in fields(DecodingParams)]
    chosen = {name: given.pop(name) for name in ("style", *names)}
    chosen["stop"] = list(chosen["stop"]) or None
    chosen["style"] = chosen["style"] or style
    if chosen["style"] == "none":
        chosen["style"] = None
    if chosen["max_new_tokens"] is None:
        chosen["max_new_tokens"] = max_new_tokens
    overrides = {name: value for name, value in chosen.items() if value is not None}
    decoding_params(overrides.get("style"), **{name: value for name, value in overrides.items() if name != "style"})
    return overrides


def describe_run(
    edge: Engine,
    cloud: Engine,
    workload: Workload,
    modes: Sequence[Mode],
    *,
    command: str,
    execution: str,
    overrides: dict[str, Any],
    repetitions: int,
    links: tuple[float | None, ...],
    link_prompts: int,
    share_audio: str | None,
    link_kbps: float,
    calibration: Calibration | None,
    engine_options: EngineOptions,
    peer: str | None,
) -> RunLine:
    """The first line of the records."""
    return RunLine(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{cpu_model()}, {os.cpu_count()} threads, {platform.system()}, Python {platform.python_version()}",
        versions=_versions(),
        command=command,
        draft=_entry(edge),
        target=_entry(cloud),
        vocab_fingerprint=cloud.vocab.fingerprint,
        execution=execution,
        modes=tuple(mode.name for mode in modes),
        repetitions=repetitions,
        max_new_tokens=overrides["max_new_tokens"],
        overrides=overrides,
        workload=workload.name,
        workload_sha256=workload.sha256,
        prompts=tuple(
            PromptEntry(
                id=entry.id,
                prompt=entry.prompt,
                category=entry.category,
                references=entry.references,
                audio=str(entry.audio) if entry.audio else None,
            )
            for entry in workload.prompts
        ),
        links=links,
        link_prompts=link_prompts,
        share_audio=share_audio,
        link_kbps=link_kbps,
        engine_options={name: getattr(engine_options, name) for name in _RUN_OPTIONS},
        peer=peer,
        calibration=hashlib.sha256(calibration.model_dump_json().encode()).hexdigest()[:32] if calibration else None,
    )


def _entry(engine: Engine) -> ModelEntry:
    return ModelEntry(
        name=engine.name,
        fingerprint=engine.fingerprint,
        invariant_rows=engine.invariant_rows,
        forward_ms=tuple(round(ms, 3) for ms in engine.profile.forward_ms),
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
