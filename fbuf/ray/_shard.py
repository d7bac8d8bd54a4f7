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
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import checks
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, anchor_set
from fbuf._concurrency.fair_lock import FairLock
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index
from fbuf._core.slots import sum_of_lanes
from fbuf._formats.checkpoint import CheckpointNotFound
from fbuf._host.io.lock import NO_LOCKS, FileLock, lock_path
from fbuf._replay import Replay, ReplayClosed
from fbuf._replay.limiter import LimitTimeout
from fbuf._rows.columns import padded
from fbuf.limits import Limit
from fbuf.ray import _draws
from fbuf.ray._blocks import pack, rounded, unpack
from fbuf.ray._calls import Ledger, Receipt
from fbuf.ray._draws import Facts

_PATIENCE = 0.1  # seconds that a write, or one learner of a group, waits for a limit while others wait
_POLL = 0.01  # seconds
ENDING = 5.0
"""Seconds that a process that held the folder may take to end."""
_MOST_PLANS, _MOST_SHARES = 64, 8  # that wait for a learner of a group, which may have died; shares are drawn again
_NO_WRITER = -1  # of a lane whose last rows were refused


class Plan(NamedTuple):
    """How to draw batches that the learners of a group share."""

    name: tuple[int, int]
    counts: Any  # int64[n, K], rows of each shard
    used: Any  # float64[K], shares that decided them


class Drawn(NamedTuple):
    """The answer to a draw of one batch or several."""

    birth: int
    facts: list[Facts]  # with each batch, of one shard among several
    # Of the batches in the block, None without rows; fewer than asked for if there are no more yet.
    places: list[PyTree]
    block: Any


