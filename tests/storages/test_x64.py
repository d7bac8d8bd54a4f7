"""64-bit leaves on the host without x64 mode: written and read exactly, refused inside jit with the reason."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Compressed, Device, Host, Memmap, Ragged
from tests.support.x64 import EXAMPLE, KEYS, buffer_of, extremes, same, same_rows

ROWS = extremes(6)


def test_extremes_are_read_as_they_were_written(tmp_path: Path) -> None:
    buffer = buffer_of("compressed", tmp_path)  # every storage: tier `more`
    state = buffer.extend(buffer.init(EXAMPLE), ROWS)
    state = buffer.add(state, {name: column[2] for name, column in ROWS.items()})
    same_rows(buffer.rows(state, last=7).data, {name: column[[*range(6), 2]] for name, column in ROWS.items()})
    same_rows(buffer.get(state, jnp.array([5, 0])).data, {name: column[[5, 0]] for name, column in ROWS.items()})
    rows = buffer.rows(state)
    same(rows.data["id"][np.asarray(rows.mask)], ROWS["id"][[*range(6), 2]])
    state, batch = buffer.sample(state, jax.random.key(0), 16)
    drawn = np.asarray(batch.data["n"]).astype(int)
    same_rows(batch.data, {name: column[drawn] for name, column in ROWS.items()})
    new = {"id": np.array([-(2**63)]), "x": np.array([-0.0])}
    state = buffer.update_rows(state, buffer.rows(state, last=1).index, new)
    last = buffer.rows(state, last=1).data
    same_rows({n: last[n] for n in new}, new)
    spec, _ = buffer.storage.spec(state.rows)
    assert spec["id"].dtype == np.int64 and "int64[]" in str(buffer.summary(state))


def test_ragged_leaves_keep_64_bits() -> None:
    buffer = fbuf.Buffer(8, storage=Ragged(keys=KEYS))
    state = buffer.extend(buffer.init(EXAMPLE), [{n: x[i] for n, x in ROWS.items()} for i in range(6)])
    lazy = buffer.rows(state, last=6).lazy
    same_rows({n: lazy.stack(n) for n in KEYS}, {n: ROWS[n] for n in KEYS})


def test_jit_refuses_with_the_reason() -> None:
    buffer = fbuf.Buffer(8, storage=Host(keys=KEYS))
    state = buffer.extend(buffer.init(EXAMPLE), ROWS)
    key, slots = jax.random.key(0), jnp.arange(2)
    methods: dict[str, Any] = {
        "sample": lambda state: buffer.sample(state, key, 2),
        "peek": lambda state: buffer.peek(state, key, 2),
        "get": lambda state: buffer.get(state, slots),
        "rows": lambda state: (buffer.rows(state, last=2), buffer.rows(state)),
    }
    for name, method in methods.items():
        said = rf"^Buffer.{name}: leaf '\w+' is \w+, which jit cannot hold while .*Replay"
        pytest.raises(TypeError, jax.jit(method), state).match(said)
    with pytest.raises(TypeError, match=r"leaf 'id' is int32 of JAX; this buffer keeps int64 .* outside jit"):
        jax.jit(buffer.extend)(state, ROWS)
    replay = fbuf.Replay(buffer, EXAMPLE)
    for wrong in (ROWS["id"].astype(np.int32), jnp.arange(6), np.zeros((6, 2), np.uint32), 7):
        for write in (partial(buffer.extend, state), replay.extend):
            with pytest.raises(TypeError, match=r"extend: leaf 'id' is \w+( of JAX)?; this buffer keeps int64"):
                write(ROWS | {"id": wrong})
    assert len(replay) == 0
    with pytest.raises(ValueError, match=r"leaf 'id' has shape \[6, 1\]; expected \[N\]"):
        buffer.extend(state, ROWS | {"id": ROWS["id"][:, None]})
    with pytest.raises(ValueError, match=rf"leaf 'id' is {2**63}, which int64 cannot hold"):
        buffer.add(state, {"id": 2**63, "u": 0, "x": 0.0, "n": 0.0})


def test_parts_that_read_a_leaf_inside_jit_refuse_it() -> None:
    rows = {"action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    view = fbuf.views.Transition(autoreset="same_step")
    cast = fbuf.transforms.Cast("reward", "float16")
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"view": view}, np.zeros(3), r"Transition\(.*\) reads it there"),
        ({"sampler": fbuf.samplers.Staleness(10, version="obs")}, np.int64(0), "Staleness"),
        ({"writer": fbuf.writers.TopK("reward")}, np.zeros(3), r"TopK\(.*\) reads rows there"),
        ({"on_read": cast}, np.zeros(3), "transform"),
        ({"on_write": cast}, np.zeros(3), "transform"),
    ]
    for settings, obs, why in cases:
        buffer = fbuf.Buffer(8, storage=Host(keys=("obs",)), **settings)
        with pytest.raises(TypeError, match=rf"leaf 'obs' is \w+64, which jit cannot hold .*{why}.*np\.\w+32\(x\)"):
            buffer.init(rows | {"obs": obs})
        buffer.init(rows | {"obs": obs.astype("float32" if obs.ndim else "int32")})
    buffer = fbuf.Buffer(8, storage=Host(keys=KEYS))
    with pytest.raises(TypeError, match=r"^Mixture.sample: leaf 'id' of 'a' is int64, which jit cannot hold"):
        fbuf.Mixture({"a": buffer}).sample({"a": buffer.init(EXAMPLE)}, jax.random.key(0), 4)


def test_only_leaves_that_are_named_and_declared_have_64_bits(tmp_path: Path) -> None:
    for storage, example in (
        (Device(), EXAMPLE),
        (Host(), EXAMPLE),
        (Memmap(str(tmp_path / "rows")), EXAMPLE),
        (Compressed(keys=("n",)), EXAMPLE),
        (Host(keys=("id",)), {"id": 0}),
    ):
        buffer = fbuf.Buffer(8, storage=storage)
        spec, _ = buffer.storage.spec(buffer.init(example).rows)
        assert spec["id"].dtype == np.int32
    buffer = fbuf.Buffer(8, storage=Host(keys=("a",)))
    spec, _ = buffer.storage.spec(buffer.init({"a": {"b": jax.ShapeDtypeStruct((), np.int64)}}).rows)
    assert spec["a/b"].dtype == np.int64
