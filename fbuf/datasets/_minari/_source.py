"""What a Minari data set says of itself: its description, `data/metadata.json`, checked before anything else is read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fbuf.datasets._minari import _arrow, _hdf5
from fbuf.datasets._minari._space import Leaf, leaves_of
from fbuf.datasets._names import under
from fbuf.interop._source import Column, check_count, read_json

_KEPT = "algorithm_name author author_email code_permalink dataset_id description env_spec minari_version".split()


class Episodes(Protocol):
    """What a format reads."""

    def steps(self, episode: int) -> int:
        """T of an episode."""

    def columns(
        self, episode: int, observations: Sequence[Leaf], actions: Sequence[Leaf]
    ) -> dict[str, tuple[Column, int]]:
        """Leaves of an episode by name here, with the number of their rows: T + 1 of observations, else T."""

    def infos(self, episode: int) -> list[tuple[str, ...]]:
        """Paths of what was recorded beside the steps."""

    def info(self, episode: int, keys: tuple[str, ...]) -> tuple[Column, int]:
        """One of them, with the number of its rows: T + 1, or T."""

    def close(self) -> None:
        """Lets go of files."""


class Source:
    """A Minari data set in a folder.

    Attributes:
      mark: Of its description: another data set, or another state of this one, has another.
      episodes, total: How many, and their steps.
      observations, actions: Leaves that are taken.
    """

    def __init__(self, call: str, folder: Path, skip: Sequence[str], infos: Sequence[str] = ()) -> None:
        """Reads the description. Raises ValueError: it is none, or a leaf cannot be one."""
        self.call, self.folder = call, folder
        about = read_json(folder / "metadata.json")
        self._about, where = about, f"{call}: {folder}/metadata.json"
        self.mark = f"minari {zlib.crc32((folder / 'metadata.json').read_bytes()):08x}"
        self.episodes = check_count(where, "total_episodes", about.get("total_episodes"))
        self.total = check_count(where, "total_steps", about.get("total_steps"))
        for name in ("observation_space", "action_space"):
            if name not in about:
                raise ValueError(
                    f"{where} has no {name}, as those of early Minari; expected one. Make the data set anew with a later "
                    f"Minari, or read its arrays: fbuf.datasets.from_arrays."
                )
        self.observations = leaves_of(where, "obs", about["observation_space"])
        self.actions = leaves_of(where, "action", about["action_space"])
        self._leave_out(skip)
        if isinstance(infos, str):
            raise TypeError(f"{call}: infos is {infos!r}; expected names. Write infos=({infos!r},).")
        self._infos = tuple(infos)

    def _leave_out(self, skip: Sequence[str]) -> None:
        leaves = [*self.observations, *self.actions]
        if isinstance(skip, str):
            raise TypeError(f"{self.call}: skip is {skip!r}; expected names. Write skip=({skip!r},).")
        names = [leaf.name for leaf in leaves]
        out = {leaf for name in skip for leaf in under(name, names)}
        for name in skip:
            if not under(name, names):
                raise ValueError(f"{self.call}: skip has '{name}', but leaves are {', '.join(names)}.")
        for leaf in leaves:
            if leaf.refused and leaf.name not in out:
                also = tuple(sorted({*skip, *(leaf.name for leaf in leaves if leaf.refused)}))
                raise ValueError(
                    f"{self.call}: leaf '{leaf.name}' {leaf.refused}; expected arrays of one shape. Leave it out: skip={also}."
                )
        self.observations = [leaf for leaf in self.observations if leaf.name not in out]
        self.actions = [leaf for leaf in self.actions if leaf.name not in out]
        if not self.observations:
            raise ValueError(f"{self.call}: skip={tuple(skip)} leaves no observation; expected one at least.")

    def open(self) -> Episodes:
        """Its episodes."""
        kind = self._about.get("data_format", "hdf5")
        if kind == "hdf5":
            return _hdf5.Reader(self.call, self.folder, self.episodes)
        if kind in ("arrow", "parquet"):
            return _arrow.Reader(self.call, self.folder, self.episodes, kind)
        raise ValueError(
            f"{self.call}: {self.folder} is of the format {str(kind)[:40]!r}; expected hdf5, arrow or parquet."
        )

    def infos(self, reader: Episodes, episode: int) -> list[tuple[str, ...]]:
        """Paths of the infos to take. Raises ValueError: one is not there."""
        if not self._infos:
            return []
        there = {"/".join(keys): keys for keys in reader.infos(episode)}
        for name in self._infos:
            if not under(name, there):
                have = ", ".join(there) or "nothing"
                raise ValueError(f"{self.call}: infos has '{name}', but episode {episode} recorded {have}.")
        return [keys for name, keys in there.items() if any(name in under(wanted, there) for wanted in self._infos)]

    def meta(self, settings: str) -> dict[str, Any]:
        """What the data set says of itself."""
        kept = {name: self._about[name] for name in _KEPT if name in self._about}
        return {"from": "minari", "mark": self.mark, "settings": settings, "episodes": self.episodes, "minari": kept}
