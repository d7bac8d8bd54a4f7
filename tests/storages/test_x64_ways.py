"""64-bit leaves on the host, without x64 mode: every storage, way of writing and way of reading, against the rows given."""

import gc
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fbuf
from fbuf.storages import Compressed, Host
from tests.support.tables import product_by_tier
from tests.support.trees import x64
from tests.support.x64 import EXAMPLE, KEYS, STORAGES, buffer_of, extremes, same, same_rows

pytestmark = pytest.mark.more

torch = pytest.importorskip("torch")
WAYS = ("eager", "extend", "add", "tensors")


def rows_at(rows, at):
    return {name: column[at] for name, column in rows.items()}


def written(replay, rows, way):
    """Return a replay, the given one or of an eager state, with the rows."""
    if way == "eager":
        replay._engine.state = replay.buffer.extend(replay.state, rows)
    elif way == "add":
        for i in range(len(rows["n"])):
            replay.add(rows_at(rows, i))
    else:
        replay.extend({n: torch.from_numpy(x) for n, x in rows.items()} if way == "tensors" else rows)
    return replay


def check_reads(replay, rows):
    """Compare everything that reads with the rows, oldest first, which `n` numbers."""
    number = len(rows["n"])
    held = replay.rows()
    for name, column in rows.items():
        same(np.asarray(held.data[name])[np.asarray(held.mask)], column)
    same_rows(replay.rows(last=number).data, rows)
    same_rows(replay.get(replay.rows(last=number).index).data, rows)
    first = int(rows["n"].reshape(number, -1)[0, 0])
    for to in ("jax", "numpy", "torch"):
        batch = replay.sample(8, to=to).data
        if to == "torch":
            assert [batch[n].dtype for n in KEYS] == [torch.int64, torch.uint64, torch.float64]
        same_rows(batch, rows_at(rows, np.asarray(batch["n"]).astype(int) - first))


@settings(max_examples=4)
@given(first=st.integers(0, 50), count=st.sampled_from([1, 9, 16, 40]), shape=st.sampled_from([(), (3,), (2, 2)]))
@product_by_tier(("storage", "way"), STORAGES, WAYS, more=list(zip(STORAGES, itertools.cycle(WAYS), strict=False)))
def test_rows_are_read_exactly(storage, way, tmp_path_factory, first, count, shape):
    path = tmp_path_factory.mktemp("rows")
    example = {name: np.zeros(shape if name in KEYS else (), leaf.dtype) for name, leaf in EXAMPLE.items()}
    rows = extremes(count, shape, first)
    kept = rows_at(rows, slice(-16, None))
    buffer = buffer_of(storage, path)
    replay = written(fbuf.Replay(buffer, example), rows, way)
    check_reads(replay, kept)
    replay.save(path / "saved")
    if buffer.storage.in_files:
        del replay
        gc.collect()
        check_reads(fbuf.Replay(buffer, example, resume=True), kept)
        other = buffer_of(storage, path / "loaded")
        check_reads(fbuf.Replay.load(path / "saved", other), kept)
    else:
        loaded = fbuf.Replay.load(path / "saved")
        assert loaded.buffer == buffer
        check_reads(loaded, kept)
        for target in (Host(keys=KEYS), Compressed(keys=KEYS)):
            check_reads(fbuf.Replay.load(path / "saved", fbuf.Buffer(20, storage=target), resize=True), kept)
        with pytest.raises(TypeError, match=r"leaf 'id' is int64, which jit cannot hold .* does not name it in keys"):
            fbuf.Replay.load(path / "saved", fbuf.Buffer(16, storage=Host(keys=("x", "u"))), resize=True)


@pytest.mark.parametrize("storage", ["host", "compressed", "memmap"])
def test_lanes_windows_and_prefetch(storage, tmp_path):
    view = fbuf.views.Sequence(3, boundary="mask", episode_end=(), autoreset="same_step")
    buffer = buffer_of(storage, tmp_path, 32, lanes=2, view=view, prefetch=1, batch_size=6)
    replay, rows = fbuf.Replay(buffer, EXAMPLE), extremes(20)
    lanes = {name: column.reshape(10, 2) for name, column in rows.items()}
    for part in range(0, 10, 5):
        replay.extend(rows_at(lanes, slice(part, part + 5)))
        batch = replay.sample(to="numpy")
        mask = batch.data["mask"]
        at = batch.data["n"][mask].astype(int)
        for name in KEYS:
            same(batch.data[name][mask], rows[name][at])
            assert not batch.data[name][~mask].view(np.uint64).any()


def test_threads_and_loader_return_64_bits(tmp_path):
    replay, rows = fbuf.Replay(buffer_of("compressed", tmp_path), EXAMPLE), extremes(16)
    replay.extend(rows)
    for form in ({"to": "torch"}, {"to": "numpy"}, {"device": jax.devices()[0]}):
        with replay.batches(8, **form) as batches:
            batch = next(batches).data
            same_rows(batch, rows_at(rows, np.asarray(batch["n"]).astype(int)))
    for loader in (
        fbuf.torch.Loader(replay, 8, steps=1),
        fbuf.torch.Loader(replay.buffer, 8, state=replay.state, steps=1),
        fbuf.torch.Loader(replay, 16, epochs=1),
    ):
        (batch,) = (batch.data for batch in loader)
        same_rows(batch, rows_at(rows, batch["n"].numpy().astype(int)))


def test_files_of_interop_keep_64_bits(tmp_path):
    rows = extremes(6)
    buffer = fbuf.Buffer(6, storage=Host(keys=KEYS))
    state = buffer.extend(buffer.init(EXAMPLE), rows)
    fbuf.interop.to_file(tmp_path / "rows.npz", buffer, state)
    with np.load(tmp_path / "rows.npz") as saved:
        same_rows({name: saved[name] for name in rows}, rows)
    again, state = fbuf.interop.from_file(tmp_path / "rows.npz").into(buffer)
    same_rows(again.rows(state).data, rows)


def test_with_x64_jit_takes_them():
    with x64():
        buffer, rows = fbuf.Buffer(6, storage=Host(keys=KEYS)), extremes(6)
        state = jax.jit(buffer.extend)(buffer.init(EXAMPLE), rows)
        batch = jax.jit(lambda state, key: buffer.peek(state, key, 8))(state, jax.random.key(0))
        assert batch.data["id"].dtype == np.int64 and isinstance(batch.data["id"], jax.Array)
        same_rows(jax.device_get(buffer.rows(state).data), rows)
