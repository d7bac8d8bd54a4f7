"""Checks of arguments by structure, dtype and shape, at trace time.

A message has one form: `Call: leaf 'obs' is X; expected Y. Fix.`
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.pytree import PyTree, Spec, leaf_spec, named_leaves, narrow, needs_x64, refuse, to_pairs

_KIND = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
_WITHOUT_ARRAYS = frozenset(("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"))
"""Names of dtypes of which XLA (jax 0.10) takes no arrays."""


class DrawOptions(TypedDict, total=False):
    """Numbers of fbuf's samplers for one draw, for type checkers."""

    beta: Any
    uniform: Any


class Numbers(DrawOptions, total=False):
    """Numbers of fbuf's samplers that `set` replaces, for type checkers."""

    alpha: Any
    eps: Any
    version: Any


def is_int(value: Any) -> bool:
    """Return whether it is an int of Python or numpy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_int(call: str, name: str, value: Any, least: int = 1, hint: str = "") -> None:
    """Raise unless it is an int from `least`."""
    if not is_int(value) or value < least:
        fix = f" Write {int(value)}." if isinstance(value, float) and value.is_integer() and value >= least else ""
        raise ValueError(f"{call}: {name} is {value!r}; expected an int >= {least}{hint}.{fix}")


def check_bool(call: str, name: str, value: Any) -> None:
    """Raise unless it is a Python bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{call}: {name} is {value!r}; expected a bool.")


def check_choice(call: str, name: str, value: Any, known: Sequence[Any]) -> None:
    """Raise unless the value is one of those known: strings, or None."""
    if value is not None and not isinstance(value, str) or value not in known:
        *most, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in known)
        choices = f"{', '.join(most)} or {last}" if most else last
        raise ValueError(f"{call}: {name} is {value!r}; expected {choices}.{did_you_mean(value, known)}")


