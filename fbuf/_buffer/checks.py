"""Checks of a buffer's parts and states, and of the arguments of its methods; `Mixture`, `Replay` and `checked` share them.

They look at structure, dtypes and shapes, so they run once, at trace time. Each message says what to write instead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import prefetch
from fbuf._buffer.state import BufferConfig, BufferState, empty_state, row_format_of
from fbuf._core import arguments
from fbuf._core.dispatch import DONATED
from fbuf._core.packed_leaf import is_packed
from fbuf._core.pytree import PyTree, Spec, is_under, leaf_spec, named_leaves, narrow, needs_x64
from fbuf._core.sample import Index
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.storage import Storage
from fbuf._interfaces.view import AnchorRule, View
from fbuf._interfaces.writer import Writer
from fbuf.views import Hindsight
from fbuf.views._fields import check_ends

# ------------------------------------------------------------------------------------------------------------ parts


def check_sizes(buffer: BufferConfig) -> None:
    """Raise unless capacity, lanes, prefetch and batch size are numbers that fit together."""
    capacity, lanes = buffer.capacity, buffer.lanes
    arguments.check_int("Buffer", "capacity", capacity)
    if capacity >= 2**31 - 2**24:
        raise ValueError(f"Buffer: capacity is {capacity}; expected less than 2^31 - 2^24 (slots are int32).")
    if lanes is not None:
        arguments.check_int("Buffer", "lanes", lanes, hint=", or None for one stream")
        if capacity % lanes:
            low = capacity - capacity % lanes
            near = f"{low} or {low + lanes}" if low else f"{lanes}"
            raise ValueError(f"Buffer: capacity is {capacity}, not a multiple of lanes={lanes}. Use capacity={near}.")
    if not arguments.is_int(buffer.prefetch) or buffer.prefetch not in (0, 1):
        raise ValueError(f"Buffer: prefetch is {buffer.prefetch!r}; expected 0, or 1 to draw one batch ahead.")
    if buffer.batch_size is not None:
        check_batch_size("Buffer", buffer.batch_size)
    elif buffer.prefetch:
        raise ValueError("Buffer: prefetch is 1, but batch_size is None. Write Buffer(..., batch_size=256).")


_BASES: dict[str, Any] = {"storage": Storage, "sampler": Sampler, "view": View, "writer": Writer}


def check_parts(buffer: BufferConfig) -> None:
    """Raise unless storage, sampler, view and writer are parts, and fit together."""
    for role, base in _BASES.items():
        value = getattr(buffer, role)
        if isinstance(value, type):
            raise TypeError(f"Buffer: {role} is the class {value.__name__}; expected a value. Write {_made(value)}.")
        if not isinstance(value, base):
            _refuse_other(role, value)
            name = f"fbuf.parts.{'Scattering' if base is Writer else base.__name__}"
            raise TypeError(
                f"Buffer: {role} is {value!r}; expected a {name}. Write class {type(value).__name__}({name})."
            )
    if not buffer.view.rule.prompt and type(buffer.view).decide is View.decide:
        raise TypeError(f"Buffer: view is {buffer.view!r}, which has no `decide`; see fbuf.parts.View.")
    if not buffer.writer.streams:
        _check_order(buffer)
    if buffer.writer.read_only != buffer.storage.read_only:
        raise ValueError(
            f"Buffer: storage is {buffer.storage!r} and writer {buffer.writer!r}; expected both for a data set, or neither. "
            f"Use fbuf.datasets.open(path), or storage=fbuf.storages.DataSet(path) with writer=fbuf.writers.Frozen()."
        )
    if buffer.sampler.by_episode and (buffer.view.rule.crosses or not (buffer.ends or buffer.view.rule.episode)):
        why = "its windows cross the ends of episodes" if buffer.ends else "nothing ends an episode"
        fix = "Use boundary='stop' or 'mask'." if buffer.ends else "Name what does: Buffer(..., episode_end=('done',))."
        raise ValueError(f"Buffer: {buffer.sampler!r} draws episodes, but with {buffer.view!r} {why}. {fix}")
    need = buffer.view.rule.rows
    if buffer.geometry.length < need:
        more, fewer = f"capacity={need * buffer.geometry.lanes} or more", "a view of fewer rows, such as views.Row()"
        each = "" if buffer.lanes is None else " per lane (capacity / lanes)"
        raise ValueError(
            f"Buffer: {buffer.view!r} reads {need} rows at a time, but there are {buffer.geometry.length}{each}. "
            f"Use {fewer if buffer.writer.read_only else more}."
        )


def _refuse_other(role: str, value: Any) -> None:
    """Raise for a name, a number, or a part of another role."""
    from fbuf import samplers, storages, views, writers

    members = {"storage": storages, "sampler": samplers, "view": views, "writer": writers}
    if type(value).__module__ == "builtins":
        meant = [n for n in members[role].__all__ if n.lower() == str(value).lower()]
        name = meant[0] if meant else {"storage": "Device", "sampler": "Uniform", "view": "Row", "writer": "Ring"}[role]
        raise TypeError(f"Buffer: {role} is {value!r}. Use fbuf.{role}s.{_made(getattr(members[role], name))}.")
    for other, base in _BASES.items():
        if other != role and isinstance(value, base):
            raise TypeError(f"Buffer: {role} is {value!r}, a {other}; expected a {role}. Write {other}={value!r}.")


def _made(part: type) -> str:
    """Return the call that makes a part."""
    needs = dataclasses.is_dataclass(part) and any(f.default is dataclasses.MISSING for f in dataclasses.fields(part))
    return f"{part.__name__}({'...' if needs else ''})"


def _check_order(buffer: BufferConfig) -> None:
    """Raise for parts that need rows in order of time, with a writer that replaces any row."""
    needs = ""
    if buffer.view.rule != AnchorRule():
        needs = f"{buffer.view!r} reads neighbouring rows"
    elif buffer.sampler.by_episode:
        needs = f"{buffer.sampler!r} draws episodes"
    elif buffer.sampler.in_order:
        needs = f"{buffer.sampler!r} needs rows to be replaced oldest first"
    if needs:
        fix = "sampler=fbuf.samplers.Uniform()" if buffer.view.rule == AnchorRule() else "view=fbuf.views.Row()"
        raise ValueError(f"Buffer: {needs}, but {buffer.writer!r} may replace any. Use {fix}, or writers.Ring().")


def check_fields(call: str, buffer: BufferConfig, spec: Spec) -> None:
    """Raise unless rows have the leaves that the view, the sampler and `episode_end` name."""
    buffer.view.check(spec)
    stamp = buffer.sampler.stamp
    if stamp is not None:
        if stamp not in spec:
            raise ValueError(f"{call}: {buffer.sampler!r} reads leaf '{stamp}'; expected one of {', '.join(spec)}.")
        dtype, shape = spec[stamp].dtype, spec[stamp].shape
        if not jnp.issubdtype(dtype, jnp.integer) or dtype in (jnp.uint32, jnp.uint64) or shape != ():
            raise TypeError(
                f"{call}: {buffer.sampler!r} reads leaf '{stamp}', which is {dtype}{list(shape)}; expected an integer [] that "
                f"int32 holds. Cast with x.astype(jnp.int32)."
            )
    check_ends(call, buffer.episode_end, spec)
    check_64_bits(call, buffer, spec)


def check_64_bits(call: str, buffer: BufferConfig, spec: Spec) -> None:
    """Raise if a leaf that JAX cannot hold is not on the host, or is read inside jit."""
    for name in (name for name, leaf in spec.items() if needs_x64(leaf.dtype)):
        if why := _needs_32_bits(buffer, name):
            raise TypeError(
                f"{call}: leaf '{name}' is {spec[name].dtype}, which jit cannot hold while jax_enable_x64 is off, but {why}. "
                f"Give the leaf 32 bits, np.{leaf_spec(spec[name]).dtype}(x) in the example, or enable x64."
            )


def _needs_32_bits(buffer: BufferConfig, name: str) -> str:
    """Return which part needs the values of a leaf inside jit; "" if none does."""
    if not is_under(name, buffer.storage.exact):
        return f"{buffer.storage!r} does not name it in keys"
    if buffer.on_write is not None or buffer.on_read is not None:
        return "on_write and on_read transform rows there"
    if buffer.writer.reads_rows:
        return f"{buffer.writer!r} reads rows there"
    view = buffer.view
    for part in (view, view.view if isinstance(view, Hindsight) else view, buffer.sampler, buffer.writer):
        fields: Any = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
        values = [getattr(part, field.name) for field in fields]
        if is_under(name, (key for key in values if isinstance(key, str) and key not in view.reads_pairs)):
            return f"{part!r} reads it there"
    return ""


def check_same_rows(call: str, buffer: BufferConfig, other: BufferConfig) -> None:
    """Raise unless states of both buffers can share rows."""
    for field in ("capacity", "lanes", "storage", "writer", "on_write"):
        if getattr(buffer, field) != getattr(other, field):
            fix = f"For another {field} add the rows again: other.extend(other.init(example), rows)."
            if other.writer.read_only:
                fix = f"Open the other data set instead: fbuf.datasets.open({other.storage.folder!r})."
            raise ValueError(
                f"{call}: other.{field} is {getattr(other, field)!r}; expected {getattr(buffer, field)!r}. {fix}"
            )


# ------------------------------------------------------------------------------------------------ state and rows


def check_writable(call: str, buffer: BufferConfig) -> None:
    """Raise if the rows never change."""
    if buffer.writer.read_only:
        buffer.writer.refuse(call)


def check_state(call: str, buffer: BufferConfig, state: Any) -> None:
    """Raise for another type, a donated state, or several states. Operations compare it with the buffer when traced."""
    if _is_usable(state):
        return
    check_state_type(call, type(buffer), BufferState, state)
    refuse_donated(call, state)
    refuse_stacked(call, type(buffer), state)


def refuse_donated(call: str, state: BufferState) -> None:
    """Raise if arrays of a state were donated: all of them, or those of its sampler, as draws of a `Replay` do."""
    concrete = [x for x in jax.tree.leaves((state.header, state.sampler)) if not isinstance(x, jax.core.Tracer)]
    if any(hasattr(x, "is_deleted") and x.is_deleted() for x in concrete):
        raise RuntimeError(f"{call}: {DONATED}")


def check_made_by(buffer: BufferConfig, state: BufferState, call: str = "Buffer") -> None:
    """Raise if another buffer made the state (ValueError), or if its leaves need x64, which is off now."""
    if any(leaf.dtype.itemsize == 8 for leaf in jax.tree.leaves(state.rows)):
        check_64_bits(call, buffer, buffer.storage.spec(state.rows)[0])  # before `fits`, whose cache ignores x64
    if not fits(buffer, state):
        refuse_stacked(call, type(buffer), state)
        raise ValueError(
            f"{call}: this state was made by another buffer than {buffer!r}, with other sizes, parts or other transforms. "
            f"Use the buffer that made it (`grow` returns a new one); if only sampler, view, prefetch, batch_size or on_read "
            f"differ, write buffer.convert(other, state)."
        )


def fits(buffer: BufferConfig, state: BufferState) -> bool:
    """Return whether the buffer, or an equal one, can have made the state."""
    leaves, structure = jax.tree.flatten(state)
    return _fits(buffer, structure, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves))


@functools.lru_cache(maxsize=256)
def _fits(buffer: BufferConfig, structure: Any, leaves: tuple[tuple[tuple[int, ...], Any], ...]) -> bool:
    """Return what `fits` does, of a state of `leaves` (shape, dtype)."""
    state = structure.unflatten(list(itertools.starmap(jax.ShapeDtypeStruct, leaves)))
    spec, of_row = buffer.storage.spec(state.rows)
    row_format = row_format_of(state)
    if (row_format is None) != (buffer.on_write is None):
        return False
    rows = buffer.storage.abstract(buffer.geometry, spec, of_row)
    empty = prefetch.empty_state if buffer.prefetch else empty_state
    expected = jax.eval_shape(functools.partial(empty, buffer, row_format=row_format), rows)
    return bool(_outline(state) == _outline(expected))


def _outline(state: BufferState) -> Any:
    leaves = tuple((tuple(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(state, is_leaf=is_packed))
    rule = None if state.anchors is None else state.anchors.rule
    return leaves, rule, jax.tree.structure((state.ahead, state.transforms))


def _is_usable(state: Any) -> bool:
    """Return whether it is one state with values, and not donated."""
    header: Any = getattr(state, "header", None)
    return (
        isinstance(state, BufferState)
        and _is_concrete(header.__class__)
        and header.ndim == 1
        and not header.is_deleted()
    )


def can_trace(buffer: BufferConfig, state: Any, *arguments: Any) -> bool:
    """Return whether a call is eager and jit takes its arguments as they are: then its checks can be traced with it, once."""
    return _is_usable(state) and not buffer.storage.ragged and all(map(jit_takes, arguments))


def jit_takes(tree: Any) -> bool:
    """Return whether jit takes all leaves without converting them, and none is a tracer."""
    kind: Any = type(tree)
    if tree is None or _is_concrete(kind):
        return True
    if kind is np.ndarray or issubclass(kind, np.generic):  # others may be masked arrays
        dtype = tree.dtype
        return dtype.kind in "biufc" and dtype.isnative and not (dtype.itemsize == 8 and needs_x64(dtype))
    if kind is dict and {str}.issuperset(map(type, tree)):  # flattening takes three times as long
        return all(map(jit_takes, tree.values()))
    try:
        leaves = jax.tree.leaves(tree)
    except (TypeError, ValueError):  # dicts with keys of several types
        return False
    return all(leaf is not tree and jit_takes(leaf) for leaf in leaves)  # a leaf of another kind is its own tree


@functools.cache
def _is_concrete(kind: Any) -> bool:
    """Return whether it is the type of JAX arrays with values. (`isinstance` with `jax.Array` costs a microsecond.)"""
    return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


def check_state_type(call: str, owner: type, kind: type, state: Any) -> None:
    """Raise unless the state is a `kind`; name the arguments of the method of `owner` that was called."""
    if not isinstance(state, kind):
        name = call.rpartition(".")[2]
        parameters = list(inspect.signature(getattr(owner, name)).parameters.values())[1:]
        order = ", ".join(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        raise TypeError(
            f"{call}: first argument is {type(state).__name__}, expected {kind.__name__}. The order is {name}({order})."
        )


_STATIC = ("batch_size", "n", "name", "other", "numbers")
_EAGER = ("flush", "grow", "summary")


def refuse_stacked(call: str, owner: type, state: BufferState) -> None:
    """Raise for states stacked along a leading axis; name the `vmap` of the method of `owner` that was called."""
    if not state.leading:
        return
    name = call.rpartition(".")[2]
    fix = "one of them, jax.tree.map(lambda x: x[0], state)"
    if name not in _EAGER and hasattr(owner, name):
        parameters = [p for p in inspect.signature(getattr(owner, name)).parameters.values() if p.name != "self"]
        parameters = [
            p for p in parameters if p.name in _STATIC or p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        several = ", ".join(p.name for p in parameters if p.name not in _STATIC)
        all_of_them = ", ".join("**" * (p.kind is p.VAR_KEYWORD) + p.name for p in parameters)
        method = f"{owner.__name__.lower()}.{name}"
        fix = f"jax.vmap({method})({several})"
        if several != all_of_them:
            fix = f"jax.vmap(lambda {several}: {method}({all_of_them}))({several})"
    raise ValueError(f"{call}: this state has a leading axis of {state.leading[0]}: use {fix}.")


def given_spec(buffer: BufferConfig, state: BufferState) -> tuple[Spec, Any]:
    """Return spec and structure of the rows that `add` and `extend` take."""
    row_format = row_format_of(state)
    return buffer.storage.spec(state.rows) if row_format is None else (row_format.spec, row_format.structure)


def check_rows(
    call: str, buffer: BufferConfig, state: BufferState, rows: PyTree, priority: Any, mask: Any
) -> tuple[dict[str, Any], Any, tuple[int, int], jax.Array | None, jax.Array | None]:
    """Return arrays by name, other values (`storages.Ragged`) or None, [N, E], priority and mask, for `add` and `extend`."""
    check_state(call, buffer, state)
    single, lanes = call.endswith("add"), buffer.lanes
    spec, structure = given_spec(buffer, state)
    lead: tuple[int | None, ...] = (() if single else (None,)) + (() if lanes is None else (lanes,))
    axes = ", ".join((() if single else ("N",)) + (() if lanes is None else ("E",)))
    values = None
    if buffer.storage.ragged:
        leaves, values = buffer.storage.parse(call, state.rows, rows, lead, axes)
    else:
        leaves = arguments.check_rows(call, rows, spec, structure, lead, axes)
    shape = next(iter(leaves.values())).shape[: len(lead)]
    if priority is not None:
        if not buffer.sampler.prioritized:
            raise TypeError(f"{call}: {buffer.sampler!r} takes no priority. Use samplers.Prioritized(), or omit it.")
        priority = arguments.check_array(call, "priority", priority, shape, "fi")
    if mask is not None:
        mask = arguments.check_array(call, "mask", mask, shape, "b")
    return leaves, values, (1 if single else shape[0], lanes or 1), priority, mask


def check_update(
    call: str, buffer: BufferConfig, state: BufferState, index: Any, fields: PyTree, mask: Any
) -> tuple[Index, dict[str, jax.Array], jax.Array | None]:
    """Return index, leaves `[B, ...]` or `[B, T, ...]`, and mask of `update_rows`."""
    check_state(call, buffer, state)
    spec = buffer.storage.spec(state.rows)[0]
    index, changed = check_index(call, index, (1, 2)), named_leaves(fields)
    if buffer.storage.ragged:
        spec = buffer.storage.changeable(call, state.rows, list(changed))
    unknown = [n for n in changed if n not in spec]
    if unknown or not changed:
        what = f"leaf '{unknown[0]}' is not in this buffer" if unknown else "no fields are given"
        fix = f"Write {{'{next(iter(spec), 'x')}': x}}."
        if unknown and (near := [n for n in spec if unknown[0].startswith(f"{n}/0")]):
            fix = f"Of a list make an array: '{near[0]}': np.asarray(x, dtype)."
        raise ValueError(f"{call}: {what} (it has: {', '.join(spec)}). {fix}")
    ends = *buffer.ends, buffer.view.rule.episode
    for name in (*ends, buffer.sampler.stamp):
        if name in changed:
            what = "ends episodes" if name in ends else f"is read by {buffer.sampler!r}"
            raise ValueError(f"{call}: leaf '{name}' {what}, and cannot change afterwards. Leave it out.")
    part = {n: spec[n] for n in changed}
    shape, window = index.slot.shape, buffer.view.rule.window
    for name, leaf in changed.items():
        if window and np.shape(leaf) == (*shape, window, *spec[name].shape):
            raise ValueError(
                f"{call}: leaf '{name}' has shape {list(np.shape(leaf))}, rows of windows, but index names anchors. Pass "
                f"the index that window_index makes of batch.index."
            )
    leaves = arguments.check_rows(
        call, changed, part, jax.tree.structure(changed), shape, ", ".join("BT"[: len(shape)])
    )
    return index, leaves, None if mask is None else arguments.check_array(call, "mask", mask, shape, "b")


def check_lanes(call: str, buffer: BufferConfig, lanes: Any) -> jax.Array | None:
    """Return bool[E] or bool[], the lanes of `cut`; None: all."""
    shape = () if buffer.lanes is None else (buffer.lanes,)
    if lanes is None:
        return None
    lanes = lanes if hasattr(lanes, "dtype") else np.asarray(lanes)
    if lanes.dtype != np.bool_:
        fix = f" Write np.isin(np.arange({buffer.lanes}), lanes)." if shape and lanes.dtype.kind in "iu" else ""
        raise TypeError(f"{call}: lanes is {lanes.dtype}{list(lanes.shape)}; expected bool{list(shape)}.{fix}")
    return arguments.check_array(call, "lanes", lanes, shape, "b")


def check_last(call: str, buffer: BufferConfig, last: Any) -> int:
    """Return the number of newest rows of each lane."""
    if not arguments.is_int(last) or not 1 <= last <= buffer.geometry.length:
        raise ValueError(f"{call}: last is {last!r}; expected an int from 1 to {buffer.geometry.length}.")
    return int(last)


def check_rows_count(call: str, n: Any) -> jax.Array:
    """Return a number of rows as int32[]; a traced one may be negative."""
    count = arguments.check_array(call, "n", n, (), "i")
    if not isinstance(n, jax.core.Tracer) and int(n) < 0:
        raise ValueError(f"{call}: n is {n}; expected rows >= 0.")
    return count.astype(jnp.int32)


# ------------------------------------------------------------------------------------------------------ draws


def check_draw(
    call: str, form: str, buffer: BufferConfig, key: Any, batch_size: int | None, options: Mapping[str, Any]
) -> tuple[int, dict[str, jax.Array]]:
    """Return batch size and options of a draw; `form` is the call with its arguments in order."""
    if isinstance(batch_size, jax.core.Tracer):
        raise TypeError(f"{call}: batch_size is traced; expected a Python int. Make it static in your jit.")
    numbers = {}
    if asked := options and {name: value for name, value in options.items() if value is not None}:
        numbers = check_numbers(call, buffer.sampler, buffer.sampler.options, asked)
    size = buffer.batch_size if batch_size is None else batch_size
    if size is None:
        raise TypeError(f"{call}: batch_size is missing. Write {form}, or Buffer(..., batch_size=256).")
    check_batch_size(call, size, f" The order is {form}.")
    arguments.check_key(call, key, "and for many keys vmap `peek`")
    return int(size), numbers


def check_batch_size(call: str, batch_size: Any, order: str = "") -> None:
    """Raise unless it is an int >= 1."""
    if not arguments.is_int(batch_size):
        raise TypeError(f"{call}: batch_size is {type(batch_size).__name__}; expected a Python int.{order}")
    if batch_size < 1:
        raise ValueError(f"{call}: batch_size is {batch_size}; expected an int >= 1.")


def check_number(call: str, name: str, value: Any, most: float = np.inf) -> None:
    """Raise unless it is one real number from 0 to `most`. Values of JAX arrays are not read."""
    expected = "a finite number >= 0" if most == np.inf else f"a number from 0 to {most:g}"
    is_array = isinstance(value, (np.ndarray, np.generic, jax.Array))
    kind = value.dtype if is_array else np.dtype(type(value) if isinstance(value, (bool, int, float)) else object)
    if not jnp.issubdtype(kind, jnp.floating) and not jnp.issubdtype(kind, jnp.integer):
        fix = "" if is_array or not hasattr(value, "__float__") else " Write float(x)."
        raise TypeError(f"{call}: {name} is {value!r}; expected {expected}.{fix}")
    if np.shape(value) != ():
        raise ValueError(f"{call}: {name} has shape {list(np.shape(value))}; expected one number. Write x[0].")
    if not isinstance(value, jax.Array) and (not 0 <= float(value) <= most or float(value) == np.inf):
        raise ValueError(f"{call}: {name} is {value!r}; expected {expected}.")


_ELSEWHERE = {
    "key": " A Replay has its key; Buffer.sample takes it as its second argument.",
    "device": " Move the batch, or use Replay.batches(..., device=device).",
}
"""Where arguments of a draw belong that are no numbers of a sampler."""


def check_numbers(
    call: str, sampler: Sampler, known: Mapping[str, Any], numbers: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Return numbers by name, as arrays of their dtype; values that are known must be finite, >= 0, and not too large."""
    checked = {}
    for name, value in numbers.items():
        if name not in known:
            hint = arguments.did_you_mean(name, known) or _ELSEWHERE.get(name, "")
            raise ValueError(
                f"{call}: {sampler!r} has no number '{name}' (it has: {', '.join(known) or 'none'}).{hint}"
            )
        check_number(call, name, value, sampler.most.get(name, np.inf))
        if np.issubdtype(known[name], np.integer):
            if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
                raise TypeError(f"{call}: {name} is {value!r}; expected an integer. Write int(x).")
            if not isinstance(value, jax.Array) and int(value) >= 2**31:
                raise ValueError(f"{call}: {name} is {value}; expected less than 2^31.")
        # JAX would share the memory of an array that the caller may change.
        checked[name] = jnp.asarray(value.copy() if isinstance(value, np.ndarray) else value, known[name])
    return checked


