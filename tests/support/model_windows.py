"""`window_index`, `priorities`, updates `[B, T]` and the ring facts of `stats`, compared with the model after every step."""

import functools
import itertools

import jax
import numpy as np

from tests.support.model_trial import BATCH, Trial, index_of, nest, pairs_of


@functools.cache
def methods_of(buffer):
    """Return what looks at a state, compiled once for all programs, and the two updates of windows."""

    def look(state, index):
        known = [buffer.priorities(state, *which) for which in ((), (index,), (buffer.rows(state).index,))]
        return known, buffer.window_index(state, index), buffer.stats(state)

    def update_rows(state, rows, fields, mask):
        return buffer.update_rows(state, rows, fields, mask=mask)

    def update_priority(state, rows, errors, mask):
        return buffer.update_priority(state, rows, errors, mask=mask)

    return jax.jit(look), jax.jit(update_rows, donate_argnums=0), jax.jit(update_priority, donate_argnums=0)


class WindowTrial(Trial):
    """A trial whose steps also write to the rows of windows, found at any earlier step."""

    def __init__(self, buffer):
        super().__init__(buffer, "donated")
        self.look, self.write_rows, self.write_priorities = methods_of(buffer)
        self.windows = []  # B T indices each
        self.cleared = [0] * self.model.lane_count  # rows of each lane before the last `clear`, rounded up to rounds

    def clear(self, rng):
        length = self.model.length
        self.cleared = [n + -(-self.written(e) // length) * length for e, n in enumerate(self.cleared)]
        super().clear(rng)

    def written(self, lane):
        past = self.model.history[lane]
        return past[-1].number + 1 if past else 0

    def some_windows(self, rng):
        """Return the indices of windows found now or earlier, a mask, and the indices with those left out masked."""
        index = self.windows[rng.integers(max(0, len(self.windows) - 5), len(self.windows))]
        mask = rng.random(len(index)) < rng.choice([0.5, 1.0])
        nowhere = (self.model.capacity, 0)
        return index, mask, [pair if keep else nowhere for pair, keep in zip(index, mask, strict=True)]

    def update_windows(self, rng):
        for method in ("rows", "priority") if self.windows else ():
            index, mask, chosen = self.some_windows(rng)
            shape = (BATCH, len(index) // BATCH)
            rows = jax.tree.map(lambda x, shape=shape: x.reshape(shape), index_of(index))
            if method == "rows":
                fields = {"reward": rng.normal(size=len(index)).astype(np.float32)}
                fields |= {"obs": rng.integers(1, 256, (len(index), 4)).astype(np.uint8)}
                self.model.update_rows(chosen, fields)
                fields = {n: x.reshape((*shape, *x.shape[1:])) for n, x in fields.items()}
                self.state = self.write_rows(self.state, rows, nest(fields), mask.reshape(shape))
            else:
                errors = self.magnitudes(rng, (len(index),))
                self.model.update_priority(chosen, errors)
                self.state = self.write_priorities(self.state, rows, errors.reshape(shape), mask.reshape(shape))

    def compare_all(self, rng):
        super().compare_all(rng)
        indices = self.some_indices(rng)
        (all_known, known, again), windows, stats = jax.device_get(self.look(self.state, index_of(indices)))
        in_order = list(itertools.chain(*self.model.by_age()))
        self.compare_priorities(all_known.reshape(-1), in_order)
        self.compare_priorities(again.reshape(-1), in_order)
        self.compare_priorities(known, [self.model.row_at(*pair) for pair in indices])
        self.compare_windows(windows, indices)
        self.compare_ring(stats)

    def compare_priorities(self, got, rows):
        model = self.model
        anchors = {row.name for row in model.anchors()}
        expected = np.full(len(rows), np.nan)
        for i, row in enumerate(rows):
            if row is not None and row.name in anchors:
                expected[i] = self.priority(row)
        assert (np.isnan(got) == np.isnan(expected)).all()
        if model.ranked:
            np.testing.assert_array_equal(got, expected)
        elif model.sampler.largest == "held":
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=0)
        elif (alpha := model.numbers["alpha"]) > 0.1:  # small alphas amplify the rounding of leaves
            with np.errstate(over="ignore"):
                np.testing.assert_allclose(got, expected.astype(np.float32), rtol=2e-5 / alpha, atol=1e-9 / alpha)

    def priority(self, row):
        """What is known of the priority of an anchor."""
        model = self.model
        if model.ranked:
            step = int(model.leaf[row.name]) - 1
            return 2.0 ** (step // 8 - 32) * (1 + step % 8 / 8) if step else 0.0
        if model.sampler.largest == "held":
            return model.magnitude[row.name]
        with np.errstate(over="ignore"):
            power = np.float64(model.leaf[row.name]) ** (1 / model.numbers["alpha"])
        return float(max(power - model.numbers["eps"], 0.0))

    def compare_windows(self, got, indices):
        """The rows of anchors; a masked index has masked rows, any other no row, but a count for each entry."""
        model, capacity = self.model, self.model.capacity
        anchors = {row.name for row in model.anchors()}
        for i, (slot, generation) in enumerate(indices):
            pairs = pairs_of(jax.tree.map(lambda x, i=i: x[i], got))
            row = model.row_at(slot, generation)
            if row is not None and row.name in anchors:
                for pair, expected in zip(pairs, model._window(row), strict=True):
                    found = model.row_at(*pair)
                    assert (pair == (capacity, 0)) if expected is None else found is not None
                    assert found is None or found.name == expected.name
            else:
                assert all(model.row_at(*pair) is None for pair in pairs)
                assert {pair == (capacity, 0) for pair in pairs} == {(slot, generation) == (capacity, 0)}
        self.windows.append(pairs_of(got))

    def compare_ring(self, stats):
        model = self.model
        writes = [base + self.written(e) for e, base in enumerate(self.cleared)]
        cursors = {n % model.length for n in writes}
        assert int(stats["writes"]) == sum(writes) and bool(stats["is_full"]) == (model.size == model.capacity)
        assert int(stats["cursor"]) == (cursors.pop() if len(cursors) == 1 else -1)
