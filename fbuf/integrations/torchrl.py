"""A storage for torchrl that keeps each large leaf of a row once, compressed.

    ReplayBuffer(storage=fbuf.integrations.torchrl.CompressedStorage(1_000_000), batch_size=256)

It derives from torchrl's `LazyTensorStorage`. Only leaves of 1,024 bytes a row or more are replaced, by tensors that read
their rows when they are used, so torchrl's samplers, writers and transforms run unchanged. With the same generator every
batch equals that of `LazyTensorStorage`, bit for bit.

`("next", key)` takes no memory where it equals `key` of the step that follows. `storage[a:b]` reads nothing: its large leaves
are read when they are used, and assigning to them changes the storage. Other indices return copies; `storage[3]` does too.

`dumps` writes fbuf's checkpoint format, and `loads` verifies its checksums; it also loads what `LazyTensorStorage` dumped.
`state_dict`, pickle and deepcopy keep the compressed bytes. Unpickling can run any code: load only files that you trust.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from contextvars import ContextVar
from pathlib import Path
from types import EllipsisType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer

from fbuf._formats import checkpoint
from fbuf._host.codecs import Codec, Zstd
from fbuf._host.memory.lazy_array import within
from fbuf._host.pairs import ObservationPairs
from fbuf._host.types import Array

__all__ = ["CompressedStorage"]

__dir__ = __all__.copy  # without the imports

_BLOCK = 512  # rows that are read or written at once
_FOLDER = "compressed"  # of a dump
_deferred = ContextVar("_deferred", default=False)
"""Whether indices return rows that are not read yet."""
_waiting: ContextVar[dict[_Leaf, dict[int, tuple[Array, Array]]] | None] = ContextVar("_waiting", default=None)
"""Rows of leaves by offset, with their numbers, which are stored together; None to store each at once."""


class _Leaf:
    """The rows of `key`, offset 0, and of `("next", key)`, offset 1. Rows are numbered by step, then lane."""

    def __init__(
        self, steps: int, lanes: int, shape: tuple[int, ...], dtype: torch.dtype, device: Any, codec: Any, paired: bool
    ) -> None:
        kind = _numpy_dtype(dtype)
        stored = shape if kind else (math.prod(shape) * dtype.itemsize,)
        self.pairs = ObservationPairs(steps, lanes, stored, kind or np.uint8, codec, paired)
        self.shape, self.dtype, self.device = shape, dtype, device

    def read(self, number: Array, offsets: tuple[int, ...]) -> list[torch.Tensor]:
        """Return rows by number, int64[...]."""
        parts = self.pairs.read(*np.divmod(number.reshape(-1), self.pairs.lanes), offsets)
        shape = (*number.shape, *self.shape)
        return [torch.from_numpy(rows).view(self.dtype).reshape(shape).to(self.device) for rows in parts]

    def to_numpy(self, value: Any, shape: tuple[int, ...]) -> Array:
        """Return what is assigned to rows of some shape, `[M, *column]`."""
        value = torch.as_tensor(value).detach().to("cpu", self.dtype).expand(shape)
        if not _numpy_dtype(self.dtype):
            value = value.reshape(-1, math.prod(self.shape)).contiguous().view(torch.uint8)
        return np.asarray(value.numpy()).reshape(-1, *self.pairs.column.shape)

    def write(self, number: Array, rows: dict[int, Array]) -> None:
        """Replace rows int64[M]; rows of an offset that is missing stay."""
        lanes, wanted = self.pairs.lanes, 1 + self.pairs.paired
        for start in range(0, len(number), _BLOCK * lanes):
            part = slice(start, start + _BLOCK * lanes)
            step, lane = np.divmod(number[part], lanes)
            updates = {offset: array[part] for offset, array in rows.items()}
            steps = step[::lanes]
            every = (steps[:, None] * lanes + np.arange(lanes)).ravel()
            if len(updates) < wanted or not np.array_equal(number[part], every):  # read the others, and store all again
                steps, nth = np.unique(step, return_inverse=True)
                whole = np.repeat(steps, lanes), np.tile(np.arange(lanes), len(steps))
                merged = dict(enumerate(self.pairs.read(*whole, (0, 1)[:wanted])))
                for offset, array in updates.items():
                    merged[offset][nth * lanes + lane] = array
                updates = merged
            shape = len(steps), lanes, *self.pairs.column.shape
            following = updates[1].reshape(shape) if wanted == 2 else None
            self.pairs.extend(updates[0].reshape(shape), following, steps)


def _numpy_dtype(dtype: torch.dtype) -> Any:
    """Return NumPy's dtype of the same name; None for bfloat16, float8 and complex numbers, which are kept as bytes."""
    with contextlib.suppress(TypeError):
        found = torch.empty(0, dtype=dtype).numpy().dtype
        return found if found.kind in "biuf" else None
    return None