# ------------------------------------------------------------------------------------------------- priorities


def check_errors(
    call: str, buffer: BufferConfig, index: Any, td_error: Any, mask: Any, eta: Any
) -> tuple[Index, jax.Array, jax.Array | None, jax.Array | None]:
    """Return index, errors, mask and eta of `update_priority`; eta is None for errors in the shape of the index."""
    check_prioritized(call, buffer.sampler)
    index = check_index(call, index, (1, 2))
    check_eta(call, eta)
    window, shape = buffer.view.rule.window, np.shape(td_error)
    if index.slot.ndim == 2:
        mask = None if mask is None else arguments.check_array(call, "mask", mask, index.slot.shape, "b")
        return index, arguments.check_array(call, "td_error", td_error, index.slot.shape, "fi"), mask, None
    number = index.slot.shape[0]
    if len(shape) == 2 and shape[0] <= window and shape[0] != number == shape[1]:
        raise ValueError(
            f"{call}: td_error has shape {list(shape)}; expected {[number, shape[0]]}. Time comes second: x.swapaxes(0, 1)."
        )
    if len(shape) == 2 and 1 <= shape[1] <= window:
        shape = (number, shape[1])
        td_error = arguments.check_array(call, "td_error", td_error, shape, "fi")
        mask = jnp.ones(shape, bool) if mask is None else arguments.check_array(call, "mask", mask, shape, "b")
        return index, td_error, mask, jnp.asarray(eta, jnp.float32)
    if mask is not None or (window and len(shape) == 2):
        expected = f"[B] without mask, or [B, T] with T up to {window}" if window else "[B] without mask"
        raise ValueError(
            f"{call}: td_error has shape {list(shape)}; expected {expected}: {buffer.view!r} makes "
            f"{f'windows of {window} rows' if window else 'no windows'}."
        )
    return index, arguments.check_array(call, "td_error", td_error, index.slot.shape, "fi"), None, None


