"""A buffer's configuration as JSON, from which nothing is imported.

Custom functions and components are stored as `"module:qualname"`. They are compared and named in errors; `load` then needs
the buffer itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fbuf._core.component import COMPONENTS, named
from fbuf._core.row_schema import name_of_type

_REMOVED: dict[str, dict[str, Any]] = {
    "fbuf.samplers.Prioritized": {"decay": None, "keep": None, "spread": 0, "rho": ...},
    "fbuf.samplers.Ranked": {"spread": 0, "rho": ...},
}
"""Removed fields of components, and the value at which each had no effect; `...`: any value."""


def to_json(value: Any) -> Any:
    """Return the JSON form of a component: that of `to_config`, with names for custom parts."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"own": f"float:{value}"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"tuple": [to_json(item) for item in value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        name = next((name for name, kind in COMPONENTS.items() if kind is type(value)), None)
        return {"own": name_of_type(type(value)), **fields} if name is None else {"type": name, **fields}
    if callable(value) and hasattr(value, "__qualname__"):
        return {"function": name_of_type(value)}
    return {"own": name_of_type(type(value))}


def without_removed(config: Any) -> Any:
    """Drop removed fields that had no effect.

    Raises:
      ValueError: a removed field was in use; the message names it.
    """
    if isinstance(config, list):
        return [without_removed(item) for item in config]
    if not isinstance(config, Mapping):
        return config
    removed = _REMOVED.get(str(config.get("type")), {})
    for name, inactive in removed.items():
        if inactive is not ... and config.get(name, inactive) != inactive:
            kind = config["type"].rpartition(".")[2]
            raise ValueError(f"{kind}({name}={config_text(config[name])}), but {name} was removed")
    return {name: without_removed(value) for name, value in config.items() if name not in removed}


def custom_part(config: Any) -> str | None:
    """Return a description of the first custom part, if any."""
    if not isinstance(config, Mapping):
        return None
    if "function" in config:
        return f"the function {config['function']}"
    if "own" in config:
        return f"a {config['own']}"
    items = config["tuple"] if "tuple" in config else config.values()
    return next((found for found in map(custom_part, items) if found is not None), None)


def differences(saved: Any, wanted: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the differing settings by path: saved and given."""
    if isinstance(saved, Mapping) and isinstance(wanted, Mapping):
        kinds = [{k: v for k, v in c.items() if k in ("type", "own", "function")} for c in (saved, wanted)]
        if kinds[0] == kinds[1] and saved.keys() == wanted.keys() and "tuple" not in saved:
            out: dict[str, tuple[Any, Any]] = {}
            for name in saved:
                if name not in kinds[0]:
                    out |= differences(saved[name], wanted[name], f"{where}.{name}" if where else name)
            return out
    return {} if saved == wanted else {where: (saved, wanted)}


def config_text(config: Any) -> str:
    """Return a configuration as code, without defaults."""
    if not isinstance(config, Mapping):
        return repr(config)
    if "tuple" in config:
        items = [config_text(item) for item in config["tuple"]]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if "function" in config:
        return str(config["function"])
    known = named(config.get("type", ""))
    usual = {} if known is None else {f.name: to_json(f.default) for f in dataclasses.fields(known)}
    name = str(config.get("type") or config["own"].replace(":", ".")).rsplit(".", 1)[-1]
    fields = [(k, v) for k, v in config.items() if k not in ("type", "own") and not (k in usual and usual[k] == v)]
    return f"{name}({', '.join(f'{k}={config_text(v)}' for k, v in fields)})"
