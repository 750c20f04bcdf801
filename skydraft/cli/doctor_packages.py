"""The optional packages, by the extra that installs them: which are here, and how to get the others."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True, slots=True)
class Extra:
    """What `pip install 'skydraft[name]'` adds. A test compares it with pyproject.toml."""

    name: str
    purpose: str
    packages: tuple[str, ...]
    before: str = ""  # what has to be done first
    is_needed: bool = False  # by the pair that is used where none is named

    @property
    def command(self) -> str:
        """How to install it."""
        return f"{self.before}pip install 'skydraft[{self.name}]'"


EXTRAS = (
    Extra("llamacpp", "GGUF models", ("llama-cpp-python",), "install a C++ compiler, then: ", is_needed=True),
    Extra(
        "transformers", "hub checkpoints, and transformers as a peer in compare",
        ("torch", "transformers", "accelerate", "gguf"),
    ),
    Extra("grammar", "text that follows a grammar", ("llguidance",)),
    Extra(
        "learn", "learning from corrections",
        ("accelerate", "gguf", "peft", "safetensors", "torch", "transformers"),
    ),
    Extra("omni", "models that take speech", ("torch", "transformers", "soundfile", "soxr")),
    Extra("audio", "reading recordings", ("soundfile", "soxr")),
    Extra("serve", "skydraft serve", ("grpcio-health-checking", "grpcio-reflection", "prometheus_client")),
    Extra("gateway", "skydraft gateway", ("starlette", "uvicorn", "prometheus_client")),
    Extra("otel", "OpenTelemetry traces", ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")),
    Extra("report", "reports of compare, and calibrate", ("matplotlib", "sacrebleu", "scikit-learn")),
    Extra(
        "conformance", "tests with other people's clients",
        ("langchain-core", "langchain-openai", "litellm", "llm", "trustedrouter-provider-check"),
    ),
    Extra(
        "dev", "working on skydraft",
        (
            "axe-playwright-python", "grpcio-tools", "hypothesis", "jsonschema", "llguidance", "mypy", "openai",
            "playwright", "pytest", "pytest-timeout", "pytest-xdist", "pyyaml", "ruff", "scipy", "soundfile", "soxr",
            "tokenizers", "trustme", "types-grpcio", "types-grpcio-health-checking", "types-grpcio-reflection",
            "types-grpcio-status", "types-protobuf",
        ),
    ),
)  # fmt: skip


def examine_packages(console: Console) -> Iterator[str]:
    """Print what is installed of each extra; yields what has to be done."""
    console.print("\nextras")
    for extra in EXTRAS:
        found = {package: _version(package) for package in extra.packages}
        missing = [package for package, version in found.items() if version is None]
        if not missing:
            versions = ", ".join(f"{package} {version}" for package, version in found.items())
            state = versions if len(found) < 6 else f"all {len(found)} packages"
            console.print(f"  {extra.name:<12} installed: {state}")
            continue
        lacks = ", ".join(missing) if len(missing) < 6 else f"{len(missing)} packages"
        console.print(f"  {extra.name:<12} missing {lacks}; for {extra.purpose}: {extra.command}")
        if extra.is_needed:
            yield f"{', '.join(missing)} is missing, which runs {extra.purpose}: {extra.command}"
    console.print()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
