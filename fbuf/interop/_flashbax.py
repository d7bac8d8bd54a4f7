r"""Read flashbax's states of every kind, with their priorities, and its Vaults, without flashbax.

A state is `experience` with leaves `[E, L, ...]`, lanes first, and the index of the next row. A prioritised one has a tree
whose leaf `e * (L / period) + i` is :math:`p^\alpha` of the window of lane e that begins at row `i * period`. States are read
by their fields, so dicts restored by another checkpointer work.

A Vault has arrays `[E, time, ...]` in tensorstore's OCDBT, read block by block, and no priorities, since flashbax drops them.
Its index is the commit point: rows beyond it belong to a writer that died, and are ignored. Missing chunks, which tensorstore
reads as zeros, raise an error. Shapes come from the arrays, not from the strings that flashbax evaluates.

Source: flashbax 0.1.3, `trajectory_buffer.py`, `prioritised_trajectory_buffer.py`, `sum_tree.py`, `trajectory_queue.py`,
`vault/vault.py`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.lazy_import import import_extra
from fbuf._core.pytree import named_leaves
from fbuf._rows.columns import DTYPES, Column, Fields, check_name, read_json
from fbuf.interop._source import Source

_CALL = "from_flashbax"
_LARGEST_CHUNK = 2**27  # bytes; chunks that flashbax writes have a million elements


def from_flashbax(
    state: Any,
    *,
    priority_exponent: float | None = None,
    priorities: bool = True,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
) -> Source:
    """Return the rows, and priorities, of a flashbax state: flat, item, trajectory, prioritised, queue.

    Args:
      state: Of any flashbax buffer, or dicts with its fields. An `add_batch_size` above 1 becomes lanes.
      priority_exponent: flashbax's exponent (`make_prioritised_..._buffer(priority_exponent=0.6)`): the state has only the
        powers.
      priorities: False: ignore the priorities.
      fields: `{name there: name here}`, or names of leaves; None: all, in the structure of the experience.
      dtypes: As for `from_arrays`.
    Returns:
      The source; without a buffer, `into` makes one with `priority_exponent` as alpha. A row has the priority of the window
      that begins with it; a row that begins none (the newest of a flat buffer) has the largest recorded, as flashbax gives to
      new windows.
    Raises:
      TypeError: it is not a state of flashbax.
      ValueError: priorities without an exponent; a tree that does not fit the rows; else as `from_arrays`.
    Leaves on an accelerator are transferred block by block.

    Example:
      >>> import fbuf, numpy as np
      >>> experience = {"obs": np.array([[4, 5, 2, 3]])}  # lane 0, its ring
      >>> state = {"experience": experience, "current_index": 2, "is_full": True}
      >>> buffer, state = fbuf.interop.from_flashbax(state).into()
      >>> buffer.rows(state).data["obs"].tolist()
      [2, 3, 4, 5]
    """
    return dataclasses.replace(_source(state, priorities, priority_exponent), fields=fields, dtypes=dtypes)


def _field(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def _source(state: Any, priorities: bool, exponent: float | None) -> Source:
    experience = _field(state, "experience")
    leaves = {} if experience is None else named_leaves(experience)
    shapes = {name: tuple(getattr(leaf, "shape", ())) for name, leaf in leaves.items()}
    lead = {shape[:2] for shape in shapes.values()}
    if len(lead) != 1 or len(next(iter(lead))) != 2:
        raise TypeError(
            f"{_CALL}: state is a {type(state).__name__} with leaves {shapes or 'of no experience'}; expected a state of "
            f"flashbax, whose experience has leaves [lanes, rows, ...]."
        )
    lanes, length = next(iter(lead))
    full = bool(np.asarray(_field(state, "is_full")))
    if _field(state, "write_index") is not None:  # a queue
        oldest, cursor = (int(np.asarray(_field(state, name))) for name in ("read_index", "write_index"))
        steps = length if full else (cursor - oldest) % max(length, 1)
    else:
        cursor = int(np.asarray(_field(state, "current_index")))
        oldest, steps = (cursor, length) if full else (0, cursor)
    if not (0 <= cursor < max(length, 1) and 0 <= oldest < max(length, 1)):
        raise ValueError(f"{_CALL}: the index is {cursor}; expected one below {length}, the rows of a lane.")
    columns = {
        name: Column(shapes[name][2:], np.dtype(leaf.dtype), _row_reader(leaf, oldest, length, lanes))
        for name, leaf in leaves.items()
    }
    priority, largest = None, 1.0
    tree = _field(state, "sum_tree_state")
    if tree is not None and priorities:
        priority, largest = _priorities(tree, lanes, length, exponent, (oldest + np.arange(steps)) % max(length, 1))
        priority = priority[:, 0] if lanes == 1 else priority
    kept = {
        "structure": jax.tree.structure(experience),
        "call": _CALL,
        "exponents": (0.6 if exponent is None else exponent, 0.4),
    }
    return Source("flashbax state", columns, steps, None if lanes == 1 else lanes, None, priority, largest, **kept)


def _row_reader(leaf: Any, oldest: int, length: int, lanes: int) -> Callable[[int, int], np.ndarray]:
    """Return a reader of rows by age from `[E, L, ...]`: `[n, E, ...]`, without the lane axis if there is one lane."""

    def read(first: int, last: int) -> np.ndarray:
        at = (oldest + np.arange(first, last)) % length
        if isinstance(leaf, jax.Array) and any(device.platform != "cpu" for device in leaf.devices()):
            rows = np.asarray(_take(leaf, jnp.asarray(at, jnp.int32)))  # transfers these rows only
        else:
            rows = np.asarray(leaf)[:, at]
        return rows[0] if lanes == 1 else rows.swapaxes(0, 1)

    return read


_take = jax.jit(lambda leaf, at: leaf.at[:, at].get(mode="promise_in_bounds"))


def _priorities(tree: Any, lanes: int, length: int, exponent: float | None, at: np.ndarray) -> tuple[np.ndarray, float]:
    """Return |p| float64[T, E] of rows at these places, NaN where no window begins; and the largest recorded."""
    if exponent is None or not 0 <= exponent < float("inf"):
        raise ValueError(f"{_CALL}: priority_exponent is {exponent!r}. Pass flashbax's, or priorities=False.")
    nodes = np.asarray(_field(tree, "nodes")).reshape(-1)
    depth = (nodes.size + 1).bit_length() - 2
    capacity = _field(tree, "capacity")
    number = 2**depth if capacity is None else int(capacity)
    period = length * lanes // number if number else 0
    if nodes.size != 2 ** (depth + 1) - 1 or number > 2**depth or period < 1 or number != lanes * (length // period):
        raise ValueError(
            f"{_CALL}: the tree has {nodes.size} nodes for {number} windows, {lanes} lanes, {length} rows."
        )
    leaves = nodes[2**depth - 1 :][:number].astype(np.float64).reshape(lanes, length // period)
    most = float(np.asarray(_field(tree, "max_recorded_priority")))
    if not (np.isfinite(leaves).all() and (leaves >= 0).all() and np.isfinite(most) and most >= 0):
        raise ValueError(f"{_CALL}: nodes are negative or not finite: a TD error was NaN. Pass priorities=False.")
    starts = np.zeros((lanes, length), bool)
    starts[:, : number // lanes * period : period] = True
    powers = np.full((lanes, length), np.nan)
    powers[starts] = leaves.reshape(-1)
    starts, powers = starts.T[at], powers.T[at]
    # The newest windows are incomplete and have 0; elsewhere 0 is a priority.
    newest = np.logical_and.accumulate((powers == 0)[::-1] | ~starts[::-1])[::-1]
    powers = np.where(newest, np.nan, powers)
    root = 1 / exponent if exponent else 0.0
    return np.power(powers, root, where=~np.isnan(powers), out=np.full_like(powers, np.nan)), most**root


_VAULT = "from_vault"


def from_vault(
    path: str | os.PathLike[str], *, fields: Fields = None, dtypes: Mapping[str, str] | None = None
) -> Source:
    """Return the rows of a flashbax Vault, oldest first. Needs tensorstore (`pip install "fbuf[vault]"`).

    Args:
      path: The folder with `metadata.json`: `<rel_dir>/<vault_name>/<vault_uid>`. An `add_batch_size` above 1 becomes lanes.
      fields, dtypes: As for `from_arrays`.
    Returns:
      The source.
    Raises:
      ImportError: tensorstore is missing.
      FileNotFoundError: there is no Vault.
      ValueError: another version; arrays that are damaged, incomplete, or of other dtypes than stated; else as `from_arrays`.

    Example:
      buffer, state = fbuf.interop.from_vault("vaults/pong/20260101").into(newest=100_000)
    """
    return dataclasses.replace(_vault_source(Path(path)), fields=fields, dtypes=dtypes)


def _vault_source(path: Path) -> Source:
    tensorstore = import_extra(_VAULT, "tensorstore", '"fbuf[vault]"')
    described = path / "metadata.json"
    if not described.exists() or not (path / "manifest.ocdbt").exists():
        raise FileNotFoundError(f"{_VAULT}: {path} has no metadata.json and manifest.ocdbt; expected a flashbax Vault.")
    about = read_json(described)
    version = about.get("version")
    if not isinstance(version, (int, float)) or int(version) != 1:
        raise ValueError(f"{described}: version is {str(version)[:80]!r}; expected 1.x. Rewrite it by flashbax 0.1.")
    names = dict(_leaves(described, about.get("structure_dtype")))
    if not names:
        raise ValueError(f"{described}: structure_dtype names no leaves; expected at least one.")
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 * 2**20}})
    index = _open_array(tensorstore, context, path, "vault_index")
    if tuple(index.shape) != (1,) or index.dtype.numpy_dtype.kind not in "iu":
        what = f"{index.dtype.name}{list(index.shape)}"
        raise ValueError(f"{_VAULT}: vault_index of {path} is {what}; expected one integer.")
    steps = int(np.asarray(_result(path, index.read()))[0])
    arrays = {name: _open_array(tensorstore, context, path, name.replace("/", ".") + ".") for name in names}
    lanes = {int(array.shape[0]) for array in arrays.values() if array.rank >= 2}
    if len(lanes) != 1 or any(array.rank < 2 or not 0 <= steps <= array.shape[1] for array in arrays.values()):
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        raise ValueError(f"{_VAULT}: {path} has arrays {shapes} and {steps} rows; expected [lanes, rows, ...].")
    number = lanes.pop()
    single = number == 1
    columns: dict[str, Column] = {}
    for name, array in arrays.items():
        dtype = DTYPES.get(array.dtype.name)
        if dtype is None or dtype != DTYPES.get(names[name]):
            raise ValueError(f"{described}: leaf '{name}' is {names[name]!r}, but its array {array.dtype.name!r}.")
        columns[name] = Column(tuple(array.shape[2:]), dtype, _block_reader(path, name, array, single))
    return Source("flashbax Vault", columns, steps, None if single else number, call=_VAULT)


def _leaves(described: Path, tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and dtypes of leaves."""
    if not isinstance(tree, dict) or prefix.count("/") > 64:
        raise ValueError(
            f"{described}: structure_dtype{f' at {prefix!r}' if prefix else ''} is a {type(tree).__name__}; expected nested "
            f"objects. A Vault cannot hold lists."
        )
    for key, value in tree.items():
        name = check_name(str(described), prefix + key)
        if isinstance(value, str):
            yield name, value
        else:
            yield from _leaves(described, value, name + "/")


