"""Results of methods: `Sample`, `Rows`, and the `Index` of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import jax

from fbuf._core.arguments import did_you_mean
from fbuf._core.component import state
from fbuf._core.pytree import PyTree

TICKET = "_ticket"
"""Name of the leaf that says where a row's ragged part is: uint32[2]. It goes through views like any other leaf."""


class _Lazy(Protocol):
    """The public side of `fbuf.Lazy`, which reads a store; `ragged.open` makes one."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def present(self) -> Any: ...
    @property
    def missing(self) -> dict[str, list[Any]]: ...
    def __getitem__(self, name: str | tuple[str, ...]) -> list[Any]: ...
    def get(self, name: str | tuple[str, ...], default: Any = None) -> list[Any]: ...
    def stack(self, name: str | tuple[str, ...], axis: int = 0) -> Any: ...
    def objects(self, name: str | tuple[str, ...], default: Any = None) -> Any: ...
    def nested(self, name: str | tuple[str, ...], layout: Any = None) -> Any: ...
    def rows(self) -> list[Any]: ...
    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...


class _DeferredFields:
    """Fields that may be computed when they are first read.

    `_compute_deferred`, where an object has it, returns one of `_DEFERRED` from the object and the field's name.
    """

    _DEFERRED: ClassVar[frozenset[str]]

    if not TYPE_CHECKING:  # else no misspelt name would be an error of mypy

        def __getattr__(self, name: str) -> Any:
            fields = vars(self)
            if name in self._DEFERRED and (compute := fields.get("_compute_deferred")) is not None:
                return fields.setdefault(name, compute(self, name))  # another thread may have been first
            if name in fields:  # another thread computed all
                return fields[name]
            near = did_you_mean(name, self._fields())
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'.{near}", name=name, obj=self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._fields()})

    def __getstate__(self) -> dict[str, Any]:  # of copies and pickles
        return {name: getattr(self, name) for name in self._fields()}

    def _fields(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]


@state
class Index(_DeferredFields):
    """Identify rows by slot and generation, which differs between successive rows of a slot.

    An index whose row has been overwritten is *stale*: methods skip it and count it. Use an index only with states that
    descend from the one it came from: in another branch it may match another row. Any selection of its entries is an index
    too. The last three say which of several members has the row; each is None, and no leaf, where it does not apply.

    Attributes:
      slot: int32[B], in [0, C) of the buffer or shard; C where the sample's mask is False (0 in a mixture).
      generation: uint32[B], which of the rows that the slot has had; 0 where the mask is False.
      source: int32[B], of a mixture: its buffer, in the order of the names; their number where the mask is False.
      shard: int32[B], of a buffer in D shards: in [0, D); D where the mask is False.
      birth: uint32[B], of a `RayReplay`: the incarnation of the shard, which a restart changes.
    """

    slot: jax.Array
    generation: jax.Array
    source: Any = None
    shard: Any = None
    birth: Any = None

    _DEFERRED = frozenset(("slot", "generation"))


class _Ragged(_DeferredFields):
    """The `lazy` property of `Sample` and `Rows`, and advice for leaves that are asked of the batch itself."""

    _DEFERRED = frozenset(("index", "probability", "weight", "mask"))

    data: PyTree
    ragged: Any
    __iter__ = None  # not a sequence, although there is a `__getitem__`

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "lazy":  # the property raised
                if self.ragged is not None:
                    return self.ragged.open(self.data)  # for the error itself
                raise AttributeError("lazy: all rows are arrays, in `data`. For text or objects use storages.Ragged().")
            data = vars(self).get("data")
            if isinstance(data, Mapping) and name in data and name not in self._DEFERRED:
                raise AttributeError(f"{type(self).__name__} has no attribute '{name}'. Write batch.data['{name}'].")
            return super().__getattr__(name)

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}[{key!r}] is not defined; leaves are in `data`. Write batch.data[{key!r}]."
        )

    def __repr__(self) -> str:
        from fbuf._core import sample_display

        return sample_display.as_text(self)

    def _repr_html_(self) -> str:
        from fbuf._core import sample_display

        return sample_display.as_html(self)

    @property
    def lazy(self) -> _Lazy:
        """Leaves that are not arrays, of rows in `storages.Ragged`; see `fbuf.Lazy`. Eager."""
        if self.ragged is None:
            raise AttributeError
        return self.ragged.open(self.data)


def deferring(cls: type[Any], compute: Callable[[Any, str], Any], **fields: Any) -> Any:
    """Return an object of these fields, and others that `compute` makes of it and a name when they are first read."""
    node = object.__new__(cls)
    vars(node).update(fields, _compute_deferred=compute)
    return node


@state
class Sample(_Ragged):
    """Hold a batch. Where `mask` is False, data, probability and weight are zero.

    Of batches that `Replay` drew in NumPy, all but `data` is computed when it is first read.

    Attributes:
      data: The batch of the view, leaves `[B, ...]`: see `fbuf.views.Row`, `Transition`, `Sequence`, ...
      index: The sampled rows, `Index` `[B]`, for `update_priority` and `update_rows`.
      probability: float32[B], of each row in one draw from the whole buffer, of all its shards, or mixture.
      weight: float32[B], importance weights; 1 for uniform draws.
      mask: bool[B], False where no row could be drawn, or the row had expired.
      ragged: Tickets of rows in `storages.Ragged`, which `lazy` reads; None for other storages.
      last: bool[], whether an epoch of `samplers.Epoch` ends with this batch; None for other samplers.
    """

    data: PyTree
    index: Index
    probability: jax.Array
    weight: jax.Array
    mask: jax.Array
    ragged: Any = None
    last: Any = None


@state
class Rows(_Ragged):
    """Hold rows as stored, and their indices. Where `mask` is False the row is zeros.

    Attributes:
      data: Leaves `[..., item]`.
      index: `Index` `[...]`.
      mask: bool[...], False where there is no row.
      ragged: As in `Sample`.
    """

    data: PyTree
    index: Index
    mask: jax.Array
    ragged: Any = None
