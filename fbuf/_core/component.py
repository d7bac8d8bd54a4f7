"""`@component` for configuration (values) and `@state` for state (arrays).

A buffer and its parts are frozen dataclasses of values. They hash, compare, print and pickle by value, so a jitted function
does not trace again for an equal buffer. Both kinds are pytree nodes registered with `jax.export`, which stores JSON of the
fields, never a pickle.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import itertools
import json
import operator
import re
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Literal, Union, dataclass_transform, get_args, get_origin

import jax
from jax import export

from fbuf._core.arguments import check_choice, did_you_mean

COMPONENTS: dict[str, type[Any]] = {}
"""Every class that `from_config` builds, by public name."""
_NAMES: dict[type[Any], str] = {}
_LITERAL = re.compile(r"""Literal\[((?:"[^"]*"|'[^']*'|None|, )+)\](?: \| None)?""")
"""The annotation of a field with a few strings as values."""
STATES: set[type[Any]] = set()
"""The classes made by `state`."""


def _qualified(cls: type[Any]) -> str:
    """Return the name a class is saved under: its own, after its module or, for fbuf's classes, their public package."""
    module = cls.__module__.split(".")
    if module[0] == "fbuf":
        module = list(itertools.takewhile(lambda part: not part.startswith("_"), module))
    return ".".join((*module, cls.__qualname__))


def _choices(annotation: Any) -> tuple[tuple[Any, ...], bool]:
    """Return the strings of `Literal[...]`, a type or its text, and whether `| None` follows; else `(), False`."""
    if isinstance(annotation, str):
        found = _LITERAL.fullmatch(annotation)
        return (ast.literal_eval(f"({found[1]},)") if found else ()), annotation.endswith(" | None")
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    literals = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
    if len(literals) != 1 or len(kinds) > 1 + (NoneType in kinds):
        return (), False
    known: tuple[Any, ...] = literals[0]
    return (known if all(isinstance(value, str | None) for value in known) else ()), NoneType in kinds


def allow(cls: type[Any], name: str) -> None:
    """Register a dataclass of values for `to_config` and `from_config`."""
    COMPONENTS[name] = cls
    _NAMES[cls] = name


def _save_as(cls: type[Any], name: str) -> None:
    """Register a component under the name that files and exported programs have for it."""
    allow(cls, name)
    export.register_pytree_node_serialization(
        cls,
        serialized_name=name,
        serialize_auxdata=lambda aux: json.dumps(to_config(aux)).encode(),
        deserialize_auxdata=lambda data: from_config(json.loads(bytes(data).decode())),
    )


@functools.cache
def _names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _values(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, name) for name in _names(self.__class__)])


