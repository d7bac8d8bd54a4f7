"""Compare observation pairs with a list of all steps."""

import copy
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host.codecs import BitPack, Zstd
from fbuf._host.pairs import ObservationPairs
from tests.support.store import DTYPES, frames
from tests.support.threads import Thread


class Model:
    """Every step ever added, and the pairs of the last `length`."""

    def __init__(self, pairs):
        self.pairs, self.steps = pairs, []

    def add(self, observation, following):
        assert self.pairs.position == len(self.steps) % self.pairs.length
        self.pairs.add(observation, following, self.pairs.position)
        self.steps.append((observation.copy(), following.copy()))

    def extend(self, steps):
        position = (len(self.steps) + np.arange(len(steps))) % self.pairs.length
        self.pairs.extend(*map(np.stack, zip(*steps, strict=True)), position)
        self.steps += steps

    def replace(self, observation, following):
        self.pairs.add(observation, following, (len(self.steps) - 1) % self.pairs.length)
        self.steps[-1] = (observation.copy(), following.copy())

    def check(self, position, lane, offsets=(0, 1)):
        length, total = self.pairs.length, len(self.steps)
        for offset, found in zip(offsets, self.pairs.read(position, lane, offsets), strict=True):
            for row, p, e in zip(found, position.tolist(), lane.tolist(), strict=True):
                number = (total - 1 - p) // length * length + p  # the last step at this position
                expected = self.steps[number][offset][e] if number >= 0 else np.zeros_like(row)
                assert row.tobytes() == expected.tobytes(), (p, e, offset)

    def check_all(self):
        position, lane = np.divmod(np.arange(self.pairs.length * self.pairs.lanes), self.pairs.lanes)
        self.check(position, lane)


@given(data=st.data())
def test_any_sequence_of_steps_agrees_with_a_list(data):
    lanes, length = data.draw(st.integers(1, 4), "lanes"), data.draw(st.integers(1, 40), "length")
    shape, dtype = data.draw(st.sampled_from([(), (7,), (3, 5)]), "shape"), np.dtype(data.draw(st.sampled_from(DTYPES)))
    codec = data.draw(st.sampled_from([None, Zstd(), Zstd(chunk=1), Zstd(chunk=3, dictionary=0), BitPack()]), "codec")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    model = Model(ObservationPairs(length, lanes, shape, dtype, codec))
    following = np.zeros((lanes, *shape), dtype)

    def noise():
        """NaN and -0.0 among the bits."""
        bits = rng.integers(0, 256, (lanes, *shape, dtype.itemsize), np.uint8)
        return bits.view(dtype).reshape(lanes, *shape) if dtype.kind != "b" else bits[..., 0] > 99

    for _ in range(data.draw(st.integers(1, 6), "calls")):
        call = data.draw(st.sampled_from(["add", "add", "add", "replace", "read", "pickle", "clear"]))
        if call == "replace" and model.steps:
            for observation in (model.steps[-1][0], following):
                following = noise()
                model.replace(observation, following)
        elif call == "add":
            chance, steps = data.draw(st.sampled_from([0.0, 0.1, 1.0]), "ends"), []
            for _ in range(data.draw(st.sampled_from([1, 3, 8, 50]))):
                observation, ends = following.copy(), rng.random(lanes) < chance
                observation[ends], following = noise()[ends], noise()
                steps.append((observation, following))
            if data.draw(st.booleans(), "together"):
                model.extend(steps)
            else:
                for step in steps:
                    model.add(*step)
        elif call == "read":
            at = rng.integers(0, length, 20), rng.integers(0, lanes, 20)
            model.check(*at, offsets=data.draw(st.sampled_from([(0, 1), (0,), (1,)])))
        elif call == "pickle":
            pickled = pickle.loads(pickle.dumps(model.pairs))
            model.pairs = data.draw(st.sampled_from([pickled, copy.deepcopy(model.pairs)]))
        else:
            model.pairs.clear()
            model.steps.clear()
    model.check_all()


