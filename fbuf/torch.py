"""JAX to torch and back by DLPack: a sample crosses without a copy, a state is copied by default.

A batch that `sample` returned is fresh and held by nobody else, so torch may take its memory over.
A state is not: torch can write through a shared leaf, and while that tensor lives XLA refuses to
donate the leaf, without a word, so that every step copies it. Whatever makes the two libraries
abort, narrow, copy or misread in silence is checked here first, for all leaves before any crosses;
the message names the leaf and the fix.

Tried and rejected (jax 0.10, torch 2.13): `jnp.from_dlpack(t, copy=True)`, which does not copy;
`torch.from_dlpack` of numpy arrays, which aborts the process on negative strides and writes into
read-only ones; `jax.device_put(x, may_alias=False)` as the copy, which transfer guards refuse.

Source: the DLPack protocol of the Python array API standard. torch is imported by the first call,
not with this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._tree import PyTree

# What DLPack carries between the two. The 64-bit ones need jax_enable_x64 on the way in.
_NARROW = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}
_SHARED = frozenset(
    "bool uint8 int8 uint16 int16 uint32 int32 float16 bfloat16 float32 complex64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
).union(_NARROW)
_ALIGNMENT = 64  # bytes; what is aligned to less, XLA copies on import (CPU)


def to_torch(tree: PyTree, *, copy: bool | None = None) -> PyTree:
    """Turns the arrays of a pytree into tensors; the structure stays: a `Sample` stays a `Sample`.

    Args:
      tree: Pytree of concrete `jax.Array` and `numpy.ndarray` leaves, any shape (0-d and empty
        too). A typed PRNG key crosses as `jax.random.key_data(key)`.
      copy: None shares memory, except for leaves inside a `BufferState`, which are copied. (A leaf
        taken out of a state by hand, `state.ring.cursor`, looks like any other: pass True.)
        True copies every leaf and takes any strides. False shares every leaf; then, for as long as
        a tensor lives, nobody may write to it, and donating its leaf silently copies instead.
    Returns:
      `tree` with tensors of the same shapes, dtypes and devices. Shared memory lives as long as
      either side holds it. Writing to a tensor that shares memory changes the JAX array, which
      compiled code takes for constant: drop the JAX reference before you write to a sample.
    Raises:
      ImportError: torch is missing.
      TypeError, ValueError: a leaf cannot cross, or not without the copy that was not asked for.
      RuntimeError: torch or JAX refused a leaf that had passed every check.
    Cost: some 25 us a leaf, plus the memory copy if copied. Waits for pending arrays.
    Source: https://dmlc.github.io/dlpack/latest/python_spec.html
    Example:
      >>> import jax.numpy as jnp
      >>> to_torch({"obs": jnp.arange(3, dtype=jnp.int32)})
      {'obs': tensor([0, 1, 2], dtype=torch.int32)}
    """
    call = "to_torch"
    torch = _import_torch(call)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    copies = _in_state(tree) if copy is None else [copy] * len(leaves)
    jobs: list[tuple[str, Callable[..., Any], Any, bool]] = []
    for (path, leaf), copied in zip(leaves, copies, strict=True):
        where = _where(call, path, "the array")
        if isinstance(leaf, jax.Array):
            _check_jax(where, leaf, torch)
            jobs.append((where, _from_jax, leaf, copied))
        elif isinstance(leaf, np.ndarray):
            _check_numpy(where, leaf, torch, copied)
            jobs.append((where, _from_numpy, leaf, copied))
        else:
            _refuse(where, leaf, "a jax.Array or numpy.ndarray", "jnp.asarray(x)")
    out = [_cross(where, convert, torch, leaf, copied) for where, convert, leaf, copied in jobs]
    for device in {t.device for t, copied in zip(out, copies, strict=True) if copied and t.is_cuda}:
        # Once the clone's source is dropped JAX may reuse its memory (donation), on another stream.
        torch.cuda.current_stream(device).synchronize()
    return jax.tree.unflatten(structure, out)


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
    torch = _import_torch(call)
    if device is not None and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        raise TypeError(
            f"{call}: device is {device!r}; expected a jax.Device or jax.sharding.Sharding. "
            f"Use device=jax.devices('cpu')[0]."
        )
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [_where(call, path, "the tensor") for path, _ in leaves]
    for where, (_, leaf) in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            _refuse(where, leaf, "a torch.Tensor", "torch.as_tensor(x)")
        _check_tensor(where, leaf, torch, copy)
    out = []
    for where, (_, leaf) in zip(names, leaves, strict=True):
        array = _cross(where, _copied if copy else _shared, leaf, device)
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


def _import_torch(call: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f'{call}: torch is missing ({error}); expected torch 2.6 or later. Run pip install "fbuf[torch]".'
        ) from error
    return torch


def _where(call: str, path: Any, bare: str) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{call}: leaf '{name}'" if name else f"{call}: {bare}"


def _in_state(tree: PyTree) -> list[bool]:
    """For each leaf, whether it belongs to a `BufferState`."""
    from fbuf._state import BufferState

    def is_state(node: Any) -> bool:
        return isinstance(node, BufferState)

    marks: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=is_state):
        marks += [True] * len(jax.tree.leaves(node)) if is_state(node) else [False]
    return marks


def _refuse(where: str, leaf: Any, want: str, wrap: str) -> None:
    if isinstance(leaf, (bool, int, float, complex, np.generic)):
        fix = f"Wrap it: {wrap}."
    elif hasattr(leaf, "to_dict"):  # a TensorDict
        fix = "Unpack it: x.to_dict()."
    else:
        fix = "Leave it out of the tree."
    raise TypeError(f"{where} is a {type(leaf).__name__}; expected {want}. {fix}")


def _cross(where: str, convert: Callable[..., Any], *args: Any) -> Any:
    """Runs one conversion; what no check foresaw still says which leaf it was."""
    try:
        return convert(*args)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise RuntimeError(f"{where} was refused on its way through DLPack: {error}") from error


def _check_dtype(where: str, dtype: np.dtype[Any], torch: Any) -> None:
    """Checks a dtype on its way to torch, of which an old release may lack some."""
    name = dtype.name
    if name in _SHARED and hasattr(torch, name):
        return
    fix = "Leave it out of the tree."
    if dtype.isbuiltin == 2 or dtype.kind in "fc":  # 2: made by an extension, as JAX's int4 is
        by_kind = {"i": "int8", "u": "uint8", "c": "complex64"}
        fix = f"Cast with x.astype(jnp.{by_kind.get(name[0], 'float32')})."
    raise TypeError(f"{where} is {name}; expected a dtype that torch and DLPack know. {fix}")


def _check_jax(where: str, x: jax.Array, torch: Any) -> None:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{where} is a tracer; expected a concrete array. "
            f"Call it outside jax.jit, on what the jitted function returns."
        )
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{where} is a typed PRNG key; expected a plain array. Use jax.random.key_data(key).")
    _check_dtype(where, np.dtype(x.dtype), torch)
    if x.is_deleted():
        raise ValueError(
            f"{where} is deleted (donated to a jitted call?); expected a live array. "
            f"Use what that call returned: state = step(state)."
        )
    devices: set[Any] = x.sharding.device_set
    if len(devices) > 1:
        raise ValueError(
            f"{where} is spread over {len(devices)} devices; expected one. "
            f"Gather it with jax.device_put(x, jax.devices()[0])."
        )
    platform = next(iter(devices)).platform
    if not _torch_reaches(torch, platform):
        raise ValueError(
            f"{where} is on '{platform}'; expected a device that this torch can use. "
            f"Move it with jax.device_put(x, jax.devices('cpu')[0])."
        )


def _torch_reaches(torch: Any, platform: str) -> bool:
    return platform == "cpu" or (platform in ("gpu", "cuda", "rocm") and torch.cuda.is_available())


def _from_jax(torch: Any, x: jax.Array, copy: bool) -> Any:
    shared = torch.from_dlpack(x)
    return shared.clone() if copy else shared


def _check_numpy(where: str, x: np.ndarray[Any, Any], torch: Any, copy: bool) -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{where} is a masked array; expected one without a mask. Use x.filled(0).")
    _check_dtype(where, x.dtype, torch)
    if not x.dtype.isnative:
        raise TypeError(
            f"{where} has dtype '{x.dtype.str}'; expected this machine's byte order. "
            f"Cast with x.astype(x.dtype.newbyteorder('='))."
        )
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


def _from_numpy(torch: Any, x: np.ndarray[Any, Any], copy: bool) -> Any:
    if copy:
        x = np.array(x, order="C", copy=True)
    if x.dtype.isbuiltin == 2:  # bfloat16 and float8, which torch knows but not from numpy
        return torch.from_numpy(x.view(f"uint{8 * x.itemsize}")).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x)


def _check_tensor(where: str, x: Any, torch: Any, copy: bool) -> None:
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        fix = "torch.nested.to_padded_tensor(x, 0)" if x.is_nested else "x.to_dense()"
        raise TypeError(f"{where} is a {kind} tensor; expected a dense one. Use {fix}.")
    if not _jax_reaches(x.device.type):
        fix = "Make it on a real device." if x.is_meta else "Move it with x.cpu()."
        raise ValueError(f"{where} is on '{x.device}'; expected a device that this JAX can use. {fix}")
    name = str(x.dtype).removeprefix("torch.")
    if name not in _SHARED:
        cast = "complex64" if x.dtype.is_complex else "float32"
        raise TypeError(f"{where} is {name}; expected a dtype that JAX and DLPack know. Cast with x.to(torch.{cast}).")
    if name in _NARROW and jax.dtypes.canonicalize_dtype(name) != name:
        raise TypeError(
            f"{where} is {name}; expected {_NARROW[name]}, since JAX narrows it silently while "
            f"jax_enable_x64 is off. Cast with x.to(torch.{_NARROW[name]})."
        )
    if x.requires_grad:
        raise ValueError(f"{where} requires grad; expected a tensor outside autograd. Use x.detach().")
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
