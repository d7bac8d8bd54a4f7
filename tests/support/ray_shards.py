"""Shards of a `RayReplay` in this process, whose calls return at once, and which can be restarted."""

from typing import Any

import jax
import numpy as np

import fbuf
from fbuf.ray._calls import Away
from fbuf.ray._checks import check_shards
from fbuf.ray._client import Client, Settings
from fbuf.ray._shard import Shard

ROW = {"t": np.int32(0)}


def steps(first: int, count: int, *lanes: int) -> dict[str, Any]:
    return {"t": np.arange(first, first + count * int(np.prod(lanes)), dtype=np.int32).reshape(count, *lanes)}


class LocalLink:
    """What `RayLink` is to actors."""

    def __init__(self, make: Any, shards: int):
        self.make = make
        self.shards = [make(shard) for shard in range(shards)]
        self.away: set[int] = set()
        self.calls: list[str] = []

    def restart(self, shard: int) -> None:
        self.stop(shard)
        self.shards[shard] = self.make(shard)

    def stop(self, shard: int) -> None:
        """Release the folder, as the end of a process does."""
        if self.shards[shard]._folder is not None:
            self.shards[shard]._folder.release()

    def call(self, shard: int, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if shard in self.away or any(isinstance(arg, Away) for arg in args):
            return Away()
        try:
            return getattr(self.shards[shard], method)(*args)
        except Exception as error:
            return error

    def result(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    def is_ready(self, reference: Any) -> bool:
        return True


def clients(
    buffer: fbuf.Buffer, example: Any, shards: int = 1, durable: bool = False, path: Any = None, **options: Any
) -> tuple[LocalLink, Any]:
    """Return the link, and a function that makes clients for `lanes`."""
    part = check_shards(buffer, shards)

    def make(shard: int) -> Shard:
        folder = None if path is None else str(path / f"{shard}")
        return Shard(part, example, shards, shard, path=folder, **options)

    link = LocalLink(make, shards)
    arrays = jax.tree.map(np.asarray, example)
    settings = Settings(link, buffer, shards, arrays, link.shards[0].spec(), None, 4, 1.0, durable, (0, 1))

    def client(lanes: Any = None, group: tuple[int, int] = (0, 1)) -> Client:
        lanes = range(buffer.lanes) if lanes is None and buffer.lanes else lanes
        return Client(settings._replace(lanes=None if lanes is None else tuple(lanes), group=group))

    return link, client
