"""The error tree is complete, and each class says how to exit, what to answer and whether to retry."""

import importlib
import pkgutil
import re

import grpc

import skydraft
from skydraft import errors
from skydraft.errors import OptionError, SkydraftError


def descendants(cls: type[SkydraftError]) -> list[type[SkydraftError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in descendants(child))]


def test_every_error_is_in_the_drawing_and_maps_to_one_status_of_each_kind() -> None:
    for module in pkgutil.walk_packages(skydraft.__path__, "skydraft."):
        if "transformers" not in module.name:
            importlib.import_module(module.name)
    tree = [cls for cls in descendants(SkydraftError) if cls.__module__.startswith("skydraft")]
    assert {cls.__module__ for cls in tree} == {"skydraft.errors"}
    drawn = set(re.findall(r"^    (?:[│├└─ ]*)(\w+)", errors.__doc__ or "", re.M))
    assert drawn == {cls.__name__ for cls in tree}
    for cls in tree:
        assert cls.exit_status in (1, 2), cls
        assert cls.grpc_status in grpc.StatusCode.__members__, cls
        assert (cls.exit_status == 2) == issubclass(cls, errors.UsageError), cls


def test_the_public_names_are_what_can_be_imported() -> None:
    public = {name for name in vars(skydraft) if not name.startswith("_")}
    modules = {module.name for module in pkgutil.iter_modules(skydraft.__path__)}
    assert set(skydraft.__all__) == public - modules


def test_options_are_named_as_they_are_given() -> None:
    """By a flag on the command line, by its name in Python; a command that is to be run keeps its flags."""
    says, runs = "--max-new-tokens must be positive.", "Run: skydraft models fetch x --source pypi."
    error = OptionError(says, hint=f"{runs} Or pip install --no-deps x. To wait: --cloud-timeout, --cloud-key-file.")
    assert error.line == f"{says} {runs} Or pip install --no-deps x. To wait: --cloud-timeout, --cloud-key-file."
    expected = f"max_new_tokens must be positive. {runs} Or pip install --no-deps x. To wait: timeout_s, token."
    assert str(error) == f"{error.message} {error.hint}" == expected
