"""What the processes of `tests.support.two_processes` do. Imported after `jax.distributed.initialize`."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import fbuf
from fbuf._formats.checkpoint.data_file import DataFile
from fbuf.sharded import Sharded
from tests.support import sharded as support
from tests.support.trees import same


def global_rows(sharded: Sharded, rows: Any) -> Any:
    place = jax.sharding.NamedSharding(sharded.mesh, jax.sharding.PartitionSpec(None, sharded.axis))
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, lambda at: np.asarray(x)[at]), rows)


def fetched(tree: Any) -> Any:
    def one(array: Any) -> Any:
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(one, tree) if jax.process_count() > 1 else jax.device_get(tree)


def filled(sharded: Sharded) -> Any:
    rows, mask, priority = support.rows_and_masks()
    rows, mask, priority = global_rows(sharded, (rows, mask, priority))
    return sharded.extend(sharded.init(support.example()), rows, mask=mask, priority=priority)


def everything(path: str, draw: Any, storage: str) -> None:
    buffer = support.buffer_of("buffer", storage=getattr(fbuf.storages, storage)())
    sharded = Sharded(buffer, support.mesh_of(), draw=draw)
    step, state, found = jax.jit(support.step_of(sharded, 32)), filled(sharded), []
    rows, _, _ = support.rows_and_masks()
    new = global_rows(sharded, {name: leaf[:2] for name, leaf in rows.items()})
    for turn in range(3):
        state, out = step(state, new, jax.random.key(turn))
        found += jax.tree.leaves(fetched(out))
    extra = {"key": jax.random.key(3), "number": 7}
    fbuf.save(f"{path}/saved", sharded, state, extra=extra)
    again, loaded, beside = fbuf.load(f"{path}/saved", sharded, extra=True)
    assert again == sharded and beside["number"] == 7
    same(*(fetched(step(each, new, jax.random.key(9))[1]) for each in (state, loaded)))
    if storage == "Device":
        same(fetched(state), fetched(loaded))
    fewer = Sharded(sharded.buffer, jax.make_mesh((4,), ("data",), devices=jax.devices()[::2]))
    _, moved = fbuf.load(f"{path}/saved", fewer)
    assert int(fewer.size(moved)) == int(sharded.size(state))
    if sharded.draw == "local":  # as mixtures need it
        mixture, state = fbuf.Mixture({"a": sharded}), {"a": state}
        fbuf.save(f"{path}/mixture", mixture, state, extra={"number": 8})
        again, loaded, beside = fbuf.load(f"{path}/mixture", mixture, extra=True)
        assert again == mixture and beside["number"] == 8
        draws = [fetched(mixture.peek(each, jax.random.key(9), 32)) for each in (state, loaded)]
        same(*draws)
        found += jax.tree.leaves(draws[0])
    if jax.process_count() > 1:
        check_failures(path, sharded, fewer, moved)
    if jax.process_index() == 0:
        np.savez(f"{path}/found.npz", *found)


def check_failures(path: str, sharded: Sharded, fewer: Sharded, moved: Any) -> None:
    """A save that fails in one process fails in all and leaves the checkpoint before; some calls are refused."""

    def raised(work: Any) -> str:
        try:
            work()
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("nothing was raised")

    add = DataFile.add
    for failing in range(2):
        if jax.process_index() == failing:
            DataFile.add = lambda *args: (_ for _ in ()).throw(OSError("the disk is full"))  # type: ignore[method-assign]
        said = raised(lambda: fbuf.save(f"{path}/saved", fewer, moved))
        theirs = f"RuntimeError: fbuf.save: process {failing}"
        assert said.startswith("OSError: the disk is full" if jax.process_index() == failing else theirs)
        DataFile.add = add  # type: ignore[method-assign]
    assert "wait is False" in raised(lambda: fbuf.save(f"{path}/saved", fewer, moved, wait=False))
    split = moved.shards.header
    assert "split over processes" in raised(lambda: fbuf.save(f"{path}/saved", fewer, moved, extra=split))
    again = fbuf.load(f"{path}/saved", sharded)[1]
    assert int(sharded.size(again)) == int(fewer.size(moved))
    multihost_utils.sync_global_devices("before a second save")
    assert fbuf.save(f"{path}/saved", fewer, moved, keep=1).result().generation > 1
    names = {each.name for each in Path(path, "saved").iterdir()}
    assert len(names) == 4 and "lock" in names  # one manifest, and a data file of each process


def save_for_ever(path: str) -> None:
    sharded = Sharded(fbuf.Buffer(512, lanes=8), support.mesh_of())
    state = sharded.init({"id": np.int32(0), "obs": np.zeros(512, np.float32)})
    for number in range(10**6):
        rows = {"id": np.full((64, 8), number, np.int32), "obs": np.full((64, 8, 512), number, np.float32)}
        state = sharded.extend(state, global_rows(sharded, rows))
        print(f"start {number}", flush=True)
        fbuf.save(path, sharded, state, extra={"number": number})
        print(f"done {number}", flush=True)