def _equal(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _cached_hash(self: Any) -> int:  # every eager call hashes its buffer
    known: int | None = self.__dict__.get("_hash")
    if known is None:
        self.__dict__["_hash"] = known = _hash(self)
    return known


def _repr(self: Any) -> str:  # of a component fields that differ from their defaults
    all_fields, of_state = dataclasses.fields(self), type(self) in STATES
    shown = [
        f.name for f in all_fields if of_state or f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
    ]
    return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def _without_hash(self: Any) -> dict[str, Any]:  # string hashes differ between processes
    return {k: v for k, v in self.__dict__.items() if k != "_hash"}


def _frozen(cls: Any, has_repr: bool) -> Any:
    """Make a frozen dataclass whose methods are shared: `dataclasses` would compile them for each class in `import fbuf`."""
    made: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    made.__eq__, made.__hash__ = _equal, _hash
    if not has_repr:
        made.__repr__ = _repr
    return made


@dataclass_transform(frozen_default=True)
def component(cls: Any = None, *, name: str | None = None) -> Any:
    """Make `cls` a frozen dataclass of hashable values that JAX treats as static.

    Args:
      name: Name to save instances of an fbuf class under; None: its public name.
    Raises, on construction:
      TypeError: a field does not exist, or does not hash; the message names it.
      ValueError: a field annotated `Literal["a", "b"]` has another value.
    """
    if cls is None:
        return functools.partial(component, name=name)
    checks, makes = getattr(cls, "__post_init__", None), cls.__dict__.get("__init__")

    def __post_init__(self: Any) -> None:
        for name, (known, optional) in choices.items():
            if getattr(self, name) is not None or not optional:
                check_choice(type(self).__name__, name, getattr(self, name), known)
        if checks is not None:
            checks(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{type(self).__name__}: field '{field.name}' is {value!r}, which does not hash; expected a value "
                    f"(number, string, tuple, function, component). A list becomes a tuple with tuple(...)."
                ) from None

    cls.__post_init__ = __post_init__
    made = _frozen(cls, "__repr__" in cls.__dict__)
    by_name = made.__init__
    fields = {f.name: f.type for f in dataclasses.fields(made)}
    choices = {name: found for name, kind in fields.items() if (found := _choices(kind))[0]}

    @functools.wraps(by_name)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in fields:
                hint = did_you_mean(name, fields) or _owners(name)
                raise TypeError(f"{cls.__name__}: there is no option '{name}'.{hint}")
        by_name(self, *args, **options)

    made.__init__, made.__hash__, made.__getstate__ = makes or __init__, _cached_hash, _without_hash
    jax.tree_util.register_static(made)
    if made.__module__.split(".")[0] == "fbuf":
        _save_as(made, name or _qualified(made))
    return made


def _owners(option: str) -> str:
    """Return which components have an option, as a hint; "" if there is none."""
    owners = [name for name, kind in COMPONENTS.items() if option in (f.name for f in dataclasses.fields(kind))]
    return f" It is an option of {', '.join(owners)}." if owners else ""


@dataclass_transform(frozen_default=True)
def state(cls: Any) -> Any:
    """Make `cls` a frozen dataclass of arrays: a pytree node whose every field is a child.

    An optional method `ranges(self, geometry)` says what the fields hold, for checkpoints that no buffer wrote: it yields name,
    array, least and largest value (numbers or arrays that broadcast) of fields. `fbuf.load` refuses other values, in this
    order, so that a range may rely on those before it.
    """
    made = _frozen(cls, cls.__repr__ is not object.__repr__)
    STATES.add(made)
    _register_state(made)
    export.register_pytree_node_serialization(
        made, serialized_name=_qualified(made), serialize_auxdata=lambda aux: b"", deserialize_auxdata=lambda data: ()
    )
    return made


def _register_state(cls: type[Any]) -> None:
    """Register a frozen dataclass as a pytree node.

    Each call of a jitted function makes its states from their fields. The `__init__` of a frozen dataclass, which
    `jax.tree_util.register_dataclass` would call, takes three times as long as that of one that is not frozen.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    keys = [jax.tree_util.GetAttrKey(name) for name in names]
    fields_of = operator.attrgetter(*names) if len(names) > 1 else lambda node: (getattr(node, names[0]),)
    unfrozen = functools.cache(lambda: dataclasses.make_dataclass(cls.__name__, names))  # `import` has no use for it

    def unflatten(_: Any, fields: Iterable[Any]) -> Any:
        node: Any = unfrozen()(*fields)
        node.__class__ = cls
        return node

    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda node: (tuple(zip(keys, fields_of(node), strict=True)), ()),
        unflatten,
        lambda node: (fields_of(node), ()),
    )


def to_config(value: Any) -> Any:
    """Return the JSON form of a component: `{"type": ..., field: ...}`; tuples become `{"tuple": [...]}`.

    Raises:
      TypeError: a value has no JSON form (for instance a function).
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
    """Return the component of a public name, or None; import storages and transforms when needed."""
    package, _, last = name.rpartition(".")
    if name not in COMPONENTS and package in ("fbuf.storages", "fbuf.transforms"):
        getattr(importlib.import_module(package), last, None)
    return COMPONENTS.get(name)


def from_config(config: Any) -> Any:
    """Build a component of fbuf from its JSON form."""
    if isinstance(config, dict) and "tuple" in config:
        return tuple(from_config(item) for item in config["tuple"])
    if isinstance(config, dict):
        kind = named(config["type"])
        if kind is None:
            raise ValueError(f"from_config: '{config['type']}' is not a component of this version of fbuf.")
        return kind(**{k: from_config(v) for k, v in config.items() if k != "type"})
    return config
