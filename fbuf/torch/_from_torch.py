"""`from_torch`: tensors as JAX arrays, copied by default.

Rejected (jax 0.10, torch 2.13): `jnp.from_dlpack(t, copy=True)`, which does not copy; `jax.device_put(x, may_alias=False)` as
the copy on one device, which transfer guards refuse.

Source: the DLPack protocol of the Python array API standard.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.pytree import PyTree
from fbuf.torch._dtypes import NARROW, SHARED, cross, import_torch, name_leaf, refuse

_ALIGNMENT = 64  # bytes; what is aligned to less, XLA copies on import (CPU)


def from_torch(tree: PyTree, *, copy: bool = True, device: jax.Device | jax.sharding.Sharding | None = None) -> PyTree:
    """Turns the tensors of a pytree into JAX arrays; the structure stays.

    Args:
      tree: Pytree of dense `torch.Tensor` leaves outside autograd, any shape (0-d and empty too).
        64-bit tensors are refused, not narrowed, unless `jax_enable_x64` is on.
      copy: True makes arrays that XLA owns: later writes by torch do not show, donation works in
        place, any strides and alignment will do. False shares memory, which must be compact (a
        transpose is) and on CPU 64-byte aligned; from then on nobody may write to the tensor,
        since compiled code takes an array for constant, and donating the array copies it.
      device: Where the arrays go; by default they stay where the tensors are (CPU tensors on JAX's
        first CPU device, so name the accelerator if that is where they are used). With
        `copy=False` no other device will do.
    Returns:
      `tree` with committed arrays of the same shapes and dtypes; if copied, complete, not pending.
    Raises:
      ImportError: torch is missing.
      TypeError, ValueError: a leaf cannot cross, or not without a copy under `copy=False`; or the
        call is inside `jax.jit`, where the values would become constants.
      RuntimeError: torch or JAX refused a leaf that had passed every check.
    Cost: some 100 us a leaf shared, 150 us copied, plus the memory copy (two if strided or
      misaligned). A copy waits for the work queued on its device.
    Source: https://dmlc.github.io/dlpack/latest/python_spec.html
    Example:
      >>> import torch
      >>> from_torch({"td_error": torch.ones(2)})
      {'td_error': Array([1., 1.], dtype=float32)}
    """
    call = "from_torch"
    torch = import_torch(call)
    if device is not None and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        raise TypeError(
            f"{call}: device is {device!r}; expected a jax.Device or jax.sharding.Sharding. "
            f"Use device=jax.devices('cpu')[0]."
        )
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [name_leaf(call, path, "the tensor") for path, _ in leaves]
    for where, (_, leaf) in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            refuse(where, leaf, "a torch.Tensor", "torch.as_tensor(x)")
        _check_tensor(where, leaf, torch, copy)
    out = []
    for where, (_, leaf) in zip(names, leaves, strict=True):
        array = cross(where, _copied if copy else _shared, leaf, device)
        if not copy:
            _check_device(where, array, device)
        out.append(array)
    if out and isinstance(out[0] if copy else _probe(torch), jax.core.Tracer):
        raise TypeError(
            f"{call}: called inside jax.jit; expected an eager call, for the values would become "
            f"constants of the program. Hand them in: step(from_torch(tree))."
        )
    if copy:
        # Copies queue behind other work, on CPU too: unwaited, one reads what is written next.
        for array in out:
            array.block_until_ready()
    return jax.tree.unflatten(structure, out)


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
        raise TypeError(
            f"{where} is {name}; expected {NARROW[name]}, since JAX narrows it silently while "
            f"jax_enable_x64 is off. Cast with x.to(torch.{NARROW[name]})."
        )
    if x.requires_grad:
        raise ValueError(f"{where} requires grad; expected a tensor outside autograd. Use x.detach().")
    if not _holds(x):
        raise ValueError(
            f"{where} has no memory behind its shape {list(x.shape)} (resized, or a stand-in of torch.compile or torch.func); "
            f"expected one that has. Copy it before it is freed, x.clone(), or call {where.split(':')[0]} outside of these."
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
        raise ValueError(
            f"{where} starts {x.data_ptr() % _ALIGNMENT} bytes past a multiple of {_ALIGNMENT}; "
            f"expected aligned memory to share. Use x.clone(), {copying}."
        )


def _holds(x: Any) -> bool:
    """Whether there is memory as far as the tensor says: one resized meanwhile, fake or functional ends the process."""
    if x.numel() == 0 or x.is_meta:
        return True
    try:
        storage = x.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a tensor without storage of its own: what comes next refuses it
        return True
    try:
        there = storage.device == x.device and storage.data_ptr() != 0
    except RuntimeError:  # a functional tensor's
        there = False
    if not there:
        return False
    held = storage.nbytes()
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    within: bool = (last + 1) * x.element_size() <= held
    return within


def _jax_reaches(kind: str) -> bool:
    if kind != "cuda":
        return kind == "cpu"
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:  # there is no such backend
        return False


def _is_compact(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements fill their memory without gap or overlap, whatever the order of the axes."""
    dense = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != dense:
            return False
        dense *= size
    return True


def _shared(x: Any, device: Any) -> jax.Array:
    return jnp.from_dlpack(x, copy=False)


def _copied(x: Any, device: Any) -> jax.Array:
    array: jax.Array = jnp.from_dlpack(x.contiguous())
    if device is None or array.sharding.device_set == {device}:
        # A copy computes nothing: NaN in the data is not what these switches look for.
        with jax.debug_nans(False), jax.debug_infs(False):
            return jnp.array(array, copy=True)
    moved: jax.Array = jax.device_put(array, device, may_alias=False)
    return moved


def _check_device(where: str, array: jax.Array, device: Any) -> None:
    """Checks that sharing memory has met the user's wish for a device."""
    wanted = {device} if isinstance(device, jax.Device) else device and device.device_set
    if wanted and wanted != array.sharding.device_set:
        raise ValueError(
            f"{where} is on {array.device}; expected {device} to share memory there. "
            f"Use from_torch(tree, copy=True, device=device)."
        )


def _probe(torch: Any) -> jax.Array:
    """An empty array; inside jit a tracer. A constant would do, but transfer guards refuse it."""
    return jnp.array(jnp.from_dlpack(torch.empty(0)), copy=True)
