"""Minari's `hdf5` format: `data/main_data.hdf5`, a group `episode_<i>` each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fbuf.datasets._minari import _jpeg
from fbuf.datasets._minari._space import MOST_DEPTH, Leaf
from fbuf.interop._h5 import library
from fbuf.interop._source import DTYPES, Column


class Reader:
    """Episodes of one file."""

    def __init__(self, call: str, folder: Path, episodes: int) -> None:
        self._call, self._path = call, folder / "main_data.hdf5"
        self._h5 = library(call)
        if not self._path.is_file():
            raise ValueError(f"{call}: {self._path} is missing; expected the episodes. Load the data set anew.")
        try:
            self._file = self._h5.File(self._path, "r")
        except OSError as error:
            raise ValueError(f"{call}: {self._path} is no HDF5 file ({error}). It is damaged or cut off.") from None
        if len(self._file) != episodes:
            there = len(self._file)
            self._file.close()
            raise ValueError(
                f"{call}: {self._path} has {there} episodes; expected {episodes}, as metadata.json says. Its writer did not "
                f"finish, or it is damaged."
            )

    def steps(self, episode: int) -> int:
        """Of an episode."""
        rewards = self._item(episode, "rewards")
        return int(rewards.shape[0]) if rewards.shape else 0

    def columns(
        self, episode: int, observations: Sequence[Leaf], actions: Sequence[Leaf]
    ) -> dict[str, tuple[Column, int]]:
        """Leaves of an episode, with the number of their rows; reads nothing."""
        out = {leaf.name: self._column(episode, "observations", leaf) for leaf in observations}
        out |= {leaf.name: self._column(episode, "actions", leaf) for leaf in actions}
        for there, here in (("rewards", "reward"), ("terminations", "terminated"), ("truncations", "truncated")):
            out[here] = self._plain(episode, there, here)
        return out

    def infos(self, episode: int) -> list[tuple[str, ...]]:
        """Paths of what was recorded beside the steps of an episode."""
        found: list[tuple[str, ...]] = []
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            keys = waiting.pop()
            group = self._file.get("/".join((f"episode_{episode}", "infos", *keys)))
            if isinstance(group, self._h5.Group) and len(keys) < MOST_DEPTH:
                waiting += [(*keys, key) for key in group]
            elif keys:
                found.append(keys)
        return sorted(found)

    def info(self, episode: int, keys: tuple[str, ...]) -> tuple[Column, int]:
        """One of them, as `infos/...`."""
        path = "/".join(("infos", *keys))
        return self._plain(episode, path, path)

    def _item(self, episode: int, path: str) -> Any:
        group: Any = self._file
        where = f"episode_{episode}/{path}"
        for part in where.split("/"):
            link = group.get(part, getlink=True) if isinstance(group, self._h5.Group) else None
            if not isinstance(link, self._h5.HardLink):
                what = "is missing" if link is None else "is a link to elsewhere"
                raise ValueError(f"{self._call}: {self._path}: '{where}' {what}; expected it in the file.")
            group = group[part]
        if not isinstance(group, self._h5.Dataset) or group.external or group.is_virtual:
            raise ValueError(f"{self._call}: {self._path}: '{where}' is no data set of this file.")
        return group

    def _column(self, episode: int, root: str, leaf: Leaf) -> tuple[Column, int]:
        parts = [f"_index_{key}" if isinstance(key, int) else key for key in leaf.keys]
        path = "/".join((root, *parts))
        data = self._item(episode, path)
        packed = data.dtype.kind == "O" or (leaf.dtype == np.uint8 and data.ndim == 2 and len(leaf.shape) > 1)
        if not packed:
            return self._plain(episode, path, leaf.name)
        if self._h5.check_vlen_dtype(data.dtype) != np.uint8 and data.dtype != np.uint8:
            raise ValueError(
                f"{self._call}: leaf '{leaf.name}' of episode {episode} is {data.dtype}, values of no one shape; expected "
                f"{leaf.dtype.name}{list(leaf.shape)}. Leave it out: skip=('{leaf.name}',)."
            )
        image = _jpeg.decoder(self._call, leaf.name)

        def read(first: int, last: int) -> np.ndarray:
            return _jpeg.decode(self._call, leaf.name, image, self._rows(data, path, first, last), leaf.shape)

        return Column(leaf.shape, leaf.dtype, read), int(data.shape[0])

    def _plain(self, episode: int, path: str, name: str) -> tuple[Column, int]:
        data = self._item(episode, path)
        dtype = DTYPES.get(data.dtype.name)
        if dtype is None or dtype != data.dtype or not data.shape:
            raise ValueError(
                f"{self._call}: leaf '{name}' of episode {episode} is {data.dtype}; expected plain numbers. Leave it out: "
                f"skip=('{name}',)."
            )
        return Column(tuple(data.shape[1:]), dtype, lambda a, b: np.asarray(self._rows(data, path, a, b))), data.shape[
            0
        ]

    def _rows(self, data: Any, path: str, first: int, last: int) -> Any:
        try:
            return data[first:last]
        except OSError as error:
            raise ValueError(f"{self._call}: {self._path}: '{path}' is damaged ({error}).") from None

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()