def _is_stack(data: Any) -> bool:
    """Return whether a lazy stack, whose parts may differ in shape, is in a tensordict."""
    if not is_tensor_collection(data):
        return False
    return isinstance(data, LazyStackedTensorDict) or any(_is_stack(value) for value in data.values())


class _Rows(torch.Tensor):  # type: ignore[misc]
    """Rows of a leaf, read each time that they are used."""

    _leaf: _Leaf
    _offset: int
    _number: Array
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, leaf: _Leaf, offset: int, number: Array) -> _Rows:
        shape = (*number.shape, *leaf.shape)
        rows = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=leaf.dtype, device=leaf.device)
        rows._leaf, rows._offset, rows._number = leaf, offset, number
        return rows

    def read(self) -> torch.Tensor:
        """Return the rows as an ordinary tensor."""
        return self._leaf.read(self._number, (self._offset,))[0]

    def _find(self, index: Any) -> tuple[Array | None, bool]:
        """Return the rows of an index, None if it reaches into rows, and whether torch would return a view of them."""
        parts = index if isinstance(index, tuple) else (index,)
        masks = [getattr(part, "dtype", None) in (torch.bool, np.bool_) for part in parts]
        taken = sum(part.ndim if mask else part is not None for part, mask in zip(parts, masks, strict=True))
        if taken > self._number.ndim or (len(parts) > 1 and any(part is Ellipsis for part in parts)):
            return None, False
        is_view = all(part is None or isinstance(part, slice | int | EllipsisType) for part in parts)
        parts = tuple(part.cpu().numpy() if isinstance(part, torch.Tensor) else part for part in parts)
        return np.asarray(self._number[parts]), is_view

    def __getitem__(self, index: Any) -> torch.Tensor:
        number, is_view = self._find(index)
        if number is None:
            return self.read()[index]
        rows = _Rows(self._leaf, self._offset, number)
        return rows if is_view or _deferred.get() else rows.read()

    def __setitem__(self, index: Any, value: Any) -> None:
        number, _ = self._find(index)
        if number is None:
            rows = self.read()
            rows[index] = value
            self[...] = rows
            return
        waiting = _waiting.get()
        array = self._leaf.to_numpy(value, (*number.shape, *self._leaf.shape))
        if waiting is None:
            self._leaf.write(number.reshape(-1), {self._offset: array})
        else:
            updates = waiting.setdefault(self._leaf, {})
            if self._offset in updates:
                _write_waiting(self._leaf, updates)
            updates[self._offset] = number.reshape(-1), array

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return _Rows(args[0]._leaf, args[0]._offset, args[0]._number)
        if func is torch.ops.aten.transpose.int and -1 < min(args[1:]) <= max(args[1:]) < args[0]._number.ndim:
            return _Rows(args[0]._leaf, args[0]._offset, args[0]._number.swapaxes(*args[1:]))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], _Rows):
            args[0][...] = args[1]
            return args[0]
        tensors: dict[int, torch.Tensor] = {}

        def read(value: Any) -> Any:
            return tensors.setdefault(id(value), value.read()) if isinstance(value, _Rows) else value

        result = func(*tree_map(read, args), **tree_map(read, kwargs))
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for value in tree_leaves(arguments.get(argument.name)):
                    if isinstance(value, _Rows):
                        value[...] = tensors[id(value)]
                        result = value if result is tensors[id(value)] else result
        return result

    def numpy(self, **kwargs: Any) -> Array:
        return self.read().numpy(**kwargs)

    def tolist(self) -> Any:
        return self.read().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.read().numpy(force=True), dtype)

    def is_shared(self) -> bool:
        return False

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self.read())

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rows:
        return _Rows(copy.deepcopy(self._leaf, memo), self._offset, self._number)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Rows, (self._leaf, self._offset, self._number)


def _write_waiting(leaf: _Leaf, updates: dict[int, tuple[Array, Array]]) -> None:
    """Store rows by offset, those of both offsets together."""
    (number, _), *others = updates.values()
    if all(np.array_equal(number, other) for other, _ in others):
        leaf.write(number, {offset: array for offset, (_, array) in updates.items()})
    else:
        for offset, (number, array) in updates.items():
            leaf.write(number, {offset: array})
    updates.clear()


