"""A Minari data set, episode by episode, into the pieces of a data set of ours.

An episode of T steps has T + 1 observations. Rows are its T steps; the observation after the last is kept beside it, as
`final_obs`, zeros elsewhere (which compress to nothing), so that `Transition(final_observation="final_obs")` bootstraps a
truncated step from it, and `Sequence`, `Episode` and `Row` see steps only. Rejected: a row of its own for the last
observation (`autoreset="next_step"`): every view, and whoever reads the rows, would have to know of it, and one that does not
takes it for the first step of the next episode.

A piece holds whole episodes. What JAX holds by default is what is stored: float64 (which Minari's rewards always are) becomes
float32, and 64-bit integers that fit 32 bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fbuf import _pieces
from fbuf._host.codec import Codec
from fbuf.datasets._episodes import as_flag, check_rewards, final_codec, final_name, only
from fbuf.datasets._minari import _arrow, _hdf5
from fbuf.datasets._minari._space import Leaf, leaves_of
from fbuf.datasets._names import under
from fbuf.datasets._writing import Block, Work, rows_a_piece
from fbuf.interop._columns import block_of
from fbuf.interop._fill import BLOCK_BYTES
from fbuf.interop._source import DTYPES, Column, check_count, read_json

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
_KEPT = "algorithm_name author author_email code_permalink dataset_id description env_spec minari_version".split()


Leaves = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


class Episodes(Protocol):
    """What a format reads."""

    def steps(self, episode: int) -> int:
        """T of an episode."""

    def columns(
        self, episode: int, observations: Sequence[Leaf], actions: Sequence[Leaf]
    ) -> dict[str, tuple[Column, int]]:
        """Leaves of an episode by name here, with the number of their rows: T + 1 of observations, else T."""

    def close(self) -> None:
        """Lets go of files."""


class Source:
    """A Minari data set in a folder.

    Attributes:
      mark: Of its description: another data set, or another state of this one, has another.
    """

    def __init__(self, call: str, folder: Path, skip: Sequence[str]) -> None:
        """Reads the description. Raises ValueError: it is none, or a leaf cannot be one."""
        self._call, self._folder = call, folder
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
        self._observations = leaves_of(where, "obs", about["observation_space"])
        self._actions = leaves_of(where, "action", about["action_space"])
        self._leave_out(skip)

    def _leave_out(self, skip: Sequence[str]) -> None:
        leaves = [*self._observations, *self._actions]
        if isinstance(skip, str):
            raise TypeError(f"{self._call}: skip is {skip!r}; expected names. Write skip=({skip!r},).")
        names = [leaf.name for leaf in leaves]
        out = {leaf for name in skip for leaf in under(name, names)}
        for name in skip:
            if not under(name, names):
                raise ValueError(f"{self._call}: skip has '{name}', but leaves are {', '.join(names)}.")
        for leaf in leaves:
            if leaf.refused and leaf.name not in out:
                also = tuple(sorted({*skip, *(leaf.name for leaf in leaves if leaf.refused)}))
                raise ValueError(
                    f"{self._call}: leaf '{leaf.name}' {leaf.refused}; expected arrays of one shape. Leave it out: skip={also}."
                )
        self._observations = [leaf for leaf in self._observations if leaf.name not in out]
        self._actions = [leaf for leaf in self._actions if leaf.name not in out]
        if not self._observations:
            raise ValueError(f"{self._call}: skip={tuple(skip)} leaves no observation; expected one at least.")

    def open(self) -> Episodes:
        """Its episodes."""
        kind = self._about.get("data_format", "hdf5")
        if kind == "hdf5":
            return _hdf5.Reader(self._call, self._folder, self.episodes)
        if kind in ("arrow", "parquet"):
            return _arrow.Reader(self._call, self._folder, self.episodes, kind)
        raise ValueError(
            f"{self._call}: {self._folder} is of the format {str(kind)[:40]!r}; expected hdf5, arrow or parquet."
        )

    def work(
        self,
        reader: Episodes,
        dtypes: Mapping[str, str] | None,
        codec: Mapping[str, Codec] | None,
        piece_rows: int | None,
        settings: str,
    ) -> Work:
        """What is to be written. Raises what is wrong with the leaves of the first episode, and with the episodes' lengths."""
        steps = [reader.steps(episode) for episode in range(self.episodes)]
        if sum(steps) != self.total or not self.total:
            raise ValueError(
                f"{self._call}: {self._folder} has {sum(steps)} steps in {self.episodes} episodes; expected "
                f"{self.total or 'some'}, as metadata.json says. Its writer did not finish, or it is damaged."
            )
        first = next(episode for episode, number in enumerate(steps) if number)
        stored = self._stored(reader.columns(first, self._observations, self._actions), dtypes)
        leaves = dict(stored)
        finals = {final_name(leaf.name): leaves[leaf.name] for leaf in self._observations}
        schema = _pieces.Schema(
            leaves | finals, codec={name: final_codec(*leaf) for name, leaf in finals.items()} | dict(codec or {})
        )
        size = rows_a_piece(self._call, piece_rows, schema)
        pieces = _whole_episodes(steps, size)

        def blocks(number: int) -> Iterator[Block]:
            for episode in pieces[number]:
                if steps[episode]:
                    yield from self._episode(reader, episode, steps[episode], stored, schema.row_bytes)

        return Work(
            schema,
            [sum(steps[episode] for episode in piece) for piece in pieces],
            blocks,
            lambda number: f"{self.mark} {settings} {pieces[number].start} {pieces[number].stop}",
            lambda: self.meta(settings),
        )

    def meta(self, settings: str) -> dict[str, Any]:
        """What the data set says of itself."""
        kept = {name: self._about[name] for name in _KEPT if name in self._about}
        return {"from": "minari", "mark": self.mark, "settings": settings, "episodes": self.episodes, "minari": kept}

    def _stored(self, columns: Mapping[str, tuple[Column, int]], dtypes: Mapping[str, str] | None) -> Leaves:
        """Shape and dtype of each leaf as it is stored."""
        given = dict(dtypes or {})
        if unknown := [name for name in given if name not in columns]:
            raise ValueError(f"{self._call}: dtypes has '{unknown[0]}', but leaves are {', '.join(columns)}.")
        out: Leaves = {}
        for name, (column, _) in columns.items():
            if name in ("terminated", "truncated"):
                out[name] = (), np.dtype(bool)
                continue
            wanted = str(given.get(name, _NARROW.get(column.dtype.name, column.dtype.name)))
            if wanted not in DTYPES:
                raise TypeError(f"{self._call}: dtypes['{name}'] is {wanted!r}; expected one of {', '.join(DTYPES)}.")
            out[name] = column.shape, DTYPES[wanted]
        return out

    def _episode(
        self,
        reader: Episodes,
        episode: int,
        steps: int,
        stored: Leaves,
        row_bytes: int,
    ) -> Iterator[Block]:
        columns = reader.columns(episode, self._observations, self._actions)
        seen = [leaf.name for leaf in self._observations]
        for name, (column, rows) in columns.items():
            wanted = steps + (name in seen)
            if rows != wanted or column.shape != stored[name][0]:
                raise ValueError(
                    f"{self._call}: leaf '{name}' of episode {episode} is {[rows, *column.shape]}; expected "
                    f"{[wanted, *stored[name][0]]}, as {steps} steps have {steps + 1} observations, all of one shape."
                )
        block = max(1, BLOCK_BYTES // max(1, row_bytes))
        for start in range(0, steps, block):
            stop = min(start + block, steps)
            rows_of = {}
            for name, (column, _) in columns.items():
                came = block_of(self._call, name, column, start, stop + (name in seen), ())
                rows_of[name] = self._cast(name, episode, start, came, stored[name][1])
            last = stop == steps
            end = rows_of["terminated"] | rows_of["truncated"]
            if last and not end[-1]:  # whoever recorded it stopped here
                rows_of["truncated"][-1] = end[-1] = True
            finals = {final_name(name): only(rows_of[name][1:], end) for name in seen}
            rows_of |= {name: rows_of[name][:-1] for name in seen}
            check_rewards(f"{self._call}: episode {episode}", start, rows_of)
            yield rows_of | finals

    def _cast(self, name: str, episode: int, start: int, rows: np.ndarray, to: np.dtype[Any]) -> np.ndarray:
        where = f"{self._call}: episode {episode}"
        if name in ("terminated", "truncated"):
            return as_flag(where, name, start, rows)
        with np.errstate(all="ignore"):
            cast = rows.astype(to)
        if to.kind in "iub" and not np.array_equal(cast.astype(rows.dtype), rows):
            raise ValueError(
                f"{where}: leaf '{name}' is {rows.dtype}, and holds values that {to.name} cannot. Say what they are to become: "
                f"dtypes={{'{name}': 'float32'}}."
            )
        return cast


def _whole_episodes(steps: Sequence[int], size: int) -> list[range]:
    """Runs of episodes with at least `size` rows each, but the last."""
    out, begin, rows = [], 0, 0
    for episode, number in enumerate(steps):
        rows += number
        if rows >= size:
            out.append(range(begin, episode + 1))
            begin, rows = episode + 1, 0
    if rows:
        out.append(range(begin, len(steps)))
    return out
