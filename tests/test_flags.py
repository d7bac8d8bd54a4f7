"""Invariants 9 and 10: every verb is clean under JAX's strict modes, and importing fbuf starts and imports nothing.

The flags are part of JAX's trace context, so each `with` below traces anew. The suite itself runs with rank promotion
"raise" (tests/conftest.py). What has to hold before the first import runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Prioritized, Ranked, Uniform
from fbuf.storages import Deduplicated
from fbuf.transforms import Augment, Cast, Normalize, NormalizeReward, RewardToGo, Scale
from fbuf.views import Row, Transition

ROOT = Path(__file__).resolve().parent.parent
LANES, STEPS, BATCH = 2, 5, 4
EXHAUSTIVE = os.environ.get("FBUF_EXHAUSTIVE", "") not in ("", "0")
EXAMPLE = {
    "obs": np.zeros((3,), np.uint8),
    "action": np.zeros((), np.int32),
    "reward": np.zeros((), np.float32),
    "terminated": np.zeros((), np.bool_),
    "truncated": np.zeros((), np.bool_),
    "final": np.zeros((3,), np.uint8),
}
BUFFERS = {
    "plain": fbuf.Buffer(capacity=16),
    "lanes": fbuf.Buffer(capacity=16, lanes=LANES, episode_end=("truncated",)),
    "prioritized": fbuf.Buffer(capacity=16, sampler=Prioritized(stratified=False, normalize=None)),
    "transition": fbuf.Buffer(
        capacity=16, lanes=LANES, sampler=Uniform(), view=Transition(n_step=2, stack=2, pad="repeat")
    ),
    "final": fbuf.Buffer(capacity=16, view=Transition(n_step=2, stack=2, final_observation="final")),
    "next_step": fbuf.Buffer(capacity=16, lanes=LANES, view=Transition(n_step=2, autoreset="next_step")),
    "rich": fbuf.Buffer(
        capacity=16, lanes=LANES, sampler=Prioritized(normalize="buffer"), view=Transition(n_step=3, stack=2)
    ),
    "deduplicated": fbuf.Buffer(
        capacity=16,
        lanes=LANES,
        storage=Deduplicated(keys=("obs", "final", "reward"), blocks=64),
        sampler=Prioritized(),
        view=Transition(n_step=2, stack=2),
    ),
    "everything": fbuf.Buffer(
        capacity=16,
        lanes=LANES,
        sampler=Prioritized(normalize="buffer", largest="held", uniform=0.1),
        view=Transition(n_step=2, stack=2),
    ),
    "distinct": fbuf.Buffer(capacity=16, sampler=Prioritized(replace=False)),
    "ranked": fbuf.Buffer(capacity=16, lanes=LANES, sampler=Ranked(uniform=0.1, normalize="buffer"), view=Transition()),
    "transforms": fbuf.Buffer(
        capacity=16,
        lanes=LANES,
        view=Transition(n_step=2, stack=2),
        on_write=(NormalizeReward(), RewardToGo(0.9), Cast("action", "int16")),
        on_read={
            "shift": Augment("obs", 1),
            "frames": Scale(("obs", "next_obs"), offset=1.0),
            "norm": Normalize("obs"),
        },
    ),
    "prefetch": fbuf.Buffer(capacity=16, lanes=LANES, sampler=Prioritized(), prefetch=1, batch_size=BATCH),
}


def rows(buffer: fbuf.Buffer, steps: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    axes = (steps,) if buffer.lanes is None else (steps, buffer.lanes)
    return jax.device_put(
        {
            "obs": draw.integers(0, 255, (*axes, 3)).astype(np.uint8),
            "action": draw.integers(0, 4, axes).astype(np.int32),
            "reward": draw.normal(size=axes).astype(np.float32),
            "terminated": draw.random(axes) < 0.2,
            "truncated": draw.random(axes) < 0.1,
            "final": draw.integers(0, 255, (*axes, 3)).astype(np.uint8),
        }
    )


def given(buffer: fbuf.Buffer) -> dict[str, Any]:
    """Everything the verbs are called with, on the device."""
    axes = (STEPS,) if buffer.lanes is None else (STEPS, buffer.lanes)
    return {
        "rows": rows(buffer, STEPS, 0),
        "more": rows(buffer, STEPS, 1),
        "row": jax.tree.map(lambda x: jax.device_put(np.asarray(x)[0]), rows(buffer, 1, 2)),
        "mask": jax.device_put(np.arange(STEPS * (buffer.lanes or 1)).reshape(axes) % 3 != 0),
        "priority": jax.device_put(np.ones(axes, np.float32)),
        "error": jax.device_put(np.array([1.0, -2.0, np.float32(1e30), 0.0], np.float32)),
        "beta": jax.device_put(np.float32(0.7)),
        "slots": jax.device_put(np.array([0, 3, -1, 16], np.int32)),
        "key": jax.device_put(jax.random.key_data(jax.random.key(3))),
    }


def every_verb(buffer: fbuf.Buffer, state: Any, x: dict[str, Any]) -> Any:
    """All verbs on `state`, an empty one at first, so that the masked paths run too."""
    prioritized, out = buffer.sampler.prioritized, []
    state, empty = buffer.sample(state, x["key"], BATCH)
    state = buffer.extend(state, x["rows"])
    state = buffer.extend(state, x["more"], mask=x["mask"], priority=x["priority"] if prioritized else None)
    state = buffer.add(state, x["row"])
    options = {"beta": x["beta"]} if prioritized else {}
    state, batch = buffer.sample(state, x["key"], BATCH, **options)
    if prioritized:
        state = buffer.update_priority(state, batch.index, x["error"])
        state = buffer.update_priority(state, empty.index, x["error"])
        state = buffer.set(state, alpha=x["beta"])
        state = state if buffer.sampler.rebuilds else buffer.rebuild(state)
    state = buffer.update_rows(state, batch.index, {"reward": x["error"]})
    out += [empty, batch, buffer.peek(state, x["key"], BATCH), buffer.get(state, batch.index), buffer.rows(state)]
    out += [buffer.get(state, x["slots"]), buffer.last(state, 3), buffer.stats(state), buffer.can_sample(state)]
    other = fbuf.Buffer(
        capacity=16,
        lanes=buffer.lanes,
        storage=buffer.storage,
        sampler=Prioritized(normalize=None),
        view=Row(),
        on_write=buffer.on_write,
        on_read=Normalize("reward") if buffer.on_read else None,
    )
    out.append(buffer.convert(other, state))
    return state, buffer.clear(state), out


@contextlib.contextmanager
def x64() -> Iterator[None]:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        yield


FLAGS: dict[str, Callable[[], Any]] = {
    "x64": x64,
    "strict dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "tracer leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}


@contextlib.contextmanager
def flags(*names: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(FLAGS[name]())
        yield


def plain(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@functools.cache
def expected(name: str) -> Any:
    buffer = BUFFERS[name]
    return plain(jax.jit(functools.partial(every_verb, buffer))(buffer.init(EXAMPLE), given(buffer)))


def check(name: str, got: Any) -> None:
    want = expected(name)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [n if n in ("plain", "rich") else pytest.param(n, marks=pytest.mark.slow) for n in BUFFERS]
)
def test_every_verb_under_every_flag_at_once(name: str) -> None:
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags("x64", "strict dtype promotion", "rank promotion", "debug_nans", "tracer leaks"):
        got = plain(jax.jit(functools.partial(every_verb, buffer))(state, x))
    check(name, got)


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", BUFFERS if EXHAUSTIVE else ("plain", "rich", "deduplicated"))
def test_every_verb_under_each_flag(name: str, flag: str) -> None:
    if flag == "debug_infs" and name == "rich":
        pytest.skip("an empty tree of minima holds infinity")
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags(flag):
        got = every_verb(buffer, state, x)
    check(name, plain(got))


@pytest.mark.parametrize("name", ["plain", "rich", pytest.param("deduplicated", marks=pytest.mark.slow)])
def test_eager_verbs_move_nothing_to_or_from_the_device(name: str) -> None:
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags("transfer_guard"):
        got = every_verb(buffer, state, x)
    check(name, plain(got))


def test_init_under_x64_keeps_the_dtypes_it_is_given() -> None:
    want = {path: leaf.dtype for path, leaf in jax.tree_util.tree_flatten_with_path(BUFFERS["rich"].init(EXAMPLE))[0]}
    with flags("x64", "strict dtype promotion"):
        state = BUFFERS["rich"].init(EXAMPLE)
        assert {path: leaf.dtype for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]} == want
        assert not [d for d in want.values() if d.itemsize > 4]
        wide = fbuf.Buffer(capacity=4).init({"x": np.zeros((), np.float64), "n": np.zeros((), np.int64)})
        assert wide.rows["x"].dtype == jnp.float64 and wide.rows["n"].dtype == jnp.int64


def test_nothing_leaks_from_scan_vmap_and_grad() -> None:
    buffer = BUFFERS["rich"]
    x = given(buffer)

    def run(weight: Any, key: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            state, batch = buffer.sample(buffer.extend(state, x["rows"]), key, BATCH)
            return buffer.update_priority(state, batch.index, batch.data["reward"] * weight), batch.data["reward"]

        return jnp.sum(weight * lax.scan(step, buffer.init(EXAMPLE), jax.random.split(key, 3))[1])

    with jax.checking_leaks():
        slopes = jax.jit(jax.vmap(jax.grad(run), in_axes=(0, None)))(jnp.ones((2,), jnp.float32), jax.random.key(0))
    assert np.all(np.isfinite(slopes))


def test_an_error_under_the_leak_checker_is_still_ours() -> None:
    buffer = BUFFERS["plain"]
    with jax.checking_leaks(), pytest.raises(TypeError, match="leaf 'obs' is float32"):
        jax.jit(buffer.extend)(buffer.init(EXAMPLE), rows(buffer, 2, 0) | {"obs": jnp.zeros((2, 3), jnp.float32)})


# --------------------------------------------------------------------------------------------------------- import


def python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


OPTIONAL = ("torch", "optax", "gymnasium", "ale_py", "matplotlib", "tqdm", "chex", "flax", "orbax", "flashbax")
OPTIONAL += ("torchrl", "tensordict", "hypothesis", "pytest", "ray", "safetensors", "PIL", "cv2", "pandas")


def test_import_starts_no_backend_and_imports_no_extra() -> None:
    """With a platform that does not exist, whatever starts a backend fails."""
    python(
        "import sys, jax\n"
        "jax.config.update('jax_platforms', 'nowhere')\n"
        "import fbuf\n"
        "fbuf.Buffer(capacity=8, sampler=fbuf.samplers.Prioritized(), view=fbuf.views.Transition(), lanes=2)\n"
        f"found = sorted({{m.split('.')[0] for m in sys.modules}} & set({OPTIONAL!r}))\n"
        "assert not found, found\n"
        "try:\n"
        "    jax.devices()\n"
        "except RuntimeError:\n"
        "    pass\n"
        "else:\n"
        "    raise AssertionError('the check checks nothing')\n"
    )


def test_import_leaves_jax_as_it_was() -> None:
    """No flag, no thread, no environment variable, nothing printed."""
    python(
        "import io, os, sys, threading, contextlib, jax\n"
        "config, environment, threads = dict(jax.config.values), dict(os.environ), threading.active_count()\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "    import fbuf\n"
        "assert dict(jax.config.values) == config\n"
        "assert dict(os.environ) == environment\n"
        "assert threading.active_count() == threads\n"
        "assert not out.getvalue() and not err.getvalue()\n"
    )
