from pathlib import Path
from typing import Any

import click

from skydraft import api
from skydraft.characters import json_line
from skydraft.cli.options.pair import SOURCE_OPTION
from skydraft.cli.options.sections import Command, loose, option
from skydraft.cli.progress import downloads
from skydraft.cli.terminal import console_for
from skydraft.errors import UnknownModel
from skydraft.models.adapters import all_adapters
from skydraft.models.cache import cache_dir, made_models, present
from skydraft.models.fetch import fetch_model, leftovers, present_path, remove, verify
from skydraft.models.found import StoredModel, models_here, places
from skydraft.models.manifest import KNOWN, known_model
from skydraft.models.resolve import EMBEDDED, embedded_path


def _known(context: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Check all names before the first is used. `remove` also takes models that were quantized here."""
    for name in names:
        if name in EMBEDDED:
            raise UnknownModel(f"{name} comes with skydraft: it is always here and cannot be removed.")
        if context.command.name != "remove" or not leftovers(name, cache_dir()):
            known_model(name)
    return names


_names = click.argument("names", nargs=-1, required=True, metavar="NAME...", callback=_known)
_OFFLINE = option("--offline", None, "Look only on this machine, also in the Hugging Face cache.", is_flag=True)


@click.group(invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> None:
    """List, fetch and remove the models that skydraft knows by name."""
    if context.invoked_subcommand is None:
        context.invoke(list_models)


@models.command("list", cls=Command)
@loose("Output", [option("--json", None, "Print one JSON object: the folder, and a list of models.", is_flag=True)])
def list_models(json: bool) -> None:
    """Show the known models, quantized ones, Ollama's models, and their adapters."""
    folder, rows = cache_dir(), _rows(models_here(places()))
    if json:
        click.echo(json_line({"folder": str(folder), "models": rows}))
        return
    wide = max(len(row["name"]) for row in rows)
    console = console_for("auto")
    for row in rows:
        size = f"{row['bytes'] / 1e6:.{0 if row['bytes'] > 1e7 else 1}f} MB"
        console.print(f"{row['name']:<{wide}}  {size:>8}  {row.get('type', row['license']):<12}  {_state(row)}")
    size = f"{_bytes_in(folder) / 1e6:.0f} MB"
    console.print(f"\nOur own files are in {folder}, {size}; SKYDRAFT_HOME names another folder.")


def _rows(here: list[StoredModel]) -> list[dict[str, Any]]:
    """Return a row for each known, included, quantized or Ollama model, and each other model with adapters."""
    adapters = all_adapters(cache_dir())

    def row(name: str, size: int, license: str, path: Path | None, kind: str) -> dict[str, Any]:
        about = {"name": name, "bytes": size, "license": license, "path": str(path) if path else None, "kind": kind}
        return about | {"adapters": adapters.get(name, [])}

    rows = [row(each.name, each.bytes, each.license, present(each, cache_dir()), "known") for each in KNOWN.values()]
    for name in EMBEDDED:
        rows.append(row(name, _bytes_in(embedded_path(name)), "Apache-2.0", embedded_path(name), "included"))
    for name, path in made_models(cache_dir()).items():
        rows.append(row(name, _bytes_in(path), "-", path, "made") | {"type": name.rpartition("-")[2]})
    for found in here:
        about = row(found.spec, found.bytes, "Ollama", found.path, "found")
        rows.append(about | {"unfit": found.unfit or None})
    others = adapters.keys() - {each["name"] for each in rows}
    rows += [row(name, _bytes_in(Path(name)), "-", Path(name), "own") for name in sorted(others)]
    return rows


def _state(row: dict[str, Any]) -> str:
    state = row["path"] or f"not here; get it with: skydraft models fetch {row['name']}"
    if row["kind"] == "included":
        state = "always here: a toy for speech, trained on synthetic voices"
    elif row.get("unfit"):
        return f"not usable: {row['unfit']}"
    return f"{state}; has learned: {', '.join(row['adapters'])}" if row["adapters"] else state


def _bytes_in(place: Path) -> int:
    return sum(path.stat().st_size for path in (place, *place.rglob("*")) if path.is_file())


@models.command("fetch", cls=Command)
@_names
@loose("Models", [_OFFLINE, SOURCE_OPTION])
def fetch_models(names: tuple[str, ...], **where: Any) -> None:
    """Download known models and check them against their published hashes. A present model is only checked."""
    wanted = [known_model(name) for name in names]
    with downloads() as progress:
        paths = [fetch_model(model, cache_dir(), progress=progress, **where) for model in wanted]
    for model, path in zip(wanted, paths, strict=True):
        verify(model, path)
        click.echo(path)


@models.command("path", cls=Command)
@click.argument("names", nargs=-1, metavar="[NAME]...")
def show_path(names: tuple[str, ...]) -> None:
    """Print the file of each named model; without NAME, the folder of downloaded models and profiles."""
    if not names:
        click.echo(cache_dir())
    for path in [embedded_path(name) if name in EMBEDDED else present_path(name, cache_dir()) for name in names]:
        click.echo(path)


@models.command("quantize", cls=Command)
@click.argument("model")
@loose("Models", [
    option("--type", None, "Type of all weights.", default="q4_0", type=click.Choice(["q4_0", "q8_0"])),
    option("--force", None, "Quantize even a model as large as a target; its answers will change.", is_flag=True),
])  # fmt: skip
def quantize_model(model: str, type: str, force: bool) -> None:
    """Write a GGUF model in another type, as a new model MODEL-TYPE. Draft models in q4_0 are faster.

    The new model has no calibration or adapter yet: mode auto needs skydraft learn.
    """
    with downloads() as progress:
        made = api.quantize(model, type, force=force, progress=progress)
    click.echo(f"{made.stem}  {made.stat().st_size / 1e6:.0f} MB  {made}")


@models.command("remove", cls=Command)
@_names
def remove_models(names: tuple[str, ...]) -> None:
    """Delete known or quantized models from this machine."""
    for name in names:
        for path in remove(name, cache_dir()):
            click.echo(f"Removed {path}")
