"""`Shard`: a `Replay` that clients of other processes write to and draw from.

It is plain Python; `RayReplay` makes it an actor whose methods run in several threads. A write and the note that its call was
applied are one step for `save`, so a checkpoint holds exactly the calls that it names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import state_ops
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index
from fbuf._formats.checkpoint import CheckpointNotFound
from fbuf._replay import Replay, ReplayClosed
from fbuf._replay.fair_lock import FairLock
from fbuf.limits import Limit
from fbuf.ray._blocks import pack, padded, rounded, unpack
from fbuf.ray._calls import Ledger, Receipt
from fbuf.ray._draws import Facts

_PATIENCE = 0.2  # seconds that a write waits for the limit before a save may run
_POLL = 0.01  # seconds
_MOST_SHARES = 64  # batches that wait for a learner of a group, which may have died
_NOBODY = -1  # writer of a lane whose last rows were refused


class Drawn(NamedTuple):
    """The answer to a draw of one batch or several."""

    birth: int
    facts: list[Facts]  # with each batch, of one shard among several
    places: list[PyTree]  # of the batches in the block; fewer than were asked for if there are no more yet
    block: Any


@functools.partial(jax.jit, static_argnums=0)
def _facts(buffer: Buffer, state: BufferState) -> jax.Array:
    eligible = state_ops.eligible_set(buffer, state)
    mass = buffer.sampler.mass(state.sampler, eligible)  # type: ignore[attr-defined]
    number = jnp.sum(eligible.available, dtype=jnp.int32)
    beta = getattr(state.sampler, "beta", 0)
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in (*mass, number, beta)])


class Shard:
    """One shard of a `RayReplay`.

    Args:
      buffer: Of this shard, with its part of the capacity and of the lanes.
      example: One row.
      shards: How many there are.
      seed, limit: As for `Replay`. The draws of one shard also wait for the first row.
      path: Folder of its checkpoints, of which the newest is loaded; None saves nothing.
      save_every: Writes after which it saves; 0: only `save`.
    """

    def __init__(
        self,
        buffer: Buffer,
        example: PyTree,
        shards: int = 1,
        seed: int = 0,
        limit: Limit | None = None,
        path: str | None = None,
        save_every: int = 0,
    ):
        self._shards, self._path, self._save_every = shards, path, save_every
        self._birth = secrets.randbits(31)  # of this incarnation
        self._lock = FairLock()
        self._sharing, self._shares = FairLock(), dict[int, list[deque[Any]]]()
        saved: dict[str, Any] = {}
        if path is not None:
            with contextlib.suppress(CheckpointNotFound):
                self._replay, saved = Replay.load(path, buffer, extra=True, cut=False, limit=limit)
                if limit is None and not self._replay._queue:
                    self._replay._limiter = None  # the saved limit is that of an earlier service
        if not saved:
            self._replay = Replay(buffer, example, seed, limit=limit)
        self._replay.expect_stale()
        self._has_row = self._replay.limit is not None  # else the first draw waits for one
        self._ledger = Ledger(saved.get("calls"))
        self._writer = saved.get("writer", np.zeros(buffer.lanes or 1, np.int64))
        self._structure: Any = jax.tree.structure(example)
        self._has_episodes = not buffer.dense
        self._numbers = {"restored": int(bool(saved)), "writes": 0, "skipped": 0, "cuts": 0}

    def extend(
        self, client: int, number: int, oldest: int, lanes: Sequence[int] | None, places: PyTree, block: Any
    ) -> Receipt:
        """Apply a write unless it is a duplicate, or follows one that is missing. Wait for the limit.

        Args:
          client, number, oldest: Name the call; see `Ledger`.
          lanes: The lanes of this shard that the rows belong to; None: the buffer has none.
          places, block: Leaves, priority and mask, or None, of rows `[N, ...]`, with lanes `[N, L, ...]`.
        Raises:
          ReplayClosed: the service was closed.
          ValueError, TypeError: the rows are refused. The call counts as applied.
        """
        leaves, priority, mask = unpack(places, block)
        rows, priority, mask = self._fit(leaves, priority, mask, lanes)
        where = slice(None) if lanes is None else list(lanes)
        while True:
            with self._lock.acquire():  # in order of arrival, so a save gets its turn
                if not self._ledger.is_next(client, number, oldest):
                    self._numbers["skipped"] += 1
                    return self._ledger.receipt(client)
                try:
                    self._cut(client, where, self._ledger.has_gap(client, number))
                    wait = None if self._replay.limit is None else _PATIENCE
                    self._replay.extend(rows, priority=priority, mask=mask, timeout=wait)
                except TimeoutError:
                    continue
                except ReplayClosed:
                    raise
                except Exception:
                    self._writer[where] = _NOBODY
                    self._ledger.finish(client, number)
                    raise
                self._ledger.finish(client, number)
                self._numbers["writes"] += 1
                if self._save_every and self._numbers["writes"] % self._save_every == 0:
                    self.save()
                return self._ledger.receipt(client)

    def _cut(self, client: int, where: Any, has_gap: bool) -> None:
        """End the episodes of lanes that another client wrote, or of which rows were lost."""
        before = self._writer[where]
        changed = (before != client) | has_gap
        if self._has_episodes and (changed & (before != 0)).any():
            ends = np.zeros(len(self._writer), bool)
            ends[where] = changed & (before != 0)
            self._replay.cut(None if self._replay.buffer.lanes is None else ends)
            self._numbers["cuts"] += 1
        self._writer[where] = client

    def _fit(self, leaves: list[Any], priority: Any, mask: Any, lanes: Sequence[int] | None) -> tuple[Any, Any, Any]:
        """Return rows of every lane, and of a number that is a power of two; the mask says which are there."""
        rows, count, every = self._structure.unflatten(leaves), len(leaves[0]), self._replay.buffer.lanes
        size, whole = rounded(count), lanes is None or list(lanes) == list(range(every or 0))
        if size == count and whole:
            return rows, priority, mask

        def fit(array: Any) -> Any:
            if whole:
                return padded(array, size)
            out = np.zeros((size, every, *array.shape[2:]), array.dtype)
            out[:count, lanes] = array
            return out

        keep = np.ones(leaves[0].shape[: 1 if lanes is None else 2], bool)
        if mask is not None:
            keep &= mask.reshape(*mask.shape, *(1,) * (keep.ndim - mask.ndim))
        return tuple(jax.tree.map(fit, (rows, priority, keep)))

    def receipt(self, client: int) -> Receipt:
        """Return which calls of a client are applied and saved."""
        with self._lock.acquire():
            return self._ledger.receipt(client)

    def update_priority(
        self, birth: Any, slot: Any, ticket: Any, td_error: Any, mask: Any = None, eta: float = 0.9
    ) -> None:
        """Set priorities of rows drawn from this incarnation; `birth`, `slot` and `ticket` are of their index."""
        buffer, size = self._replay.buffer, rounded(len(slot))
        own = np.asarray(birth) == self._birth
        slot = np.where(own, slot, buffer.capacity).astype(np.int32)
        ticket = np.where(own, ticket, 0).astype(np.uint32)
        index: Any = Index(padded(slot, size, buffer.capacity), padded(ticket, size))  # type: ignore[arg-type]
        mask = None if mask is None else padded(mask, size)
        self._replay.update_priority(index, padded(td_error, size), mask=mask, eta=eta)

    def sample(
        self,
        sizes: Sequence[int],
        options: dict[str, Any],
        updates: Sequence[tuple[Any, ...]],
        rank: int = 0,
        ranks: int = 1,
    ) -> Drawn:
        """Set the priorities of `updates`, then draw batches.

        One shard waits for its limit before the first batch, and returns those that it allows at once. One of several may
        have no rows. Learner `rank` of `ranks` gets its share of each batch.
        """
        for update in updates:
            self.update_priority(*update)
        if self._shards == 1:
            return Drawn(self._birth, [], *pack(self._draw(sizes, options, rank, ranks)))
        batches: list[Any] = []
        facts: list[Facts] = []
        for size in sizes:
            with self._replay._acquire():  # a write in between would change the mass
                facts.append(self._read_facts())
                if not facts[-1].number:
                    break
                batch = self._replay.sample(rounded(size), to="numpy")
            batches.append(jax.tree.map(lambda leaf, size=size: leaf[:size], batch))  # draws are in random order
        return Drawn(self._birth, facts, *pack(batches))

    def _draw(self, sizes: Sequence[int], options: dict[str, Any], rank: int, ranks: int) -> list[Any]:
        while not self._has_row:
            self._replay._refuse_closed("Client.sample")
            self._has_row = self._replay.can_sample()
            time.sleep(0 if self._has_row else _POLL)
        limited = self._replay.limit is not None
        batches: list[Any] = []
        for size in sizes:
            wait = 0 if batches and limited else None
            try:
                draw = functools.partial(self._replay.sample, size, to="numpy", timeout=wait, **options)
                batches.append(draw() if ranks == 1 else self._share(draw, rank, ranks))
            except (TimeoutError, ReplayClosed):
                if batches:
                    break
                raise
        return batches

    def _share(self, draw: Callable[[], Any], rank: int, ranks: int) -> Any:
        """Return the rank's share of the next batch; the first rank to ask draws it for all."""
        with self._sharing.acquire():
            shares = self._shares.setdefault(ranks, [deque(maxlen=_MOST_SHARES) for _ in range(ranks)])
            if not shares[rank]:
                batch = draw()
                for other, waiting in enumerate(shares):
                    waiting.append(jax.tree.map(lambda x, r=other: x[r::ranks] if np.ndim(x) else x, batch))
            return shares[rank].popleft()

    def facts(self) -> Facts:
        """Return what draws from all shards need to know of this one."""
        with self._replay._acquire():
            return self._read_facts()

    def _read_facts(self) -> Facts:
        self._replay._flush()  # priorities that were set
        return Facts(*np.asarray(_facts(self._replay.buffer, self._replay._state)).tolist())

    def spec(self) -> dict[str, Any]:
        """Return shapes and dtypes of the leaves of a row, by name."""
        return dict(self._replay.buffer.given_spec(self._replay.state)[0])

    def stats(self) -> dict[str, float]:
        """Return `Replay.stats`, bytes in use, and counts of calls."""
        used = {f"{where}_bytes": number for where, number in self._replay.nbytes().items()}
        return self._replay.stats() | used | self._numbers | {"pid": os.getpid()}

    def save(self) -> None:
        """Save the rows, the limit and the calls that are applied. Other calls wait."""
        with self._lock.acquire():
            self._replay.save(self._path, extra={"calls": self._ledger.arrays(), "writer": self._writer.copy()})
            self._ledger.saved()

    def close(self) -> None:
        """End waiting and later calls with `ReplayClosed`."""
        self._replay.close()
