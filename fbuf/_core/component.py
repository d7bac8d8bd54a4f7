"""`@component` for configuration (values) and `@state` for what changes (arrays).

A buffer and its parts are frozen dataclasses of *values*: they hash, compare, print and pickle by value, so a jitted
function that gets an equal buffer built again does not trace again (a dataclass of functions would: its hash is an
identity). Both kinds are pytree nodes known to `jax.export`; what the file holds is JSON of the fields, never a
pickle.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast, dataclass_transform, overload

import jax
from jax import export

C = TypeVar("C", bound=type[Any])

COMPONENTS: dict[str, type[Any]] = {}
"""Every class that `from_config` will build, by public name; see `named`."""
_NAMES: dict[type[Any], str] = {}


def _qualified(cls: type[Any]) -> str:
    """Return the name a class is saved under: its own, after its module or, for fbuf's classes, their public package."""
    module = cls.__module__.split(".")
    if module[0] == "fbuf":
        module = list(itertools.takewhile(lambda part: not part.startswith("_"), module))
    return ".".join((*module, cls.__qualname__))


def allow(cls: type[Any], name: str) -> None:
    """Lets a dataclass of values cross `to_config` and `from_config`."""
    COMPONENTS[name] = cls
    _NAMES[cls] = name


@overload
def component(cls: C) -> C: ...
@overload
def component(*, name: str) -> Callable[[C], C]: ...
@dataclass_transform(frozen_default=True)
def component(cls: Any = None, *, name: str | None = None) -> Any:
    """Make `cls` a frozen dataclass of hashable values that JAX treats as static.

    Args:
      name: Name to save instances of an fbuf class under; None: its public name.
    Raises:
      TypeError: on construction, when a field does not hash; the message names the field.
    """
    if cls is None:
        return lambda cls: _make_component(cls, name)
    return _make_component(cls, name)


def _make_component(cls: Any, name: str | None) -> Any:
    checks = cls.__dict__.get("__post_init__")

    def __post_init__(self: Any) -> None:
        if checks is not None:
            checks(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{type(self).__name__}: field '{field.name}' is {value!r}, which does not hash; "
                    f"expected a value (number, string, tuple, function, component). "
                    f"A list becomes a tuple with tuple(...)."
                ) from None

    cls.__post_init__ = __post_init__
    made: Any = dataclasses.dataclass(frozen=True, repr=False)(cls)
    by_fields = made.__hash__

    def __hash__(self: Any) -> int:  # every eager verb hashes its buffer: keep the answer
        known = self.__dict__.get("_hash")
        if known is None:
            known = by_fields(self)
            object.__setattr__(self, "_hash", known)
        return cast(int, known)

    def __getstate__(self: Any) -> dict[str, Any]:  # string hashes differ between processes
        return {k: v for k, v in self.__dict__.items() if k != "_hash"}

    def __repr__(self: Any) -> str:  # what was chosen, not what was left alone
        chosen = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(chosen)})"

    made.__hash__ = __hash__
    if "__repr__" not in cls.__dict__:
        made.__repr__ = __repr__
    made.__getstate__ = __getstate__
    jax.tree_util.register_static(made)
    if made.__module__.split(".")[0] == "fbuf":
        name = name or _qualified(made)
        allow(made, name)
        export.register_pytree_node_serialization(
            made,
            serialized_name=name,
            serialize_auxdata=lambda aux: json.dumps(to_config(aux)).encode(),
            deserialize_auxdata=lambda data: from_config(json.loads(bytes(data).decode())),
        )
    return made


@overload
def state(cls: C) -> C: ...
@overload
def state(*, name: str) -> Callable[[C], C]: ...
@dataclass_transform(frozen_default=True)
def state(cls: Any = None, *, name: str | None = None) -> Any:
    """Make `cls` a frozen dataclass of arrays: a pytree node whose every field is a child.

    Args:
      name: Name to save instances under; None: the public name of the class.
    """
    if cls is None:
        return lambda cls: _make_state(cls, name)
    return _make_state(cls, name)


def _make_state(cls: Any, name: str | None) -> Any:
    made = dataclasses.dataclass(frozen=True)(cls)
    jax.tree_util.register_dataclass(made)
    export.register_pytree_node_serialization(
        made,
        serialized_name=name or _qualified(made),
        serialize_auxdata=lambda aux: b"",
        deserialize_auxdata=lambda data: (),
    )
    return made


def to_config(value: Any) -> Any:
    """The JSON form of a component: `{"type": ..., field: ...}`; tuples become `{"tuple": [...]}`.

    Raises:
      TypeError: for a value without a JSON form (a function, say); the message says which.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = _NAMES.get(type(value), "")
        if not name:
            raise TypeError(f"to_config: {value!r} is not one of fbuf's components.")
        fields = {f.name: to_config(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": name, **fields}
    if isinstance(value, tuple):
        return {"tuple": [to_config(item) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"to_config: {value!r} has no JSON form; expected numbers, strings, tuples, components.")


def named(name: str) -> type[Any] | None:
    """The component of that public name, if there is one; storages and transforms are imported when they are named."""
    package, _, last = name.rpartition(".")
    if name not in COMPONENTS and package in ("fbuf.storages", "fbuf.transforms"):
        getattr(importlib.import_module(package), last, None)
    return COMPONENTS.get(name)


def from_config(config: Any) -> Any:
    """The inverse of `to_config`; builds fbuf's own components only."""
    if isinstance(config, dict) and "tuple" in config:
        return tuple(from_config(item) for item in config["tuple"])
    if isinstance(config, dict):
        kind = named(config["type"])
        if kind is None:
            raise ValueError(f"from_config: '{config['type']}' is not a component of this version of fbuf.")
        return kind(**{k: from_config(v) for k, v in config.items() if k != "type"})
    return config
