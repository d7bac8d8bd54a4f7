"""A sharded buffer in a checkpoint: each shard as if saved alone, under prefixed names.

A process saves and loads its own shards. If the number of shards is the saved one, a load reads each shard as it was;
otherwise the lanes, or the rows, are distributed again (`fbuf._checkpoint.reshard`). A checkpoint of a plain buffer is one of
a single shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fbuf._buffer import prefetch, transforms
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, host_ring
from fbuf._checkpoint import compatibility, config_json, reshard
from fbuf._checkpoint.parts import SavedPart, device_array
from fbuf._formats import checkpoint
from fbuf._members import split
from fbuf.sharded import Sharded, ShardedState, _split, _write

KEYS = frozenset(("shards", "shard", "buffer", "rows", "rule", "extra", "replay"))
"""The keys of such a checkpoint's `meta`."""
Gathered = tuple[dict[str, Any], dict[str, Any]]
Load = Callable[..., tuple[Buffer, BufferState]]


def prefix(number: int) -> str:
    """Return the prefix of a shard's array names."""
    return f"shards/{number}/"


def gather(sharded: Sharded, state: ShardedState, of_buffer: Callable[[Buffer, BufferState], Gathered]) -> Gathered:
    """Return sources by name, and their description for the manifest, of the shards in this process."""
    arrays: dict[str, Any] = {}
    common: dict[str, Any] = {}
    placed: dict[str, Any] = {}
    for number, own in _split.states_here(sharded, state).items():
        mine, common = of_buffer(sharded.shard, own)
        arrays |= {prefix(number) + key: value for key, value in mine.items()}
        placed[str(number)] = common.pop("placed")
    about = {"number": sharded.shards, "axis": sharded.axis, "draw": sharded.draw, "placed": placed}
    if common:
        common["shard"] = common.pop("buffer")
    return arrays, common | {"buffer": config_json.to_json(sharded.buffer), "shards": about}


def join_meta(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one description of the shards of all processes, of which some may have none; the rest is the first one's."""
    joined = {name: value for part in reversed(parts) for name, value in part.items()}
    if "mixture" in joined:
        return joined | {"buffers": [join_meta(each) for each in zip(*(p["buffers"] for p in parts), strict=True)]}
    placed = {number: each for part in parts for number, each in part["shards"]["placed"].items()}
    return joined | {"shards": joined["shards"] | {"placed": placed}}


def restore(
    call: str, saved: checkpoint.Saved, target: Any, example: Any, resize: Any, of_buffer: Load
) -> tuple[Any, Any]:
    """Return a sharded buffer, or a plain one, and its state; `of_buffer(part, buffer, example, resize)` loads a shard."""
    whole = target.buffer if isinstance(target, Sharded) else target
    match = compatibility.match(call, saved.path, saved.meta, whole, resize)
    whole, new = match.target, transforms.new_stages(match.reader, match.target)
    sources = _Sources(call, saved, whole, example, resize, of_buffer)
    if not isinstance(target, Sharded):
        state = sources.state(0, 1)
        state = dataclasses.replace(state, ahead=prefetch.empty_prefetch(whole, state))
        return whole, transforms.refit(whole, state, static=(new,))[0] if new.remembers else state
    if whole != target.buffer:  # it was resized
        target = Sharded(whole, target.mesh, target.axis, target.draw)
    states = {}
    for number, devices in _split.numbers_here(target).items():
        with _split.making_arrays_for(devices[0]):
            states[number] = sources.state(number, target.shards)
    joined = _split.join(target, states)
    return target, _write.refit(target, joined, static=(new,))[0] if new.remembers else joined


def parts(saved: Any) -> list[Any]:
    """Return the saved shards, each as if it had been saved alone; of a plain buffer itself."""
    meta, about = saved.meta, saved.meta.get("shards")
    if about is None:
        return [saved]
    common = {name: meta[name] for name in ("rows", "given", "rule")} | {"buffer": meta["shard"]}
    placed = about["placed"]
    return [SavedPart(saved, prefix(n), common | {"placed": placed[str(n)]}) for n in range(int(about["number"]))]


class _Sources:
    """The saved shards, read as far as they are needed."""

    def __init__(self, call: str, saved: checkpoint.Saved, whole: Buffer, example: Any, resize: Any, of_buffer: Load):
        self._call = f"{call}: {saved.path}"
        self._of_buffer, self._example, self._resize = of_buffer, example, None if resize is None else True
        about = saved.meta.get("shards", {})
        self._saved = parts(saved)
        self.number = len(self._saved)
        split.check_multiple(call, "capacity", whole.capacity, self.number, f" of axis '{about.get('axis', '')}'")
        self._whole = dataclasses.replace(whole, prefetch=0, batch_size=None)
        self._buffer = split.member_of(self._whole, self.number)
        self._states: dict[int, BufferState] = {}

    def state(self, number: int, shards: int) -> BufferState:
        """Return the state of one of so many shards."""
        if shards == self.number:
            return self._read(number)
        first, stop = number * self.number // shards, -(-(number + 1) * self.number // shards)
        with _near():
            self._states = {n: self._states[n] if n in self._states else self._read(n) for n in range(first, stop)}
            target = split.member_of(self._whole, shards)
            parts = list(self._states.values())
            moves = reshard.Moves(first, self.number, number, shards, *self._numbers())
            return reshard.reshard(self._call, self._buffer, parts, target, moves)

    def _read(self, number: int) -> BufferState:
        return self._of_buffer(self._saved[number], self._buffer, self._example, self._resize)[1]

    def _numbers(self) -> tuple[int, int]:
        """Return the latest lap of all lanes, and the most epochs begun of all shards."""
        laps = [int(host_ring(device_array(part, "state/header"))[2].max()) for part in self._saved]
        epoch = "state/sampler/turn/begun"
        begun = [int(device_array(part, epoch)) for part in self._saved if epoch in part.arrays]
        return max(laps), max(begun, default=0)


def _near() -> contextlib.AbstractContextManager[Any]:
    """Make arrays on the host, if JAX has its CPUs: shards are read one after another, and may be larger than a device."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()
