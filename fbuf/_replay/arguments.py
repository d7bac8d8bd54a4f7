"""Arguments of `Replay`: checks, conversion of rows and indices to arrays, and of batches to JAX, numpy or torch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.checks import check_is_index, jit_takes, narrow_index
from fbuf._core.arguments import check_choice, check_kind, did_you_mean, is_int
from fbuf._core.pytree import PyTree, named_leaves, needs_x64
from fbuf._core.sample import Index, Sample
from fbuf._host_draws.reads import HostBatch, drawn_rows
from fbuf._replay.packed import PackedBatch
from fbuf.limits import Limit

Init = TypeVar("Init", bound=Callable[..., None])
Form = Literal["jax", "numpy", "torch"]
FORMS: tuple[Form, ...] = get_args(Form)
_SHARED = frozenset(map(np.dtype, ("bool", "uint8", "int8", "int16", "uint32", "int32", "float32")))


_ALIGNMENT = 64  # bytes; XLA on CPUs shares memory that begins at multiples of it
_SMALL = 4096  # bytes that XLA shares, or copies before the call returns

_ELSEWHERE = {
    "to": 'Write replay.sample(256, to="torch")',
    "device": "Put the state there: jax.config.update('jax_default_device', device). For SB3 use fbuf.integrations.sb3",
    "batch_size": "Write Buffer(..., batch_size=256), or replay.sample(256)",
    "capacity": "Write Replay(fbuf.Buffer(capacity), example)",
    "lanes": "Write Buffer(..., lanes=4)",
}
"""Where options belong that `Replay` does not have."""


def named_options(init: Init) -> Init:
    """Return an `__init__` that says where an option belongs that it does not have."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(*args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                fix = f" {_ELSEWHERE[name]}." if name in _ELSEWHERE else did_you_mean(name, known)
                raise TypeError(f"Replay: there is no option '{name}'.{fix}")
        init(*args, **options)

    return cast(Init, checked)


def check_form(call: str, to: Any, device: Any = None) -> None:
    """Raise unless `to` is one of `FORMS` and `device` can hold such arrays."""
    check_choice(call, "to", to, FORMS)
    if device is not None and to == "numpy":
        raise ValueError(
            f'{call}: device is {device!r}, but numpy\'s arrays are in memory. Leave it out, or use to="jax".'
        )
    if device is not None and to == "jax" and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        raise TypeError(
            f"{call}: device is {device!r}; expected a jax.Device or jax.sharding.Sharding. Use device=jax.devices()[0]."
        )


def check_seed(call: str, seed: Any) -> None:
    """Raise unless `seed` is an int, or an integer scalar."""
    if not is_int(seed) and (np.shape(seed) != () or not jnp.issubdtype(getattr(seed, "dtype", np.void), jnp.integer)):
        raise TypeError(f"{call}: seed is {seed!r}; expected an int. Write {call}(buffer, example, seed=0).")


def check_limit(call: str, limit: Any, buffer: Buffer, unlimited: bool) -> None:
    """Raise unless `limit` is a `Limit` under which the buffer can be sampled."""
    if limit is None:
        return
    if not isinstance(limit, Limit):
        raise TypeError(
            f"{call}: limit is {type(limit).__name__}; expected a Limit. Write limit=fbuf.limits.samples_per_insert(8, "
            f"min_size=1000, rows=16, draws=256)."
        )
    if buffer.writer.read_only:
        raise ValueError(f"{call}: a limit paces adding and sampling, but {buffer!r} is read-only. Leave it out.")
    if limit.min_size > buffer.capacity and not unlimited:
        raise ValueError(
            f"{call}: the limit's min_size is {limit.min_size}, but capacity is {buffer.capacity}. Use a min_size up to "
            f"{buffer.capacity}."
        )


def check_seconds(call: str, timeout: Any) -> None:
    """Raise unless `timeout` is None or seconds >= 0."""
    number = isinstance(timeout, (int, float, np.number)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout >= 0):
        raise ValueError(f"{call}: timeout is {timeout!r}; expected seconds >= 0, or None to wait without a limit.")


@functools.lru_cache(maxsize=1024)
def _of_torch(kind: Any) -> bool:
    return kind.__module__.split(".")[0] == "torch"


def _is_torch(value: Any) -> bool:
    kind: Any = type(value)
    return _of_torch(kind)


def to_array(value: Any, name: str) -> Any:
    """Return an array-like as JAX accepts it, or as NumPy's where JAX would narrow it. An error names it `name`."""
    if value is None or type(value) is np.ndarray:
        return value
    if _is_torch(value):
        if _is_64_bit_tensor(value):
            return value.cpu().numpy()
        try:
            array = value.numpy()
        except (TypeError, RuntimeError):  # on a GPU, of bfloat16, or it requires grad
            array = None
        if array is not None and array.dtype in _SHARED:
            return array
        from fbuf.torch import from_torch

        return from_torch({name: value})[name]
    known = isinstance(value, (jax.Array, np.ndarray, bool, int, float, np.generic, slice))
    return value if known else np.asarray(value)


