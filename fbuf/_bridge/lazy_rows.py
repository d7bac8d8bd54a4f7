"""`batch.lazy`: read the ragged leaves of a batch from the host on demand.

A batch of ragged rows carries their tickets as arrays; text, objects and leaves of varying shapes are read eagerly, leaf by
leaf. The tickets keep their store open, as a state does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, cast

import jax
import numpy as np

from fbuf._bridge import lifetime
from fbuf._core.lazy_import import import_extra
from fbuf._core.pytree import PyTree, name_of, named_leaves, nested, register_node
from fbuf._host.ragged.store import Records
from fbuf._host.ragged.values import MISSING

_RAISE: Any = object()


def length_name(name: str) -> str:
    """Return the name of the leaf int32[rank] that holds the lengths of a padded leaf."""
    return f"{name}_length"


class Tickets:
    """The part of a batch that `lazy` reads: a pytree node of two arrays that keeps its store open."""

    __slots__ = ("dense", "id", "owner", "slot", "strict", "ticket")

    def __init__(self, id: Any, ticket: Any, slot: int, strict: bool, dense: tuple[str, ...]):
        self.id = id  # uint32[..., 2], names the store: one for each place, so that a batch can be cut and joined
        self.ticket = ticket  # uint32[..., 2], the row of each place; 0: none
        self.slot = slot  # static: owner group
        self.strict = strict  # static: an expired row is an error
        self.dense = dense  # static: names of all leaves of a row that are arrays in the batch
        self.owner = lifetime.owner_of(slot, _array(id))

    def open(self, data: PyTree) -> Lazy:
        """Return the view that users get."""
        if isinstance(self.ticket, jax.core.Tracer) or isinstance(self.id, jax.core.Tracer):
            raise TypeError(
                "lazy: this batch is traced; ragged leaves are read eagerly, for they are no arrays. Return the batch from "
                "jit and read batch.lazy outside; inside use leaves with a maximum: storages.Ragged(maximum={'obs': (12,)})."
            )
        ids = np.unique(np.asarray(_array(self.id)).reshape(-1, 2), axis=0)
        if len(ids) != 1:
            raise ValueError(f"lazy: rows are of {len(ids)} buffers; expected one. Read lazy before joining them.")
        store = cast(Records, lifetime.find(lifetime.join_id(ids[0])))
        pairs = np.ascontiguousarray(np.asarray(_array(self.ticket)), np.uint32)
        return Lazy(store, pairs.view(np.uint64)[..., 0], data, self.strict, self.dense)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tickets:
        return Tickets(deepcopy(self.id, memo), deepcopy(self.ticket, memo), self.slot, self.strict, self.dense)

    def __reduce__(self) -> Any:
        raise TypeError("fbuf: ragged batches cannot be pickled, as rows are in this process. Pass batch.lazy.rows().")

    def __repr__(self) -> str:
        return f"Tickets({getattr(self.ticket, 'shape', '?')})"


def _array(leaf: Any) -> Any:
    """Return the leaf, from torch where it is a tensor."""
    return leaf.cpu().numpy() if type(leaf).__module__.split(".")[0] == "torch" else leaf


register_node(Tickets, ("id", "ticket"), lambda t: ((t.id, t.ticket), (t.slot, t.strict, t.dense)))


class Lazy:
    """Read the ragged leaves of a batch, `batch.lazy`, when they are used.

    Places where the batch has no row (`mask` False) read as None. A row that lacks a leaf is reported by `missing`, raised by
    `lazy[name]`, and given a default by `get`. A row that the store has dropped since the batch was drawn is an error, never
    other data (with `on_expired="mask"`: None): read a batch before much more is added, or give the storage more `slack`.

    A batch `[B]` gives lists of B values; windows `[B, T]` give B lists of T.

    Attributes:
      names: The ragged leaves, by path.
      shape: Leading axes of the batch.

    Example:
      >>> import fbuf, jax, numpy as np
      >>> buffer = fbuf.Buffer(capacity=10, storage=fbuf.storages.Ragged())
      >>> state = buffer.init({"obs": np.zeros(0), "text": ""})
      >>> state = buffer.add(state, {"obs": np.arange(3.0), "text": "three"})
      >>> state, batch = buffer.sample(state, jax.random.key(0), 2)
      >>> batch.lazy["text"], batch.lazy.stack("obs", axis=-1).shape
      (['three', 'three'], (3, 2))
    """

    def __init__(self, store: Records, ticket: Any, data: PyTree, strict: bool, dense: tuple[str, ...]):
        self._store, self._ticket, self._data, self._strict, self._dense = store, ticket, data, strict, dense
        self.names: tuple[str, ...] = tuple(leaf.name for leaf in store.leaves)
        self.shape: tuple[int, ...] = ticket.shape

    # ---------------------------------------------------------------- what is there

    @property
    def present(self) -> Any:
        """Return bool of `shape`: the batch has a row there, and its store still does.

        Raises:
          RuntimeError: some have expired (unless `on_expired="mask"`).
        """
        present = self._store.present(self._ticket)
        self._raise_if_expired(present)
        return present

    @property
    def missing(self) -> dict[str, list[Any]]:
        """Return the places of the rows that lack a leaf, by its name: ints, or tuples of them where the batch has more axes.

        Leaves that no row lacks are left out.
        """
        present, found = self.present, {}
        for i, name in enumerate(self.names):
            lacking = present & ~self._store.has(i, self._ticket)
            if lacking.any():
                found[name] = self._places(lacking)
        return found

    def _places(self, where: Any) -> list[Any]:
        places = np.argwhere(where).tolist()
        return [p[0] if len(p) == 1 else tuple(p) for p in places]

    def _raise_if_expired(self, present: Any) -> None:
        gone = (self._ticket != 0) & ~present
        if self._strict and gone.any():
            raise RuntimeError(
                f"lazy: {int(gone.sum())} of {gone.size} rows have expired ({_some(self._places(gone))}): the store has "
                f"dropped them since this batch was drawn. Read batch.lazy before adding more (with prefetch=1 a batch is one "
                f"sample old when it comes), or keep rows longer: "
                f"storages.Ragged(slack={max(2 * self._store.slack, 32) * self._store.lanes})."
            )

    # ---------------------------------------------------------------- values

    def __getitem__(self, name: str | tuple[str, ...]) -> list[Any]:
        """Return the values of a leaf: numpy arrays (copies), str, bytes, numbers, objects.

        Raises:
          KeyError: there is no such leaf, or rows lack it.
          RuntimeError: rows have expired.
          StoreCorrupted: stored bytes are damaged.
        """
        return self.get(name, _RAISE)

    def get(self, name: str | tuple[str, ...], default: Any = None) -> list[Any]:
        """Return `lazy[name]` with `default` for the rows that lack the leaf."""
        return _in_lists(iter(self._values(name_of(name), default)), self.shape)

    def _values(self, name: str, default: Any) -> list[Any]:
        if name not in self.names:
            hint = "It is an array: batch.data has it. " if name in self._dense else ""
            raise KeyError(f"lazy: no ragged leaf '{name}' (there are: {', '.join(self.names) or 'none'}). {hint}")
        found, present = self._store.values(self._store.index(name), self._ticket)
        self._raise_if_expired(present.reshape(self.shape))
        lacking = [i for i, value in enumerate(found) if value is MISSING and present[i]]
        if lacking and default is _RAISE:
            mask = np.zeros(len(found), bool)
            mask[lacking] = True
            places = _some(self._places(mask.reshape(self.shape)))
            raise KeyError(
                f"lazy: {len(lacking)} of {len(found)} rows lack leaf '{name}' ({places}). Ask batch.lazy.missing first, or "
                f"give a value for them: batch.lazy.get('{name}', default)."
            )
        for i, value in enumerate(found):
            if value is MISSING:
                found[i] = default if present[i] else None
        return found

    def stack(self, name: str | tuple[str, ...], axis: int = 0) -> Any:
        """Return a leaf as one numpy array, where the shapes of its rows agree.

        Args:
          axis: Where the axis of the rows goes, as in `np.stack`; for windows, where B and T go.
        Returns:
          `[B, ...]` for `axis=0`, `[..., B]` for -1.
        Raises:
          ValueError: shapes or dtypes differ (it says which rows have which), a place has no row, or values are not numbers.
          KeyError, RuntimeError: as for `lazy[name]`.
        """
        name = name_of(name)
        arrays = self._numbers("stack", name)
        kinds: dict[tuple[Any, Any], list[int]] = {}
        for i, array in enumerate(arrays):
            kinds.setdefault((array.shape, array.dtype), []).append(i)
        if len(kinds) > 1:
            each = ", ".join(f"{dtype}{list(shape)}: rows {_some(rows)}" for (shape, dtype), rows in kinds.items())
            raise ValueError(
                f"lazy.stack: leaf '{name}' has {len(kinds)} shapes ({each}); expected one. Use batch.lazy['{name}'], "
                f"batch.lazy.objects('{name}') or batch.lazy.nested('{name}'); or pad them: "
                f"storages.Ragged(maximum={{'{name}': (...)}})."
            )
        if not arrays:
            raise ValueError(f"lazy.stack: leaf '{name}' has no rows here; expected one or more.")
        stacked = np.stack(arrays, axis)
        at = axis % stacked.ndim
        return stacked.reshape(stacked.shape[:at] + self.shape + stacked.shape[at + 1 :])

    def _numbers(self, call: str, name: str) -> list[Any]:
        """Return values as arrays of numbers, one for each place."""
        found = self._values(name, _RAISE)
        empty = self._places(~self.present)
        if empty:
            raise ValueError(
                f"lazy.{call}: {len(empty)} places of this batch have no row ({_some(empty)}); expected rows everywhere. Draw "
                f"from a buffer that has rows, or use batch.lazy['{name}'], which gives None there."
            )
        for i, value in enumerate(found):
            array = np.asarray(value) if isinstance(value, (int, float, complex, np.generic, np.ndarray)) else None
            if array is None or array.dtype.kind in "OSU":
                raise ValueError(f"lazy.{call}: leaf '{name}' of row {i} is {type(value).__name__}; expected a number.")
            found[i] = array
        return found

    def objects(self, name: str | tuple[str, ...], default: Any = None) -> Any:
        """Return a leaf as a numpy array of objects, of `shape`; `default` for the rows that lack it."""
        out = np.empty(int(np.prod(self.shape)), object)
        for i, value in enumerate(self._values(name_of(name), default)):
            out[i] = value
        return out.reshape(self.shape)

    def nested(self, name: str | tuple[str, ...], layout: Any = None) -> Any:
        """Return a leaf as a torch nested tensor of its rows, in order.

        Args:
          layout: None: `torch.jagged` where the first axis alone differs, else `torch.strided` (of which torch says that it
            is a prototype).
        Raises:
          ImportError: torch is missing.
          ValueError: a place has no row, or values are not numbers.
        """
        torch = import_extra("lazy.nested", "torch", '"fbuf[torch]"')
        arrays = self._numbers("nested", name_of(name))
        if layout is None:
            alike = all(a.ndim > 0 and a.shape[1:] == arrays[0].shape[1:] for a in arrays)
            layout = torch.jagged if alike else torch.strided
        return torch.nested.nested_tensor([_tensor(torch, array) for array in arrays], layout=layout)

    def rows(self) -> list[Any]:
        """Return the rows as dicts, as they were given to `add`: ragged leaves, and the others as numpy arrays where the
        batch is of rows (`views.Row`, `get`, `rows`). Leaves that a row lacks are left out; None where there is
        no row.
        """
        found = {name: self._values(name, MISSING) for name in self.names}
        present = self.present.reshape(-1)
        dense = {} if self._data is None else named_leaves(self._data)
        if tuple(dense) == self._dense:
            padded = [leaf.name for leaf in self._store.leaves if leaf.maximum is not None]
            wanted = set(dense) - set(padded) - {length_name(name) for name in padded}
            lead = (-1,) if self.shape else (1,)
            for name in sorted(wanted):
                array = np.asarray(_array(dense[name]))
                found[name] = list(array.reshape(*lead, *array.shape[len(self.shape) :]))
        out: list[Any] = []
        for i in range(len(present)):
            row = nested({name: of_leaf[i] for name, of_leaf in found.items() if of_leaf[i] is not MISSING})
            out.append(row if present[i] else None)
        return _in_lists(iter(out), self.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __repr__(self) -> str:
        return f"Lazy({', '.join(self.names)}; {list(self.shape)})"


def _in_lists(values: Iterator[Any], shape: tuple[int, ...]) -> Any:
    """Return values in nested lists of these lengths."""
    if not shape:
        return next(values)
    return [_in_lists(values, shape[1:]) for _ in range(shape[0])]


def _some(places: list[Any]) -> str:
    """Return the first few as text."""
    return ", ".join(map(str, places[:5])) + (", ..." if len(places) > 5 else "")


def _tensor(torch: Any, array: Any) -> Any:
    make: Callable[..., Any] = torch.from_numpy
    # bfloat16 and float8, which torch knows but not from numpy.
    if array.dtype.isbuiltin == 2 and hasattr(torch, array.dtype.name):
        shape = array.shape
        return (
            make(array.reshape(-1).view(f"uint{8 * array.itemsize}"))
            .view(getattr(torch, array.dtype.name))
            .reshape(shape)
        )
    return make(np.ascontiguousarray(array))
