"""`to_torch`: JAX arrays as tensors. A sample is shared without a copy; a state is copied by default.

A batch that `sample` returned has no other user, so torch may own its memory. torch could write through a shared leaf of a
state, and XLA silently refuses to donate the leaf while the tensor lives, so every step would copy it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge.lazy_rows import length_name
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import PyTree, name_of, named_leaves
from fbuf._core.sample import Rows, Sample
from fbuf.torch._dtypes import SHARED, convert, import_torch, name_leaf, refuse


def to_torch(tree: PyTree, *, copy: bool | None = None) -> PyTree:
    """Convert the arrays of a pytree to tensors; the structure stays, so a `Sample` stays a `Sample`.

    Args:
      tree: Pytree of concrete `jax.Array` and `numpy.ndarray` leaves, any shape (0-d and empty too). Convert a typed PRNG
        key by
        `jax.random.key_data(key)`.
      copy: None shares memory, except for leaves of a `BufferState`, which are copied. Pass True for a leaf taken out of a
        state, such as `state.ring.cursor`. True copies every leaf and accepts any strides. False shares every leaf: nothing
        may write to the tensors, and donating a leaf copies it while its tensor lives.
    Returns:
      `tree` with tensors of the same shapes, dtypes and devices. Shared memory lives as long as either side holds it. Writing
      to a shared tensor changes the JAX array, which compiled code takes for constant: drop the JAX reference first.
    Raises:
      ImportError: torch is missing.
      TypeError, ValueError: a leaf cannot be converted, or not without a copy under `copy=False`.
      RuntimeError: torch or JAX refused a leaf that passed every check.
    Cost: about 25 us per leaf, plus the memory copy if copied. Waits for pending arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> to_torch({"obs": jnp.arange(3, dtype=jnp.int32)})
      {'obs': tensor([0, 1, 2], dtype=torch.int32)}
    """
    call = "to_torch"
    torch = import_torch(call)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    copies = _in_state(tree) if copy is None else [copy] * len(leaves)
    jobs: list[tuple[str, Any, bool]] = []
    for (path, leaf), copied in zip(leaves, copies, strict=True):
        where = name_leaf(call, path, "the array")
        if isinstance(leaf, jax.Array):
            _check_jax(where, leaf, torch)
        elif isinstance(leaf, np.ndarray):
            _check_numpy(where, leaf, torch, copied)
        else:
            refuse(where, leaf, "a jax.Array or numpy.ndarray", "jnp.asarray(x)")
        jobs.append((where, leaf, copied))
    out = [convert(where, _to_tensor, torch, leaf, copied) for where, leaf, copied in jobs]
    for device in {t.device for t, copied in zip(out, copies, strict=True) if copied and t.is_cuda}:
        # JAX may reuse the source's memory (donation) on another stream once the source is dropped.
        torch.cuda.current_stream(device).synchronize()
    return jax.tree.unflatten(structure, out)


def sample_to_torch(batch: Sample) -> Sample:
    """Return the batch with tensors for arrays; references to ragged rows on the host stay."""
    tensors: Sample = to_torch(dataclasses.replace(batch, ragged=None))
    return dataclasses.replace(tensors, ragged=batch.ragged)


def as_tensors(torch: Any, leaves: dict[str, Any]) -> dict[str, Any]:
    """Return leaves by name as tensors; numpy arrays are copied."""
    out = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    out |= to_torch({name: leaf for name, leaf in leaves.items() if isinstance(leaf, jax.Array)})
    rest = {name: leaf for name, leaf in leaves.items() if name not in out}
    out |= to_torch(rest, copy=True) if rest else {}
    return {name: out[name] for name in leaves}


def _in_state(tree: PyTree) -> list[bool]:
    """Return for each leaf whether it belongs to a `BufferState`."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, BufferState))
    return [isinstance(node, BufferState) for node in nodes for _ in jax.tree.leaves(node)]


def _check_dtype(where: str, dtype: np.dtype[Any], torch: Any) -> None:
    """Raise TypeError for a dtype that DLPack or this release of torch lacks."""
    name = dtype.name
    if name in SHARED and hasattr(torch, name):
        return
    fix = "Leave it out of the tree."
    if dtype.isbuiltin == 2 or dtype.kind in "fc":  # 2: of an extension, as JAX's int4
        by_kind = {"i": "int8", "u": "uint8", "c": "complex64"}
        fix = f"Cast with x.astype(jnp.{by_kind.get(name[0], 'float32')})."
    raise TypeError(f"{where} is {name}; expected a dtype that torch and DLPack know. {fix}")