class _Checkpointer(TensorStorageCheckpointer):  # type: ignore[misc]
    """Write small leaves as torchrl does, and the compressed ones in fbuf's format."""

    def dumps(self, storage: Any, path: Any) -> None:
        path = Path(path)
        leaves = storage._leaves() if storage.initialized and is_tensor_collection(storage._storage) else {}
        if self._save_hooks or not leaves:
            return super().dumps(storage, path)
        small = SimpleNamespace(
            _storage=storage._storage.exclude(*leaves),
            initialized=True,
            _is_full=storage._is_full,
            _last_cursor=storage._last_cursor,
            _len=storage._len,
        )
        super().dumps(small, path)
        arrays: dict[str, Any] = {}
        entries: list[dict[str, Any]] = []
        for key, rows in leaves.items():
            leaf = rows._leaf
            entry = {
                "key": list(key),
                "lead": list(rows._number.shape),
                "row": list(leaf.shape),
                "dtype": str(leaf.dtype),
            }
            if rows._offset == 0:
                entries.append(entry | {"paired": leaf.pairs.paired})
                arrays |= {f"{len(entries) - 1}:{name}": array for name, array in leaf.pairs.to_arrays().items()}
        checkpoint.write(path / _FOLDER, arrays, {"leaves": entries})

    def loads(self, storage: Any, path: Any) -> None:
        path = Path(path)
        description = json.loads((path / "storage_metadata.json").read_text())
        if description["is_pytree"] or self._load_hooks:
            return super().loads(storage, path)
        rows = TensorDict.load_memmap(path)
        if not (path / _FOLDER).exists():
            return storage._load(rows, description["len"])
        with checkpoint.read(path / _FOLDER) as saved:
            storage._init_from(rows, saved.meta["leaves"], saved.arrays)
        storage._len = description["len"]


