"""What goes wrong when buffers, states and numbers are mixed up: refused in words, never silent other data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.testing import assert_inplace, measure

EXAMPLE = {
    "obs": np.zeros((4,), np.float32),
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": np.bool_(False),
    "truncated": np.bool_(False),
}
BASE = fbuf.Buffer(10, view=fbuf.views.Transition())


def rows(count: int, start: int = 0) -> dict[str, Any]:
    number = np.arange(start, start + count)
    return {
        "obs": np.repeat(number[:, None], 4, 1).astype(np.float32),
        "action": number.astype(np.int32),
        "reward": number.astype(np.float32),
        "terminated": np.zeros(count, bool),
        "truncated": np.zeros(count, bool),
    }


@pytest.mark.parametrize(
    "other",
    [
        dict(capacity=100),
        dict(lanes=2),
        dict(sampler=fbuf.samplers.Prioritized()),
        dict(view=fbuf.views.Row()),
        dict(view=fbuf.views.Transition(n_step=2)),
        dict(view=fbuf.views.Transition(stack=2)),
        dict(view=fbuf.views.Transition(autoreset="next_step")),
    ],
    ids=str,
)
def test_the_state_of_another_buffer_is_refused(other: dict[str, Any]) -> None:
    state = BASE.extend(BASE.init(EXAMPLE), rows(10))
    stranger = dataclasses.replace(BASE, **other)
    with pytest.raises(ValueError, match=r"made by another buffer.*buffer.convert\(other, state\)"):
        stranger.peek(state, jax.random.key(0), 4)
    with pytest.raises(ValueError, match="made by another buffer"):
        jax.jit(lambda s: stranger.sample(s, jax.random.key(0), 4))(state)


def test_a_view_that_decides_alike_is_welcome() -> None:
    state = BASE.extend(BASE.init(EXAMPLE), rows(10))
    other = dataclasses.replace(BASE, view=fbuf.views.Transition(gamma=0.5))
    assert other.peek(state, jax.random.key(0), 4).mask.all()


def test_device_and_deduplicated_states_do_not_mix() -> None:
    other = dataclasses.replace(BASE, storage=fbuf.storages.Deduplicated(keys=("obs",)))
    with pytest.raises(TypeError, match="Deduplicated: this state was made by another storage"):
        other.peek(BASE.init(EXAMPLE), jax.random.key(0), 4)
    with pytest.raises((TypeError, ValueError), match="this state"):
        BASE.peek(other.init(EXAMPLE), jax.random.key(0), 4)


def test_device_and_host_states_do_not_mix() -> None:
    host = dataclasses.replace(BASE, storage=fbuf.storages.Host(keys=("obs",)))
    with pytest.raises(TypeError, match="Host: this state keeps its rows on the device"):
        host.peek(BASE.init(EXAMPLE), jax.random.key(0), 4)
    with pytest.raises(TypeError, match="Device: this state keeps rows on the host"):
        BASE.peek(host.init(EXAMPLE), jax.random.key(0), 4)


@pytest.mark.parametrize("storage", [fbuf.storages.Host(slack=0), fbuf.storages.Compressed(keys=("obs",), slack=0)])
def test_clear_between_two_writes_keeps_their_order(storage: Any) -> None:
    buffer = fbuf.Buffer(64, storage=storage)

    def both(state: Any, first: Any, second: Any) -> Any:
        return buffer.extend(buffer.clear(buffer.extend(state, first)), second)

    step = jax.jit(both, donate_argnums=0)
    for _ in range(5):
        state = step(buffer.init(EXAMPLE), rows(60), rows(60, 100))
        state = buffer.extend(state, rows(4, 160))
        held = buffer.rows(state)
        assert held.mask.all()
        assert np.asarray(held.data["obs"])[:, 0].tolist() == list(range(100, 164))


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
def test_a_bad_annealed_number_is_refused_or_harmless(name: str, bad: float) -> None:
    buffer = fbuf.prioritized(16)
    state = buffer.extend(buffer.init(EXAMPLE), rows(16))
    with pytest.raises(ValueError, match=f"{name} is {bad}; expected a finite number >= 0"):
        buffer.set(state, **{name: bad})
    with pytest.raises(ValueError, match=rf"{name} has shape \[3\]; expected one number"):
        buffer.set(state, **{name: jnp.ones(3)})
    set_to = jax.jit(lambda state, value: buffer.set(state, **{name: value}))
    worse = set_to(state, jnp.float32(bad))  # traced: nobody can look
    worse, batch = buffer.sample(worse, jax.random.key(0), 8)
    assert np.isfinite(batch.weight).all()
    worse = buffer.update_priority(worse, batch.index, np.full(8, 0.5, np.float32))
    good = {"alpha": 0.6, "beta": 0.4, "eps": 1e-6}[name]
    worse = buffer.update_priority(buffer.set(worse, **{name: good}), batch.index, np.full(8, 0.5, np.float32))
    batch = buffer.peek(worse, jax.random.key(1), 8)
    assert np.isfinite(batch.probability).all() and (np.asarray(batch.probability) > 0).all()
    assert np.isfinite(batch.weight).all() and (np.asarray(batch.weight) > 0).all()


@pytest.mark.parametrize("name", ["alpha", "eps"])
def test_sample_takes_beta_only(name: str) -> None:
    buffer = fbuf.prioritized(16)
    state = buffer.extend(buffer.init(EXAMPLE), rows(16))
    with pytest.raises(ValueError, match=rf"has no number '{name}' \(it has: beta\)"):
        buffer.sample(state, jax.random.key(0), 4, **{name: 0.0})


def test_assert_inplace_refuses_a_step_that_reuses_nothing() -> None:
    buffer = fbuf.Buffer(100_000)
    state, more = buffer.init(np.zeros(8, np.float32)), np.ones((4, 8), np.float32)
    assert_inplace(buffer.extend, state, more)
    with pytest.raises(AssertionError, match="donated bytes are not reused"):
        assert_inplace(lambda s, r: jax.tree.map(lambda a: a.astype(jnp.float16), buffer.extend(s, r)), state, more)


def test_convert_reads_only_what_ends_episodes() -> None:
    buffer = fbuf.Buffer(2000, storage=fbuf.storages.Host())
    big = EXAMPLE | {"obs": np.zeros((5000,), np.float32)}
    other = dataclasses.replace(buffer, view=fbuf.views.Transition(n_step=2, stack=3))
    state = buffer.init(big)
    assert measure(lambda s: buffer.convert(other, s), state, donate=()).temporary < 2_000_000


class Rounds:
    """A lossy codec: what it gives is what rows are, from the first chunk on."""

    chunk = 4

    def encode(self, values: np.ndarray) -> bytes:
        return bytes((np.asarray(values) & 0xFE).tobytes())

    def decode(self, data: bytes | memoryview, out: np.ndarray) -> None:
        out[...] = np.frombuffer(data, np.uint8).reshape(out.shape)

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rounds)


def test_a_codec_of_ones_own_is_never_dropped() -> None:
    buffer = fbuf.Buffer(4096, storage=fbuf.storages.Compressed(keys=("obs",), codec=Rounds()))
    state = buffer.init({"obs": np.zeros(64, np.uint8)})
    for _ in range(2):
        state = buffer.extend(state, {"obs": np.full((2048, 64), 3, np.uint8)})
    assert (np.asarray(buffer.rows(state).data["obs"]) == 2).all()


def test_first_words_of_a_beginner() -> None:
    buffer = fbuf.Buffer(8)
    state = buffer.init({"a": np.uint8(0), "r": np.float32(0)})
    with pytest.raises(ValueError, match="leaf 'a' is 300, which uint8 cannot hold"):
        buffer.add(state, {"a": 300, "r": 0.0})
    with pytest.raises(TypeError, match=r"The order is sample\(state, key, batch_size\)"):
        buffer.sample(state, 4, jax.random.key(0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key is float32.*expected one PRNG key"):
        buffer.sample(state, jnp.float32(0), 3)
    with pytest.raises(TypeError, match="for many keys vmap `peek`"):
        buffer.sample(state, jax.random.split(jax.random.key(0), 3), 3)
    with pytest.raises(TypeError, match="writer is the class Ring"):
        fbuf.Buffer(8, writer=fbuf.writers.Ring)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="codec is the class Zstd"):
        fbuf.storages.Compressed(codec=fbuf.storages.Zstd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keys is empty"):
        fbuf.Buffer(8, storage=fbuf.storages.Compressed(keys=())).init({"a": np.uint8(0)})
    with pytest.raises(ValueError, match="slack is 1.5; expected an int"):
        fbuf.storages.Host(slack=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"The order is Replay\(buffer, example\)"):
        fbuf.Replay({"a": 1}, buffer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="terminated is 'terminated'"):
        BASE.init(EXAMPLE | {"terminated": {"x": np.bool_(False)}})
    replay = fbuf.Replay(buffer, {"a": np.uint8(0), "r": np.float32(0)})
    replay.add({"a": 1, "r": 2})
    assert len(replay) == 1


def test_torch_tensors_are_named() -> None:
    torch = pytest.importorskip("torch")
    buffer = fbuf.Buffer(8)
    state = buffer.init({"a": np.float32(0)})
    with pytest.raises(TypeError, match=r"^Buffer.extend: leaf 'a' is a torch tensor.*fbuf.torch.from_torch\(x\)"):
        buffer.extend(state, {"a": torch.ones(3)})
