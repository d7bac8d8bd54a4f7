"""`ReplayRows`: the methods of `Replay` that read or change rows it holds. None of them waits for a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import read
from fbuf._buffer.checks import check_eta
from fbuf._buffer.summary import Summary
from fbuf._core.arguments import Numbers, check_bool
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index, Rows, Sample
from fbuf._core.text_table import counted
from fbuf._replay import programs
from fbuf._replay.arguments import Form, check_form, convert, to_array, to_device_of, to_index, to_rows
from fbuf._replay.batches import EpochBatches
from fbuf._replay.interrupts import DeferInterrupts
from fbuf._replay.locked import LockedState, locked, restores_lock
from fbuf._replay.outside_jit import refuse_trace


class ReplayRows(LockedState):
    """Rows by index, by position, or all; their priorities; numbers about them."""

    @restores_lock
    def update_priority(self, index: Index, td_error: Any, *, mask: Any = None, eta: float = 0.9) -> None:
        """Set priorities from TD errors; see `Buffer.update_priority`. Arrays may be JAX, numpy or torch.

        Raises:
          ValueError: some were refused (not finite, out of range, stale, ineligible); the others are set. Stale indices are
            only counted with `prefetch=1`, under a limit, and after `batches`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> batch = replay.sample(4)
          >>> replay.update_priority(batch.index, np.array([0.5, 1.0, 2.0, 0.1]))
        """
        call = "Replay.update_priority"
        check_eta(call, eta)
        index, td_error, mask = to_index(call, index), to_array(td_error, "td_error"), to_array(mask, "mask")
        with self._acquire():
            if self._updates is not None and self._updates.keep(self, self._block, index, td_error, mask):
                return
            self._flush()
            index, td_error, mask = jax.tree.map(lambda x: to_device_of(x, self._state.header), (index, td_error, mask))
            counts = self._set_priorities(index, td_error, mask=mask, eta=eta)
        self._raise(call, counts)

    @restores_lock
    def update_rows(self, index: Index, fields: PyTree, *, mask: Any = None) -> None:
        """Replace some leaves of rows; see `Buffer.update_rows`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.update_rows(replay.last(1).index, {"done": np.array([True])})
          >>> bool(replay.last(1).data["done"][0])
          True
        """
        index, fields, mask = to_index("Replay.update_rows", index), to_rows(fields), to_array(mask, "mask")
        with self._acquire():
            self._flush()
            fields = self._narrowed("Replay.update_rows", fields)
            index, fields, mask = jax.tree.map(lambda x: to_device_of(x, self._state.header), (index, fields, mask))
            counts = self._donate(programs.update_rows, index, fields, mask=mask)
        self._raise("Replay.update_rows", counts)

    @locked
    def get(self, index: Any) -> Rows:
        """Return rows by index; see `Buffer.get`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> batch = replay.sample(4)
          >>> bool((replay.get(batch.index).data["t"] == batch.data["t"]).all())
          True
        """
        index = to_index("Replay.get", index) if isinstance(index, Index) else to_array(index, "index")
        return self.buffer.get(self._state, index)

    @locked
    def window_index(self, index: Index) -> Index:
        """Return the rows `[B, T]` of sampled windows; see `Buffer.window_index`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100, view=fbuf.views.Sequence(3, episode_end=())), {"carry": 0.0})
          >>> index = replay.extend({"carry": np.zeros(5, np.float32)})
          >>> rows = replay.window_index(replay.sample(4).index)
          >>> replay.update_rows(rows, {"carry": np.ones((4, 3), np.float32)})
          >>> float(replay.get(rows).data["carry"].min())
          1.0
        """
        return self.buffer.window_index(self._state, to_index("Replay.window_index", index))

    @locked
    def priorities(self, index: Index | None = None) -> jax.Array:
        """Return priorities |p| of some or all rows; see `Buffer.priorities`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(4), {"t": 0})
          >>> index = replay.extend({"t": np.arange(3)}, priority=np.array([1.0, 2.0, 3.0]))
          >>> replay.priorities().round(1).tolist()
          [1.0, 2.0, 3.0, nan]
        """
        return self.buffer.priorities(self._state, None if index is None else to_index("Replay.priorities", index))

    @locked
    def __getitem__(self, position: int | slice) -> Rows:
        """Return rows by position, 0 the oldest, -1 the newest; of several lanes step by step, lane by lane.

        An int gives one row, leaves `[item]`; a slice leaves `[n, item]`. Each length compiles once. Iteration reads the rows
        in blocks, as NumPy arrays; writes in between shift positions.

        Raises:
          IndexError: there is no such row.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0})
          >>> index = replay.extend({"t": np.arange(5)})
          >>> int(replay[-1].data["t"]), replay[2:4].data["t"].tolist(), [int(row.data["t"]) for row in replay]
          (4, [2, 3], [0, 1, 2, 3, 4])
        """
        if not isinstance(position, (slice, int, np.integer)) or isinstance(position, bool):
            fix = "For an Index or slots use replay.get(index)"
            raise TypeError(f"Replay: position is {type(position).__name__}; expected an int or a slice. {fix}.")
        held = range(self._held())
        if not isinstance(position, slice) and not -len(held) <= position < len(held):
            raise IndexError(f"Replay: position is {position}, but it holds {counted(len(held), 'row')}.")
        chosen = held[position]
        positions = np.arange(chosen.start, chosen.stop, chosen.step) if isinstance(chosen, range) else np.int64(chosen)
        return self.buffer.get(self._state, jnp.asarray(self._slots(positions)))

    def __iter__(self) -> Iterator[Rows]:
        refuse_trace("__iter__")
        for first in range(0, len(self), 256):
            block = jax.device_get(self[first : first + 256])
            for i in range(len(block.mask)):
                yield jax.tree.map(lambda leaf, i=i: leaf[i], block)

    @locked
    def rows(self) -> Rows:
        """Return every row, oldest first; see `Buffer.rows`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> rows = replay.rows()
          >>> rows.data["t"][rows.mask].tolist()
          [0, 1, 2, 3, 4]
        """
        return self.buffer.rows(self._state)

    @locked
    def last(self, n: int) -> Rows:
        """Return the newest rows; see `Buffer.last`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.last(2).data["t"].tolist()
          [3, 4]
        """
        return self.buffer.last(self._state, n)

    def epoch(
        self, batch_size: int | None = None, *, shuffle: bool = True, drop_last: bool = False, to: Form = "jax"
    ) -> EpochBatches:
        """Return the batches of one epoch: every row (window) that can be sampled now, once. `len` counts them.

        It is independent of the sampler and the limit: `Consume` loses no row, priorities have no effect, and no draw is
        counted. Rows added later are not part of it. Rows that are overwritten before their batch have `mask` False there. Each
        iteration takes one key of the replay, and draws the same rows in a new order. A checkpoint does not keep its
        position; `samplers.Epoch` does, and runs in jit.

        Args:
          batch_size: B; None uses the buffer's.
          shuffle: Draw in random order; False: in order of arrival.
          drop_last: Leave out a last batch of fewer than B rows. False: the last batch is shorter than B, without padding.
          to: As for `sample`.
        Cost: O(C) once and 16 bytes a row on the host; O(B) a batch. A short last batch compiles once for its size.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0})
          >>> index = replay.extend({"t": np.arange(10)})
          >>> epoch = replay.epoch(4, shuffle=False, to="numpy")
          >>> len(epoch), [batch.data["t"].tolist() for batch in epoch]
          (3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
        """
        refuse_trace("epoch", batch_size)
        call = "Replay.epoch"
        check_form(call, to)
        check_bool(call, "shuffle", shuffle)
        check_bool(call, "drop_last", drop_last)
        size, _ = self._check_draw(call, batch_size, {})

        def read(*args: Any) -> Sample:
            return convert(self._read_epoch(*args), to)

        return EpochBatches(self._anchors(), size, shuffle, drop_last, self._next_key, read)

    @locked
    def _anchors(self) -> Index:
        """Return the index of every anchor, in order of arrival, as NumPy arrays."""
        index, mask = jax.device_get(read.all_anchors(self.buffer, self._state)[1])
        return Index(index.slot[mask], index.ticket[mask])

    @locked
    def _next_key(self) -> jax.Array:
        after, key = jax.random.split(jax.random.wrap_key_data(self._key, impl=self._impl))
        self._key = jax.random.key_data(after)
        return key

    @locked
    def _read_epoch(self, key: jax.Array, number: int, index: Index, chance: float) -> Sample:
        with DeferInterrupts():  # an interrupt inside a callback would become another error
            self._state, batch = read.sample_at(self.buffer, self._state, key, number, index, chance)
        return self._exact("Replay.epoch", batch)

    @locked
    def set(self, **numbers: Unpack[Numbers]) -> None:
        """Set annealed numbers, `set(alpha=0.5)`; see `Buffer.set`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.set(alpha=0.5, beta=0.7)
        """
        self._state = self.buffer.set(self._state, **numbers)

    @locked
    def rebuild(self) -> None:
        """Apply annealed numbers to all rows; see `Buffer.rebuild`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100, sampler=fbuf.samplers.Prioritized(largest="held")), {"t": 0})
          >>> index = replay.extend({"t": np.arange(5)}, priority=np.arange(1.0, 6.0))
          >>> replay.set(alpha=1.0)
          >>> replay.rebuild()
        """
        self._state = self.buffer.rebuild(self._state)

    @locked
    def summary(self, *, compare: int | None = 1 << 14) -> Summary:
        """Return a table of the rows and the next draws; see `Buffer.summary`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.summary().to_dict()["size"]
          5
        """
        return self.buffer.summary(self._state, compare=compare)

    @locked
    def nbytes(self) -> dict[str, int]:
        """Return the bytes in use on the device, the host and the disk.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> sorted(replay.nbytes())
          ['device', 'disk', 'host']
        """
        return self.buffer.nbytes(self._state)

    @restores_lock
    def __len__(self) -> int:
        with self._acquire():
            return self._held()