def test_stacks_are_stored_as_frames_and_finals_as_one_more():
    shown, model = frames(400, 40), Model(ObservationPairs(300, 1, (4, 40, 40), np.uint8, Zstd()))
    for t in range(300):
        if t % 40 != 39:
            model.add(shown[None, t : t + 4], shown[None, t + 1 : t + 5])
        else:  # the last step of an episode shows what no other does
            model.add(shown[None, t : t + 4], np.concatenate([shown[None, t + 1 : t + 4], 255 - shown[None, :1]], 1))
    model.check_all()
    (stacked,) = model.pairs._store._parts
    assert 300 < stacked.inner.count.item() <= 300 + 7 + 8 * 3  # a frame a step and a final, three more of each episode
    assert model.pairs.nbytes < 300 * 4 * 40 * 40


def test_finals_expire_with_their_steps():
    model, rng = Model(ObservationPairs(50, 2, (16, 16), np.uint8, None)), np.random.default_rng(0)
    sizes = []
    for t in range(1000):
        model.add(*rng.integers(0, 255, (2, 2, 16, 16), np.uint8))
        sizes.append(model.pairs.nbytes)
        if t % 97 == 0:
            model.check_all()
    model.check_all()
    assert max(sizes[200:]) == sizes[200] and sizes[-1] < 2 * (50 + 3 + 2 * 64) * 256 + 12_000


def test_replaced_steps_leave_the_others():
    model, step = Model(ObservationPairs(20, 2, (4,), np.int16, Zstd())), np.zeros((2, 4), np.int16)
    for t in range(150):
        model.add(step + t, step + t + 1)
        for again in range(t % 3 if t < 100 else 30):
            model.replace(step + t, step + t + 1 + 1000 * again)
        if t % 10 == 0:
            model.check_all()


def test_a_failed_write_stores_nothing(monkeypatch):
    model = Model(ObservationPairs(20, 1, (4,), np.int16, Zstd()))
    step = np.arange(4, dtype=np.int16)[None]
    for t in range(8):
        model.add(step + t, step + t + 1)
    pytest.raises(ValueError, lambda: model.pairs.add(step, np.zeros((1, 5), np.int16), 8)).match("broadcast")
    with monkeypatch.context() as patch:
        patch.setattr(model.pairs._store, "write", lambda *_: exec("raise MemoryError"))
        for _ in range(30):
            pytest.raises(MemoryError, model.pairs.add, step, step, 8)
    for t in range(8, 30):
        model.add(step + t, step + t + 1)
    model.check_all()


def test_readers_see_whole_steps_while_another_thread_adds():
    pairs, stop = ObservationPairs(64, 2, (300,), np.int32, Zstd()), threading.Event()

    def read(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            position, lane = rng.integers(0, 64, 16), rng.integers(0, 2, 16)
            one, other = pairs.read(position, lane)
            there = one[:, 0] > 0
            assert ((other - one)[there] == 1).all() and ((one[:, 0] % 64)[there] == (position + 1)[there] % 64).all()

    threads = [Thread(read, seed) for seed in range(2)]
    for t in range(1, 1500):
        step = np.full((2, 300), t, np.int32)
        pairs.add(step, step + 1, (t - 1) % 64)
    stop.set()
    for thread in threads:
        thread.ends()


LENGTH = 40


@pytest.mark.more
def test_damage_and_other_arguments_are_noticed():
    pairs = ObservationPairs(LENGTH, 2, (6, 5), np.uint8, Zstd())
    rows = np.arange(30 * 2 * 30, dtype=np.uint8).reshape(30, 2, 6, 5)
    pairs.extend(rows[:-1], rows[1:], np.arange(29))
    arrays = pairs.to_arrays()
    for name, value in (("row", 10_000), ("row", -2), ("written", 1_000), ("where", -1)):
        with pytest.raises(ValueError, match=r"Store\.from_arrays"):
            pairs.restore(arrays | {name: np.full_like(arrays[name], value)})
    with pytest.raises(ValueError, match=r"Store\.from_arrays"):
        ObservationPairs(LENGTH, 1, (6, 5), np.uint8, Zstd()).restore(arrays)
    np.testing.assert_array_equal(pairs.read(np.arange(29), np.zeros(29, int))[1], rows[1:, 0])