def check_prioritized(call: str, sampler: Sampler) -> None:
    """Raise unless the sampler has priorities."""
    if not sampler.prioritized:
        raise TypeError(f"{call}: {sampler!r} has no priorities. Use sampler=fbuf.samplers.Prioritized().")


def check_windows(call: str, view: View) -> None:
    """Raise unless the view makes windows."""
    if not view.rule.window:
        raise TypeError(f"{call}: {view!r} makes no windows. Use batch.index, or views.Sequence(...).")


def check_eta(call: str, eta: Any) -> None:
    """Raise unless `eta` is a number from 0 to 1, as far as its value is known."""
    if type(eta) is float and 0 <= eta <= 1 or isinstance(eta, jax.core.Tracer) and eta.shape == ():
        return
    number = isinstance(eta, (int, float, np.generic, np.ndarray, jax.Array)) and np.shape(eta) == ()
    if not number or not 0 <= float(eta) <= 1:
        raise ValueError(f"{call}: eta is {eta!r}; expected one number from 0 to 1.")


def check_rebuilds(call: str, sampler: Sampler) -> None:
    """Raise unless the sampler can apply its current numbers to old rows."""
    check_prioritized(call, sampler)
    if fix := sampler.rebuilds:
        raise TypeError(f"{call}: {sampler!r} stores powers of priorities, not the priorities themselves. Use {fix}.")


