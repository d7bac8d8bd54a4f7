"""Sections of a benchmark that end in every way, for `benchmarks._budget`."""

import os
import time

from benchmarks._budget import Section
from benchmarks._harness import row


def measured(quick):
    yield row("measured", "first" if quick else "slowly", ratio=1.0)
    yield row("measured", "second", ratio=2.0)


def fails(quick):
    yield row("fails", "first")
    raise ArithmeticError("of the section")


def crashes(quick):
    yield row("crashes", "first")
    os._exit(3)


def hangs(quick):
    yield row("hangs", "first")
    time.sleep(600)


SECTIONS = {
    "fails": Section(fails, 1),
    "crashes": Section(crashes, 1),
    "long": Section(measured, 1e6),
    "hangs": Section(hangs, 0.1),
    "measured": Section(measured, 1),
}