def _check_jax(where: str, x: jax.Array, torch: Any) -> None:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{where} is a tracer; expected a concrete array. Convert what the jitted function returns.")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{where} is a typed PRNG key; expected a plain array. Use jax.random.key_data(key).")
    _check_dtype(where, np.dtype(x.dtype), torch)
    if x.is_deleted():
        raise ValueError(f"{where} is deleted (donated?); expected a live array. Use what the jitted call returned.")
    devices: set[Any] = x.sharding.device_set
    if len(devices) > 1:
        raise ValueError(f"{where} is on {len(devices)} devices; expected one. Gather it with jax.device_put.")
    platform = next(iter(devices)).platform
    if not _torch_reaches(torch, platform):
        raise ValueError(f"{where} is on '{platform}'; expected a device of this torch. Move it with jax.device_put.")


def _torch_reaches(torch: Any, platform: str) -> bool:
    return platform == "cpu" or (platform in ("gpu", "cuda", "rocm") and torch.cuda.is_available())


def _check_numpy(where: str, x: np.ndarray[Any, Any], torch: Any, copy: bool) -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{where} is a masked array; expected one without a mask. Use x.filled(0).")
    _check_dtype(where, x.dtype, torch)
    if not x.dtype.isnative:
        raise TypeError(f"{where} has dtype '{x.dtype.str}'; expected native byte order. Cast with x.astype.")
    if copy:
        return
    if any(stride < 0 or stride % x.itemsize for stride in x.strides):
        what = f"has strides {x.strides}; expected multiples of {x.itemsize} bytes, none negative,"
    elif not x.flags.aligned:
        what = f"is not aligned for {x.dtype.name}; expected aligned memory"
    elif not x.flags.writeable:
        what = "is read-only; expected writable memory"
    else:
        return
    raise ValueError(f"{where} {what} to share. Use np.array(x), or to_torch(tree, copy=True).")


def _to_tensor(torch: Any, x: Any, copy: bool) -> Any:
    if isinstance(x, jax.Array):
        return torch.from_dlpack(x).clone() if copy else torch.from_dlpack(x)
    # Not torch.from_dlpack, which aborts on negative strides and writes into read-only arrays.
    if copy:
        x = np.array(x, order="C", copy=True)
    if x.dtype.isbuiltin == 2:  # bfloat16 and float8, which torch does not take from numpy
        return torch.from_numpy(x.view(f"uint{8 * x.itemsize}")).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x)


def nested(batch: Sample | Rows, name: str | tuple[str, ...]) -> Any:
    """Return a ragged leaf of a batch as a nested tensor of B rows (layout `torch.jagged`).

    Args:
      batch: From `sample`, `peek`, `get` and the like, of rows in `storages.Ragged`; of JAX arrays, numpy or tensors.
      name: A leaf with a maximum, whose rows `[maximum_0, ...]` differ in their first axis only. A leaf without a maximum
        is read
        from the host, by `batch.lazy.nested(name)`.
    Returns:
      A tensor `[B, j, ...]` with B rows. Rows without the leaf and masked rows have length 0.
    Raises:
      KeyError: there is no such leaf.
      ValueError: rows differ in another axis, or the leaf has no axis that could differ.
      ImportError: torch is missing.
    Cost: one masked gather on the leaf's device.

    Example:
      >>> import fbuf, jax, numpy as np
      >>> buffer = fbuf.Buffer(10, storage=fbuf.storages.Ragged(maximum={"tokens": (5,)}))
      >>> state = buffer.init({"tokens": np.zeros(0, np.int32)})
      >>> state = buffer.extend(state, [{"tokens": np.arange(2, dtype=np.int32)}, {"tokens": np.arange(4, dtype=np.int32)}])
      >>> [row.tolist() for row in nested(buffer.rows(state), "tokens").unbind()[:2]]
      [[0, 1], [0, 1, 2, 3]]
    """
    call = "fbuf.torch.nested"
    torch = import_torch(call)
    name = name_of(name)
    leaves = named_leaves(batch.data)
    if length_name(name) not in leaves or name not in leaves:
        lazy: Any = batch.lazy if batch.ragged is not None else {}
        if name in lazy:
            return batch.lazy.nested(name)
        known = dict.fromkeys([*(n for n in leaves if length_name(n) in leaves), *lazy])
        raise KeyError(f"{call}: there is no ragged leaf '{name}' (there are: {', '.join(known) or 'none'}).")
    padded, lengths = as_tensors(torch, {n: leaves[n] for n in (name, length_name(name))}).values()
    if lengths.ndim != 2 or padded.ndim < 2:
        raise ValueError(
            f"{call}: leaf '{name}' has shape {list(padded.shape)}; expected a batch of rows [B, maximum, ...]."
        )
    kept = lengths[:, 0].clamp(min=0).to(torch.int64)
    present = kept > 0
    for axis in range(1, lengths.shape[1]):
        size = padded.shape[axis + 1]
        if bool((present & (lengths[:, axis] != size)).any()):
            raise ValueError(
                f"{call}: rows of leaf '{name}' differ in axis {axis}. Use batch.lazy.nested('{name}', torch.strided)."
            )
    steps = torch.arange(padded.shape[1], device=padded.device)
    values = padded[steps < kept[:, None]]
    offsets = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)
