"""Load the newest complete generation of a checkpoint.

Blocks are read on request and checked. If the newest generation is damaged, the one before is loaded with a warning. All files
are opened at once, so that a concurrent save cannot remove them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

from fbuf._core.progress import Bar, Progress
from fbuf._formats.checkpoint.data_file import OpenFile, bytes_of
from fbuf._formats.checkpoint.directory import DAMAGED, Folder
from fbuf._formats.checkpoint.errors import CheckpointNotFound
from fbuf._formats.checkpoint.filesystem import DISK, Disk
from fbuf._formats.checkpoint.manifest import ArrayEntry, Manifest
from fbuf._host.types import Array, StoreCorrupted, bare

_PIECE = 1 << 20


class SavedArray:
    """An array in a checkpoint, and a source for another: `shape`, `dtype`, `[a:b]`, `blocks()`, `numpy.asarray`.

    Cost: reading rows reads the blocks that they lie in, and checks each.
    """

    def __init__(self, name: str, entry: ArrayEntry, files: list[OpenFile], save: str) -> None:
        self._name, self._entry, self._files, self._save = name, entry, files, save
        self._layout = entry.layout
        self.shape, self.dtype = entry.layout.shape, entry.layout.dtype
        self.cuts, self.keys, self.marks = entry.layout.cuts, entry.layout.keys, entry.marks
        self.checked: Array = np.zeros(entry.layout.count, bool)
        self.bar: Bar | None = None  # told of each block once
        if entry.layout.block is not None:
            self.block = entry.layout.block

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self._layout.nbytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"SavedArray({self._name!r}, {self.dtype}{list(self.shape)})"

    def __getitem__(self, rows: Any) -> Array:
        """Rows `[a:b]`, one row, or all with `[()]` and `[...]`; a copy. Raises StoreCorrupted."""
        if rows is Ellipsis or (isinstance(rows, tuple) and not rows):
            return self._rows(0, self._layout.rows).reshape(self.shape)
        if not self.shape:
            raise IndexError(f"array '{self._name}' has no axes; read it with [()]")
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.shape[0])
            if step != 1:
                raise IndexError(f"array '{self._name}' is read in steps of {step}; expected 1. Read it, then slice.")
            return self._rows(start, max(start, stop))
        row = int(rows.__index__())
        if not -self.shape[0] <= row < self.shape[0]:
            raise IndexError(f"row {row} of array '{self._name}', which has {self.shape[0]}")
        return self._rows(row % self.shape[0], row % self.shape[0] + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"array '{self._name}' lies in a file: reading it makes a copy")
        value = self[()]
        return value if dtype is None else value.astype(dtype, copy=False)

    def places(self) -> tuple[Array, Array, Array, Array, Array]:
        """Of each block, int64[count]: first row, which of `Saved.files`, first byte there, bytes, crc32."""
        first: Array = np.array([self._layout.span(i)[0] for i in range(self._layout.count)], np.int64)
        entry = self._entry
        return first, entry.file, entry.offset, self._layout.sizes, entry.crc

    def blocks(self) -> Iterator[tuple[int, Array]]:
        """(first row, rows) of each block, in order. Memory: one block."""
        for i in range(self._layout.count):
            start, stop = self._layout.span(i)
            yield start, self._rows(start, stop).reshape(self._layout.block_shape(i))

    def faults(self, whole: set[tuple[str, int, int]] | None = None) -> Iterator[StoreCorrupted]:
        """Reads what was not read yet, and gives what is wrong with each block.

        Args:
          whole: (path, offset, crc32) of blocks that need not be read; those that are whole are added.
        """
        sizes, buffer = self._layout.sizes, memoryview(bytearray(_PIECE))
        for i in np.flatnonzero(~self.checked).tolist():
            at, size, crc = int(self._entry.offset[i]), int(sizes[i]), int(self._entry.crc[i])
            file = self._files[self._entry.file[i]]
            try:
                if whole is None or (file.path, at, crc) not in whole:
                    if file.crc(at, size, buffer) != crc:
                        raise self._damaged(i)
                    if whole is not None:
                        whole.add((file.path, at, crc))
                self._passed(i, size)
            except StoreCorrupted as error:
                yield error

    def fill(self, start: int, out: Array) -> None:
        """Reads the rows from `start` on into an array, contiguous, of its dtype. Raises StoreCorrupted."""
        layout, stop = self._layout, start + len(out)
        i = layout.first(start)
        at = start
        while at < stop:
            first, last = layout.span(i)
            if first >= start and last <= stop:
                self._read(i, out[first - start : last - start])
            else:
                block: Array = np.empty((last - first, *self.shape[1:]), self.dtype)
                self._read(i, block)
                out[max(first, start) - start : min(last, stop) - start] = block[max(start - first, 0) : stop - first]
            at, i = last, i + 1

    def _rows(self, start: int, stop: int) -> Array:
        out: Array = np.empty((stop - start, *self.shape[1:]), self.dtype)
        self.fill(start, out)
        return out

    def _read(self, i: int, out: Array) -> None:
        data = bytes_of(out)
        if not data.nbytes:
            return
        self._files[self._entry.file[i]].read(data, int(self._entry.offset[i]))
        if zlib.crc32(data) != self._entry.crc[i]:
            raise self._damaged(i)
        if self.dtype == bool and out.view(np.uint8).max() > 1:
            raise StoreCorrupted(f"fbuf.load: array '{self._name}' is bool and holds other bytes than 0 and 1")
        self._passed(i, data.nbytes)

    def _passed(self, i: int, size: int) -> None:
        if self.bar is not None and not self.checked[i]:
            self.bar(size)
        self.checked[i] = True

    def _damaged(self, i: int) -> StoreCorrupted:
        DAMAGED.add(self._save)
        start, stop = self._layout.span(i)
        at, size = int(self._entry.offset[i]), int(self._layout.sizes[i])
        return StoreCorrupted(
            f"{self._files[self._entry.file[i]].path} is damaged in bytes {at} to {at + size}, rows {start} to {stop} of array "
            f"'{self._name}': they have another crc32 than they were saved with"
        )


class Saved:
    """One generation of a checkpoint, open for reading. Closes with `with`, or `close()`.

    Attributes:
      generation: Its number.
      meta: What was saved beside the arrays.
      arrays: `SavedArray` by name.
    """

    def __init__(self, folder: Folder, generation: int) -> None:
        self.path, self.generation = folder.path, generation
        self.manifest: Manifest = folder.manifest(generation)
        self.meta = self.manifest.meta
        self._files: list[OpenFile] = []
        try:
            for entry in self.manifest.files:
                self._files.append(OpenFile(folder.disk, folder.path, entry))
        except BaseException:
            self.close()
            raise
        entries, save = self.manifest.arrays, self.manifest.save
        arrays = {name: SavedArray(name, entry, self._files, save) for name, entry in entries.items()}
        self.arrays: Mapping[str, SavedArray] = arrays

    @property
    def files(self) -> list[OpenFile]:
        """The data files; who keeps one keeps it open for as long."""
        return self._files

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @contextlib.contextmanager
    def told(self, progress: Progress) -> Iterator[None]:
        """Tells how far reading is, of all that is read meanwhile."""
        with contextlib.closing(Bar(progress, "fbuf.load", self.nbytes)) as bar:
            for array in self.arrays.values():
                array.bar = bar
            try:
                yield
            finally:
                for array in self.arrays.values():
                    array.bar = None

    def verify(self) -> None:
        """Reads every block that was not read yet, and checks it. Raises StoreCorrupted. Memory: a megabyte."""
        for array in self.arrays.values():
            for error in array.faults():
                raise error

    def close(self) -> None:
        """Closes the files; twice is fine."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Built = TypeVar("Built")
