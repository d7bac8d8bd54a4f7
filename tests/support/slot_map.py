"""Stores where a row replaces that in any slot, and a plain-Python model of them."""

from collections import deque

import numpy as np

from fbuf._host.codecs import Zstd
from tests.support import store as stores
from tests.support.store import Deflate, load
from tests.support.store_model import Model

CODECS = [None, Zstd(), Zstd(dictionary=0), Deflate(1)]


def make(*codecs, **more):
    return stores.make(*codecs, **more, streams=False)


def reload(store):
    return load(store, streams=False)


class Scattered(Model):
    """A row replaced can be read until `slack` others (a lane) were replaced after it."""

    def __init__(self, store):
        super().__init__(store)
        self.spare = store.lanes * (store.length + store.slack)  # places without a row
        self.of_slot = {}  # newest ticket
        self.replaced = deque()
        self.alive = set()

    def write_at(self, rows, slots, keep=None):
        tickets = self.store.write(rows, keep, slots)
        inside = (slots >= 0) & (slots < self.store.lanes * self.store.length)
        taken = self.learn(tickets, rows, inside if keep is None else inside & keep)
        for at, ticket in taken:
            if int(slots[at]) in self.of_slot:
                self.replaced.append(self.of_slot[int(slots[at])])
            self.of_slot[int(slots[at])] = ticket
        for _ in taken:
            if self.spare:
                self.spare -= 1
            else:
                self.alive.remove(self.replaced.popleft())
        self.alive.update(ticket for _, ticket in taken)

    def newest(self):
        return self.alive

    def check(self, rng):
        super().check(rng)
        stats = self.store.stats()
        assert stats["rows_live"] == len(self.alive) and stats["rows_accepted"] == len(self.rows) - len(self.origin)
        assert stats["patches"] == sum(o in self.alive for o in self.origin.values())


def churn(store, rows, times, step=50):
    capacity, rng, sizes = store.length, np.random.default_rng(0), []
    for i in range(0, capacity, step):
        slots = np.arange(i, min(i + step, capacity), dtype=np.int32)[:, None]
        store.write([rows[rng.integers(len(rows), size=slots.shape)]], None, slots)
    for i in range(0, times, step):
        slots = rng.permutation(capacity)[:step].astype(np.int32)[:, None]
        store.write([rows[rng.integers(len(rows), size=slots.shape)]], None, slots)
        if i % (step * 20) == 0:
            sizes.append(store.nbytes)
    return sizes
