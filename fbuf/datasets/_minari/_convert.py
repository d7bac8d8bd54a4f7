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

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fbuf import _pieces
from fbuf._host.codec import Codec
from fbuf.datasets._episodes import as_flag, check_rewards, final_codec, final_name, only
from fbuf.datasets._minari._source import Episodes, Source
from fbuf.datasets._writing import Block, Work, rows_a_piece
from fbuf.interop._columns import block_of
from fbuf.interop._fill import BLOCK_BYTES
from fbuf.interop._source import DTYPES, Column

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}

Leaves = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


def work_of(
    source: Source,
    reader: Episodes,
    *,
    dtypes: Mapping[str, str] | None,
    codec: Mapping[str, Codec] | None,
    piece_rows: int | None,
    settings: str,
) -> Work:
    """What is to be written. Raises what is wrong with the leaves of the first episode, and with the episodes' lengths."""
    steps = [reader.steps(episode) for episode in range(source.episodes)]
    if sum(steps) != source.total or not source.total:
        raise ValueError(
            f"{source.call}: {source.folder} has {sum(steps)} steps in {source.episodes} episodes; expected "
            f"{source.total or 'some'}, as metadata.json says. Its writer did not finish, or it is damaged."
        )
    first = next(episode for episode, number in enumerate(steps) if number)
    infos = source.infos(reader, first)
    conversion = _Conversion(source, reader, infos, dtypes, first)
    finals = {final_name(leaf.name): conversion.stored[leaf.name] for leaf in source.observations}
    codecs = {name: final_codec(*leaf) for name, leaf in finals.items()} | dict(codec or {})
    schema = _pieces.Schema(conversion.stored | finals, codec=codecs)
    pieces = _whole_episodes(steps, rows_a_piece(source.call, piece_rows, schema))

    def blocks(number: int) -> Iterator[Block]:
        for episode in pieces[number]:
            if steps[episode]:
                yield from conversion.episode(episode, steps[episode], schema.row_bytes)

    return Work(
        schema,
        [sum(steps[episode] for episode in piece) for piece in pieces],
        blocks,
        lambda number: f"{source.mark} {settings} {pieces[number].start} {pieces[number].stop}",
        lambda: source.meta(settings),
    )


class _Conversion:
    """Episodes as rows.

    Attributes:
      stored: Shape and dtype of each leaf, but those with final observations.
    """

    def __init__(
        self,
        source: Source,
        reader: Episodes,
        infos: Sequence[tuple[str, ...]],
        dtypes: Mapping[str, str] | None,
        first: int,
    ) -> None:
        self._source, self._reader, self._infos, self._call = source, reader, infos, source.call
        self._seen = [leaf.name for leaf in source.observations]
        columns, given = self._columns(first), dict(dtypes or {})
        if unknown := [name for name in given if name not in columns]:
            raise ValueError(f"{self._call}: dtypes has '{unknown[0]}', but leaves are {', '.join(columns)}.")
        self.stored: Leaves = {}
        for name, (column, _) in columns.items():
            if name in ("terminated", "truncated"):
                self.stored[name] = (), np.dtype(bool)
                continue
            wanted = str(given.get(name, _NARROW.get(column.dtype.name, column.dtype.name)))
            if wanted not in DTYPES:
                raise TypeError(f"{self._call}: dtypes['{name}'] is {wanted!r}; expected one of {', '.join(DTYPES)}.")
            self.stored[name] = column.shape, DTYPES[wanted]

    def _columns(self, episode: int) -> dict[str, tuple[Column, int]]:
        columns = self._reader.columns(episode, self._source.observations, self._source.actions)
        return columns | {"infos/" + "/".join(keys): self._reader.info(episode, keys) for keys in self._infos}

    def episode(self, episode: int, steps: int, row_bytes: int) -> Iterator[Block]:
        """The rows of an episode, in blocks of some 8 MiB."""
        columns = self._columns(episode)
        for name, (column, rows) in columns.items():
            wanted, shape = steps + (name in self._seen), self.stored[name][0]
            long_enough = name.startswith("infos/") and rows in (steps, steps + 1)
            if (rows != wanted and not long_enough) or column.shape != shape:
                raise ValueError(
                    f"{self._call}: leaf '{name}' of episode {episode} is {[rows, *column.shape]}; expected "
                    f"{[wanted, *shape]}, as {steps} steps have {steps + 1} observations, all of one shape."
                )
        block = max(1, BLOCK_BYTES // max(1, row_bytes))
        for start in range(0, steps, block):
            stop = min(start + block, steps)
            rows_of = {}
            for name, (column, _) in columns.items():
                came = block_of(self._call, name, column, start, stop + (name in self._seen), ())
                rows_of[name] = self._cast(name, episode, start, came)
            end = rows_of["terminated"] | rows_of["truncated"]
            if stop == steps and not end[-1]:  # whoever recorded it stopped here
                rows_of["truncated"][-1] = end[-1] = True
            finals = {final_name(name): only(rows_of[name][1:], end) for name in self._seen}
            rows_of |= {name: rows_of[name][:-1] for name in self._seen}
            check_rewards(f"{self._call}: episode {episode}", start, rows_of)
            yield rows_of | finals

    def _cast(self, name: str, episode: int, start: int, rows: np.ndarray) -> np.ndarray:
        where, to = f"{self._call}: episode {episode}", self.stored[name][1]
        if name in ("terminated", "truncated"):
            return as_flag(where, name, start, rows)
        if rows.dtype == to:
            return rows
        with np.errstate(all="ignore"):
            cast = rows.astype(to)
        if to.kind in "iub":
            lost = not np.array_equal(cast.astype(rows.dtype), rows)
        else:
            lost = rows.dtype.kind == "f" and to.isbuiltin == 1 and bool((np.isfinite(rows) & ~np.isfinite(cast)).any())
        if lost:
            raise ValueError(
                f"{where}: leaf '{name}' is {rows.dtype}, and holds values that {to.name} cannot. Say what they are to become: "
                f"dtypes={{'{name}': '{'float32' if to.kind in 'iub' else 'float64'}'}}."
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
