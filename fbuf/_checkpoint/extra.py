"""`extra=` of save and load: any pytree of arrays, PRNG keys, numbers and text.

Arrays become arrays of the checkpoint; numbers, text and None are in its manifest; a typed PRNG key is its data and the name
of its generator. Types are restored.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._checkpoint.device_arrays import DeviceLeaf
from fbuf._core import row_schema
from fbuf._core.pytree import named_leaves
from fbuf._formats import checkpoint

_PREFIX = "extra/"


def pack(call: str, extra: Any) -> tuple[dict[str, Any], Any]:
    """Return arrays by name, and their description for the manifest.

    Raises:
      TypeError: a leaf is of another type.
      ValueError: two leaves have the same name.
    """
    arrays: dict[str, Any] = {}
    leaves = []
    for i, (name, leaf) in enumerate(named_leaves(extra).items()):
        about: dict[str, Any] = {"name": name}
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{call}: extra '{name}' is traced; expected an array. Call it outside jit, vmap and scan.")
        if isinstance(leaf, (bool, int, float, str)) and type(leaf) in (bool, int, float, str):
            about |= {"kind": type(leaf).__name__, "value": leaf.hex() if isinstance(leaf, float) else leaf}
        elif isinstance(leaf, jax.Array):
            key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            about |= {"kind": "key", "impl": str(jax.random.key_impl(leaf))} if key else {"kind": "jax"}
            data = _here(call, name, jax.random.key_data(leaf) if key else leaf)
            about["shape"] = list(data.shape)
            arrays[f"{_PREFIX}{i}"] = DeviceLeaf(data, whole=True)
        elif (
            isinstance(leaf, (np.ndarray, np.generic))
            and leaf.dtype.kind not in "OSUmM"
            and not isinstance(leaf, np.ma.MaskedArray)
        ):
            about |= {"kind": "numpy" if isinstance(leaf, np.ndarray) else "scalar", "shape": list(leaf.shape)}
            arrays[f"{_PREFIX}{i}"] = np.atleast_1d(np.array(leaf))
        else:
            raise TypeError(f"{call}: extra '{name}' is {_kind(leaf)}; expected arrays, PRNG keys, numbers or text.")
        leaves.append(about)
    return arrays, {"structure": row_schema.encode(jax.tree.structure(extra)), "leaves": leaves}


def _here(call: str, name: str, array: jax.Array) -> jax.Array:
    """Return an array of this process."""
    if array.is_fully_addressable:
        return array
    if not array.is_fully_replicated:
        raise TypeError(
            f"{call}: extra '{name}' is split over processes; expected the same array in each. Gather it: "
            f"jax.experimental.multihost_utils.process_allgather(x, tiled=True)."
        )
    return array.addressable_data(0)


def _kind(leaf: Any) -> str:
    return f"ndarray of {leaf.dtype}" if type(leaf) is np.ndarray else type(leaf).__name__


def unpack(call: str, path: str, saved: Any, meta: Any, example: Any) -> Any:
    """Return the pytree: in the structure of `example`, or (True) as it was saved.

    Raises:
      SchemaError: nothing was saved; `example` has another structure, or a leaf another shape or dtype; a JAX array has 64
        bits, and x64 is off.
    """
    if meta is None:
        raise checkpoint.SchemaError(f"{call}: {path} was saved without extra. Leave extra out.")
    values = [_leaf(call, path, saved, i, about) for i, about in enumerate(meta["leaves"])]
    if example is True:
        custom = row_schema.custom_node(meta["structure"])
        if custom is not None:
            raise checkpoint.SchemaError(f"{call}: the extra of {path} contains a {custom}. Pass extra=<example>.")
        return row_schema.decode(meta["structure"]).unflatten(values)
    wanted = named_leaves(example)
    found = {about["name"]: _text(value) for about, value in zip(meta["leaves"], values, strict=True)}
    expected = {name: _text(leaf) for name, leaf in wanted.items()}
    difference = row_schema.difference(found, expected)
    structure: Any = jax.tree.structure(example)
    if difference or row_schema.encode(structure) != meta["structure"]:
        raise checkpoint.SchemaError(
            f"{call}: the extra of {path} is not like the example:\n{difference or '  other nodes'}\n"
            f"Pass an example of the same structure, or extra=True."
        )
    return structure.unflatten(values)


def _text(leaf: Any) -> str:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"key {jax.random.key_impl(leaf)}{list(leaf.shape)}"
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def _leaf(call: str, path: str, saved: Any, i: int, about: Any) -> Any:
    kind = about["kind"]
    if kind in ("bool", "int", "str"):
        return about["value"]
    if kind == "float":
        return float.fromhex(about["value"])
    array = np.asarray(saved.arrays[f"{_PREFIX}{i}"]).reshape(about["shape"])
    if kind == "key":
        return jax.random.wrap_key_data(jnp.array(array), impl=about["impl"])
    if kind == "jax" and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise checkpoint.SchemaError(f"{call}: extra '{about['name']}' of {path} is {array.dtype}, but x64 is off.")
    return jnp.array(array) if kind == "jax" else array[()] if kind == "scalar" else np.array(array)
