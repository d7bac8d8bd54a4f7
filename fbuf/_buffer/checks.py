"""What `Buffer` checks: that its parts fit together, and what its verbs are given. Messages say what to write instead.

Structure, dtypes and shapes only, so all of it happens once, at trace time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.config import BufferConfig
from fbuf._core import arguments
from fbuf._core.pytree import Spec
from fbuf._core.sample import Index
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.storage import Storage
from fbuf._interfaces.view import EligibilityRule, View
from fbuf._interfaces.writer import ReadOnly, Scattering, Streaming, Writer


def check_parts(buffer: BufferConfig) -> None:
    """Raises unless storage, sampler, view and writer are parts, and fit together."""
    for role, value, protocol in (
        ("storage", buffer.storage, Storage),
        ("sampler", buffer.sampler, Sampler),
        ("view", buffer.view, View),
        ("writer", buffer.writer, Streaming if getattr(buffer.writer, "streams", True) else Scattering),
    ):
        if isinstance(value, type):
            raise TypeError(f"Buffer: {role} is the class {value.__name__}; expected a value. Write {_made(value)}.")
        if not isinstance(value, protocol):
            _refuse_other(role, value)
            missing = [m for m in _methods(protocol) if not hasattr(value, m)]
            if not missing:  # `isinstance` does not take what `__getattr__` gives, from Python 3.12 on, nor None
                raise TypeError(
                    f"Buffer: {role} is {value!r}, not all of whose methods are its class's own; expected all of "
                    f"fbuf.parts.{protocol.__name__}. Derive the class from one that has them, instead of passing calls on "
                    f"with `__getattr__`."
                )
            raise TypeError(
                f"Buffer: {role} is {value!r}, which has no `{missing[0]}`; see fbuf.parts.{protocol.__name__}."
            )
    needed = "opens" if buffer.view.rule.prompt else "decide"
    if not hasattr(buffer.view, needed):
        raise TypeError(f"Buffer: view is {buffer.view!r}, which has no `{needed}`; see fbuf.parts.View.")
    if not buffer.writer.streams:
        _check_order(buffer)
    if isinstance(buffer.writer, ReadOnly) != isinstance(buffer.storage, ReadOnly):
        raise ValueError(
            f"Buffer: storage is {buffer.storage!r} and writer {buffer.writer!r}; expected a data set and a writer of no "
            f"rows, or neither. Write Buffer(rows, storage=fbuf.storages.DataSet(path), writer=fbuf.writers.Frozen()), or "
            f"fbuf.datasets.open(path)."
        )
    if buffer.sampler.by_episode and (buffer.view.rule.crosses or not buffer.ends):
        why = "its windows cross the ends of episodes" if buffer.ends else "nothing ends an episode"
        fix = "Use boundary='stop' or 'mask'." if buffer.ends else "Name what does: Buffer(..., episode_end=('done',))."
        raise ValueError(f"Buffer: {buffer.sampler!r} goes by episodes, but with {buffer.view!r} {why}. {fix}")
    need = buffer.view.rule.rows
    if buffer.geometry.length < need:
        each = "" if buffer.lanes is None else f" a lane (capacity / lanes = {buffer.geometry.length})"
        if isinstance(buffer.writer, ReadOnly):
            raise ValueError(
                f"Buffer: {buffer.view!r} looks at {need} rows at a time, but the data set has {buffer.geometry.length}. Use a "
                f"view of fewer rows, as views.Row()."
            )
        raise ValueError(
            f"Buffer: {buffer.view!r} looks at {need} rows at a time, but there is room for {buffer.geometry.length}"
            f"{each}. Use capacity={need * buffer.geometry.lanes} or more."
        )


def _refuse_other(role: str, value: Any) -> None:
    """Raises for what is no part of anybody's making: a name, a number, a part that has another role."""
    from fbuf import samplers, storages, views, writers

    members = {"storage": storages, "sampler": samplers, "view": views, "writer": writers}
    if isinstance(value, (str, int, float)) or value is None:
        meant = [n for n in members[role].__all__ if n.lower() == str(value).lower()]
        name = meant[0] if meant else {"storage": "Device", "sampler": "Uniform", "view": "Row", "writer": "Ring"}[role]
        raise TypeError(
            f"Buffer: {role} is {value!r}; expected a part of fbuf.{role}s. "
            f"Write Buffer(..., {role}=fbuf.{role}s.{_made(getattr(members[role], name))})."
        )
    for other, protocol in (("storage", Storage), ("sampler", Sampler), ("view", View), ("writer", Writer)):
        if other != role and isinstance(value, protocol):
            raise TypeError(f"Buffer: {role} is {value!r}, a {other}; expected a {role}. Write {other}={value!r}.")


