"""A plain-Python model of host stores, and stores that Hypothesis draws."""

import numpy as np
from hypothesis import strategies as st

from fbuf._host.store.store import UPDATE_BIT
from tests.support.store import CODECS, DTYPES, columns_of


class Drawn:
    """The columns, sizes and values of a store that Hypothesis draws."""

    def __init__(self, data, codecs=CODECS):
        self.lanes = data.draw(st.integers(1, 4), "lanes")
        self.length = data.draw(st.integers(1, 30), "length")
        self.slack = data.draw(st.sampled_from([0, 1, 4, 9, 9]), "slack")
        self.shape = data.draw(st.sampled_from([(), (7,), (2, 3), (0,)]), "shape")
        self.codecs = data.draw(st.lists(st.sampled_from(codecs), min_size=1, max_size=3), "codecs")
        self.dtype = np.dtype(data.draw(st.sampled_from(DTYPES), "dtype"))
        self.rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
        self.sizes = {"lanes": self.lanes, "length": self.length, "slack": self.slack}
        self.columns = columns_of(*self.codecs, shape=self.shape, dtype=self.dtype)

    def values(self, *lead):
        return (self.rng.integers(0, 2, (*lead, *self.shape)) * self.rng.integers(1, 99)).astype(self.dtype)

    def rows(self, number):
        return [self.values(number, self.lanes) for _ in self.columns]

    def mask(self, number):
        return self.rng.random((number, self.lanes)) < self.rng.choice([0.0, 0.1, 0.8])


class Model:
    """Every row ever written, by ticket, and which are live."""

    def __init__(self, store):
        self.store, self.depth = store, store.length + store.slack
        self.rows = {}
        self.lanes = [[] for _ in range(store.lanes)]  # stream tickets in order
        self.origin = {}  # of patches

    def write(self, rows, keep=None):
        tickets = self.store.write(rows, keep)
        taken = self.learn(tickets, rows, np.ones(tickets.shape, bool) if keep is None else keep)
        for (_, e), ticket in taken:
            self.lanes[e].append(ticket)

    def learn(self, tickets, rows, kept):
        """Check that exactly the rows kept have tickets, new ones; return where these are, and which."""
        assert tickets.dtype == np.uint64 and tickets.shape == rows[0].shape[:2]
        np.testing.assert_array_equal(tickets > 0, kept)
        taken = [((n, e), int(tickets[n, e])) for n, e in np.argwhere(kept).tolist()]
        for at, ticket in taken:
            assert ticket not in self.rows and ticket < UPDATE_BIT
            self.rows[ticket] = [r[at].tobytes() for r in rows]
        return taken

    def update_rows(self, tickets, keep, fields):
        alive = self.live()
        new = self.store.update_rows(tickets, keep, fields)
        for i, (old, ticket) in enumerate(zip(tickets.tolist(), new.tolist(), strict=True)):
            if not keep[i] or old not in alive:
                assert ticket == old
                continue
            assert ticket >= UPDATE_BIT and ticket not in self.rows
            self.rows[ticket] = [fields[c][i].tobytes() if c in fields else v for c, v in enumerate(self.rows[old])]
            self.origin[ticket] = self.origin.get(old, old)

    def patch_some(self, drawn):
        """Change some of three rows that were not changed yet; superseded changes stay for `slack` patches alone."""
        known = np.array([0, *(t for t in self.rows if t < UPDATE_BIT)], np.uint64)
        if drawn.slack == 9 and len(known) > 3:
            tickets = drawn.rng.choice(known, 3, replace=False)
            column = int(drawn.rng.integers(len(drawn.columns)))
            self.update_rows(tickets, drawn.rng.random(3) < 0.8, {column: drawn.values(3)})

    def newest(self):
        return {t for lane in self.lanes for t in lane[-self.depth :]}

    def live(self):
        there = self.newest()
        return there | {t for t, o in self.origin.items() if o in there}

    def check(self, rng):
        """Read every ticket there was, and some that never were, in two requests a column."""
        top = max((t for t in self.rows if t < UPDATE_BIT), default=0)  # tickets of the rows to come are above it
        coming = range(top + 1, top + 1 + self.store.lanes)
        tickets = rng.permutation(np.array([0, 0, 2**62, UPDATE_BIT | 2**40, *coming, *self.rows], np.uint64))
        split = len(tickets) // 2
        alive, requests = self.live(), []
        for c, column in enumerate(self.store.columns):
            for part in (tickets[:split], tickets[split:]):
                requests.append((c, part, np.full((len(part), *column.shape), 1).astype(column.dtype)))
        ok = self.store.read(requests)
        assert ok.dtype == bool and ok.size == len(tickets) * len(self.store.columns)
        at = 0
        for c, part, out in requests:
            for ticket, row in zip(part.tolist(), out, strict=True):
                there = ticket in alive
                assert ok[at] == (there or ticket == 0), ticket
                assert row.tobytes() == (self.rows[ticket][c] if there else bytes(row.nbytes)), ticket
                at += 1
