"""`Client`: what actors and learners hold of a `RayReplay`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.checks import check_eta, check_is_index, check_prioritized, narrow_index
from fbuf._core.arguments import DrawOptions, check_int, check_kind, check_rows
from fbuf._core.pytree import PyTree, named_leaves, narrow
from fbuf._core.sample import Index, Sample
from fbuf._core.text_table import counted
from fbuf._replay import ReplayClosed
from fbuf._replay.arguments import Form, check_form, to_array, to_rows
from fbuf._replay.outside_jit import refuse_trace
from fbuf.ray import _draws
from fbuf.ray._batch import of_shard, placed
from fbuf.ray._blocks import pack, unpack
from fbuf.ray._calls import Away, Outbox
from fbuf.ray._draws import Facts
from fbuf.ray._shard import Drawn, Plan

_FIRST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds between calls to a shard that restarts
_PREFETCH, _AHEAD = 23, 8 << 20  # batches that are drawn ahead by default, and the bytes that they may have


class Settings(NamedTuple):
    """What a client is made of. Picklable."""

    link: Any  # `RayLink`
    buffer: Buffer  # of the whole
    shards: int
    example: PyTree
    spec: dict[str, Any]  # of a row
    lanes: tuple[int, ...] | None  # that it writes
    in_flight: int
    timeout: float
    durable: bool
    group: tuple[int, int]  # rank and number of learners that share each batch
    group_name: str = ""


class _Request(NamedTuple):
    """Batches that are being drawn."""

    size: int
    options: dict[str, Any]
    plan: Any  # `Plan`; of a group a reference to it
    call: tuple[Any, ...]  # of a group, what was asked for
    parts: list[tuple[int, Any]]  # shard, reference


class Client:
    """Write to a `RayReplay` and draw from it; `RayReplay.client` returns one.

    It pickles: a copy in another process or thread is another client. Use one per thread. It needs no closing.

    Calls return before they are applied, except those that return rows. A call that a shard refuses raises in a later call
    of this client, at the latest in `flush`.
    """

    def __init__(self, settings: Settings):
        self._settings, self._link = settings, settings.link
        self._id = secrets.randbits(62) + 1
        self._rng = np.random.default_rng()
        self._boxes = [self._outbox(shard) for shard in range(settings.shards)]
        self._turn = int(self._rng.integers(settings.shards))
        self._known: set[Any] = set()  # structures and shapes of checked rows
        self._structure: Any = jax.tree.structure(settings.example)
        self._updates: list[list[Any]] = [[] for _ in self._boxes]  # wait for the next draw
        self._most_waiting = 1  # of them
        self._updating: deque[Any] = deque()  # references
        self._facts = [_draws.NONE] * settings.shards
        self._probes: dict[int, Any] = {}  # references to facts, by shard

    def __reduce__(self) -> Any:
        return Client, (self._settings,)

    def __repr__(self) -> str:
        kept = sum(box.kept for box in self._boxes)
        return f"Client({self._settings.buffer!r}, shards={self._settings.shards}, {counted(kept, 'call')} kept)"

    # ---------------------------------------------------------------------------------------------------------- writes

    def extend(self, rows: PyTree, *, priority: Any = None, mask: Any = None) -> None:
        """Add rows in order of time; see `Buffer.extend`. Return when fewer than `in_flight` calls are not yet applied.

        Without lanes each call goes to the next shard in turn. Rows are copied before it returns. A shard compiles once
        for each power of two of N.

        Args:
          rows: Leaves `[N, ...]`; of a buffer with lanes `[N, L, ...]` for the L lanes of this client.
          priority: As for `Buffer.extend`, `[N]` or `[N, L]`.
          mask: bool, of the same shape: which rows to add.
        Raises:
          ValueError, TypeError: the rows are not like the example; a priority is not finite; a shard refused an earlier call.
          TimeoutError: a shard did not answer for `timeout` seconds.
          fbuf.ReplayClosed: the service was closed.
        No row is added if it raises; the call can be repeated.

        Example:
          >>> client = replay.client()
          >>> client.extend({"obs": np.ones((5, 3), np.float32)}, priority=np.ones(5))
        """
        refuse_trace("extend", rows, priority, mask, owner="Client")
        leaves, priority, mask = self._checked(rows, priority, mask)
        routes = self._routes(len(leaves[0]))
        for shard, _, _ in routes:  # may raise: before any row is sent, so that the caller can repeat the call
            self._await_receipts(shard, self._settings.in_flight - 1)
        for shard, shard_lanes, columns in routes:
            part: Any = (leaves, priority, mask)
            if columns is not None:
                part = [x[:, columns] for x in leaves], *(x if np.ndim(x) < 2 else x[:, columns] for x in part[1:])
            self._boxes[shard].post((shard_lanes, *pack(part)))

    def _checked(self, rows: PyTree, priority: Any, mask: Any) -> tuple[list[Any], Any, Any]:
        """Return leaves, priority and mask as NumPy arrays."""
        call, lanes, spec = "Client.extend", self._settings.lanes, self._settings.spec
        leading, axes = ((None,), "N") if lanes is None else ((None, len(lanes)), "N, E")
        rows = jax.tree.map(np.asanyarray, to_rows(rows))  # masked arrays reach the check
        kind = (jax.tree.structure(rows), *((type(leaf), leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(rows)))
        if kind not in self._known:
            check = functools.partial(check_rows, call, rows, spec, self._structure, leading, axes)
            jax.eval_shape(check)  # compiles nothing
            self._known.add(kind)
        named = named_leaves(rows).items()
        leaves = [narrow(f"{call}: leaf '{name}'", name, leaf, spec[name].dtype) for name, leaf in named]
        shapes = leaves[0].shape[:1], leaves[0].shape[: len(leading)]
        priority, mask = _numbers(call, "priority", priority, "fi"), _numbers(call, "mask", mask, "b")
        for name, value, known in (("priority", priority, shapes[1:]), ("mask", mask, shapes)):
            if value is not None and value.shape not in known:
                raise ValueError(f"{call}: {name} has shape {list(value.shape)}; expected {list(shapes[1])}.")
        if priority is not None:
            check_prioritized(call, self._settings.buffer.sampler)
            added = True if mask is None else mask.reshape(*mask.shape, *(1,) * (priority.ndim - mask.ndim))
            bad = int((~np.isfinite(priority) & added).sum())
            if bad:
                raise ValueError(
                    f"{call}: priority has {counted(bad, 'value')} that are not finite; no row was added. Check the loss, or "
                    f"write np.nan_to_num(np.float32(priority))."
                )
        return leaves, priority, mask

    def _routes(self, rows: int) -> list[tuple[int, Any, Any]]:
        """Return for each shard that a write concerns: its number, its lanes, and their columns in the rows."""
        shards, lanes = self._settings.shards, self._settings.lanes
        if not rows:
            return []
        if lanes is None:
            self._turn = (self._turn + 1) % shards
            return [(self._turn, None, None)]
        each = (self._settings.buffer.lanes or 1) // shards
        routes = []
        for shard in dict.fromkeys(lane // each for lane in lanes):
            columns = [i for i, lane in enumerate(lanes) if lane // each == shard]
            local = [lanes[i] % each for i in columns]
            routes.append((shard, local, None if len(local) == len(lanes) else columns))
        return routes

    def _outbox(self, shard: int) -> Outbox:
        def send(number: int, oldest: int, payload: Any) -> Any:
            return self._link.call(shard, "extend", self._id, number, oldest, *payload)

        return Outbox(send, self._settings.in_flight, self._settings.durable)

    def _await_receipts(self, shard: int, most: int) -> None:
        """Wait until at most `most` calls have no receipt."""
        box = self._boxes[shard]
        while len(box) > most:
            box.pump()
            self._again(shard, functools.partial(box.receive, self._link.result), box.resend)

    def _again(self, shard: int, wait: Callable[[], Any], retry: Callable[[], Any]) -> Any:
        """Return the result of `wait`; while the shard is away, call `retry` and wait again."""
        pause, until = _FIRST_WAIT, time.monotonic() + self._settings.timeout
        while True:
            try:
                return wait()
            except Away as error:
                if time.monotonic() + pause > until:
                    raise TimeoutError(
                        f"Client: shard {shard} was away for {self._settings.timeout:g} s. Raise timeout, or see Ray's logs."
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT)
            retry()

    def _ask(self, shard: int, method: str, *args: Any, reference: Any = None) -> Any:
        """Return the result of a call that can be repeated."""
        references = [self._link.call(shard, method, *args) if reference is None else reference]
        return self._again(
            shard,
            lambda: self._link.result(references[0]),
            lambda: references.__setitem__(0, self._link.call(shard, method, *args)),
        )

    def flush(self) -> None:
        """Wait until every call is applied; with `durable`, until its rows are in a checkpoint.

        Raises:
          ValueError, TypeError: a shard refused an earlier call.
          TimeoutError: a shard did not answer for `timeout` seconds.

        Example:
          >>> client = replay.client()
          >>> client.extend({"obs": np.ones((5, 3), np.float32)})
          >>> client.flush()
        """
        refuse_trace("flush", owner="Client")
        for shard, box in enumerate(self._boxes):
            self._await_receipts(shard, 0)
            while self._settings.durable and box.kept:
                self._ask(shard, "save")
                box.note(self._ask(shard, "receipt", self._id))
                self._await_receipts(shard, 0)
            self._send_updates(shard)
        self._finish_updates(0)

    # ------------------------------------------------------------------------------------------------------ priorities

    def update_priority(self, index: Index, td_error: Any, *, mask: Any = None, eta: float = 0.9) -> None:
        """Set priorities from TD errors; see `Buffer.update_priority`. Arrays may be JAX, numpy or torch.

        They are sent with the next draw of this client, at the latest by `flush`. Updates of rows that were overwritten since,
        or lost by a restart, have no effect.

        Args:
          index: Of a batch, or any selection of its entries.
          td_error: float[B], or `[B, T]` for windows.
        Raises:
          ValueError: a TD error is not finite; the others are set.

        Example:
          >>> client = replay.client()
          >>> batch = client.sample(4, to="numpy")
          >>> client.update_priority(batch.index, np.ones(4, np.float32))
        """
        refuse_trace("update_priority", index, td_error, mask, owner="Client")
        call = "Client.update_priority"
        check_eta(call, eta)
        check_prioritized(call, self._settings.buffer.sampler)
        check_is_index(call, index, "shard", "birth")
        names = ("shard", "birth", "slot", "generation")
        parts = {name: to_array(getattr(index, name), f"index.{name}") for name in names}
        index = narrow_index(call, Index(**parts))
        shard, birth, slot, generation = (np.asarray(getattr(index, name)) for name in names)
        for name in names:
            if np.shape(getattr(index, name)) != slot.shape:
                found = list(np.shape(getattr(index, name)))
                raise ValueError(f"{call}: index.{name} has shape {found}; expected {list(slot.shape)}.")
        td_error = np.asarray(check_kind(call, "td_error", to_array(td_error, "td_error"), "fi"))
        mask = _numbers(call, "mask", mask, "b")
        if slot.ndim != 1 or td_error.shape[:1] != slot.shape:
            shapes = f"index has shape {list(slot.shape)}, td_error {list(td_error.shape)}"
            raise ValueError(f"{call}: {shapes}; expected [B], and [B] or [B, T].")
        if mask is not None and mask.shape != td_error.shape:
            raise ValueError(f"{call}: mask has shape {list(mask.shape)}; expected {list(td_error.shape)}.")
        bad = ~np.isfinite(td_error) if mask is None else ~np.isfinite(td_error) & mask
        bad = bad.reshape(len(slot), -1).any(axis=1) & (shard < len(self._boxes))
        for number in range(len(self._boxes)):
            chosen = (shard == number) & ~bad
            if chosen.any():
                if len(self._updates[number]) >= self._most_waiting:
                    self._send_updates(number)
                arrays = (birth, slot, generation, td_error, mask)
                self._updates[number].append((*(None if x is None else x[chosen] for x in arrays), eta))  # copies
        if bad.any():
            raise ValueError(
                f"{call}: {counted(int(bad.sum()), 'TD error')} of {len(bad)} not finite; the others are set. Check the loss."
            )

    def _send_updates(self, shard: int) -> None:
        for update in self._updates[shard]:
            self._finish_updates(self._settings.in_flight - 1)
            self._updating.append(self._link.call(shard, "update_priority", *update))
        self._updates[shard].clear()

    def _finish_updates(self, most: int) -> None:
        """Wait until at most `most` updates are under way. A shard that restarts has lost the rows of its updates."""
        while len(self._updating) > most:
            with contextlib.suppress(Away):
                self._link.result(self._updating.popleft())

    # ----------------------------------------------------------------------------------------------------------- draws

    def sample(self, batch_size: int | None = None, *, to: Form = "jax", **options: Unpack[DrawOptions]) -> Sample:
        """Draw a batch from all shards; see `Buffer.sample`. Wait until a row can be sampled, and the limit allows it.

        Args:
          batch_size: B; None uses the buffer's. A learner of a group gets B / `ranks` rows.
          to: Arrays in the batch: "jax", "numpy" (read-only) or "torch" (do not write to them).
          **options: As for `Buffer.sample`: `beta=0.6`; with several shards only that.
        Raises:
          TimeoutError: a shard, of several all, were away for `timeout` seconds.
          fbuf.ReplayClosed: the service was closed.
        Cost: one call. A batch of one shard is not copied in this process.

        Example:
          >>> batch = replay.client().sample(4, beta=0.6)
          >>> batch.data["obs"].shape, batch.weight.shape
          ((4, 3), (4,))
        """
        refuse_trace("sample", batch_size, options, owner="Client")
        check_form("Client.sample", to)
        return placed(self._collect(self._request(batch_size, 1, dict(options)))[0], to)

    def batches(
        self,
        batch_size: int | None = None,
        *,
        prefetch: int | None = None,
        to: Form = "jax",
        device: Any = None,
        **options: Unpack[DrawOptions],
    ) -> Iterator[Sample]:
        """Yield batches, and draw up to `prefetch` more while the caller uses one. End when the service is closed.

        One call draws a third of them, and costs about as much as drawing a few batches. Priorities set in the meantime do not
        affect batches that are being drawn.

        Args:
          batch_size, to: As for `sample`.
          prefetch: Batches drawn ahead; >= 1. They are dropped when the loop ends, though a limit counts them. None: 23, of
            large batches fewer, down to 2.
          device: A `jax.Device` or `jax.sharding.Sharding` for the arrays, of `to="jax"`; the index stays on the host. If the
            sharding spans processes, the shares of a group of learners become one global array.
          **options: For every draw, as for `sample`.

        Example:
          >>> for step, batch in zip(range(3), replay.client().batches(4, to="numpy")):
          ...     pass  # learn
          >>> batch.data["obs"].shape
          (4, 3)
        """
        refuse_trace("batches", options, owner="Client")
        check_form("Client.batches", to, device)
        if prefetch is not None:
            check_int("Client.batches", "prefetch", prefetch)
        return self._batches(batch_size, prefetch, to, device, dict(options))

    def _batches(
        self, batch_size: int | None, prefetch: int | None, to: str, device: Any, options: dict[str, Any]
    ) -> Iterator[Sample]:
        with contextlib.suppress(ReplayClosed):
            if prefetch is None:
                (first,) = self._collect(self._request(batch_size, 1, options))
                used = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
                yield placed(first, to, device)
                prefetch = max(2, min(_PREFETCH, _AHEAD // used))
            each = (prefetch + 1) // 3 or 1  # batches of one call
            self._most_waiting = max(self._most_waiting, each)
            ahead = deque(self._request(batch_size, each, options) for _ in range((prefetch - each + 1) // each))
            while True:
                ready = self._collect(ahead.popleft())
                ahead.append(self._request(batch_size, each, options))
                for batch in ready:
                    yield placed(batch, to, device)

    def _request(self, batch_size: int | None, number: int, options: dict[str, Any]) -> _Request:
        """Start drawing `number` batches: of one shard, of several by their masses, or by the plan of a group."""
        size: Any = self._settings.buffer.batch_size if batch_size is None else batch_size
        shards, (rank, ranks) = self._settings.shards, self._settings.group
        check_int("Client.sample", "batch_size", size)
        if size % ranks:
            raise ValueError(f"Client.sample: batch_size is {size}; expected a multiple of the {ranks} ranks.")
        if shards > 1 and options.keys() - {"beta"}:
            raise ValueError(f"Client.sample: got {sorted(options)}; expected beta only. Use shards=1.")
        used = _draws.shares(self._known_facts()) if shards > 1 else np.ones(1)
        if ranks > 1:
            call = rank, ranks, used, size, number, self._settings.group_name
            plan = self._link.call(0, "plan", *call)
            return _Request(size, options, plan, call, [self._draw(shard, plan, options) for shard in range(shards)])
        counts = np.stack([_draws.counts(used, size, self._rng.random()) for _ in range(number)])
        parts = []
        for shard, quota in enumerate(counts.T.tolist()):
            if any(quota):
                parts.append(self._draw(shard, quota, options))
            else:  # its mass may have grown
                self._probe(shard)
        return _Request(size, options, Plan((0, 0), counts, used), (), parts)

    def _draw(self, shard: int, wanted: Any, options: dict[str, Any]) -> tuple[int, Any]:
        share = shard, *self._settings.group
        return shard, self._link.call(shard, "sample", wanted, options, self._take_updates(shard), share)

    def _take_updates(self, shard: int) -> list[Any]:
        updates, self._updates[shard] = self._updates[shard], []
        if len({eta for *_, eta in updates}) > 1 or any(mask is not None for *_, mask, _ in updates):
            return updates
        joined = [np.concatenate(part) for part in zip(*(update[:4] for update in updates), strict=True)]
        return [(*joined, None, updates[0][-1])] if updates else []  # of duplicates the last counts, as one by one

    def _known_facts(self) -> list[Facts]:
        """Return what the shards last told; wait until one has rows."""
        until, pause = time.monotonic() + self._settings.timeout, 0.0
        while True:
            for shard, facts in enumerate(self._facts):
                if not facts.number:
                    self._probe(shard)
            known = any(facts.number for facts in self._facts)
            for shard, reference in list(self._probes.items()):
                if known and not self._link.is_ready(reference):
                    continue
                del self._probes[shard]
                try:
                    self._facts[shard] = self._link.result(reference)
                    until = time.monotonic() + self._settings.timeout
                except Away as error:
                    if time.monotonic() > until:
                        text = f"Client: no shard answered for {self._settings.timeout:g} s. See Ray's logs."
                        raise TimeoutError(text) from error
            if any(facts.number for facts in self._facts):
                return self._facts
            time.sleep(pause)
            pause = min(pause + 0.01, 0.1)

    def _probe(self, shard: int) -> None:
        if shard not in self._probes:
            self._probes[shard] = self._link.call(shard, "facts")

    def _collect(self, request: _Request) -> list[Sample]:
        """Wait for batches; at least one."""
        shards, (rank, ranks), plan = self._settings.shards, self._settings.group, request.plan
        if request.call:
            plan = self._ask(0, "plan", *request.call, reference=plan)
        found: dict[int, Drawn] = {}
        for shard, reference in request.parts:
            try:
                if shards == 1 or request.call:  # all of these rows are needed
                    wanted = plan if request.call else plan.counts[:, 0].tolist()
                    again: Any = wanted, request.options, [], (shard, rank, ranks)
                    found[shard] = self._ask(shard, "sample", *again, reference=reference)
                    while shards == 1 and not found[shard].places:  # the limit does not allow it yet
                        found[shard] = self._ask(shard, "sample", *again)
                else:
                    found[shard] = self._link.result(reference)
            except Away:
                self._facts[shard] = _draws.NONE
        samples = {
            shard: [
                batch and of_shard(batch, shard, shards, drawn.birth) for batch in unpack(drawn.places, drawn.block)
            ]
            for shard, drawn in found.items()
        }
        if shards == 1:
            return samples[0]
        batches = []
        for i, counts in enumerate(plan.counts):
            if any(len(samples.get(shard, ())) <= i for shard in np.flatnonzero(counts).tolist()):
                break  # a shard is away or has no rows; the others serve meanwhile
            facts = [known._replace(rarest=np.inf) for known in self._facts]
            for shard, drawn in found.items():
                facts[shard] = drawn.facts[i]
            parts = {shard: rows[i] for shard, rows in samples.items() if rows[i]}
            batches.append(self._joined(parts, facts, plan.used, request.options.get("beta")))
        for shard, drawn in found.items():
            self._facts[shard] = drawn.facts[-1]
        return batches or self._collect(self._request(request.size, len(plan.counts), request.options))

    def _joined(self, parts: Mapping[int, Sample], facts: Sequence[Facts], used: Any, beta: float | None) -> Sample:
        """Return one batch of the rows of several shards."""
        joined: Any = jax.tree.map(lambda *x: x[0] if len(x) == 1 else np.concatenate(x), *parts.values())
        shard = np.repeat(list(parts), [len(sample.mask) for sample in parts.values()])
        sampler = self._settings.buffer.sampler
        chance, weight = _draws.weigh(facts, used, shard, joined.probability, joined.mask, beta, sampler)
        return dataclasses.replace(joined, probability=chance, weight=weight)


def _numbers(call: str, name: str, value: Any, kinds: str) -> Any:
    """Return what `check_kind` does as a NumPy array, or None."""
    return None if value is None else np.asarray(check_kind(call, name, to_array(value, name), kinds))