def _made(part: type) -> str:
    """How a part is written."""
    asks = dataclasses.is_dataclass(part) and any(f.default is dataclasses.MISSING for f in dataclasses.fields(part))
    return f"{part.__name__}({'...' if asks else ''})"


def _check_order(buffer: BufferConfig) -> None:
    """Refuses what needs rows in order beside a writer that keeps none."""
    needs = ""
    if buffer.view.rule != EligibilityRule():
        needs = f"{buffer.view!r} looks at neighbouring rows"
    elif buffer.sampler.by_episode:
        needs = f"{buffer.sampler!r} goes by episodes"
    elif getattr(buffer.sampler, "in_order", False):
        needs = f"{buffer.sampler!r} counts on the oldest row being replaced first"
    if needs:
        fix = "sampler=fbuf.samplers.Uniform()" if buffer.view.rule == EligibilityRule() else "view=fbuf.views.Row()"
        raise ValueError(
            f"Buffer: {needs}, but {buffer.writer!r} may replace any. Use {fix}, or writer=fbuf.writers.Ring()."
        )


def check_fields(call: str, buffer: BufferConfig, spec: Spec) -> None:
    """Rows have what the view reads, what ends episodes and what the sampler goes by."""
    buffer.view.check(spec)
    stamp = buffer.sampler.stamp
    if stamp is not None:
        if stamp not in spec:
            raise ValueError(
                f"{call}: {buffer.sampler!r} goes by leaf '{stamp}', but rows have {', '.join(spec)}. Use one of those."
            )
        dtype, shape = spec[stamp].dtype, spec[stamp].shape
        if not jnp.issubdtype(dtype, jnp.integer) or dtype in (jnp.uint32, jnp.uint64) or shape != ():
            raise TypeError(
                f"{call}: {buffer.sampler!r} goes by leaf '{stamp}', which is {dtype}{list(shape)}; expected an integer [] "
                f"a row that int32 holds. Cast with x.astype(jnp.int32)."
            )
    for name in buffer.episode_end:
        if name not in spec:
            raise ValueError(f"{call}: episode_end names '{name}', but rows have {', '.join(spec)}. Use one of those.")
        if spec[name].dtype != jnp.bool_ or spec[name].shape != ():
            raise TypeError(
                f"{call}: episode_end leaf '{name}' is {spec[name].dtype}{list(spec[name].shape)}; expected bool[] "
                f"a row. Cast with x.astype(bool)."
            )


def check_draw(
    call: str, form: str, buffer: BufferConfig, key: Any, batch_size: int | None, options: dict[str, Any]
) -> tuple[int, dict[str, jax.Array]]:
    """Batch size and options of a draw."""
    if isinstance(batch_size, jax.core.Tracer):
        raise TypeError(
            f"{call}: batch_size is traced; expected a Python int. Make it static in your jit. The order is {form}."
        )
    if batch_size is None:
        batch_size = buffer.batch_size
    if batch_size is None:
        raise TypeError(f"{call}: batch_size is given neither here nor to Buffer(batch_size=...). Write {form}.")
    check_batch_size(call, batch_size, f" The order is {form}.")
    arguments.check_key(call, key, "and for many keys vmap `peek`")
    asked = {name: value for name, value in options.items() if value is not None}
    return int(batch_size), check_numbers(call, buffer.sampler, buffer.sampler.options, asked)


