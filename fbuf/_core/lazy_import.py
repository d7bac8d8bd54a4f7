"""Lazy imports of modules that a training step on the device does not need.

`importlib.util.LazyLoader` is not thread-safe before Python 3.13.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def later(
    package: str, modules: Mapping[str, Sequence[str]], public: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Args:
      modules: Names by module; a module is imported when one of its names is first read.
      public: Names for completion, imported or not.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*(name for name in vars(sys.modules[package]) if name.startswith("__")), *public})

    return __getattr__, __dir__


def import_extra(call: str, module: str, install: str) -> Any:
    """Return a module of an optional dependency. Raises ImportError: it is missing, and what pip can install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"{call}: {name} is missing ({error}). Run pip install {install}.") from error


class Later:
    """A module that is imported when one of its names is first read."""

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)
