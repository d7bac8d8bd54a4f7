"""One question put to every peer: the same work at every size, all sides in turn in one process.

A table has a row for each peer and size (its time over ours) and, over two sizes or more, one for each library's growth: the
exponent b of cost = a size^b. A peer that is absent, has no such verb, or is not asked for so many rows has its row all the
same, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import peers
from benchmarks._harness import Absent, absent_row, enough_calls, exponent, interleave, ratio, row, spread
from benchmarks.peers import EXAMPLE, FBUF, Driver, Library, Thunk

LeafBytes = dict[tuple[str, int], Driver]


class Field:
    """The libraries of one comparison, with a full buffer of each at every size."""

    def __init__(self, kind: str, sizes: Sequence[int], libraries: Sequence[Library] = peers.PEERS):
        self.kind, self.sizes, self.libraries = kind, tuple(sizes), tuple(libraries)
        if not self.sizes or not libraries:
            raise ValueError("Field: expected sizes and libraries, of each at least one.")
        self.modules = {library.name: peers.load(library) for library in (FBUF, *libraries)}
        self.held: LeafBytes = {}
        self.missing: dict[tuple[str, int], str] = {}
        for library in (FBUF, *libraries):
            for size in self.sizes:
                self._open(library, size)

    def _open(self, library: Library, size: int) -> None:
        """Holds a full buffer, or the reason why not."""
        module, key = self.modules[library.name], (library.name, size)
        if isinstance(module, Absent):
            return
        if not hasattr(module, self.kind):
            self.missing[key] = "it has no priorities"
            return
        reason = peers.too_large(library, size)
        if reason is not None:
            self.missing[key] = reason
            return
        try:
            driver = getattr(module, self.kind)(size, EXAMPLE)
            peers.fill(driver, size)
        except Exception as error:  # what this library says to so many rows
            self.missing[key] = f"failed: {type(error).__name__}: {error}"[:200]
            return
        self.held[key] = driver

    def ask(
        self,
        question: str,
        thunk: Callable[[Driver], Thunk],
        rounds: int,
        targets: Mapping[tuple[str, int], str] | None = None,
        flat: str | None = None,
        **tags: Any,
    ) -> list[dict[str, Any]]:
        """Rows of one table.

        Args:
          question: What is measured, without the direction.
          thunk: From a driver, what to call.
          rounds: Measurements of each.
          targets: (peer, size) to the bound on its time over ours.
          flat: The bound on our exponent.
          **tags: Beside library and size, in every row.
        """
        thunks = {key: thunk(driver) for key, driver in self.held.items()}
        names = {f"{library} {size}": key for key in thunks for library, size in [key]}
        by_name = {name: thunks[key] for name, key in names.items()}
        timings = interleave(by_name, rounds=rounds, calls=enough_calls(by_name))
        times = {key: timings[name] for name, key in names.items()}
        asked = f"{question}: time of the peer's over ours"
        rows = [
            self._compared(asked, library, size, times, (targets or {}).get((library.name, size)), tags)
            for library in self.libraries
            for size in self.sizes
        ]
        return rows + (self._growth(question, times, flat, tags) if len(self.sizes) > 1 else [])

    def _compared(
        self, question: str, library: Library, size: int, times: Any, target: str | None, tags: Mapping[str, Any]
    ) -> dict[str, Any]:
        case, key, module = f"{library.name}, {size:,} rows", (library.name, size), self.modules[library.name]
        tags = {**tags, "library": library.name, "size": size}
        if isinstance(module, Absent):
            return absent_row(question, case, module, target, tags)
        mine = times.get((FBUF.name, size))
        if mine is None or key not in times:
            why = self.missing.get(key) or f"fbuf: {self.missing[FBUF.name, size]}"
            return row(question, case, target=target, note=why, tags=tags)
        return row(
            question,
            case,
            ours=spread(mine),
            peer=spread(times[key]),
            ratio=ratio(times[key], mine),
            target=target,
            note=library.includes if size == self.sizes[0] else "",
            tags=tags,
        )

    def _growth(self, question: str, times: Any, flat: str | None, tags: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = []
        for library in (FBUF, *self.libraries):
            known = {size: times[library.name, size] for size in self.sizes if (library.name, size) in times}
            if len(known) < 2:
                continue
            ours = library is FBUF
            small, large = min(known), max(known)
            last = spread(known[large])
            rows.append(
                row(
                    f"{question}: growth exponent over the rows held",
                    library.name,
                    ours=last if ours else None,
                    peer=None if ours else last,
                    ratio=exponent(known),
                    target=flat if ours else None,
                    note=f"from {small:,} to {large:,} rows; the time is that at {large:,}",
                    tags={**tags, "library": library.name, "growth": True},
                )
            )
        return rows
