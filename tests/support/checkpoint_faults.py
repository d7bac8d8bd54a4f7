"""Faults of checkpoints shared by tiers: power failures, damaged bytes, and a model of any sequence."""

import random
import warnings

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fbuf._formats import checkpoint
from tests.support.disk import flipped
from tests.support.memory_disk import PATH, Blocks, Faulty, Killed, Memory, load, same, save


def power_failures(each, seed):
    """Cut the power `each` times after every call of a save: the old or the new save loads. Return the number of cuts."""
    chance, tried = random.Random(seed), 0
    for before in (0, 1, 3):
        base = Memory()
        for k in range(before):
            save(PATH, k, base)
        for at in range(1000):
            disk = base.copy()
            faulty = Faulty(disk, at, None, dead=True)
            try:
                save(PATH, before, faulty)
            except Killed:
                pass
            for left in disk.crashes(chance, each):
                tried += 1
                try:
                    now = load(PATH, left)
                except checkpoint.CheckpointNotFound:
                    now = -1
                assert now in ((before - 1, before) if faulty.failed else (before,)), f"seed {seed}, cut {tried}"
            if not faulty.failed:
                break
    return tried


def small(disk, k):
    arrays = {"a": Blocks(np.arange(12, dtype=np.uint8) + k // 2, 8), "b": np.array([k], np.int16)}
    checkpoint.write(PATH, arrays, {"k": k}, disk=disk)


def outcome(disk, **how):
    """Return the number of the save that loads whole; None for an error that reports the damage."""
    try:
        with checkpoint.read(PATH, disk=disk, **how) as saved:
            k = saved.meta["k"]
            same(saved, {"a": np.arange(12, dtype=np.uint8) + k // 2, "b": np.array([k], np.int16)})
            return k
    except (checkpoint.StoreCorrupted, checkpoint.CheckpointNotFound):
        return None


def flips(data):
    return (flipped(data, bit) for bit in range(8 * len(data)))


def lengths(data):
    return (data[:at] if at < len(data) else data + b"\0" for at in range(len(data) + 1))


def damaged_outcomes(generations, change, **how):
    """Return what loads after each change of each file, and whether that was a data file."""
    disk = Memory()
    for k in range(generations):
        small(disk, k)
    seen = []
    with warnings.catch_warnings(action="ignore"):
        for name, whole in disk.contents().items():
            for damaged in change(whole):
                disk.names[name].data[:] = damaged
                seen.append((outcome(disk, **how), name.startswith("data")))
            disk.names[name].data[:] = whole
    assert outcome(disk) == generations - 1
    return seen


class Machine(RuleBasedStateMachine):
    """Saves, kills, damage and loads in any order, compared with a list of the saves."""

    @initialize()
    def start(self):
        self.disk, self.number = Memory(), 0
        self.saved = []  # newest last
        self.arrays = {}
        self.version = {}
        self.damaged = set()  # manifests: a bit flipped twice is whole again
        self.counter = 0

    def source(self, name):
        array = self.arrays[name]
        count = -(-len(array) // 4)
        marks = [f"{name}-{len(array)}-{self.version.get((name, b), 0)}" if b % 3 else None for b in range(count)]
        return Blocks(array, 4, marks)

    @rule(name=st.sampled_from("abc"), rows=st.integers(0, 20))
    def resize(self, name, rows):
        old = self.arrays.get(name, np.zeros((0, 2), np.int32))
        self.counter += 1
        self.arrays[name] = np.concatenate([old[:rows], np.full((max(rows - len(old), 0), 2), self.counter, np.int32)])
        for block in range(6):
            self.version[name, block] = self.counter

    @rule(name=st.sampled_from("abc"), row=st.integers(0, 19))
    def change(self, name, row):
        if name in self.arrays and row < len(self.arrays[name]):
            self.counter += 1
            self.arrays[name] = self.arrays[name].copy()
            self.arrays[name][row] = self.counter
            self.version[name, row // 4] = self.counter

    @rule(name=st.sampled_from("abc"))
    def drop(self, name):
        self.arrays.pop(name, None)

    @rule(keep=st.integers(1, 3), kill=st.none() | st.integers(0, 60))
    def save(self, keep, kill):
        self.number += 1
        arrays = dict(self.arrays)
        faulty = Faulty(self.disk, kill, None, dead=True)
        try:
            checkpoint.write(PATH, {n: self.source(n) for n in arrays}, {"k": self.number}, keep=keep, disk=faulty)
            self.saved.append((self.number, arrays))
        except Killed:
            with warnings.catch_warnings(action="ignore"):
                try:
                    with checkpoint.read(PATH, disk=self.disk) as found:
                        if found.meta["k"] == self.number:
                            self.saved.append((self.number, arrays))
                except checkpoint.CheckpointNotFound:
                    pass

    @rule(at=st.integers(0, 10**6))
    def damage_the_newest_manifest(self, at):
        names = sorted(n for n in self.disk.contents() if n.endswith("json") and n not in self.damaged)
        if len(names) > 1:
            self.damaged.add(names[-1])
            data = self.disk.names[names[-1]].data
            data[at % len(data)] ^= 1
            with warnings.catch_warnings(action="ignore"):
                with checkpoint.read(PATH, disk=self.disk) as found:
                    k = found.meta["k"]
            while self.saved[-1][0] != k:
                self.saved.pop()

    @invariant()
    def load(self):
        with warnings.catch_warnings(action="ignore"):
            if not self.saved:
                pytest.raises(checkpoint.CheckpointNotFound, lambda: checkpoint.read(PATH, disk=self.disk))
                return
            with checkpoint.read(PATH, disk=self.disk) as found:
                number, arrays = self.saved[-1]
                assert found.meta["k"] == number
                same(found, arrays)


def any_sequence(examples):
    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=20, max_examples=examples))
