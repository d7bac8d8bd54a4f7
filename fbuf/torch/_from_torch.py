"""`from_torch`: tensors as JAX arrays, copied by default, through the DLPack protocol of the Python array API standard."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import PyTree
from fbuf.torch._dtypes import NARROW, SHARED, convert, import_torch, name_leaf, refuse

_ALIGNMENT = 64  # bytes; XLA copies less aligned memory on import (CPU)


def from_torch(tree: PyTree, *, copy: bool = True, device: jax.Device | jax.sharding.Sharding | None = None) -> PyTree:
    """Convert the tensors of a pytree to JAX arrays; the structure stays.

    Args:
      tree: Pytree of dense `torch.Tensor` leaves outside autograd, any shape (0-d and empty too). 64-bit tensors are refused,
        not narrowed, unless `jax_enable_x64` is on.
      copy: True makes arrays that XLA owns: later writes by torch do not show, and donation works in place. Any strides and
        alignment are accepted. False shares memory, which must be compact (a transpose is) and on CPU 64-byte aligned. The
        tensor must not be written to afterwards, since compiled code takes an array for constant; donating the array copies.
      device: The device of the arrays; None: that of the tensors (CPU tensors go to JAX's first CPU device, so name the
        accelerator if they are used there). `copy=False` accepts no other device.
    Returns:
      `tree` with committed arrays of the same shapes and dtypes; copies are complete, not pending.
    Raises:
      ImportError: torch is missing.
      TypeError, ValueError: a leaf cannot be converted, or not without a copy under `copy=False`; or the call is inside
        `jax.jit`, where the values would become constants.
      RuntimeError: torch or JAX refused a leaf that passed every check.
    Cost: about 100 us per leaf shared, 150 us copied, plus the memory copy (two if strided or misaligned). A copy waits for
      the work queued on its device.

    Example:
      >>> import torch
      >>> from_torch({"td_error": torch.ones(2)})
      {'td_error': Array([1., 1.], dtype=float32)}
    """
    call = "from_torch"
    torch = import_torch(call)
    if device is not None and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        raise TypeError(f"{call}: device is {device!r}; expected a Device or Sharding, as jax.devices('cpu')[0].")
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [(name_leaf(call, path, "the tensor"), leaf) for path, leaf in paths]
    for where, leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            refuse(where, leaf, "a torch.Tensor", "torch.as_tensor(x)")
        _check_tensor(where, leaf, torch, copy)
    out = [convert(where, _copy if copy else _share, leaf, device) for where, leaf in leaves]
    wanted = {device} if isinstance(device, jax.Device) else device and device.device_set
    for (where, _), array in zip(leaves, out, strict=True) if wanted and not copy else ():
        if wanted != array.sharding.device_set:
            raise ValueError(f"{where} is on {array.device}; expected {device} to share memory. Use copy=True.")
    # Without a copy, an empty array tells whether this is inside jit; transfer guards would refuse a constant.
    probe = out[0] if out and copy else jnp.array(jnp.from_dlpack(torch.empty(0)), copy=True) if out else None
    if isinstance(probe, jax.core.Tracer):
        raise TypeError(f"{call}: called inside jax.jit. Pass tensors as arguments: step(from_torch(tree)).")
    # Copies queue behind other work, on CPU too: without waiting, one reads later writes.
    return jax.tree.unflatten(structure, jax.block_until_ready(out) if copy else out)


def _check_tensor(where: str, x: Any, torch: Any, copy: bool) -> None:
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        fix = "torch.nested.to_padded_tensor(x, 0)" if x.is_nested else "x.to_dense()"
        raise TypeError(f"{where} is a {kind} tensor; expected a dense one. Use {fix}.")
    if not _jax_reaches(x.device.type):
        fix = "Make it on a real device." if x.is_meta else "Move it with x.cpu()."
        raise ValueError(f"{where} is on '{x.device}'; expected a device that this JAX can use. {fix}")
    name = str(x.dtype).removeprefix("torch.")
    if name not in SHARED:
        cast = "complex64" if x.dtype.is_complex else "float32"
        raise TypeError(f"{where} is {name}; expected a dtype that JAX and DLPack know. Cast with x.to(torch.{cast}).")
    if name in NARROW and jax.dtypes.canonicalize_dtype(name) != name:
        raise TypeError(f"{where} is {name}, and jax_enable_x64 is off. Cast with x.to(torch.{NARROW[name]}).")
    if x.requires_grad:
        raise ValueError(f"{where} requires grad; expected a tensor outside autograd. Use x.detach().")
    if not _has_memory(x):
        raise ValueError(
            f"{where} has no memory for its shape {list(x.shape)} (resized, or a stand-in of torch.compile or torch.func); "
            f"expected a tensor that has. Use x.clone() before it is freed, or call {where.split(':')[0]} outside of these."
        )
    # JAX refuses the conjugate bit but drops the negative one: the values would change their sign.
    for lazy, is_set in (("conj", x.is_conj()), ("neg", x.is_neg())):
        if is_set:
            raise ValueError(f"{where} has its {lazy} bit set; expected plain values. Use x.resolve_{lazy}().")
    if copy or x.numel() == 0:
        return
    copying = "or from_torch(tree, copy=True)"
    if not _is_compact(x.shape, x.stride()):
        raise ValueError(
            f"{where} has shape {list(x.shape)} and strides {list(x.stride())}; expected compact "
            f"memory to share. Use x.contiguous(), {copying}."
        )
    if x.device.type == "cpu" and x.data_ptr() % _ALIGNMENT:
        raise ValueError(f"{where} is not aligned to {_ALIGNMENT} bytes. Use x.clone(), {copying}.")


def _has_memory(x: Any) -> bool:
    """Return whether the storage covers the tensor: a resized, fake or functional one ends the process."""
    if x.numel() == 0 or x.is_meta:
        return True
    try:
        storage = x.untyped_storage()
    except (RuntimeError, NotImplementedError):  # no storage of its own: later checks refuse it
        return True
    try:
        allocated = storage.device == x.device and storage.data_ptr() != 0
    except RuntimeError:  # a functional tensor's
        allocated = False
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return allocated and bool((last + 1) * x.element_size() <= storage.nbytes())


def _jax_reaches(kind: str) -> bool:
    if kind != "cuda":
        return kind == "cpu"
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:  # no such backend
        return False


def _is_compact(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the elements fill their memory without gap or overlap, in any order of the axes."""
    dense = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != dense:
            return False
        dense *= size
    return True


def _share(x: Any, device: Any) -> jax.Array:
    return jnp.from_dlpack(x, copy=False)


def _copy(x: Any, device: Any) -> jax.Array:
    array: jax.Array = jnp.from_dlpack(x.contiguous())
    if device is None or array.sharding.device_set == {device}:
        # NaN in copied data must not trip these switches.
        with jax.debug_nans(False), jax.debug_infs(False):
            return jnp.array(array, copy=True)
    return jax.device_put(array, device, may_alias=False)
