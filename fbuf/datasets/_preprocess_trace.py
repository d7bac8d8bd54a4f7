"""Trace a user's function of one row: its result, its purity and its identity.

The function is traced twice: a difference means that it is not pure (the clock, a counter, numpy's random numbers). The
program's text with its constants identifies the work to resume; a name or source text would not.
"""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._checkpoint import row_schema
from fbuf._core.pytree import PyTree, named_leaves
from fbuf._formats import dataset
from fbuf._host.codecs.codec import Codec
from fbuf.interop._columns import DTYPES

CALL = "preprocess"
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CALLBACK = re.compile(r"callback\[")  # what Python does then no text says


class Program:
    """`fn`, with the leaves of a row to keep.

    Attributes:
      schema: Of its result.
      mark: A text that only equal programs share; unique for one that calls back into Python.
    """

    def __init__(
        self, fn: Callable[[PyTree], PyTree], row: PyTree, keep: Sequence[str], codec: Mapping[str, Codec] | None
    ) -> None:
        """Trace `fn` for a row of `jax.ShapeDtypeStruct`s. Raises ValueError or TypeError for an invalid function."""
        if not callable(fn):
            raise TypeError(f"{CALL}: fn is a {type(fn).__name__}; expected a function of one row.")
        self._fn = fn
        out, text = self._trace(row)
        if text != self._trace(row)[1]:
            raise ValueError(
                f"{CALL}: fn differs when traced again; expected a pure function of its row without the clock or numpy's "
                f"random numbers. Use jax.random with a key made from the row."
            )
        self._kept = [name for name in keep if name not in named_leaves(out)]
        checksum = f"{zlib.crc32(repr((text, self._kept)).encode()):08x}"
        self.mark = secrets.token_hex(16) if _CALLBACK.search(text) else checksum
        out = jax.eval_shape(self, row)
        leaves = named_leaves(out)
        for name, leaf in leaves.items():
            if DTYPES.get(np.dtype(leaf.dtype).name if _is_plain(leaf) else "") is None:
                raise TypeError(f"{CALL}: fn returns leaf '{name}' as {leaf.dtype}; expected numbers or booleans.")
        shapes = {name: (leaf.shape, np.dtype(leaf.dtype)) for name, leaf in leaves.items()}
        structure = None if _only_dicts(out) else row_schema.encode(jax.tree.structure(out))
        if (own := row_schema.custom_node(structure)) is not None:
            raise TypeError(f"{CALL}: fn returns a {own}; expected dicts, lists and tuples of arrays.")
        self.schema = dataset.Schema(shapes, structure, codec)

    def __call__(self, row: PyTree) -> PyTree:
        """Return the result of `fn` for a row, and the leaves to keep."""
        out = self._fn(row)
        if not self._kept:
            return out
        leaves = named_leaves(row)
        return {**out, **{name: leaves[name] for name in self._kept}}

    def _trace(self, row: PyTree) -> tuple[PyTree, str]:
        """Return the result of `fn`, as shapes, and the text of its program."""

        def checked(row: PyTree) -> PyTree:
            out = self._fn(row)
            self._check(out)
            return out

        try:
            with jax.checking_leaks():
                closed, out = jax.make_jaxpr(checked, return_shape=True)(row)
        except Exception as error:
            if "Leaked" not in str(error):
                raise
            raise ValueError(
                f"{CALL}: fn leaks a traced value; expected a pure function. Return what it stores in a list, "
                f"an attribute or a global. ({str(error).splitlines()[0]:.200})"
            ) from None
        return out, f"{_ADDRESS.sub('', str(closed))} {_constants(closed)}"

    def _check(self, out: PyTree) -> None:
        leaves = named_leaves(out)
        for name, leaf in leaves.items():
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
                kind = type(leaf).__name__
                raise TypeError(f"{CALL}: fn returns '{name}' as a {kind}; expected arrays. Leave it out.")
        if not isinstance(out, dict) or not leaves:
            what = f"a {type(out).__name__}" if leaves or out is None else "no leaves"
            raise TypeError(f"{CALL}: fn returns {what} for a row; expected a dict of arrays. No row can be dropped.")


def _constants(part: Any) -> list[int]:
    """Return checksums of the arrays in a program, inner functions included, which its text leaves out."""
    if hasattr(part, "eqns"):
        inner = [value for eqn in part.eqns for value in (*eqn.invars, *eqn.params.values())]
        part = [*getattr(part, "consts", ()), *inner]
    if isinstance(part, (list, tuple)):
        return [number for inner in part for number in _constants(inner)]
    array = getattr(part, "val", part)  # of a literal
    if hasattr(array, "__array__") and hasattr(array, "dtype") and _is_plain(array):
        return [zlib.crc32(np.ascontiguousarray(np.asarray(array)).tobytes())]
    return []


def _is_plain(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _only_dicts(tree: PyTree) -> bool:
    return all(map(_only_dicts, tree.values())) if type(tree) is dict else jax.tree_util.all_leaves([tree])
