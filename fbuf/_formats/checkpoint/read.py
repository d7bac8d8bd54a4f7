"""Load the newest complete generation of a checkpoint.

Blocks are read on request and checked. If the newest generation is damaged, the one before is loaded with a warning; not if the
disk fails, since its bytes may be right. All files are opened at once, so that a concurrent save cannot remove them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

from fbuf._core.arguments import check_choice
from fbuf._core.closing import Closing
from fbuf._core.progress import Bar, Progress
from fbuf._formats.checkpoint.data_file import OpenFile
from fbuf._formats.checkpoint.directory import DAMAGED_SAVES, Folder
from fbuf._formats.checkpoint.filesystem import DISK, Disk, Path, ReadError, manifest_name
from fbuf._formats.checkpoint.manifest import ArrayEntry, CheckpointNotFound, Manifest
from fbuf._host.io.checksum import crc32
from fbuf._host.types import Array, StoreCorrupted, flat, without_traceback

_STEP_BYTES = 1 << 20
_RUN_BYTES = 1 << 19
"""Bytes of blocks that are read in one call."""


class SavedArray:
    """An array in a checkpoint, and a source for another: `shape`, `dtype`, `[a:b]`, `blocks()`, `numpy.asarray`.

    Cost: reading rows reads and checks whole blocks.
    """

    def __init__(self, name: str, entry: ArrayEntry, files: list[OpenFile], save: str) -> None:
        self._name, self._entry, self._files, self._save = name, entry, files, save
        self._layout = entry.layout
        self.shape, self.dtype = entry.layout.shape, entry.layout.dtype
        self.cuts, self.keys, self.marks = entry.layout.cuts, entry.layout.keys, entry.marks
        self.checked: Array = np.zeros(entry.layout.num_blocks, bool)
        self.bar: Bar | None = None
        if entry.layout.block is not None:
            self.block = entry.layout.block

    @property
    def nbytes(self) -> int:
        """Return the bytes of the array."""
        return self._layout.nbytes

    def __getitem__(self, rows: Any) -> Array:
        """Return a copy of rows `[a:b]`, or all with `[()]`. Raises StoreCorrupted."""
        if isinstance(rows, tuple):
            return self._rows(0, self._layout.rows).reshape(self.shape)
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise IndexError(f"array '{self._name}' is read in steps of {step}; expected 1. Read it, then slice.")
        return self._rows(start, max(start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[()], dtype)

    def block_places(self) -> tuple[Array, Array, Array, Array, Array]:
        """Return int64[num_blocks] each: first row, index in `Saved.files`, offset, bytes, crc32."""
        first: Array = np.array(self._layout.bounds[:-1], np.int64)
        entry = self._entry
        return first, entry.file, entry.offset, self._layout.sizes, entry.crc

    def find_damage(self, whole: set[tuple[str, int, int]] | None = None) -> Iterator[StoreCorrupted]:
        """Read and check the blocks not read yet; yield an error for each damaged block.

        Args:
          whole: (path, offset, crc32) of blocks known to be intact; checked blocks are added.
        """
        sizes, buffer = self._layout.sizes, memoryview(bytearray(_STEP_BYTES))
        for i in np.flatnonzero(~self.checked).tolist():
            at, size, crc = int(self._entry.offset[i]), int(sizes[i]), int(self._entry.crc[i])
            file = self._files[self._entry.file[i]]
            try:
                if whole is None or (file.path, at, crc) not in whole:
                    if file.crc(at, size, buffer) != crc and file.crc(at, size, buffer) != crc:  # read again
                        raise self._damage(i)
                    if whole is not None:
                        whole.add((file.path, at, crc))
                self._mark_checked(i, i + 1)
            except StoreCorrupted as error:
                yield error

    def fill(self, start: int, out: Array) -> None:
        """Read rows from `start` on into a contiguous array of the same dtype. Raises StoreCorrupted."""
        bounds, stop = self._layout.bounds, start + len(out)
        i, at = self._layout.block_of_row(start), start
        while at < stop:
            first, end = bounds[i], i + 1
            if first >= start and bounds[end] <= stop:
                while end < len(self._follows) and self._follows[end] and bounds[end + 1] <= stop:
                    end += 1
                self._read(i, end, out[first - start : bounds[end] - start])
            else:
                block: Array = np.empty((bounds[end] - first, *self.shape[1:]), self.dtype)
                self._read(i, end, block)
                part = block[max(start - first, 0) : stop - first]
                out[max(first, start) - start : min(bounds[end], stop) - start] = part
            at, i = bounds[end], end

    def _rows(self, start: int, stop: int) -> Array:
        out: Array = np.empty((stop - start, *self.shape[1:]), self.dtype)
        self.fill(start, out)
        return out

    @functools.cached_property
    def _follows(self) -> list[bool]:
        """Whether each block follows the one before on the disk, in the same half megabyte of the array."""
        entry, sizes = self._entry, self._layout.sizes
        step = np.cumsum(sizes) // _RUN_BYTES
        follows = (np.diff(entry.offset) == sizes[:-1]) & (np.diff(entry.file) == 0) & (np.diff(step) == 0)
        return [False, *follows.tolist()]

    def _read(self, i: int, end: int, out: Array) -> None:
        """Read and check blocks that follow one another."""
        data, at = flat(out), 0
        if not data.nbytes:
            return
        file, offset = self._files[self._entry.file[i]], int(self._entry.offset[i])
        file.read(data, offset)
        for j, (size, crc) in enumerate(
            zip(self._layout.sizes[i:end].tolist(), self._entry.crc[i:end].tolist(), strict=True)
        ):
            if crc32(data[at : at + size]) != crc:
                file.read(data[at : at + size], offset + at)  # again: only lasting damage counts
                if crc32(data[at : at + size]) != crc:
                    raise self._damage(i + j)
            at += size
        if self.dtype == bool and out.view(np.uint8).max() > 1:
            raise StoreCorrupted(f"fbuf.load: array '{self._name}' is bool and holds other bytes than 0 and 1")
        self._mark_checked(i, end)

    def _mark_checked(self, i: int, end: int) -> None:
        if self.bar is not None:
            self.bar(int(self._layout.sizes[i:end][~self.checked[i:end]].sum()))
        self.checked[i:end] = True

    def _damage(self, i: int) -> StoreCorrupted:
        DAMAGED_SAVES.add(self._save)
        start, stop = self._layout.block_span(i)
        at, size = int(self._entry.offset[i]), int(self._layout.sizes[i])
        return StoreCorrupted(
            f"{self._files[self._entry.file[i]].path} is damaged in bytes {at} to {at + size}, rows {start} to {stop} of array "
            f"'{self._name}': wrong crc32"
        )


class Saved(Closing):
    """One generation of a checkpoint, open for reading. Closes with `with`, or `close()`.

    Attributes:
      generation: Its number.
      meta: The JSON saved with the arrays.
      arrays: `SavedArray` by name.
      files: The open data files; a reference keeps a file open.
    """

    def __init__(self, folder: Folder, generation: int) -> None:
        self.path, self.generation = folder.path, generation
        self.manifest: Manifest = folder.manifest(generation)
        self.meta = self.manifest.meta
        self.files: list[OpenFile] = []
        try:
            for entry in self.manifest.files:
                self.files.append(OpenFile(folder.disk, folder.path, entry))
        except BaseException:
            self.close()
            raise
        entries, save = self.manifest.arrays, self.manifest.save
        arrays = {name: SavedArray(name, entry, self.files, save) for name, entry in entries.items()}
        self.arrays: Mapping[str, SavedArray] = arrays

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @contextlib.contextmanager
    def report_progress(self, progress: Progress) -> Iterator[None]:
        """Report the progress of all reads in the context."""
        with contextlib.closing(Bar(progress, "fbuf.load", self.nbytes)) as bar:
            for array in self.arrays.values() if progress else ():  # to count takes time
                array.bar = bar
            try:
                yield
            finally:
                for array in self.arrays.values():
                    array.bar = None

    def verify(self) -> None:
        """Read and check every block not read yet. Raises StoreCorrupted. Memory: a megabyte."""
        for array in self.arrays.values():
            for error in array.find_damage():
                raise error

    def close(self) -> None:
        """Close the files; twice is fine."""
        for file in self.files:
            file.close()


Built = TypeVar("Built")
Verify = Literal["full", "lazy"]


def read(path: Path, *, verify: Verify = "full", progress: Progress = None, disk: Disk = DISK) -> Saved:
    """Open the newest complete generation; if a newer one is damaged, a RuntimeWarning says why.

    Only bytes that were read, twice, and are wrong are damage. If the disk fails, reads are repeated, then an OSError says so.

    Args:
      path: The folder given to `write`.
      verify: `"full"`: check every byte first. `"lazy"`: check the manifest, and headers and sizes of files; each block is
        checked when read, which may then raise StoreCorrupted.
      progress: As for `write`, during the check.
    Raises:
      CheckpointNotFound: there is none.
      StoreCorrupted: no generation is complete.
      VersionError: a later release saved the newest.
      OSError: a file cannot be read.
    Cost: `"full"`: each byte is read once. Memory: the manifest, and a megabyte.
    """
    folder = _folder(path, verify, disk)

    def opened(saved: Saved) -> Saved:
        if verify == "full":
            with saved.report_progress(progress):
                saved.verify()
        return saved

    return _load_newest(folder, opened)


def restore(
    path: Path,
    build: Callable[[Saved], Built],
    *,
    verify: Verify = "full",
    progress: Progress = None,
    disk: Disk = DISK,
) -> Built:
    """Return what `build` makes of the newest complete generation; unlike `read`, each byte is read once in all.

    `build` reads what it needs, and each block is checked as it is read. The rest is checked afterwards (`verify="full"`). If
    anything is damaged, the result is dropped and `build` is called with the generation before.

    Args:
      build: Takes a `Saved`, which is closed afterwards. Its own errors end the load, except StoreCorrupted.
    Returns:
      The result of `build`.
    Raises:
      As `read`.
    """
    folder = _folder(path, verify, disk)

    def built(saved: Saved) -> Built:
        with saved, saved.report_progress(progress):
            made = build(saved)
            if verify == "full":
                saved.verify()
            return made

    return _load_newest(folder, built)


def _folder(path: Path, verify: str, disk: Disk) -> Folder:
    check_choice("fbuf.load", "verify", verify, ("full", "lazy"))
    return Folder(path, disk)


def _load_newest(folder: Folder, use: Callable[[Saved], Built]) -> Built:
    wrong: dict[int, Exception] = {}
    while True:
        generations = folder.generations()  # listed again: a concurrent save may replace generations
        left = [generation for generation in generations if generation not in wrong]
        if not left:
            _raise_none(folder, generations, wrong)
        saved = None
        try:
            saved = Saved(folder, left[0])
            made = use(saved)
        except BaseException as error:
            if saved is not None:
                saved.close()
            if isinstance(error, ReadError):
                raise _unreadable(folder, left, error) from error
            if not isinstance(error, StoreCorrupted):
                raise
            if saved is not None:
                DAMAGED_SAVES.add(saved.manifest.save)
            wrong[left[0]] = without_traceback(error)
            continue
        _warn_of_damage(folder, saved, {g: e for g, e in wrong.items() if g > saved.generation})
        return made


def _unreadable(folder: Folder, left: list[int], error: ReadError) -> ReadError:
    """Return the error of a disk that fails. Other generations are older, so the user decides."""
    text = str(error.strerror)
    if len(left) > 1:
        name = folder.file(manifest_name(left[0]))
        text = f"{text[:-1]}, or try generation {left[1]}: move {name} away."
    return ReadError(error.errno, text)


def _raise_none(folder: Folder, generations: list[int], wrong: dict[int, Exception]) -> NoReturn:
    if not generations:
        raise CheckpointNotFound(
            errno.ENOENT, f"fbuf.load: there is no checkpoint at {folder.path}. Give the path that fbuf.save was given."
        )
    what = "; ".join(f"generation {g}: {wrong[g]}" for g in generations)
    raise StoreCorrupted(
        f"fbuf.load: no generation at {os.path.join(folder.path, '')} is whole: {what}. Load another checkpoint, or the "
        f"intact part of this one with verify='lazy'."
    )


def _warn_of_damage(folder: Folder, saved: Saved, wrong: dict[int, Exception]) -> None:
    if wrong:
        what = "; ".join(f"generation {g}: {e}" for g, e in sorted(wrong.items(), reverse=True))
        warnings.warn(
            f"fbuf.load: generation {saved.generation} of {folder.path} is loaded, not the newest. {what}.",
            RuntimeWarning,
            stacklevel=4,
        )