@functools.partial(jax.jit, static_argnums=0)
def _facts(buffer: Buffer, state: BufferState) -> jax.Array:
    anchors = anchor_set(buffer, state)
    mass = buffer.sampler.mass(state.sampler, anchors)
    number = sum_of_lanes(anchors.counts)
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
        self._lock, self._saving = FairLock(), FairLock()
        self._rng, self._plans = np.random.default_rng(seed), dict[Any, list[deque[Plan]]]()
        self._shares: dict[Any, list[Any]] = {}  # by plan
        self._folder = None if path is None else _locked(path)
        self._is_closed = path is None  # for saves
        try:
            self._replay, saved = self._opened(buffer, example, seed, limit)
        except BaseException:
            if self._folder is not None:
                self._folder.release()
            raise
        self._replay._expect_stale()
        self._has_row = self._replay.limit is not None  # else the first draw waits for one
        self._ledger = Ledger(saved.get("calls"))
        self._writer = saved.get("writer", np.zeros(buffer.lanes or 1, np.int64))
        self._structure: Any = jax.tree.structure(example)
        self._has_episodes = not buffer.dense
        self._numbers = {"restored": int(bool(saved)), "writes": 0, "skipped": 0, "cuts": 0, "plans": 0}

    def _opened(self, buffer: Buffer, example: PyTree, seed: int, limit: Limit | None) -> tuple[Replay, dict[str, Any]]:
        """Return the `Replay` of the newest checkpoint and what was saved with it, or a new one."""
        if self._path is not None:
            with contextlib.suppress(CheckpointNotFound):
                replay, saved = Replay.load(self._path, buffer, extra=True, cut=False, limit=limit)
                if limit is None and not replay._engine.is_queue:
                    replay._limiter = None  # the saved limit is that of an earlier service
                return replay, saved
        return Replay(buffer, example, seed, limit=limit), {}

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
                except LimitTimeout:
                    continue
                except ReplayClosed:
                    raise
                except Exception:
                    self._writer[where] = _NO_WRITER
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
        self, birth: Any, slot: Any, generation: Any, td_error: Any, mask: Any = None, eta: float = 0.9
    ) -> None:
        """Set priorities of rows drawn from this incarnation; `birth`, `slot` and `generation` are of their index."""
        buffer, size = self._replay.buffer, rounded(len(slot))
        is_current = np.asarray(birth) == self._birth
        slot = np.where(is_current, slot, buffer.capacity).astype(np.int32)
        generation = np.where(is_current, generation, 0).astype(np.uint32)
        index: Any = Index(padded(slot, size, buffer.capacity), padded(generation, size))  # type: ignore[arg-type]
        mask = None if mask is None else padded(mask, size)
        self._replay.update_priority(index, padded(td_error, size), mask=mask, eta=eta)

    def plan(self, rank: int, ranks: int, used: Any, batch_size: int, number: int, group: str = "") -> Plan:
        """Return how the learner of a group draws its next batches: as the first of the group to ask."""
        known = group, ranks, batch_size, number
        queues = self._plans.setdefault(known, [deque(maxlen=_MOST_PLANS) for _ in range(ranks)])
        if not queues[rank]:
            self._numbers["plans"] += 1
            counts = np.stack([_draws.counts(used, batch_size, self._rng.random()) for _ in range(number)])
            for queue in queues:
                queue.append(Plan((self._birth, self._numbers["plans"]), counts, used))
        return queues[rank].popleft()

    def sample(
        self,
        wanted: Sequence[int] | Plan,
        options: dict[str, Any],
        updates: Sequence[tuple[Any, ...]],
        share: tuple[int, int, int] = (0, 0, 1),
    ) -> Drawn:
        """Set the priorities of `updates`, then draw batches.

        One shard waits for its limit before the first batch, and returns those that it allows at once. One of several may
        have no rows.

        Args:
          wanted: The size of each batch; or the plan of a group, whose learners get their rows of one draw.
          share: The number of this shard, the rank of the learner, and the number of learners.
        """
        for update in updates:
            self.update_priority(*update)
        facts, batches = (
            self._share(wanted, options, *share) if isinstance(wanted, Plan) else self._draw(wanted, options)
        )
        return Drawn(self._birth, facts, *pack(batches))

    def _share(self, plan: Plan, options: dict[str, Any], shard: int, rank: int, ranks: int) -> Any:
        """Return the rank's share of what was drawn for the first rank to ask."""
        name = plan.name
        if self._shares.get(name, {rank: None})[rank] is None:  # or its reply was lost
            sizes = plan.counts[:, shard].tolist()
            try:
                facts, batches = self._draw(sizes, options, _PATIENCE)
            except LimitTimeout:  # the limit does not allow it yet; the learner asks again
                return [], []
            first = plan.counts.cumsum(axis=1)[:, shard] - sizes  # of the rows of each batch
            self._shares[name] = [
                (
                    facts,
                    [_take_rows(batch, (other - at) % ranks, ranks) for batch, at in zip(batches, first, strict=False)],
                )
                for other in range(ranks)
            ]
            while len(self._shares) > _MOST_SHARES:
                del self._shares[next(iter(self._shares))]
        shares = self._shares[name]
        share, shares[rank] = shares[rank], None
        if not any(shares):
            del self._shares[name]
        return share

    def _draw(
        self, sizes: Sequence[int], options: dict[str, Any], patience: float | None = None
    ) -> tuple[list[Facts], list[Any]]:
        batches: list[Any] = []
        if self._shards == 1:
            self._wait_for_row()
            limited = self._replay.limit is not None
            for size in sizes:
                try:
                    timeout = (0 if batches else patience) if limited else None
                    batches.append(self._replay.sample(size, to="numpy", timeout=timeout, **options))
                except (LimitTimeout, ReplayClosed):
                    if batches:
                        break
                    raise
            return [], batches
        facts: list[Facts] = []
        for size in sizes:
            with self._replay._acquire():  # a write in between would change the mass
                facts.append(self._read_facts())
                if size and not facts[-1].number:
                    break
                batch: Any = self._replay.sample(rounded(size), to="numpy") if size else None
            batch = _take_rows(batch, 0, 1, size)  # draws are in random order
            if size:
                rarest = np.min(batch.probability, where=batch.probability > 0, initial=np.inf)
                facts[-1] = facts[-1]._replace(rarest=float(rarest))
            batches.append(batch)
        return facts, batches

    def _wait_for_row(self) -> None:
        while not self._has_row:
            self._replay._refuse_closed("Client.sample")
            self._has_row = self._replay.can_sample()
            time.sleep(0 if self._has_row else _POLL)

    def facts(self) -> Facts:
        """Return what draws from all shards need to know of this one."""
        with self._replay._acquire():
            return self._read_facts()

    def _read_facts(self) -> Facts:
        self._replay._engine.flush()  # priorities that were set
        return Facts(*np.asarray(_facts(self._replay.buffer, self._replay._engine.state)).tolist())

    def spec(self) -> dict[str, Any]:
        """Return shapes and dtypes of the leaves of a row, by name."""
        return dict(checks.given_spec(self._replay.buffer, self._replay.state)[0])

    def stats(self) -> dict[str, float]:
        """Return `Replay.stats`, the process, and counts of calls."""
        return self._replay.stats() | self._numbers | {"pid": os.getpid()}

    def save(self) -> None:
        """Save the rows, the limit and the calls that are applied. Other calls wait while what changed is copied."""
        with self._saving.acquire():
            if self._is_closed:
                raise ReplayClosed("RayReplay.save: the service was closed.")
            with self._lock.acquire():
                calls = self._ledger.arrays()
                extra = {"calls": calls, "writer": self._writer.copy()}
                saving = self._replay.save(self._path, extra=extra, wait=False)
            saving.result()
            self._ledger.saved(calls)

    def close(self) -> None:
        """End waiting and later calls with `ReplayClosed`. Another service may use the folder."""
        self._replay.close()
        with self._saving.acquire():  # a save under way ends first
            self._is_closed = True
            if self._folder is not None:
                self._folder.release()
                self._folder = None


def _take_rows(batch: Any, first: int, step: int, stop: int | None = None) -> Any:
    """Return some rows of a batch."""
    return jax.tree.map(lambda leaf: leaf[first:stop:step] if np.ndim(leaf) else leaf, batch)


def _locked(path: str) -> FileLock | None:
    """Return a lock that keeps other services out of a folder. Wait for one that is ending.

    Raises:
      BlockingIOError: another service uses it.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    until = time.monotonic() + ENDING
    while True:
        try:
            return lock_path(f"RayReplay: {path}", f"{path}.lock", "Close that service, or use another path.")
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_POLL)
        except OSError as error:  # this file system has no locks, of which saves warn
            if error.errno not in NO_LOCKS:
                raise
            return None
