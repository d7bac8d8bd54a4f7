"""A replay buffer in plain Python: what every method of `fbuf.Buffer` must do, as simply as possible.

Priorities and probabilities are float64. Source: the documentation of `Buffer` and of the samplers.
"""

import copy
import dataclasses
import itertools

import numpy as np

from tests.support.model_lanes import Lanes, Row

COUNTERS = "refused_nonfinite refused_out_of_range refused_stale refused_closed empty_samples expired_rows".split()


class Model(Lanes):
    def __init__(self, buffer, fields):
        super().__init__(buffer, fields)
        self.sampler = buffer.sampler
        self.ranked = type(self.sampler).__name__ == "Ranked"
        self.prioritized = self.ranked or type(self.sampler).__name__ == "Prioritized"
        self.ages = type(self.sampler).__name__ == "Staleness"
        # By name of the row: the number of an anchor's run in its lane and its stamp, its leaf (for `Ranked`, its bucket),
        # and its priority. By lane: the run of its newest anchor, and how many anchors have opened in it.
        self.run = {}
        self.leaf = {}
        self.magnitude = {}
        self.latest = {}
        self.came = {}
        self.version, self.max_priority = 0, 1.0
        numbers = tuple(self.sampler.numbers) if self.prioritized else ()
        self.numbers = {n: float(getattr(self.sampler, n)) for n in numbers}
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.names = itertools.count()
        self.by_index = {}
        self.generation = {}

    def copy(self):
        """As it is now, on its own (what indices mean is shared: that never changes)."""
        other = copy.copy(self)
        other.history = [[dataclasses.replace(r) for r in rows] for rows in self.history]
        other.counters, other.leaf = dict(self.counters), dict(self.leaf)
        other.numbers, other.magnitude = dict(self.numbers), dict(self.magnitude)
        other.run, other.latest, other.came = dict(self.run), dict(self.latest), dict(self.came)
        return other

    def extend(self, rows, priority=None, mask=None):
        drawable = {row.name for row in self.anchors()}
        self._see_versions(rows, mask)
        for n in range(next(iter(rows.values())).shape[0]):
            for e in range(self.lane_count):
                if mask is None or mask[n, e]:
                    given = None
                    if priority is not None:
                        given = abs(float(priority[n, e]))
                        if not np.isfinite(given):
                            self.counters["refused_nonfinite"] += 1
                            given = None
                    self._arrive(e, {k: np.array(x[n, e]) for k, x in rows.items()}, given)
        self._follow(drawable)

    def cut(self, lanes):
        """Ends the episodes of lanes bool[E]; where every row is drawn there are none."""
        if self.kind == "Row" and getattr(self.sampler, "over", "") != "episodes":
            return
        drawable = {row.name for row in self.anchors()}
        for rows in itertools.compress(self.history, lanes):
            if rows:
                self.cut_after(rows[-1])
        self._follow(drawable)

    def _arrive(self, lane, fields, given):
        past = self.history[lane]
        number = past[-1].number + 1 if past else 0
        slot = number % self.length * self.lane_count + lane
        row = Row(next(self.names), lane, number, slot, fields, given)
        self._place_in_episode(row, past[-1] if past else None)
        past.append(row)

    def _follow(self, before):
        """Rows that are drawable now and were not `before` get their first priority."""
        now = self.anchors()
        if self.ages:
            for row in now:
                if row.name not in before:
                    self._stamp(row)
        if not self.prioritized:
            return
        largest = self.max_priority or 1.0
        first = max((leaf for leaf in self.leaf.values() if leaf > self._leaf(0.0)), default=self._leaf(1.0))
        for name in before - {row.name for row in now}:
            del self.leaf[name], self.magnitude[name]
        for row in now:
            if row.name not in before:
                told = self._completed_by(row).given
                given = largest if told is None else told
                self.leaf[row.name], self.magnitude[row.name] = self._leaf(given), given
                if told is None and self.ranked and self.sampler.largest == "held":
                    self.leaf[row.name] = first
                self.max_priority = max(self.max_priority, given)
        self._hold()

    def _hold(self):
        """The largest priority, where it is that of the rows there are."""
        if self.prioritized and not self.ranked and self.sampler.largest == "held":
            self.max_priority = max(self.magnitude.values(), default=1.0)

    def _see_versions(self, rows, mask=None):
        if self.ages and self.sampler.version is not None:
            said = rows[self.sampler.version]
            self.version = max([self.version, *(said if mask is None else said[mask]).reshape(-1).tolist()])

    def _stamp(self, row):
        run, stamp = self.latest.get(row.lane, (0, 0))
        came = self.came[row.lane] = self.came.get(row.lane, 0) + 1
        if self.sampler.version is None:
            run = stamp = (came - 1) // self.sampler.unit
        else:
            said = int(self._completed_by(row).fields[self.sampler.version])
            run, stamp = run + (said != stamp), said
        self.run[row.name] = self.latest[row.lane] = (run, stamp)

    def staleness_weight(self, row):
        """What an anchor counts for; 0 where it is too stale, or of a run long forgotten."""
        sampler, (run, stamp), (newest, now) = self.sampler, self.run[row.name], self.latest[row.lane]
        staleness = max((now if sampler.version is None else self.version) - stamp, 0)
        remembered = sampler.runs or (sampler.maximum + 1 if sampler.version is None else max(64, sampler.maximum + 1))
        if staleness > sampler.maximum or newest - run >= remembered:
            return 0.0
        if sampler.decay == "inverse":
            return 1 / (1 + staleness)
        return 2 ** -(staleness / sampler.half_life) if sampler.decay == "exponential" else 1.0

    def chosen_from(self):
        anchors = self.anchors()
        return [row for row in anchors if self.staleness_weight(row) > 0] if self.ages else anchors

    def _leaf(self, priority):
        if self.ranked:  # eight buckets an octave, those beyond 2^-32 and 2^32 thrown together
            octave = int(np.floor(np.log2(priority))) if priority > 0 else -99
            return float(np.clip((octave + 32) * 8 + int((priority / 2.0**octave - 1) * 8), 0, 511) + 1)
        leaf = (np.float64(priority) + self.numbers["eps"]) ** self.numbers["alpha"]
        return float(min(leaf, 2.0**100))

    def update_priority(self, indices, errors):
        """Indices are (slot, generation)."""
        drawable = {row.name for row in self.anchors()}
        for (slot, generation), error in zip(indices, errors, strict=True):
            row = self.row_at(slot, generation)
            if (slot, generation) == (self.capacity, 0):
                continue
            if not np.isfinite(error):
                self.counters["refused_nonfinite"] += 1
            elif not 0 <= slot < self.capacity:
                self.counters["refused_out_of_range"] += 1
            elif row is None:
                self.counters["refused_stale"] += 1
            elif row.name not in drawable:
                self.counters["refused_closed"] += 1
            else:
                self.leaf[row.name] = self._leaf(abs(float(error)))
                self.magnitude[row.name] = abs(float(error))
                self.max_priority = max(self.max_priority, abs(float(error)))
        self._hold()

    def rebuild(self):
        if not self.ranked:
            self.leaf = {name: self._leaf(p) for name, p in self.magnitude.items()}

    def update_rows(self, indices, fields):
        for i, (slot, generation) in enumerate(indices):
            row = self.row_at(slot, generation)
            if (slot, generation) == (self.capacity, 0):
                continue
            if not 0 <= slot < self.capacity:
                self.counters["refused_out_of_range"] += 1
            elif row is None:
                self.counters["refused_stale"] += 1
            else:
                row.fields = row.fields | {k: np.array(x[i]) for k, x in fields.items()}

    def clear(self):
        self.history = [[] for _ in range(self.lane_count)]
        self.leaf, self.magnitude, self.max_priority = {}, {}, 1.0
        self.run, self.latest, self.came = {}, {}, {}

    def set(self, **numbers):
        if self.ages:
            self.version = int(numbers["version"])
            return
        self.numbers.update({n: float(np.float32(x)) for n, x in numbers.items()})

    def convert(self, other):
        """The rows under another sampler or view; what came before a full lane's oldest row is not known any more."""
        model = Model(other, self.fields)
        model.counters = dict(self.counters)
        model.names, model.by_index, model.generation = self.names, self.by_index, self.generation
        for lane in range(self.lane_count):
            held = [dataclasses.replace(row, given=None, reset=False, unknown=False) for row in self.held(lane)]
            full = len(held) == self.length
            for before, row in zip([None, *held], held, strict=False):
                model._place_in_episode(row, before)
                if before is None and full:
                    row.start = False
                    row.step = -1 if model.next_step else 0
            if full:
                held[0].reset = held[0].unknown = model.next_step  # it may be one
            model.history[lane] = held
        if model.ages and other.sampler.version is not None:
            kept = [row for rows in model.history for row in rows if not row.unknown]
            model.version = max([0, *(int(row.fields[other.sampler.version]) for row in kept)])
        model._follow(set())
        return model

    @property
    def size(self):
        return sum(len(self.held(lane)) for lane in range(self.lane_count))

    def meet(self, slot, generation, row):
        """A verb named `row` so: it has no other index, and no other row has this one, ever."""
        assert slot == row.slot and generation != 0
        assert self.generation.setdefault(row.name, generation) == generation, "one row with two indices"
        assert self.by_index.setdefault((slot, generation), row.name) == row.name, "two rows, one index"

    def row_at(self, slot, generation):
        row = self.in_slot(slot)
        return row if row is not None and self.by_index.get((slot, generation)) == row.name else None

    def in_slot(self, slot):
        if not 0 <= slot < self.capacity:
            return None
        return next((r for r in self.held(slot % self.lane_count) if r.slot == slot), None)

    def by_age(self):
        """`[L][E]`, oldest first, None past the newest."""
        lanes = [self.held(e) for e in range(self.lane_count)]
        return [[rows[i] if i < len(rows) else None for rows in lanes] for i in range(self.length)]

    def newest(self, n):
        """`[n][E]`, newest last, None where there are fewer."""
        lanes = [self.held(e) for e in range(self.lane_count)]
        return [[rows[i] if -i <= len(rows) else None for rows in lanes] for i in range(-n, 0)]

    def probability(self, row):
        if getattr(self.sampler, "over", "") == "episodes":
            episodes = [(r.lane, self.episode_of(r)) for r in self.anchors()]
            return 1 / len(set(episodes)) / episodes.count((row.lane, self.episode_of(row)))
        if self.ages:
            return self.staleness_weight(row) / sum(map(self.staleness_weight, self.anchors()))
        if not self.prioritized:
            return 1 / len(self.anchors())
        number, share = len(self.leaf), self.numbers.get("uniform", 0.0)
        mass = sum(self.leaf.values())
        chance = self.leaf[row.name] / mass if mass > 0 else 1 / number
        if self.ranked:
            terms = np.arange(1, number + 1, dtype=np.float64) ** -self.numbers["alpha"]
            buckets = list(self.leaf.values())
            above = sum(b > self.leaf[row.name] for b in buckets)
            tied = buckets.count(self.leaf[row.name])
            chance = terms[above : above + tied].mean() / terms.sum()
        return float((1 - share) * chance + share / number)

    def weights(self, rows, beta=None):
        if not self.prioritized:
            return [1.0] * len(rows)
        beta = self.numbers["beta"] if beta is None else beta
        number = len(self.anchors())
        raw = [(number * self.probability(row)) ** -beta for row in rows]
        top = 1.0
        if self.sampler.normalize == "batch":
            top = max(raw)
        elif self.sampler.normalize == "buffer":
            chances = [self.probability(row) for row in self.anchors()]
            top = (number * min(p for p in chances if p > 0)) ** -beta
        return [w / top for w in raw]