# ----------------------------------------------------------------------------------------------------- indices


_MEMBERS = ("source", "shard", "birth")
_NARROW = frozenset(np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4))
_WIDE = frozenset(map(np.dtype, ("int64", "uint64")))


def check_is_index(call: str, index: Any, *members: str) -> None:
    """Raise unless it is an index with these of `source`, `shard` and `birth`, and no others."""
    if not isinstance(index, Index):
        raise TypeError(f"{call}: index is {type(index).__name__}; expected the Index of a batch. Pass batch.index.")
    if not members and index.source is None and index.shard is None and index.birth is None:  # a loop takes 1 us
        return
    found = tuple(name for name in _MEMBERS if getattr(index, name) is not None)
    if found != members:
        fix = "mixture.route(batch.index, name)" if set(found) - set(members) == {"source"} else "batch.index"
        has, needs = (", ".join(names) or "one buffer" for names in (found, members))
        raise TypeError(f"{call}: index is an Index of {has}; expected one of {needs}. Pass {fix}.")


def check_index(call: str, index: Any, axes: tuple[int, ...] = (1,), *members: str) -> Index:
    """Return the index of a batch as int32 and uint32; it has one of the numbers of `axes`, and these `members`."""
    check_is_index(call, index, *members)
    index = narrow_index(call, index)
    slot = arguments.check_array(call, "index.slot", index.slot, np.shape(index.slot), "i")
    if slot.ndim not in axes:
        expected = " or ".join(("", "[B]", "[B, T]")[number] for number in axes)
        raise ValueError(f"{call}: index has shape {list(slot.shape)}; expected {expected}. Flatten it.")
    generation = arguments.check_array(call, "index.generation", index.generation, slot.shape, "i")
    where = {
        name: arguments.check_array(call, f"index.{name}", getattr(index, name), slot.shape, "i") for name in members
    }
    return Index(
        _narrowed(call, slot, jnp.int32),
        _narrowed(call, generation, jnp.uint32),
        **{name: _narrowed(call, leaf, jnp.int32) for name, leaf in where.items()},
    )