class CompressedStorage(LazyTensorStorage):  # type: ignore[misc]
    """Replace torchrl's `LazyTensorStorage`; store large leaves compressed.

    Args:
      max_size, device, ndim: As in torchrl. Rows are compressed in host memory, and read to `device`.
      codec: `fbuf.storages.Zstd()` by default.
      min_bytes: Leaves of fewer bytes a row are ordinary tensors.

    Example:
      >>> import torch
      >>> from tensordict import TensorDict
      >>> from torchrl.data import ReplayBuffer
      >>> from fbuf.integrations.torchrl import CompressedStorage
      >>> buffer = ReplayBuffer(storage=CompressedStorage(1000), batch_size=32)
      >>> frames = torch.zeros(200, 4, 84, 84, dtype=torch.uint8)
      >>> index = buffer.extend(TensorDict({"pixels": frames, "next": {"pixels": frames}}, [200]))
      >>> buffer.sample()["next", "pixels"].shape
      torch.Size([32, 4, 84, 84])
    """

    _default_checkpointer = _Checkpointer
    _storage: Any

    def __init__(
        self, max_size: int, *, device: Any = "cpu", ndim: int = 1, codec: Codec | None = None, min_bytes: int = 1024
    ) -> None:
        super().__init__(max_size, device=device, ndim=ndim)
        self._codec, self._min_bytes = Zstd() if codec is None else codec, max(min_bytes, 1)

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that rows take."""
        total, seen = 0, set()
        for value in self._values():
            if not isinstance(value, _Rows):
                total += value.numel() * value.element_size()
            elif id(value._leaf) not in seen:
                seen.add(id(value._leaf))
                total += value._leaf.pairs.nbytes + value._number.nbytes
        return total

    def _values(self) -> list[Any]:
        stored = self._storage
        if _is_stack(stored):
            return []
        values = stored.values(True, True) if is_tensor_collection(stored) else tree_leaves(stored)
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _leaves(self) -> dict[tuple[str, ...], _Rows]:
        """Return the compressed leaves of a tensordict by key."""
        items = ((k if isinstance(k, tuple) else (k,), v) for k, v in self._storage.items(True, True))
        return {key: value for key, value in items if isinstance(value, _Rows)}

    # ---------------------------------------------------------------- writing

    def _init(self, data: Any) -> None:
        """Allocate small leaves as torchrl does, and make stores for the others."""
        if _is_stack(data):
            return super()._init(data)
        large: dict[Any, torch.Tensor] = {}

        def shrink(key: Any, value: Any) -> Any:
            plain = isinstance(value, torch.Tensor) and not value.is_nested
            if not plain or math.prod(value.shape[self.ndim - 1 :]) * value.element_size() < self._min_bytes:
                return value
            large[key if isinstance(key, tuple) else (key,)] = value
            return value.new_empty((*value.shape, 0))

        if is_tensor_collection(data):
            super()._init(data.named_apply(shrink, nested_keys=True))
            for key, rows in self._make(large).items():
                self._storage.set(key, rows)
        else:
            values, structure = tree_flatten(data)
            super()._init(tree_unflatten([shrink(i, value) for i, value in enumerate(values)], structure))
            made = tree_leaves(self._storage)
            for (i,), rows in self._make(large).items():
                made[i] = rows
            self._storage = tree_unflatten(made, structure)

    def _make(self, large: dict[Any, torch.Tensor]) -> dict[Any, _Rows]:
        """Return leaves without rows, for each row of which a leaf is given."""
        made = {}
        for key, value in large.items():
            following = large.get(("next", *key))
            same = following is not None and (following.shape, following.dtype) == (value.shape, value.dtype)
            if key[0] != "next" or key not in made:
                lead = value.shape[: self.ndim - 1]
                length = self.max_size // max(lead.numel(), 1)
                number = np.arange(length * lead.numel()).reshape(length, *lead)
                row = tuple(value.shape[self.ndim - 1 :])
                leaf = _Leaf(length, lead.numel(), row, value.dtype, self.device, self._codec, same)
                made[key] = _Rows(leaf, 0, number)
                if same:
                    made["next", *key] = _Rows(leaf, 1, number)
        return made

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store rows, as torchrl does."""
        waiting: dict[_Leaf, dict[int, tuple[Array, Array]]] = {}
        token = _waiting.set(waiting)
        try:
            super().set(cursor, data, set_cursor=set_cursor)
        finally:
            _waiting.reset(token)
        for leaf, updates in waiting.items():
            _write_waiting(leaf, updates)

    # ---------------------------------------------------------------- reading

    def get(self, index: Any) -> Any:
        """Return rows, as torchrl does; compressed leaves of a slice are read when they are used."""
        token = _deferred.set(True)
        try:
            found = super().get(index)
        finally:
            _deferred.reset(token)
        parts = index if isinstance(index, tuple) else (index,)
        if all(isinstance(part, slice | EllipsisType) for part in parts) or _is_stack(found):
            return found
        if not is_tensor_collection(found):
            return tree_map(lambda value: value.read() if isinstance(value, _Rows) else value, found)
        groups: dict[_Leaf, dict[int, tuple[Any, _Rows]]] = {}
        for key, value in found.items(True, True):
            if isinstance(value, _Rows):
                groups.setdefault(value._leaf, {})[value._offset] = key, value
        for leaf, entries in groups.items():
            number = next(iter(entries.values()))[1]._number
            for (key, _), rows in zip(entries.values(), leaf.read(number, tuple(entries)), strict=True):
                found.set(key, rows)
        return found

    def _empty(self) -> None:
        super()._empty()
        for value in self._values() if self.initialized else ():
            if isinstance(value, _Rows) and value._offset == 0:
                value._leaf.pairs.clear()

    # ---------------------------------------------------------------- saving

    def _load(self, rows: Any, number: int) -> None:
        """Replace everything by the first rows of a tensordict or tensor of all rows."""
        self._storage, self.initialized = None, False
        self.__dict__.pop("_total_shape_value", None)
        self._init(rows[0])
        self._len = number
        for start in range(0, self._len_along_dim0, _BLOCK):
            part = slice(start, min(start + _BLOCK, self._len_along_dim0))
            self.set(part, rows[part], set_cursor=False)

    def _init_from(self, rows: Any, entries: list[Any], arrays: Any) -> None:
        """Replace everything by small leaves, and compressed leaves of a checkpoint."""
        if rows.shape[: self.ndim].numel() - self.max_size not in range(max(rows.shape[1 : self.ndim].numel(), 1)):
            raise ValueError(
                f"CompressedStorage.loads: the dump is of a storage of {rows.shape[: self.ndim].numel()} rows; expected "
                f"{self.max_size}. Make the storage with the max_size of the one that was dumped."
            )
        stored = rows.to(self.device).clone()
        for i, entry in enumerate(entries):
            lead, key, dtype = entry["lead"], tuple(entry["key"]), getattr(torch, entry["dtype"].removeprefix("torch."))
            shape = lead[0], math.prod(lead[1:]), tuple(entry["row"])
            leaf = _Leaf(*shape, dtype, self.device, self._codec, entry["paired"])
            leaf.pairs.restore(within(arrays, f"{i}:"))
            number = np.arange(math.prod(lead)).reshape(lead)
            stored.set(key, _Rows(leaf, 0, number))
            if entry["paired"]:
                stored.set(("next", *key), _Rows(leaf, 1, number))
        self._storage, self.initialized = stored, True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace everything by the rows of a state of this storage or of a `LazyTensorStorage`."""
        rows = state_dict["_storage"]
        if not state_dict["initialized"] or not isinstance(rows, torch.Tensor | dict):
            return super().load_state_dict(state_dict)
        self._load(
            TensorDict().load_state_dict(rows, strict=False) if isinstance(rows, dict) else rows, state_dict["_len"]
        )

    def __getstate__(self) -> dict[str, Any]:
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is not None:
            raise RuntimeError(
                "CompressedStorage: the storage was passed to another process; expected one process. Keep the buffer in "
                "the process that samples, or use LazyMemmapStorage."
            )
        return super().__getstate__()
