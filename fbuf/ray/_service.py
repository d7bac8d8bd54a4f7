"""`RayReplay`: a replay in actors of Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._core import arguments
from fbuf._core.closing import Closing
from fbuf._core.pytree import PyTree
from fbuf._replay import ReplayClosed
from fbuf._replay.arguments import check_limit, check_seed, to_rows
from fbuf.limits import Limit
from fbuf.ray import _shard
from fbuf.ray._checks import check_path, check_service, check_shards
from fbuf.ray._client import Client, Settings
from fbuf.ray._link import RayLink, import_ray
from fbuf.ray._shard import Shard

_GROUPS = dict.fromkeys(
    ("write", "update", "read", "save", "control"), 1
)  # threads; a second reader slows draws by 10 %
_METHODS = {"extend": "write", "update_priority": "update", "sample": "read", "save": "save"} | dict.fromkeys(
    ("facts", "receipt", "spec", "stats", "plan", "close"), "control"
)


class RayReplay(Closing):
    """Share one logical buffer, in one actor or several, among the processes of a Ray cluster.

    Actors of any number write through their own `client()`, learners draw through theirs. Ray starts on this machine by
    `ray.init()`, or connects to your cluster, before or with the first service.

    With several shards, each actor holds part of the capacity and of the lanes. Probabilities and importance weights are
    those of the whole; new rows get the largest priority of their shard. While a shard restarts, the others serve. Host
    storages such as `storages.Compressed` keep and compress the rows in the actors.

    Args:
      buffer: The whole: capacity and lanes are multiples of `shards`. `lanes` are the environments of all actors; each
        client writes some of them. Without lanes, clients' rows are interleaved, so a view that reads neighbouring rows
        should have lanes.
      example: One row.
      shards: Actors that hold the rows.
      seed: Seed of the draws.
      limit: From `fbuf.limits`, for all clients together; `shards=1` only. Calls wait for it without a timeout. None:
        draws wait for the first row.
      path: Folder of checkpoints, in a file system that all actors see. A service continues from those in it, each lane
        in a new episode unless its writer continues. An actor that died restarts from its own. The counts of the limit are
        saved with the rows. The number of shards stays, and one service at a time uses the folder. None: rows are lost with
        their actor.
      save_every: Writes after which a shard saves; later writes wait for it, draws do not. 0: only `save`.
      options: For `ray.remote(...).options`: `{"num_cpus": 1, "num_gpus": 1, "scheduling_strategy": ...}`. JAX runs on the
        CPU in an actor without GPUs. By default actors restart without a limit.
    Raises:
      ImportError: ray is missing.
      TypeError, ValueError: parts, sizes and options do not fit.
      RuntimeError: an actor could not start; the message ends with its error.

    The service ends with `close`, with a `with`, or when it and its clients are garbage-collected.

    Example:
      >>> import fbuf, numpy as np
      >>> replay = fbuf.ray.RayReplay(fbuf.prioritized(1000), {"obs": np.zeros(3, np.float32)})
      >>> actor, learner = replay.client(), replay.client()  # pass them to remote functions and actors
      >>> actor.extend({"obs": np.ones((5, 3), np.float32)})
      >>> for step, batch in zip(range(10), learner.batches(32, to="numpy")):
      ...     learner.update_priority(batch.index, np.ones(32, np.float32))
      >>> learner.flush()
      >>> replay.stats()["size"]
      5
      >>> replay.close()
    """

    def __init__(
        self,
        buffer: Buffer,
        example: PyTree,
        *,
        shards: int = 1,
        seed: int = 0,
        limit: Limit | None = None,
        path: Any = None,
        save_every: int = 0,
        options: Mapping[str, Any] | None = None,
    ):
        check_service(buffer, shards, limit, path, save_every)
        check_path(path, shards)
        check_limit("RayReplay", limit, buffer, False)
        check_seed("RayReplay", seed)
        ray = import_ray()
        part = check_shards(buffer, shards)
        example = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, to_rows(example))
        remote = ray.remote(concurrency_groups=_GROUPS)(_actor_class(ray))
        make = remote.options(**{"max_restarts": -1, **(options or {})})

        def start(shard: int) -> Any:
            folder = None if path is None else os.path.join(os.path.abspath(os.fspath(path)), f"shard-{shard:05d}")
            return make.remote(part, example, shards, seed + shard, limit, folder, save_every)

        self.buffer, self.shards, self._process = buffer, shards, os.getpid()
        self._saves, self._durable = path is not None, path is not None and save_every > 0
        self._link = RayLink([start(shard) for shard in range(shards)])
        self._settings = Settings(self._link, buffer, shards, example, {}, None, 8, 60.0, False, (0, 1))
        try:
            self._settings = self._settings._replace(spec=self._ask("spec")[0])
        except ReplayClosed as error:
            reason = str(error.__cause__).strip().splitlines()[-1]
            raise RuntimeError(f"RayReplay: an actor could not start: {reason}") from error

    def client(
        self,
        *,
        lanes: Sequence[int] | None = None,
        in_flight: int = 8,
        timeout: float = 60,
        durable: bool = False,
        rank: int = 0,
        ranks: int = 1,
        group: str = "",
    ) -> Client:
        """Return a client, to be passed to an actor or a learner.

        Args:
          lanes: The lanes that it writes, in the order of its environments; None: all. Each lane should have one writer; if
            the writer changes, an episode ends.
          in_flight: Calls that may be under way to each shard, >= 1; `extend` waits then.
          timeout: Seconds to call a shard again that is restarting.
          durable: Keep rows until they are in a checkpoint, and send them again after a restart, so that none is lost or
            doubled while this client lives. Needs `path` and `save_every`.
          rank, ranks: This learner among those of a group, which draw the same batches in the same order. Each gets other
            rows of each, with the weights of the whole. If a shard dies, they wait for it; if it lost its rows, or is the
            first, a learner may then be some batches ahead of the others.
          group: Name of the group. Groups that run at the same time, and one that starts again, need names of their own.
        Raises:
          ValueError: a number is out of range; or `durable` without checkpoints.

        Example:
          >>> client = replay.client(in_flight=16)
        """
        call, all_lanes = "RayReplay.client", self.buffer.lanes
        arguments.check_int(call, "in_flight", in_flight)
        arguments.check_int(call, "ranks", ranks)
        if not arguments.is_int(rank) or not 0 <= rank < ranks:
            raise ValueError(f"{call}: rank is {rank!r}; expected an int from 0 to {ranks - 1}.")
        if lanes is not None and all_lanes is None:
            raise ValueError(f"{call}: lanes is {lanes!r}, but the buffer has none. Use Buffer(..., lanes=8).")
        if all_lanes is not None:
            lanes = range(all_lanes) if lanes is None else lanes
            if np.ndim(lanes) != 1 or not 0 < len(set(lanes)) == len(lanes) or not set(lanes) <= set(range(all_lanes)):
                raise ValueError(f"{call}: lanes is {lanes!r}; expected different ints from 0 to {all_lanes - 1}.")
        if durable and not self._durable:
            raise ValueError(
                f"{call}: durable is True, but nothing is saved while it runs. Use RayReplay(..., path='/data/replay', "
                f"save_every=100)."
            )
        numbers = None if lanes is None else tuple(int(lane) for lane in lanes)
        calls: Any = {"in_flight": in_flight, "timeout": float(timeout), "durable": durable}
        return Client(self._settings._replace(lanes=numbers, group=(rank, ranks), group_name=group, **calls))

    def stats(self) -> dict[str, float]:
        """Return a flat dict of scalars: `Replay.stats` of each shard as `shard0/size`, and of the whole as `size`.

        Each shard adds its process `pid`, and counts of its calls: `writes` applied, and `skipped` because they were sent
        twice or followed a missing one. Of the whole, counts are sums, `is_full` is
        True if all shards are full, and other numbers are the largest; it has no `cursor` and no `pid`.

        Example:
          >>> stats = replay.stats()
          >>> stats["size"] == stats["shard0/size"]
          True
        """
        return merged_stats(self._ask("stats"))

    def save(self) -> None:
        """Save each shard under `path`, with its limit and the calls that it applied. Other calls wait while what changed
        is copied, not while it is written.

        Raises:
          ValueError: there is no `path`.
        """
        if not self._saves:
            raise ValueError("RayReplay.save: path is None. Use RayReplay(..., path='/data/replay').")
        self._ask("save")

    def close(self) -> None:
        """End waiting and later calls of clients with `ReplayClosed`, and the actors. Nothing is saved.

        In a forked child nothing is closed.
        """
        if os.getpid() != self._process:  # Ray would hang
            return
        ray = import_ray()
        ray.wait(self._all("close"), num_returns=self.shards, timeout=10)
        for actor in self._link.actors:
            ray.kill(actor)

    def _all(self, method: str) -> list[Any]:
        return [self._link.call(shard, method) for shard in range(self.shards)]

    def _ask(self, method: str) -> list[Any]:
        """Return the results of a method of all shards; wait for those that restart."""
        client = Client(self._settings)
        return [client._ask(shard, method, reference=reference) for shard, reference in enumerate(self._all(method))]

    def __repr__(self) -> str:
        return f"RayReplay({self.buffer!r}, shards={self.shards})"


_OF_A_SHARD = ("cursor", "pid")
_LATEST = ("epoch", "version")
"""Numbers of `stats` that only shards have, and integers that are not sums."""


def merged_stats(shards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the numbers of all shards together under their names, and those of each under `shard0/name`."""
    merged: dict[str, float] = {}
    for name in (name for name in shards[0] if name not in _OF_A_SHARD):
        values = [shard[name] for shard in shards]
        if isinstance(values[0], bool):
            merged[name] = all(values)
        else:
            merged[name] = max(values) if isinstance(values[0], float) or name in _LATEST else sum(values)
    return merged | {f"shard{i}/{name}": value for i, shard in enumerate(shards) for name, value in shard.items()}


def _actor_class(ray: Any) -> type[Shard]:
    """Return the class of the actors, whose methods run in groups of threads."""

    class RayShard(Shard):
        def __init__(self, *args: Any) -> None:
            if not ray.get_gpu_ids() and "JAX_PLATFORMS" not in os.environ:
                jax.config.update("jax_platforms", "cpu")
            if ray.get_runtime_context().was_current_actor_reconstructed:
                _shard.ENDING = 180.0  # network file systems keep the lock of a lost machine for some time
            super().__init__(*args)

    for name, group in _METHODS.items():
        setattr(RayShard, name, ray.method(concurrency_group=group)(getattr(Shard, name)))
    return RayShard
