"""Convert one dump of the DQN replay data set, six files, to segments.

Actions, rewards and ends are read whole (9 MB per million rows), frames in blocks that go straight to the encoder. The rows
before the ring's write head become one segment, those behind it another, because the file has them last and they are first
in time. A segment is in memory, encoded, until it is committed; one that reaches `MOST_BYTES` is committed and continued in
another. The dump's last segment, committed after all files proved whole, names the others; without it they do not count.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import zlib
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, Protocol

import numpy as np

from fbuf._formats import dataset
from fbuf._host.codecs import Zstd
from fbuf.datasets._atari.continuity import SAME_ROWS, pack
from fbuf.datasets._remote import FileCorrupted

BLANKS = 3  # rows of zeros before an episode: Dopamine's stack, less one
_MOST = 0.99  # of episodes, that begin with them where a writer puts them


class Part(NamedTuple):
    """Places `[begin, stop)` of the files, which were added one after another."""

    begin: int
    stop: int
    first: int | None  # rows added to the ring before the first of them; None: not known
    sure: bool  # False: it may be of another cycle, which only the neighbouring dump can tell


class Ring(NamedTuple):
    """A dump of Dopamine's circular buffer, by its counters: which rows were written, in which order.

    A dump is the arrays of a ring of C rows as in memory, written whenever a step leaves the write head on the ring's last
    place. With `add_count` = A rows added and the head at A mod C, places from the head on hold the cycle *before*, or, while
    A < C, memory never written. So the last place of dump N > 0 is the row that follows dump N - 1. Three rows of zeros, which
    are not steps, precede each episode, whose first step so adds four rows: the head can jump over C - 1, and a cycle is not
    dumped; only `add_count` shows it. The final dump has `add_count` set to the head. `invalid_range` names rows whose return
    or stack crosses the head; it is compared with the head, and may be missing.

    Source: Dopamine's `circular_replay_buffer.py` and batch_rl's `logged_replay_buffer.py`.
    """

    capacity: int
    add_count: int
    head: int
    full: bool
    before: Part | None  # older than `main`
    main: Part | None
    stack: int | None  # of the agent, from `invalid_range`; None if that does not fit to the head
    horizon: int | None
    cuts: frozenset[int]  # places after which nothing is known, as `invalid_range` says beyond what the head does


def ring(number: int, capacity: int, add_count: int, invalid_range: Array) -> Ring:
    """Interpret the counters of dump `number`.

    Raises:
      ValueError: they cannot be those of a ring of `capacity` rows.
    """
    if capacity < BLANKS + 1:
        raise ValueError(f"has {capacity} rows; expected more than {BLANKS}")
    if add_count < 0:
        raise ValueError(f"add_count is {add_count}; expected how many rows were added, at least 0")
    head, full = add_count % capacity, add_count >= capacity
    named = [int(place) for place in invalid_range]
    if any(not 0 <= place < capacity for place in named):
        raise ValueError(f"invalid_range is {named[:8]}; expected places from 0 to {capacity - 1}")
    follow = all((place - named[0]) % capacity == i for i, place in enumerate(named))
    horizon = (head - named[0]) % capacity if named else 0
    fits = bool(named) and follow and 0 < horizon < len(named)
    cumulative = full or number == 0
    main = Part(0, head, add_count - head if cumulative else None, True) if head else None
    before = None
    if full:
        before = Part(head, capacity, add_count - capacity, True)
    elif number > 0:
        before = Part(capacity - 1, capacity, None, False)
    ring_ = Ring(capacity, add_count, head, full, before, main, None, None, frozenset(named))
    return ring_._replace(stack=len(named) - horizon, horizon=horizon, cuts=frozenset()) if fits else ring_


def in_order(of: Ring) -> Array:
    """Return the places known to be consecutive in time, oldest first: int64[...]."""
    parts = [part for part in (of.before, of.main) if part is not None and part.sure]
    return np.concatenate([np.arange(part.begin, part.stop) for part in parts] or [np.zeros(0, np.int64)])


class Blanks(NamedTuple):
    """The places that may hold rows of zeros, by actions, rewards and ends."""

    padded: bool | None  # whether the writer has put them before episodes; None: no episode begins in this dump
    place: Array  # bool[C], a row of zeros if its frame is one
    lead: Array  # int64[...], places at the beginning: rows of zeros if an end lies before the dump


def blanks(of: Ring, action: Array, reward: Array, terminal: Array) -> Blanks:
    """Find rows of zeros after the ends of episodes.

    All but 1 % of the dump's episodes must begin with them: a game may begin with a dark screen and an idle agent, but not
    every time; and one torn place must not turn steps into zeros.
    """
    order = in_order(of)
    zero = ((action == 0) & (reward == 0) & (terminal == 0))[order]
    begins = np.flatnonzero(terminal[order] != 0) + 1
    if of.main is not None and len(order) and (of.before or of.main).first == 0:
        begins = np.concatenate([[0], begins])
    whole = begins[begins + BLANKS <= len(order)]
    begun = zero[whole[:, None] + np.arange(BLANKS)].all(axis=1)
    padded = bool(begun.mean() >= _MOST) if len(whole) else None
    place = np.zeros(of.capacity, bool)
    around = (begins[:, None] + np.arange(BLANKS)).reshape(-1)
    around = around[around < len(order)]
    if padded is not False:
        place[order[around[zero[around]]]] = True
    leading = np.zeros(0, np.int64)
    if len(order) and (of.before or of.main).first != 0:  # type: ignore[union-attr]
        run = int(np.argmin(np.append(zero[:BLANKS], False)))
        leading = order[:run]
    if of.before is not None and not of.before.sure:  # its one row comes first, or is not used
        last = of.capacity - 1
        if action[last] == 0 and reward[last] == 0 and terminal[last] == 0:
            leading = np.append(leading, last)
    return Blanks(padded, place, leading)


Array = np.ndarray[Any, Any]

OBSERVATION, ACTION, REWARD, TERMINAL = (f"$store$_{name}" for name in ("observation", "action", "reward", "terminal"))
ADD_COUNT, INVALID_RANGE = "add_count", "invalid_range"
KINDS = (OBSERVATION, ACTION, REWARD, TERMINAL, ADD_COUNT, INVALID_RANGE)
FRAME = (84, 84)
MAX_ROWS = 1 << 24
CODEC = Zstd(repack=False)
"""Of frames: compressing them again would take longer than all else together."""
_LEAVES = {"obs": (FRAME, "uint8"), "action": ((), "int32"), "reward": ((), "float32")}
_FLAGS = {"terminated": ((), "bool"), "truncated": ((), "bool")}
_COUNTS = ("int64", "int32")
_PAIRS = 4096  # of frames in a row, at least, between which changes are counted, if there are so many


class Files(Protocol):
    """The files of one dump, checked while they are read."""

    def whole(self, kind: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...], most: int) -> Array:
        """Return an array of at most `most` numbers, of one of these dtypes; None in `shape`: any."""

    def blocks(self, kind: str, dtype: str, shape: tuple[int, ...]) -> Generator[Array, None, None]:
        """Yield an array in blocks of its first axis; after the last the file is known to be whole."""


def schema(codec: Any = None) -> dataset.Schema:
    """Return the leaves of a row: `obs` uint8[84, 84], `action` int32, `reward` float32, `terminated` and `truncated` bool."""
    return dataset.Schema({**_LEAVES, **_FLAGS}, codec={"obs": CODEC if codec is None else codec})


def convert(files: Files, path: str, number: int, rows: dataset.Schema, meta: dict[str, Any]) -> None:
    """Write the segments of dump `number` to the data set at `path`.

    Args:
      meta: Further metadata to store.
    Raises:
      FileCorrupted: the files contradict one another. Or errors of `files`. No segment is left then.
    """
    action = files.whole(ACTION, ("int32",), (None,), MAX_ROWS)
    reward = files.whole(REWARD, ("float32",), (len(action),), MAX_ROWS)
    terminal = files.whole(TERMINAL, ("uint8",), (len(action),), MAX_ROWS)
    add_count = int(files.whole(ADD_COUNT, _COUNTS, (), 1))
    invalid = files.whole(INVALID_RANGE, _COUNTS, (None,), 1 << 16)
    try:
        dump = ring(number, len(action), add_count, invalid)
    except ValueError as error:
        raise FileCorrupted(str(error)) from None
    parts = [part for part in (dump.before, dump.main) if part is not None]
    if not parts:
        raise FileCorrupted("holds no row; expected some")
    used = np.concatenate([np.arange(part.begin, part.stop) for part in parts])
    if (terminal[used] > 1).any():
        raise FileCorrupted(f"{TERMINAL} has values up to {terminal[used].max()}; expected 0 and 1")
    zeros = blanks(dump, action, reward, terminal)
    made = [PartWriter(dump, part, zeros, action, reward, terminal) for part in parts]
    tail = _Tail(len(action))
    mark = {"piece": number, "made": secrets.token_hex(16)}
    with ExitStack() as stack:
        for one in made:
            begin = number + (0 if one.part is dump.main else BEFORE)
            one.volumes = stack.enter_context(Volumes(path, begin, rows, mark))
        at = 0
        blocks = files.blocks(OBSERVATION, "uint8", (len(action), *FRAME))
        for frames in stack.enter_context(closing(blocks)):
            for one in made:
                one.take(at, frames)
            tail.take(at, frames, action, reward, terminal)
            at += len(frames)
        about = {
            **meta,
            "capacity": dump.capacity,
            "add_count": add_count,
            "invalid_range": invalid.tolist(),
            "stack": dump.stack,
            "horizon": dump.horizon,
            "blanks": sum(one.dropped for one in made),
            "padded": zeros.padded,
            "tail": tail.sums,
            "parts": describe(dump, made),
        }
        last = max((one for one in made if one.volumes.rows), key=lambda one: one.part is dump.main, default=None)
        if last is None:
            raise FileCorrupted("holds rows of zeros only; expected steps")
        for one in made:
            if one is not last:
                one.volumes.commit()
        last.volumes.commit(about)


class PartWriter:
    """Write the rows of one part of a dump into segments, and record what `continuity` needs to know."""

    volumes: Volumes

    def __init__(self, dump: Ring, part: Part, zeros: Blanks, action: Array, reward: Array, terminal: Array) -> None:
        self.part = part
        self.dropped = self.ends = self.ended = 0
        self.begin: Array | None = None  # the first frame
        self.end: Array | None = None
        self.terminal = False
        self.change = -1
        self.leading: dict[int, bool] = {}  # of the places that may be zeros: whether they are
        self._zeros, self._lead = zeros, set(zeros.lead.tolist())
        self._action, self._reward, self._terminal = action, reward, terminal.astype(bool)
        self._truncated = np.zeros(len(action), bool)
        self._truncated[sorted(dump.cuts)] = True
        self._truncated &= ~self._terminal
        self._every = max(1, len(action) // _PAIRS)

    def take(self, at: int, frames: Array) -> None:
        """Write the rows of a block that belong to this part."""
        low, high = max(at, self.part.begin), min(at + len(frames), self.part.stop)
        if low >= high:
            return
        frames, places = frames[low - at : high - at], np.arange(low, high)
        for place in self._lead & set(range(low, high)) if self._lead else ():
            self.leading[place] = not frames[place - low].any()
        maybe = np.flatnonzero(self._zeros.place[low:high])
        if len(maybe):
            keep = np.ones(high - low, bool)
            keep[maybe[~frames[maybe].any(axis=(1, 2))]] = False
            self.dropped += int((~keep).sum())
            frames, places = frames[keep], places[keep]
        if not len(places):
            return
        terminated, truncated = self._terminal[places], self._truncated[places]
        self._compare(frames, terminated)
        if not self.ended and terminated.any():
            self.ended = self.volumes.rows + int(terminated.argmax()) + 1
        rows = {"obs": frames, "action": self._action[places], "reward": self._reward[places]}
        self.volumes.append({**rows, "terminated": terminated, "truncated": truncated})
        self.ends += int(terminated.sum())
        if self.begin is None:
            self.begin = frames[0].copy()
        self.end, self.terminal = frames[-1].copy(), bool(terminated[-1] | truncated[-1])

    def _compare(self, frames: Array, ended: Array) -> None:
        """Count the pixels that change from one frame of an episode to the next."""
        first, second = frames[: -1 : self._every], frames[1 :: self._every]
        changed = (first != second)[~ended[: -1 : self._every]]
        self.change = max([self.change, *(int(np.count_nonzero(pair)) for pair in changed)])


def describe(dump: Ring, made: Sequence[PartWriter]) -> list[dict[str, Any]]:
    """Return what `stretches` needs to know of each part, as JSON."""
    leading = {place for one in made for place, zero in one.leading.items() if zero}
    run = set(itertools.takewhile(leading.__contains__, in_order(dump)[:BLANKS].tolist()))
    run |= {one.part.begin for one in made if not one.part.sure} & leading
    return [
        {
            "pieces": one.volumes.segments,
            "rows": one.volumes.rows,
            "places": one.part.stop - one.part.begin,
            "first": one.part.first,
            "sure": one.part.sure,
            "lead": len([place for place in run if one.part.begin <= place < one.part.stop]),
            "ends": one.ends,
            "ended": one.ended,
            "terminal": one.terminal,
            "change": one.change,
            "begin": None if one.begin is None else pack(one.begin),
            "end": None if one.end is None else pack(one.end),
        }
        for one in made
    ]


class _Tail:
    """Checksums of the rows before a ring's last place, by which another dump can be recognised."""

    def __init__(self, capacity: int) -> None:
        self.sums: list[int] = []
        self._begin, self._stop = max(0, capacity - 1 - SAME_ROWS), capacity - 1

    def take(self, at: int, frames: Array, action: Array, reward: Array, terminal: Array) -> None:
        for place in range(max(at, self._begin), min(at + len(frames), self._stop)):
            small = b"".join(array[place].tobytes() for array in (action, reward, terminal))
            self.sums.append(zlib.crc32(small, zlib.crc32(frames[place - at].tobytes())))