def check_numbers(
    call: str, sampler: Sampler, known: Mapping[str, Any], numbers: dict[str, Any]
) -> dict[str, jax.Array]:
    """Numbers by name, as arrays of their dtype; where their values are known, finite and >= 0."""
    checked = {}
    for name, value in numbers.items():
        if name not in known:
            raise ValueError(f"{call}: {sampler!r} has no number '{name}' (it has: {', '.join(known) or 'none'}).")
        if np.shape(value) != ():
            raise ValueError(f"{call}: {name} has shape {list(np.shape(value))}; expected one number. Write x[0].")
        if not isinstance(value, (int, float, np.generic, np.ndarray, jax.Array)):
            raise TypeError(f"{call}: {name} is {value!r}; expected a number.")
        if isinstance(value, (int, float, np.generic, np.ndarray)) and not 0 <= float(value) < float("inf"):
            raise ValueError(f"{call}: {name} is {value}; expected a finite number >= 0.")
        if np.issubdtype(known[name], np.integer):
            if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
                raise TypeError(f"{call}: {name} is {value!r}; expected an integer. Write int(x).")
            if isinstance(value, (int, np.generic, np.ndarray)) and int(value) >= 2**31:
                raise ValueError(f"{call}: {name} is {value}; expected less than 2^31.")
        most = getattr(sampler, "most", {}).get(name, np.inf)
        if isinstance(value, (int, float, np.generic, np.ndarray)) and float(value) > most:
            raise ValueError(f"{call}: {name} is {value}; expected a number from 0 to {most:g}.")
        checked[name] = jnp.asarray(value, known[name])
    return checked


def check_fitting(
    call: str, sampler: Sampler, shape: tuple[int, ...], priority: Any, mask: Any
) -> tuple[jax.Array | None, jax.Array | None]:
    """Priorities and mask of new rows, if they are of the rows' leading `shape`."""
    if priority is not None:
        if not sampler.prioritized:
            raise TypeError(
                f"{call}: priority is given, but {sampler!r} has no priorities. "
                f"Use sampler=fbuf.samplers.Prioritized(), or leave it out."
            )
        priority = arguments.check_array(call, "priority", priority, shape, "fi")
    if mask is not None:
        mask = arguments.check_array(call, "mask", mask, shape, "b")
    return priority, mask


def check_eta(call: str, eta: Any) -> None:
    """Raises unless `eta` is a number from 0 to 1, as far as its value is known."""
    if isinstance(eta, jax.core.Tracer) and eta.shape == ():
        return
    if (
        not isinstance(eta, (int, float, np.generic, np.ndarray, jax.Array))
        or np.shape(eta)
        or not 0 <= float(eta) <= 1
    ):
        raise ValueError(f"{call}: eta is {eta!r}; expected one number from 0 to 1.")


def check_batch_size(call: str, batch_size: Any, order: str = "") -> None:
    """Raises unless it is an int >= 1."""
    if not isinstance(batch_size, (int, np.integer)) or isinstance(batch_size, bool):
        raise TypeError(f"{call}: batch_size is {type(batch_size).__name__}; expected a Python int.{order}")
    if batch_size < 1:
        raise ValueError(f"{call}: batch_size is {batch_size}; expected an int >= 1.")


def _methods(protocol: Any) -> list[str]:
    return [m for m in vars(protocol) if not m.startswith("_")]


def check_own(call: str, index: Any) -> None:
    """Refuses the index of a mixture's batch, whose rows are of several buffers."""
    if not isinstance(index, Index) and all(hasattr(index, field) for field in ("source", "slot", "ticket")):
        raise TypeError(
            f"{call}: index is {type(index).__name__}, of rows of several buffers; expected an Index of this one. Write "
            f"mixture.route(batch.index, name), or call the mixture's own verb."
        )


def check_is_index(call: str, index: Any) -> None:
    """Raises unless it is the index of a batch."""
    check_own(call, index)
    if not isinstance(index, Index):
        raise TypeError(
            f"{call}: index is {type(index).__name__}; expected the Index of a batch, which tells stale rows from live "
            f"ones. Pass batch.index."
        )


def check_index(call: str, index: Any) -> Index:
    """The index of a batch, of one axis, with the dtypes it has to have."""
    check_is_index(call, index)
    slot = arguments.check_array(call, "index.slot", index.slot, np.shape(index.slot), "i")
    if slot.ndim != 1:
        raise ValueError(f"{call}: index has shape {list(slot.shape)}; expected [B]. Flatten it with x.reshape(-1).")
    ticket = arguments.check_array(call, "index.ticket", index.ticket, slot.shape, "i")
    return Index(slot.astype(jnp.int32), ticket.astype(jnp.uint32))