Verify = Literal["full", "lazy"]


def read(
    path: str | os.PathLike[str],
    *,
    verify: Verify = "full",
    progress: Progress = None,
    disk: Disk = DISK,
) -> Saved:
    """Opens the newest generation that is whole; if that is not the newest of all, a RuntimeWarning says why.

    Args:
      path: The folder that was given to `write`.
      verify: `"full"`: every byte is checked before anything is handed out. `"lazy"`: the manifest and the headers and sizes of
        files; each block when it is read, which may then raise StoreCorrupted.
      progress: As for `write`, while everything is checked.
    Raises:
      CheckpointNotFound: there is none.
      StoreCorrupted: there is one, and no generation of it is whole.
      VersionError: a later release has saved the newest.
      OSError: a file may not be read.
    Cost: `"full"`: each byte is read once. Memory: the manifest, and a megabyte.
    """
    folder = _folder(path, verify, disk)

    def opened(saved: Saved) -> Saved:
        if verify == "full":
            with saved.told(progress):
                saved.verify()
        return saved

    return _newest(folder, opened)


def restore(
    path: str | os.PathLike[str],
    build: Callable[[Saved], Built],
    *,
    verify: Verify = "full",
    progress: Progress = None,
    disk: Disk = DISK,
) -> Built:
    """What `build` makes of the newest generation that is whole: as `read`, but each byte is read once in all.

    `build` reads what it needs, each block is checked as it is read, and what it did not read is checked after it
    (`verify="full"`). If anything is damaged, what it made is dropped, and it is called again with the generation before.

    Args:
      build: Takes a `Saved`, which is closed after it returns. An error of its own ends the load, but for StoreCorrupted.
    Returns:
      What `build` returned.
    Raises:
      As `read`.
    """
    folder = _folder(path, verify, disk)

    def built(saved: Saved) -> Built:
        with saved, saved.told(progress):
            made = build(saved)
            if verify == "full":
                saved.verify()
            return made

    return _newest(folder, built)


