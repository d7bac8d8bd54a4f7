"""Minari's `arrow` and `parquet` formats: `data/<i>/part-0.arrow`, a row for each observation.

Actions, rewards and flags have one value more than there are steps, which is padding. Files are read, not mapped: a mapped
file that is cut short ends the process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fbuf.datasets._minari import _jpeg
from fbuf.datasets._minari._space import MOST_DEPTH, Leaf
from fbuf.interop._source import DTYPES, Column, read_json

_PART = re.compile(r"part-(\d+)\.(?:arrow|parquet)")


class Reader:
    """Episodes of one folder. One episode is in memory at a time, packed as its file has it."""

    def __init__(self, call: str, folder: Path, episodes: int, kind: str) -> None:
        self._call, self._folder, self._kind = call, folder, kind
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(f'{call}: pyarrow is missing ({error}). Run pip install "fbuf[minari]".') from None
        self._pa: Any = pyarrow
        self._last: tuple[int, Any] = (-1, None)
        there = sum(1 for path in folder.iterdir() if path.is_dir() and path.name.isdigit())
        if there != episodes:
            raise ValueError(
                f"{call}: {folder} has {there} episodes; expected {episodes}, as metadata.json says. Its writer did not "
                f"finish, or it is damaged."
            )

    def steps(self, episode: int) -> int:
        """Of an episode: as its metadata.json says, which its columns are compared with, or its rows but the last."""
        about = self._folder / str(episode) / "metadata.json"
        steps = read_json(about).get("total_steps") if about.is_file() else None
        return steps if type(steps) is int and steps >= 0 else max(self._table(episode).num_rows - 1, 0)

    def columns(
        self, episode: int, observations: Sequence[Leaf], actions: Sequence[Leaf]
    ) -> dict[str, tuple[Column, int]]:
        """Leaves of an episode, with the number of their rows."""
        table = self._table(episode)
        rows = table.num_rows
        out = {leaf.name: (self._column(episode, table, "observations", leaf), rows) for leaf in observations}
        out |= {leaf.name: (self._column(episode, table, "actions", leaf), rows - 1) for leaf in actions}
        for there, here in (("rewards", "reward"), ("terminations", "terminated"), ("truncations", "truncated")):
            out[here] = self._column(episode, table, there, Leaf(here, (), (), np.dtype(bool))), rows - 1
        return out

    def infos(self, episode: int) -> list[tuple[str, ...]]:
        """Paths of what was recorded beside the steps of an episode."""
        table = self._table(episode)
        if "infos" not in table.column_names:
            return []
        found: list[tuple[str, ...]] = []
        waiting: list[tuple[tuple[str, ...], Any]] = [((), table.column("infos").type)]
        while waiting:
            keys, kind = waiting.pop()
            if self._pa.types.is_struct(kind) and len(keys) < MOST_DEPTH:
                waiting += [((*keys, field.name), field.type) for field in kind]
            elif keys:
                found.append(keys)
        return sorted(found)

    def info(self, episode: int, keys: tuple[str, ...]) -> tuple[Column, int]:
        """One of them, as `infos/...`; of its shape Minari keeps a note beside the flat numbers."""
        table = self._table(episode)
        if "infos" not in table.column_names:
            raise ValueError(f"{self._call}: episode {episode} in {self._folder} has no infos.")
        field = table.schema.field("infos")
        for key in keys:
            if not self._pa.types.is_struct(field.type) or field.type.get_field_index(key) < 0:
                raise ValueError(
                    f"{self._call}: 'infos/{'/'.join(keys)}' is not in episode {episode} in {self._folder}."
                )
            field = field.type.field(field.type.get_field_index(key))
        noted = (field.metadata or {}).get(b"shape", b"").decode("ascii", "replace")
        flat = (field.type.list_size,) if self._pa.types.is_fixed_size_list(field.type) else ()
        shape = tuple(int(n) for n in noted.split(",") if n.isdigit()) or flat
        leaf = Leaf(
            "infos/" + "/".join(keys), keys, shape if math.prod(shape) == math.prod(flat) else flat, np.dtype(bool)
        )
        return self._column(episode, table, "infos", leaf), table.num_rows

    def _parts(self, episode: int) -> list[Path]:
        folder = self._folder / str(episode)
        found = {int(m[1]): p for p in (folder.iterdir() if folder.is_dir() else ()) if (m := _PART.fullmatch(p.name))}
        if not found:
            raise ValueError(f"{self._call}: {folder} has no part-0.{self._kind}; expected episode {episode}.")
        return [found[number] for number in sorted(found)]

    def _table(self, episode: int) -> Any:
        number, table = self._last  # one tuple: threads may be at several episodes
        if number != episode:
            table = self._read(episode)
            self._last = episode, table
        return table

    def _read(self, episode: int) -> Any:
        pa = self._pa
        tables = []
        for path in self._parts(episode):
            try:
                if self._kind == "parquet":
                    tables.append(pa.parquet.read_table(path, memory_map=False))
                else:
                    with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
                        tables.append(reader.read_all())
            except (pa.ArrowInvalid, OSError) as error:
                raise self._damaged(path, error) from None
        return pa.concat_tables(tables).combine_chunks()

    def _damaged(self, path: Path, error: Exception) -> ValueError:
        return ValueError(f"{self._call}: {path} is no {self._kind} file ({error}). It is damaged or cut off.")

    def _column(self, episode: int, table: Any, root: str, leaf: Leaf) -> Column:
        pa = self._pa
        if root not in table.column_names:
            raise ValueError(f"{self._call}: episode {episode} in {self._folder} has no column '{root}'.")
        values = table.column(root)
        values = values.chunk(0) if values.num_chunks else pa.array([], values.type)
        for key in leaf.keys:
            if not pa.types.is_struct(values.type) or values.type.get_field_index(str(key)) < 0:
                raise ValueError(f"{self._call}: leaf '{leaf.name}' is not in episode {episode} in {self._folder}.")
            values = values.field(values.type.get_field_index(str(key)))
        images = leaf.dtype == np.uint8 and len(leaf.shape) in (2, 3)
        if images and (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
            image = _jpeg.decoder(self._call, leaf.name)

            def unpack(first: int, last: int) -> np.ndarray:
                packed = (value.as_buffer() for value in values.slice(first, last - first))
                return _jpeg.decode(self._call, leaf.name, image, packed, leaf.shape)

            return Column(leaf.shape, leaf.dtype, unpack)
        flat = pa.types.is_fixed_size_list(values.type)
        kind = values.type.value_type if flat else values.type
        dtype = DTYPES.get("bool" if pa.types.is_boolean(kind) else _numpy_name(kind))
        if dtype is None:
            raise ValueError(
                f"{self._call}: leaf '{leaf.name}' of episode {episode} is {values.type}; expected numbers of one shape. "
                f"Leave it out: skip=('{leaf.name}',)."
            )
        shape = leaf.shape if flat else ()

        def read(first: int, last: int) -> np.ndarray:
            rows = values.slice(first, last - first)
            if rows.null_count or (flat and rows.flatten().null_count):
                raise ValueError(f"{self._call}: leaf '{leaf.name}' of episode {episode} has rows without a value.")
            numbers = (rows.flatten() if flat else rows).to_numpy(zero_copy_only=False)
            return np.asarray(numbers, dtype).reshape(last - first, *shape)

        return Column(shape, dtype, read)

    def close(self) -> None:
        """Nothing is held."""


def _numpy_name(kind: Any) -> str:
    try:
        return np.dtype(kind.to_pandas_dtype()).name
    except (NotImplementedError, TypeError):
        return ""