def _open_array(tensorstore: Any, context: Any, path: Path, name: str) -> Any:
    base = {"driver": "file", "path": f"{path.resolve()}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": name}}
    array = _result(path, tensorstore.open(spec, open=True, read=True, context=context))
    chunk = array.chunk_layout.read_chunk.shape
    if math.prod(chunk) * array.dtype.numpy_dtype.itemsize > _LARGEST_CHUNK:  # tensorstore would end the process
        raise ValueError(
            f"{_VAULT}: array '{name}' of {path} has chunks of {list(chunk)}; expected at most {_LARGEST_CHUNK} bytes each."
        )
    return array


def _result(path: Path, future: Any) -> Any:
    try:
        return future.result()
    except ValueError as error:
        raise ValueError(f"{_VAULT}: {path} is damaged, or not a flashbax Vault: {str(error)[:300]}.") from None


def _block_reader(path: Path, name: str, array: Any, single: bool) -> Any:
    def read(first: int, last: int) -> np.ndarray:
        part = array[:, first:last]
        stored = getattr(part, "storage_statistics", None)  # of tensorstore 0.1.50 or later
        if stored is not None and not _result(path, stored(query_fully_stored=True)).fully_stored:
            raise ValueError(
                f"{_VAULT}: rows {first} to {last - 1} of leaf '{name}' in {path} are missing. Take later ones: newest=."
            )
        rows = np.asarray(_result(path, part.read()))
        return rows[0] if single else rows.swapaxes(0, 1)

    return read