def _folder(path: str | os.PathLike[str], verify: str, disk: Disk) -> Folder:
    if verify not in ("full", "lazy"):
        raise ValueError(f"fbuf.load: verify is {verify!r}; expected 'full' or 'lazy'.")
    return Folder(path, disk)


def _newest(folder: Folder, use: Callable[[Saved], Built]) -> Built:
    wrong: dict[int, Exception] = {}
    while True:
        there = folder.generations()  # again each time: a save may have put another in place, and removed this one
        left = [generation for generation in there if generation not in wrong]
        if not left:
            _nothing(folder, there, wrong)
        saved = None
        try:
            saved = Saved(folder, left[0])
            made = use(saved)
        except BaseException as error:
            if saved is not None:
                saved.close()
            if not isinstance(error, StoreCorrupted):
                raise
            if saved is not None:
                DAMAGED.add(saved.manifest.save)
            wrong[left[0]] = bare(error)
            continue
        _warn(folder, saved, {g: e for g, e in wrong.items() if g > saved.generation})
        return made


def _nothing(folder: Folder, there: list[int], wrong: dict[int, Exception]) -> NoReturn:
    if not there:
        raise CheckpointNotFound(
            errno.ENOENT,
            f"fbuf.load: there is no checkpoint at {folder.path}; expected one. Give the path that fbuf.save was given.",
        )
    what = "; ".join(f"generation {g}: {wrong[g]}" for g in there)
    raise StoreCorrupted(
        f"fbuf.load: no generation at {os.path.join(folder.path, '')} is whole; expected one. {what}. Load another checkpoint, "
        f"or what is left of this one: verify='lazy'."
    )


def _warn(folder: Folder, saved: Saved, wrong: dict[int, Exception]) -> None:
    if wrong:
        what = "; ".join(f"generation {g}: {e}" for g, e in sorted(wrong.items(), reverse=True))
        warnings.warn(
            f"fbuf.load: generation {saved.generation} of {folder.path} is loaded, not the newest. {what}.",
            RuntimeWarning,
            stacklevel=4,
        )