MOST_BYTES = 128 << 20
RUNS = 10_000  # a run has fewer dumps
MOST = 50  # volumes of a part; the last takes all that is left
BEFORE = RUNS * MOST  # added to a number: rows of the cycle before


class Volumes:
    """Rows on their way into segments `number`, `number + RUNS`, ...

    Args:
      mark: Metadata of these segments alone.
    """

    def __init__(self, path: str, number: int, schema: dataset.Schema, mark: dict[str, Any]) -> None:
        self._path, self._number, self._schema, self._mark = path, number, schema, mark
        self._writer: dataset.SegmentWriter | None = None
        self.segments: list[list[int]] = []  # number and rows of each

    def __enter__(self) -> Volumes:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Remove the segments if there was an exception."""
        if self._writer is not None:
            self._writer.close()
        if kind is not None:
            for number, _rows in self.segments:
                with contextlib.suppress(OSError):
                    dataset.discard(self._path, number)

    @property
    def rows(self) -> int:
        """Rows so far."""
        return sum(rows for _, rows in self.segments)

    def append(self, rows: dict[str, Any]) -> None:
        """Append rows, as `SegmentWriter.append`."""
        if self._writer is not None and self._writer.nbytes >= MOST_BYTES and len(self.segments) < MOST:
            self.commit()
        if self._writer is None:
            number = self._number + RUNS * len(self.segments)
            self._writer = dataset.SegmentWriter(self._path, number, self._schema)
            self.segments.append([number, 0])
        self._writer.append(rows)
        self.segments[-1][1] = self._writer.rows

    def commit(self, meta: dict[str, Any] | None = None) -> None:
        """Commit the rows appended since the last commit, if any."""
        if self._writer is not None:
            self._writer.commit({**self._mark, **(meta or {})})
            self._writer = None


def all_numbers(number: int) -> list[int]:
    """Return the numbers of all segments that a dump may have."""
    return [start + RUNS * i for start in (number, number + BEFORE) for i in range(MOST)]
