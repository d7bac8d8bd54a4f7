"""A buffer in a checkpoint, plain or sharded: each shard as if saved alone, under prefixed names.

A process saves and loads its own shards. If the number of shards is the saved one, a load reads each shard as it was;
otherwise the lanes, or the rows, are distributed again (`fbuf._checkpoint.reshard`). A checkpoint of a plain buffer is one of
a single shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fbuf._buffer import prefetch, transforms
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, host_ring
from fbuf._checkpoint import compatibility, config_json, plain, reshard
from fbuf._checkpoint.parts import SavedPart, device_array
from fbuf._checkpoint.plain import Gathered
from fbuf._members import split
from fbuf.sharded import Sharded, ShardedState, _state, _write

KEYS = frozenset(("shards", "shard", "buffer", "rows", "rule", "extra", "replay"))
"""The keys of such a checkpoint's `meta`."""


def prefix(number: int) -> str:
    """Return the prefix of a shard's array names."""
    return f"shards/{number}/"


def gather(buffer: Buffer | Sharded, state: BufferState | ShardedState) -> Gathered:
    """Return sources by name, and their description for the manifest; of the shards in this process."""
    if isinstance(buffer, Sharded) and isinstance(state, ShardedState):
        return _gather_shards(buffer, state)
    assert isinstance(buffer, Buffer) and isinstance(state, BufferState)
    return plain.gather(buffer, state)


def _gather_shards(sharded: Sharded, state: ShardedState) -> Gathered:
    arrays: dict[str, Any] = {}
    common: dict[str, Any] = {}
    placed: dict[str, Any] = {}
    for number, shard in _state.states_here(sharded, state).items():
        mine, common = plain.gather(sharded.shard, shard)
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


def restore(call: str, saved: Any, target: Any, example: Any, resize: Any, verify: Any, cut: bool) -> tuple[Any, Any]:
    """Return a buffer, plain or sharded, and its state; with `cut` all lanes are."""
    has_shards = isinstance(target, Sharded) or "shards" in saved.meta
    load = _restore_shards if has_shards else plain.restore_buffer
    buffer, state = load(call, saved, target, example, resize, verify)
    fixed = isinstance(buffer, Buffer) and buffer.writer.read_only
    return buffer, buffer.cut(state) if cut and not fixed else state


def _restore_shards(call: str, saved: Any, target: Any, example: Any, resize: Any, verify: Any) -> tuple[Any, Any]:
    """Return a sharded buffer, or the whole as a plain one, and its state."""
    whole = target.buffer if isinstance(target, Sharded) else target
    match = compatibility.match(call, saved.path, saved.meta, whole, resize)
    whole, new = match.target, transforms.new_stages(match.reader, match.target)
    sources = _Sources(call, saved, whole, example, resize, verify)
    if not isinstance(target, Sharded):
        state = sources.state(0, 1)
        state = dataclasses.replace(state, ahead=prefetch.empty_prefetch(whole, state))
        return whole, transforms.refit(whole, state, static=(new,))[0] if new.remembers else state
    if whole != target.buffer:  # it was resized
        target = Sharded(whole, target.mesh, target.axis, target.draw)
    states = {}
    for number, devices in _state.numbers_here(target).items():
        with _state.making_arrays_for(devices[0]):
            states[number] = sources.state(number, target.shards)
    joined = _state.join(target, states)
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

    def __init__(self, call: str, saved: Any, whole: Buffer, example: Any, resize: Any, verify: Any):
        self._call, self._path = call, saved.path
        self._example, self._resize, self._verify = example, None if resize is None else True, verify
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
            return reshard.reshard(f"{self._call}: {self._path}", self._buffer, parts, target, moves)

    def _read(self, number: int) -> BufferState:
        part = self._saved[number]
        return plain.restore_buffer(self._call, part, self._buffer, self._example, self._resize, self._verify)[1]

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