def to_numbers(call: str, name: str, value: Any, kinds: str) -> Any:
    """Return an argument as JAX accepts it, with a dtype kind in `kinds`; see `check_kind`. None stays."""
    array = to_array(value, name)
    return array if jit_takes(array) else check_kind(call, name, array, kinds)


def unshared(tree: PyTree) -> PyTree:
    """Return a tree with copies of NumPy arrays, which a program may read after the call that took them returned.

    XLA shares aligned memory, and copies that of large other arrays in another thread.
    """

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or hasattr(leaf, "filled"):  # masked arrays are refused later
            return leaf
        if leaf.nbytes <= _SMALL or leaf.dtype.hasobject:
            return leaf.copy()
        memory = np.empty(leaf.nbytes + _ALIGNMENT, np.uint8)
        copy = memory[-memory.ctypes.data % _ALIGNMENT :][: leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        copy[...] = leaf
        return copy

    try:
        return jax.tree.map(copied, tree)
    except ValueError:  # keys without an order, which the checks of rows refuse
        return tree


def to_rows(tree: PyTree) -> PyTree:
    """Return rows with torch leaves as JAX arrays, or as NumPy arrays where JAX would narrow them."""
    if hasattr(tree, "to_tensordict"):  # of tensordict, or a tensorclass of the user's
        kind = type(tree).__name__
        fix = "from_tensordict(rows)" if kind == "TensorDict" else "from_torch(rows.to_dict())"
        raise TypeError(f"Replay: rows are a {kind}; expected dicts of arrays. Use fbuf.torch.{fix}.")
    try:
        leaves = jax.tree.leaves(tree)
    except ValueError:  # it has no order, which `named_leaves` explains
        leaves = list(named_leaves(tree).values())
    if not any(map(_is_torch, leaves)):
        return tree
    from fbuf.torch import from_torch

    if all(_is_torch(leaf) and not _is_64_bit_tensor(leaf) for leaf in leaves):
        return from_torch(tree)

    def convert(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf.cpu().numpy() if _is_64_bit_tensor(leaf) else to_array(leaf, name)

    return jax.tree_util.tree_map_with_path(convert, tree)


def _is_64_bit_tensor(leaf: Any) -> bool:
    """Return whether it is a tensor that JAX would narrow, and NumPy can share."""
    name = str(leaf.dtype)[6:] if _is_torch(leaf) else ""
    return name in ("int64", "uint64", "float64") and needs_x64(np.dtype(name)) and not leaf.requires_grad


def to_index(call: str, index: Any) -> Index:
    """Return an `Index` of arrays for JAX; raise for anything else before the state is donated."""
    check_is_index(call, index)
    drawn = drawn_rows(index)
    if drawn is not None:
        return drawn.index(np.asarray)
    arrays = Index(to_array(index.slot, "index.slot"), to_array(index.generation, "index.generation"))
    return cast(Index, narrow_index(call, arrays))


def convert(batch: Sample | PackedBatch | HostBatch, to: str) -> Sample:
    """Return a batch of JAX, numpy or torch arrays."""
    if isinstance(batch, (PackedBatch, HostBatch)):
        return batch.to_numpy() if to == "numpy" else batch.to_torch()
    if to == "numpy":
        copied: Sample = jax.device_get(batch)
        return copied
    if to == "torch":
        from fbuf.torch._to_torch import sample_to_torch

        return sample_to_torch(batch)
    return batch


def place(batch: Sample, to: str, device: Any) -> Any:
    """Move a batch to a device, and wait for it."""
    ragged, batch = batch.ragged, dataclasses.replace(batch, ragged=None)  # names of rows, not arrays
    if to != "jax":
        batch = batch if device is None else jax.tree.map(lambda tensor: tensor.to(device), batch)
    elif device is not None:
        arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array)]
        moved = iter(jax.device_put(arrays, device))  # without NumPy's, whose 64 bits JAX would narrow
        batch = jax.tree.map(lambda leaf: next(moved) if isinstance(leaf, jax.Array) else leaf, batch)
    return dataclasses.replace(jax.block_until_ready(batch) if to == "jax" else batch, ragged=ragged)


def to_device_of(value: Any, home: jax.Array) -> Any:
    """Move a JAX array to the device of `home`; return anything else unchanged."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    source, target = value.sharding.device_set, home.sharding.device_set
    return value if len(target) != 1 or source == target else jax.device_put(value, home.sharding)
