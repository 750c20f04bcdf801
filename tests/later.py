"""Imports of libraries that take seconds: collecting a file does not import them, running its tests does."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_") and attribute != "__version__":  # pytest asks everything in a file for such
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def later(name: str) -> Any:
    """The module, imported when something of it is first used. Skips the file that asks where it is not installed."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _Later(name)
