"""Merging: an adapter and its base become one model, as fast as the base, whose fingerprint names both."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from skydraft.engines.base import Engine
from skydraft.errors import BrokenModel, MissingDependency, NotEnoughDisk, OptionError
from skydraft.learning.adapter import Adapter
from skydraft.models.adapted import merged_dir


def file_of(engine: Engine) -> Path:
    """The file or folder that an engine was opened from. Raises OptionError where there is none."""
    path = getattr(engine, "path", None)
    if not isinstance(path, Path):
        raise OptionError(
            f"{engine.name} has no weights that can be trained.", hint="Name a .gguf file or a checkpoint."
        )
    return path


def merge(base: Path, fingerprint: str, name: str, adapter: Adapter, cache: Path) -> Path:
    """The model of `base`, whose weights are called `fingerprint`, with an adapter merged in: made once, and kept.

    A GGUF file stays one of the same types, a folder a folder. Raises OptionError for an adapter of another base, and
    NotEnoughDisk.
    """
    adapter.check_base(fingerprint, name)
    is_file = base.is_file()
    stem = base.stem if is_file else base.name
    out = merged_dir(cache) / f"{stem}-{adapter.fingerprint[:16]}{'.gguf' if is_file else ''}"
    if out.exists():
        return out
    scratch = out.with_name(out.name + ".partial")
    notes = {"skydraft.base": fingerprint, "skydraft.adapter": adapter.fingerprint}
    with _cleared(scratch, out.parent):
        if is_file:
            from skydraft.engines.gguf_change import write_changed

            write_changed(base, scratch, {name: partial(adapter.change, name) for name in adapter.pairs}, notes)
        else:
            _write_folder(base, scratch, adapter, notes)
        os.replace(scratch, out)
    return out


@contextmanager
def _cleared(scratch: Path, folder: Path) -> Iterator[None]:
    """Leave nothing half done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove(scratch)
        yield
    except OSError as error:
        kind = NotEnoughDisk if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else OptionError
        raise kind(
            f"The merged model cannot be written to {folder}: {error.strerror or error}.",
            hint="Set SKYDRAFT_HOME to a folder that you can write to and that has room.",
        ) from error
    finally:
        remove(scratch)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_folder(base: Path, out: Path, adapter: Adapter, notes: dict[str, str]) -> None:
    out.mkdir()
    waiting = dict.fromkeys(adapter.pairs)
    for path in sorted(base.iterdir()):
        if path.suffix == ".safetensors":
            _write_changed(path, out / path.name, adapter, waiting)
        elif path.is_file():
            shutil.copyfile(path, out / path.name)
    if waiting:
        raise OptionError(f"{base} has no matrix {next(iter(waiting))} in its .safetensors files.")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"skydraft": notes}, indent=1), encoding="utf-8")


def _write_changed(path: Path, out: Path, adapter: Adapter, waiting: dict[str, Any]) -> None:
    """One file of weights with the matrices in it changed; takes their names out of `waiting`."""
    torch, open_file, save = _libraries()
    try:
        with open_file(path, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise BrokenModel(f"{path} cannot be read.", hint="Fetch it again.") from error
    for key, value in tensors.items():
        for name in [name for name in waiting if _is_weight_of(key, name)]:
            changed = value.float() + torch.from_numpy(adapter.change(name))
            tensors[key] = changed.to(value.dtype).contiguous()
            del waiting[name]
    save(tensors, out, metadata)


def _is_weight_of(key: str, name: str) -> bool:
    """Whether a tensor in a file is the matrix that the loaded model calls `name`: what precedes the layers differs."""
    if "audio" in key or "visual" in key:
        return False
    return key.partition("layers.")[2] == f"{name.rpartition('layers.')[2]}.weight"


def _libraries() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    try:
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingDependency(
            "Merging an adapter needs torch and safetensors.", hint="Run: pip install 'skydraft[learn]'."
        ) from error
    return torch, safe_open, save_file