def did_you_mean(value: Any, known: Iterable[Any]) -> str:
    """Return the name nearest to a misspelt one as a question, or ""."""
    near = difflib.get_close_matches(str(value), [name for name in known if isinstance(name, str)], 1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _text(name: str) -> str:
    return f"leaf '{name}'" if name else "the row"


def scalar(call: str, name: str, value: Any, dtype: Any) -> Any:
    """Return a Python number in the dtype of its leaf, if the kind allows it."""
    kind = "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"
    want = _kind(dtype)
    if _KIND[kind] > want:
        return value
    where = f"{call}: {_text(name)}"
    try:
        number = np.asarray(value, np.float64 if want == 2 else dtype)
    except OverflowError:
        refuse(where, name, value, dtype)
    return narrow(where, name, number, dtype)


def check_spec(call: str, spec: Spec) -> None:
    """Raise for rows without leaves, or with leaves that are not plain arrays, or that XLA does not take."""
    if not spec:
        raise ValueError(f"{call}: the example has no leaves; expected one row, such as {{'obs': obs}}.")
    for name, leaf in spec.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(f"{call}: {_text(name)} is a typed PRNG key. Store jax.random.key_data(key).")
        if np.dtype(leaf.dtype).kind in "OSTUmM":
            raise TypeError(
                f"{call}: {_text(name)} is {leaf.dtype}; expected numbers or booleans. Use storages.Ragged()."
            )
        if np.dtype(leaf.dtype).names:
            raise TypeError(
                f"{call}: {_text(name)} is a structured array; expected numbers or booleans. Make a dict of its fields: "
                f"{{name: x[name] for name in x.dtype.names}}."
            )
        if np.dtype(leaf.dtype).name in _WITHOUT_ARRAYS:
            raise TypeError(
                f"{call}: {_text(name)} is {leaf.dtype}, of which XLA takes no arrays. Store its bytes: x.view(np.uint8)."
            )


@functools.lru_cache
def _key_axes(dtype: Any) -> int:
    """Return the axes of one key: none if typed, one if raw, -1 for what is no key."""
    return 0 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else 1 if dtype == jnp.uint32 else -1


def check_key(call: str, key: Any, many: str) -> None:
    """Raise unless it is one PRNG key, typed or raw; `many` is the fix for several."""
    dtype = getattr(key, "dtype", None)
    if dtype is None:
        raise TypeError(f"{call}: key is {type(key).__name__}; expected a PRNG key. Use jax.random.key(0).")
    if key.ndim != _key_axes(dtype):
        raise TypeError(
            f"{call}: key is {dtype}{list(key.shape)}; expected one PRNG key. Use jax.random.key(0), {many}."
        )


def check_names(call: str, got: Any, expected: Any) -> None:
    """Raise unless the names of leaves agree."""
    missing = [n for n in expected if n not in got]
    extra = [n for n in got if n not in expected]
    if missing or extra:
        what = " and ".join(
            ([f"{_text(missing[0])} is missing"] if missing else [])
            + ([f"{_text(extra[0])} is not in this buffer"] if extra else [])
        )
        fix = "Rows must have the structure of the example given to `init`."
        if missing and any(n.startswith(f"{missing[0]}/0") for n in extra):  # a list, each number of which is a leaf
            fix = f"Of a list make an array: '{missing[0]}': np.asarray(x, dtype)."
        if extra and any(n.startswith(f"{extra[0]}/0") for n in missing):
            fix = (
                f"Of the list in the example make an array, '{extra[0]}': np.asarray(x, dtype), of a shape np.zeros(x)."
            )
        raise ValueError(f"{call}: {what} (got: {_listed(got) or 'nothing'}; expected: {_listed(expected, 99)}). {fix}")


def _listed(names: Any, most: int = 8) -> str:
    names = [name or "one unnamed array" for name in names]
    return ", ".join(names if len(names) <= most else [*names[:most], f"... {len(names)} in all"])


def _are_dicts(rows: Any, spec: Spec) -> bool:
    """Return whether this is a list of rows that are dicts, and not one row that is a list."""
    return all(isinstance(row, Mapping) for row in rows) and not next(iter(spec)).split("/")[0].isdigit()


def check_rows(
    call: str, rows: PyTree, spec: Spec, structure: Any, leading: tuple[int | None, ...], axes: str
) -> dict[str, jax.Array]:
    """Return the leaves of `rows` by name, checked against `spec` and `structure`.

    Args:
      call: For messages, `"Buffer.extend"`.
      rows: Leaves `[*leading, *item]`.
      structure: The treedef of one row.
      leading: Expected leading axes; None takes any length, the same in all leaves.
      axes: The leading axes as a message spells them, `"[N, E, ...]"`.
    Raises:
      ValueError, TypeError: wrong names, structure, dtype or shape; with the leaf's path and the fix as code.
    """
    leaves = named_leaves(rows)
    if type(rows) in (list, tuple) and leaves.keys() != spec.keys() and _are_dicts(rows, spec):
        if not leading:
            raise TypeError(
                f"{call}: the row is a {type(rows).__name__}; expected one dict. Add several with `extend`."
            )
        raise TypeError(
            f"{call}: rows are a {type(rows).__name__} of {len(rows)} dicts; this storage takes one dict of arrays "
            f"[{axes}, ...]. Stack them: jax.tree.map(lambda *x: np.stack(x), *rows); if their shapes differ, use "
            f"Buffer(storage=fbuf.storages.Ragged())."
        )
    check_names(call, list(leaves), list(spec))
    if jax.tree.structure(rows) != structure:
        empty = isinstance(rows, Mapping) and [name for name in rows if not jax.tree.leaves(rows[name])]
        fix = f" Leave out '{empty[0]}', which has no leaf." if empty else ""
        raise ValueError(f"{call}: rows are {jax.tree.structure(rows)}; expected {structure}, as in `init`.{fix}")
    wheres = {name: f"{call}: {_text(name)}" for name in leaves}
    for name, leaf in leaves.items():
        if isinstance(leaf, (bool, int, float)) and not leading and spec[name].shape == ():
            leaves[name] = scalar(call, name, leaf, spec[name].dtype)
    specs = {name: leaf_spec(leaf, wheres[name]) for name, leaf in leaves.items()}
    length: dict[int, tuple[int, str]] = {}
    out = {}
    for name, leaf in leaves.items():
        want, got, where = spec[name], specs[name], wheres[name]
        pairs = needs_x64(want.dtype)
        if pairs:
            leaf = to_pairs(where, leaf, want.dtype)
            got = jax.ShapeDtypeStruct(leaf.shape[:-1], want.dtype)
        if got.dtype != want.dtype:
            raise wrong_dtype(where, got.dtype, want.dtype, isinstance(leaf, (bool, int, float)))
        if isinstance(leaf, (np.ndarray, np.generic)) and not pairs:
            leaf = narrow(where, name, leaf, want.dtype)
        cut = len(leading)
        item, head = got.shape[cut:], got.shape[:cut]
        if len(got.shape) < cut or item != want.shape:
            inner = "".join(f", {n}" for n in want.shape)
            shape = f"[{axes}{inner}]" if axes else f"{list(want.shape)}"
            fix = _reshaped(got.shape, want.shape, leading, axes)
            raise ValueError(f"{where} has shape {list(got.shape)}; expected {shape}.{fix}")
        for axis, (have, need) in enumerate(zip(head, leading, strict=True)):
            first = length.setdefault(axis, (have if need is None else need, name if need is None else ""))
            if have != first[0]:
                owner = "the index" if axes.startswith("B") else "this buffer"
                other = f"leaf '{first[1]}' has {first[0]}" if first[1] else f"{owner} has {first[0]}"
                fix = "All leaves need the same leading axes."
                if axes == "N, E" and axis == 1 and head[0] == first[0]:
                    fix = "Time comes first: x.swapaxes(0, 1)."
                raise ValueError(f"{where} has {have} entries on axis {axis} of [{axes}, ...], but {other}. {fix}")
        out[name] = jnp.asarray(leaf)
    return out


def narrowed(call: str, rows: PyTree, spec: Spec) -> PyTree:
    """Return rows whose NumPy leaves are what `check_rows` makes of them, for a jitted function."""

    def of_leaf(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        where, want = f"{call}: {_text(name)}", spec.get(name)
        if want is not None and needs_x64(want.dtype):
            return to_pairs(where, leaf, want.dtype)
        if isinstance(leaf, (jax.Array, bool, int, float)):
            return leaf
        if want is None:
            return np.zeros(np.shape(leaf), bool)  # that function refuses its name
        if (got := leaf_spec(leaf, where).dtype) != want.dtype:
            raise wrong_dtype(where, got, want.dtype)
        return narrow(where, name, leaf, want.dtype)

    return jax.tree_util.tree_map_with_path(of_leaf, rows)


def _reshaped(got: tuple[int, ...], item: tuple[int, ...], leading: tuple[int | None, ...], axes: str) -> str:
    """Return the fix for a leaf of shape `got` where `[*leading, *item]` is expected; "" if there is none."""
    lanes = leading[-1] if axes.endswith("E") else None
    adds = axes in ("", "E")  # one row, or one a lane
    if axes.startswith("B"):
        return f" Give one a row: jnp.broadcast_to(x, {(*leading, *item)})." if got == item else ""
    if lanes is None and got == item:
        return " Add one row with `add`, or give it the leading axis with x[None]."
    if lanes is not None and got == item:
        return f" There are {lanes} lanes: add one row of each, jnp.stack([row_of_lane_0, ...])."
    if lanes is not None and not adds and got == (lanes, *item):
        return " Add one row of each lane with `add`, or give it the leading axis with x[None]."
    if lanes is not None and not adds and len(got) == 1 + len(item) and got[1:] == item:
        return f" There are {lanes} lanes: stack their rows along axis 1, [N, {lanes}, ...]."
    if got[-1:] == (1,) and len(got) == 1 + len(leading) + len(item) and got[len(leading) : -1] == item:
        return " Take its last axis away: x.squeeze(-1)."
    if adds and len(got) == 1 + len(leading) + len(item) and got[1:] == (*leading, *item):
        return " Add several rows with `extend`."
    return " Rows must have the shapes of the example given to `init`."


def wrong_dtype(where: str, got: Any, want: Any, is_number: bool = False) -> TypeError:
    """Return the error for an array, or a number of Python, of another dtype.

    A cast must not lose the fractions of images in [0, 1].
    """
    fix = f"Initialise with {got}, or convert the rows before the call."
    if np.dtype(got).kind in "OSTUmM":
        fix = f"Convert it to {want}; text and objects are for storage=fbuf.storages.Ragged()."
    elif want == np.bool_ or _kind(got) <= _kind(want):
        cast = f"np.{np.dtype(want).type.__name__}(x)" if is_number else f"x.astype(jnp.{want})"
        fix = f"Cast with {cast}, or initialise with {got}."
    return TypeError(f"{where} is {got}; this buffer was initialised with {want}. {fix}")


def _kind(dtype: Any) -> int:
    return _KIND.get(np.dtype(dtype).kind, 2)  # bfloat16 is of no kind


def check_array(call: str, what: str, value: Any, shape: tuple[int, ...], kinds: str) -> jax.Array:
    """Return an argument as an array of `shape` with a dtype kind in `kinds`; see `check_kind`."""
    value = check_kind(call, what, value, kinds, shape)
    got = np.shape(value)
    if got != shape:
        fix = f" Write x.reshape({shape})." if math.prod(got) == math.prod(shape) else ""
        raise ValueError(f"{call}: {what} has shape {list(got)}; expected {list(shape)}.{fix}")
    return jnp.asarray(value)


def check_kind(call: str, what: str, value: Any, kinds: str, shape: tuple[int, ...] | None = None) -> Any:
    """Return an argument as JAX takes it, with a dtype kind in `kinds`: "f" floating, "i" integer, "b" bool.

    Numbers that may be floating become float32, infinite beyond it; JAX would wrap integers of 64 bits.
    """
    if "f" in kinds and type(value) is np.ndarray and value.dtype.kind == "f":  # the checks take 4 us
        return _as_float32(value)
    got = leaf_spec(value, f"{call}: {what}")
    names = {"f": "floating", "i": "integer", "b": "boolean"}
    kind = {"u": "i", "V": "f"}.get(np.dtype(got.dtype).kind, np.dtype(got.dtype).kind)
    if kind not in kinds:
        want = " or ".join(names[k] for k in kinds)
        cast = {"f": "jnp.float32", "i": "jnp.int32", "b": "bool"}[kinds[0]]
        article = "an" if want[0] == "i" else "a"
        raise TypeError(
            f"{call}: {what} is {got.dtype}; expected {article} {want} array of shape "
            f"{list(got.shape if shape is None else shape)}. Use x.astype({cast})."
        )
    if isinstance(value, jax.Array):
        return value
    if "f" not in kinds:
        return narrow(f"{call}: {what}", "", value, got.dtype)
    return _as_float32(np.asarray(value))


def _as_float32(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)
