"""A buffer's configuration as JSON that never needs an import, and what of it is a user's own.

Functions and components of a user's own are noted as `"module:qualname"`. They are compared, and named in messages; `load`
then asks for the buffer itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fbuf._checkpoint.row_schema import name_of_type
from fbuf._core.component import COMPONENTS, from_config, named

_REMOVED: dict[str, dict[str, Any]] = {
    "fbuf.samplers.Prioritized": {"decay": None, "keep": None, "spread": 0, "rho": ...},
    "fbuf.samplers.Ranked": {"spread": 0, "rho": ...},
}
"""Fields that earlier versions had, by component: the value at which a field did nothing; `...`: any value."""


def describe(value: Any) -> Any:
    """The JSON form of a component: that of `to_config`, with names in place of what has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"own": f"float:{value}"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"tuple": [describe(item) for item in value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        name = next((name for name, kind in COMPONENTS.items() if kind is type(value)), None)
        return {"own": name_of_type(type(value)), **fields} if name is None else {"type": name, **fields}
    if callable(value) and hasattr(value, "__qualname__"):
        return {"function": name_of_type(value)}
    return {"own": name_of_type(type(value))}


def without_removed(config: Any) -> Any:
    """Drop the fields of earlier versions that did nothing.

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
            raise ValueError(f"{kind}({name}={shown(config[name])}), but {name} was removed")
    return {name: without_removed(value) for name, value in config.items() if name not in removed}


def missing(config: Any) -> str | None:
    """What must come from the user, in words, if anything must."""
    if not isinstance(config, Mapping):
        return None
    if "function" in config:
        return f"the function {config['function']}"
    if "own" in config:
        return f"a {config['own']}"
    items = config["tuple"] if "tuple" in config else config.values()
    return next((found for found in map(missing, items) if found is not None), None)


def build(config: Any) -> Any:
    """The component, of a configuration that lacks nothing."""
    return from_config(config)


def differing(saved: Any, given: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """What differs between two configurations, by path: the saved and the given."""
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        kinds = [{k: v for k, v in c.items() if k in ("type", "own", "function")} for c in (saved, given)]
        if kinds[0] == kinds[1] and saved.keys() == given.keys() and "tuple" not in saved:
            out: dict[str, tuple[Any, Any]] = {}
            for name in saved:
                if name not in kinds[0]:
                    out |= differing(saved[name], given[name], f"{where}.{name}" if where else name)
            return out
    return {} if saved == given else {where: (saved, given)}


def shown(config: Any) -> str:
    """A configuration as one would write it: what was chosen, not what was left alone."""
    if not isinstance(config, Mapping):
        return repr(config)
    if "tuple" in config:
        items = [shown(item) for item in config["tuple"]]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if "function" in config:
        return str(config["function"])
    known = named(config.get("type", ""))
    usual = {} if known is None else {f.name: describe(f.default) for f in dataclasses.fields(known) if _has_default(f)}
    name = str(config.get("type") or config["own"].replace(":", ".")).rsplit(".", 1)[-1]
    fields = [(k, v) for k, v in config.items() if k not in ("type", "own") and not (k in usual and usual[k] == v)]
    return f"{name}({', '.join(f'{k}={shown(v)}' for k, v in fields)})"


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING
