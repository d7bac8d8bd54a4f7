"""Runs of real or made-up games in the file format of the DQN replay data set, and the rows that a reader must return."""

import dataclasses
import gzip
import io
import os

import numpy as np
import pytest

from fbuf._formats import dataset as _dataset
from fbuf.datasets._atari import atari, plan

RUN = "dqn/Pong/1/replay_logs/"
FRAMES = RUN + "$store$_observation_ckpt.{}.gz"
KINDS = ("$store$_observation", "$store$_action", "$store$_reward", "$store$_terminal", "add_count", "invalid_range")
BLANK = -1  # in a list of row numbers: a row of zeros
NOISE = -2  # a row that was never written
STACK, HORIZON = 4, 1
MATCHES = 8  # rows of the cycle before that a final dump must still hold to be joined to its neighbour


@dataclasses.dataclass(frozen=True)
class Log:
    """What an agent saw and did, one row a step, whatever became of it in files."""

    obs: np.ndarray  # uint8[N, 84, 84]
    action: np.ndarray  # int32[N]
    reward: np.ndarray  # float32[N]
    terminal: np.ndarray  # bool[N]

    def __len__(self):
        return len(self.action)

    def take(self, rows):
        """Rows as files have them: zeros for BLANK, noise for NOISE."""
        out = {}
        noise = np.random.default_rng(len(rows))
        for field in dataclasses.fields(self):
            source = getattr(self, field.name)
            picked = source[np.maximum(rows, 0)].copy()
            picked[rows == BLANK] = 0
            unwritten = rows == NOISE
            picked[unwritten] = noise.integers(0, 2, (unwritten.sum(), *source.shape[1:])).astype(source.dtype)
            out[field.name] = picked
        return out


def synthetic(steps, seed=0, episode=40, shape=(84, 84)):
    """A dot that moves over a still background; every frame is another. Episodes of about `episode` steps."""
    rng = np.random.default_rng(seed)
    still = rng.integers(0, 8, (shape[0] // 12 + 1, shape[1])).astype(np.uint8) * 16
    obs = np.broadcast_to(still.repeat(12, axis=0)[: shape[0]], (steps, *shape)).copy()
    t = np.arange(steps)
    number = np.stack([t >> 16 & 255, t >> 8 & 255, t & 255], axis=1)  # so that each says which it is
    obs[:, 0, :3] = number
    obs[t, 10 + t % 60, 10 + t // 60 % 60] = 255
    obs[:, 1, 0] = (t - t // 256) % 2  # so that as many pixels change from any frame to the next
    terminal, action = rng.random(steps) < 1 / episode, rng.integers(0, 18, steps, dtype=np.int32)
    return Log(obs, action, rng.choice(np.array([0, 0, 0, 1, -1, 0.5], np.float32), steps), terminal)


def swap(log, at, other):
    """`log` with what comes from row `at` on taken from another: a run whose counters go on where its steps do not."""
    fields = [f.name for f in dataclasses.fields(log)]
    return Log(*(np.concatenate([getattr(log, name)[:at], getattr(other, name)[at:]]) for name in fields))


def number_of(obs):
    """Which rows of a synthetic log frames `[..., 84, 84]` are."""
    digits = obs[..., 0, :3].astype(np.int64)
    return digits[..., 0] << 16 | digits[..., 1] << 8 | digits[..., 2]


@dataclasses.dataclass(frozen=True)
class Dump:
    number: int
    rows: np.ndarray  # int64[capacity], row of the log in each place of the files, or BLANK or NOISE
    add_count: int
    invalid_range: np.ndarray
    first: int  # rows added before the oldest row that the dump holds for sure ...
    last: int  # ... and with the newest
    final: bool = False  # its counter counts no earlier cycles; only neighbours identify its oldest row


@dataclasses.dataclass(frozen=True)
class Run:
    log: Log
    capacity: int
    added: np.ndarray  # int64[A], rows of the log and BLANKs, as they were added
    dumps: tuple[Dump, ...]

    def held(self, numbers=None):
        """Places in `added` of the rows that these dumps are known to hold: int64[...]."""
        held = np.zeros(len(self.added), bool)
        for dump in self.dumps:
            if numbers is None or dump.number in numbers:
                alone = dump.final and dump.number > 0
                if alone and dump.first > 0 and self.capacity - 1 - dump.add_count >= MATCHES:
                    alone = not held[dump.first - 1]
                held[dump.first + alone : dump.last] = True
        return np.flatnonzero(held)

    def expected(self, numbers=None):
        """Rows of the log that a reader of these dumps must give, in order, and after which of them a cut lies.

        Two dumps that overlap, or lie next to each other, are one stretch; what lies between others is lost.
        """
        places = self.held(numbers)
        torn = np.append(np.diff(places) != 1, True)  # nothing is known of what comes next
        rows = self.added[places]
        # a stretch may end, or its end be left by dropped zeros, behind a terminal step: no cut then
        kept = rows != BLANK
        cut_after = []
        for at in np.flatnonzero(torn):
            before = at
            while not kept[before]:
                before -= 1
            cut_after.append(before)
        cut = np.zeros(len(rows), bool)
        cut[cut_after] = True
        rows, cut = rows[kept], cut[kept]
        return rows, cut & ~self.log.terminal[rows]


def record(log, capacity, *, blanks=STACK - 1, final=True):
    """Runs the writer over a log: `blanks` rows of zeros before each episode; `final`: one more dump at the end."""
    added = []
    dumps = []

    def dump(final_one):
        count = len(added)
        head = count % capacity
        rows = np.full(capacity, NOISE, np.int64)
        recent = np.arange(max(0, count - capacity), count)
        rows[recent % capacity] = np.asarray(added, np.int64)[recent]
        around = (head - HORIZON + np.arange(STACK + HORIZON)) % capacity
        first = max(0, count - capacity)
        if final_one:  # what the last dump held already is not new; the row at its write head is
            first = max(0, (count // capacity) * capacity - 1) if count >= capacity else 0
        add_count = head if final_one else count
        dumps.append(Dump(len(dumps), rows, add_count, around, first, count, final_one))

    for step in range(len(log)):
        if not added or log.terminal[added[-1]]:
            added += [BLANK] * blanks
        added.append(step)
        if len(added) % capacity == capacity - 1:
            dump(False)
    if final and len(added) % capacity not in (0, capacity - 1):
        dump(True)
    return Run(log, capacity, np.asarray(added, np.int64), tuple(dumps))


def arrays(run, dump):
    rows = run.log.take(dump.rows)
    return {
        "$store$_observation": rows["obs"],
        "$store$_action": rows["action"].astype(np.int32),
        "$store$_reward": rows["reward"].astype(np.float32),
        "$store$_terminal": rows["terminal"].astype(np.uint8),
        "add_count": np.array(dump.add_count),
        "invalid_range": dump.invalid_range,
    }


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def file_of(folder, kind, number):
    return folder / f"{kind}_ckpt.{number}.gz"


def write(root, name, run, numbers=None, level=6):
    folder = root / "dqn" / name / "replay_logs"
    folder.mkdir(parents=True, exist_ok=True)
    for dump in run.dumps:
        if numbers is None or dump.number in numbers:
            for kind, array in arrays(run, dump).items():
                file_of(folder, kind, dump.number).write_bytes(gzip.compress(npy(array), level, mtime=0))
    return folder


def cut_short(file, share=0.5):
    os.truncate(file, int(file.stat().st_size * share))


def _header(shape, descr):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()


def lie(file, shape, descr="|u1"):
    data = gzip.decompress(file.read_bytes())
    body = data[10 + int.from_bytes(data[8:10], "little") :]
    file.write_bytes(gzip.compress(_header(shape, descr) + body, 1, mtime=0))


def bomb(file, shape, descr="|u1"):
    file.write_bytes(gzip.compress(_header(shape, descr) + bytes(64 << 20), 9, mtime=0))


def get(root, source, **options):
    """All rows of Pong/1, as numpy, without a buffer."""
    path = root / "Pong" / "1"
    options["dumps"] = plan.selected("get", options.get("dumps"))
    ask = plan.Request("get", "Pong/1", path, source, **{"workers": 0} | options)
    with atari.get(ask, lambda: _dataset.DataSet.open(path)) as dataset:
        return {**dataset.read_rows(0, dataset.rows), "meta": dataset.meta}


def same(rows, run, numbers=None):
    want, cut = run.expected(numbers)
    assert len(rows["obs"]) == len(want)
    log = run.log.take(want)
    expected = {name: log[name] for name in ("obs", "action", "reward")}
    expected |= {"terminated": log["terminal"], "truncated": cut}
    for name, leaf in expected.items():
        assert rows[name].dtype == leaf.dtype, name
        np.testing.assert_array_equal(rows[name], leaf)


@pytest.fixture(scope="module")
def run():
    return record(synthetic(1000, episode=30), 250)