def check_any_index(call: str, index: Any) -> Index:
    """Return an index of any shape as arrays of at most 32 bits."""
    check_is_index(call, index)
    narrow: Index = narrow_index(call, index)
    slots, generations = np.shape(narrow.slot), np.shape(narrow.generation)
    if slots != generations:
        raise ValueError(f"{call}: index.generation has shape {list(generations)}; expected {list(slots)}.")
    return narrow


def narrow_index(call: str, index: Any) -> Any:
    """Return an index of arrays of at most 32 bits. One out of range is a ValueError in NumPy's, and no row in JAX's."""
    for name in ("slot", "generation", *_MEMBERS):
        values = getattr(index, name)
        is_plain = not hasattr(values, "filled")  # of masked arrays
        if is_plain and getattr(values, "dtype", None) in _NARROW or values is None and name in _MEMBERS:
            continue
        where = f"{call}: index.{name}"
        if isinstance(values, (list, tuple)) and any(isinstance(value, jax.Array) for value in values):
            values = jnp.asarray(values)  # NumPy takes no tracers
        if (kind := leaf_spec(values, where).dtype).kind not in "iu":
            raise TypeError(f"{where} is {kind}; expected integers. Pass batch.index, or cast with x.astype(np.int32).")
        dtype = "uint32" if name in ("generation", "birth") else "int32"
        values = values if isinstance(values, jax.Array) else np.asarray(values)
        index = dataclasses.replace(index, **{name: _narrowed(where, values, dtype)})
    return index


def _narrowed(where: str, values: Any, dtype: Any) -> Any:
    """Return integers as `dtype`. Of 64 bits, one that JAX would wrap is an error in NumPy's, and names no row in JAX's."""
    if isinstance(values, (np.ndarray, np.generic)):
        return narrow(where, "", values, dtype)
    made = values.astype(dtype)
    if values.dtype not in _WIDE:
        return made
    return jnp.where(made.astype(values.dtype) == values, made, made.dtype.type(np.iinfo(made.dtype).min))


def check_slots(call: str, index: Any) -> jax.Array:
    """Return slots int32[...] of `get`."""
    if isinstance(index, slice):
        raise TypeError(f"{call}: index is {index}; expected an Index or int32 slots. Use last or rows for ranges.")
    slots = index if isinstance(index, (np.ndarray, np.generic)) else jnp.asarray(index)
    if not jnp.issubdtype(leaf_spec(slots, f"{call}: index").dtype, jnp.integer):
        raise TypeError(f"{call}: index is {slots.dtype}; expected an Index or int32 slots. Use batch.index.")
    return jnp.asarray(_narrowed(f"{call}: index", slots, "int32"))
