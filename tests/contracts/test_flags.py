"""Invariants 9 and 10: every verb is clean under JAX's strict modes, and importing fbuf starts and imports nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from tests.support.flags import (
    BATCH,
    BUFFERS,
    EXAMPLE,
    FLAGS,
    check,
    check_all_flags,
    every_method,
    flags,
    given,
    plain,
    rows,
)
from tests.support.processes import run_python
from tests.support.tables import by_tier, checks


@pytest.mark.more
def test_init_under_x64_keeps_the_dtypes_it_is_given():
    want = {path: leaf.dtype for path, leaf in jax.tree_util.tree_flatten_with_path(BUFFERS["rich"].init(EXAMPLE))[0]}
    with flags("x64", "strict dtype promotion"):
        state = BUFFERS["rich"].init(EXAMPLE)
        assert {path: leaf.dtype for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]} == want
        assert not [d for d in want.values() if d.itemsize > 4]
        wide = fbuf.Buffer(capacity=4).init({"x": np.zeros((), np.float64), "n": np.zeros((), np.int64)})
        assert wide.rows["x"].dtype == jnp.float64 and wide.rows["n"].dtype == jnp.int64


@pytest.mark.more
def test_an_error_under_the_leak_checker_is_still_ours():
    buffer = BUFFERS["plain"]
    with jax.checking_leaks(), pytest.raises(TypeError, match="leaf 'obs' is float32"):
        jax.jit(buffer.extend)(buffer.init(EXAMPLE), rows(buffer, 2, 0) | {"obs": jnp.zeros((2, 3), jnp.float32)})


OPTIONAL = ("torch", "optax", "gymnasium", "ale_py", "matplotlib", "tqdm", "chex", "flax", "orbax", "flashbax")
OPTIONAL += ("torchrl", "tensordict", "hypothesis", "pytest", "ray", "safetensors", "PIL", "cv2", "pandas")


def test_import_starts_no_backend_imports_no_extra_and_leaves_jax_as_it_was():
    run_python(
        "import io, os, sys, threading, contextlib, jax\n"
        "jax.config.update('jax_platforms', 'nowhere')\n"
        "config, environment, threads = dict(jax.config.values), dict(os.environ), threading.active_count()\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "    import fbuf\n"
        "assert dict(jax.config.values) == config and dict(os.environ) == environment\n"
        "assert threading.active_count() == threads and not out.getvalue() and not err.getvalue()\n"
        "view = fbuf.views.Transition(autoreset='same_step')\n"
        "fbuf.Buffer(capacity=8, sampler=fbuf.samplers.Prioritized(), view=view, lanes=2)\n"
        f"found = sorted({{m.split('.')[0] for m in sys.modules}} & set({OPTIONAL!r}))\n"
        "assert not found, found\n"
        "try:\n"
        "    jax.devices()\n"
        "except RuntimeError:\n"
        "    pass\n"
        "else:\n"
        "    raise AssertionError('the check checks nothing')\n"
    )


@pytest.mark.more
def test_nothing_leaks_from_scan_vmap_and_grad():
    buffer = BUFFERS["rich"]
    x = given(buffer)

    def run(weight, key):
        def step(state, key):
            state, batch = buffer.sample(buffer.extend(state, x["rows"]), key, BATCH)
            return buffer.update_priority(state, batch.index, batch.data["reward"] * weight), batch.data["reward"]

        return jnp.sum(weight * lax.scan(step, buffer.init(EXAMPLE), jax.random.split(key, 3))[1])

    with jax.checking_leaks():
        slopes = jax.jit(jax.vmap(jax.grad(run), in_axes=(0, None)))(jnp.ones((2,), jnp.float32), jax.random.key(0))
    assert np.all(np.isfinite(slopes))


INFINITE = {(name, "debug_infs") for name in ("rich", "topk", "everything")}  # the least and the largest of no rows
FLAGGED = [  # `check_all_flags` sets the others together
    (name, flag)
    for i, name in enumerate(BUFFERS)
    for j, flag in enumerate(FLAGS)
    if flag in ("debug_infs", "transfer_guard") or (i + j) % 5 == 0
]
CASES = by_tier(more=[("prioritized", "transfer_guard")], exhaustive=[case for case in FLAGGED if case not in INFINITE])


@pytest.mark.parametrize(("name", "flag"), CASES)
def test_every_method_under_each_flag(name, flag):
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags(flag):
        got = every_method(buffer, state, x)
    check(name, plain(got))


test_every_method_under_all_flags = checks(
    more=[(check_all_flags, ["rich"])],
    exhaustive=[(check_all_flags, sorted(BUFFERS.keys() - {"rich"}))],
)
