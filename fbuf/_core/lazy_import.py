"""What is imported when it is first asked for: the stores on the host, and whatever else a step on the device never meets.

`import fbuf` is paid by every process, also by those whose rows are plain arrays (how much: `python -m benchmarks --only
import`). Rejected: `importlib.util.LazyLoader` (until
Python 3.13 two threads that touch such a module at once may meet it half made).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def later(
    package: str, modules: Mapping[str, Sequence[str]], public: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package.

    Args:
      modules: Names by the modules that have them, which are imported when one of their names is asked for.
      public: What completion offers, imported or not.
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


class Later:
    """A module that is imported when one of its names is first asked for."""

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)
