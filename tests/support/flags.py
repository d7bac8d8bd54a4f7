"""Buffers of all kinds, all their methods in one program, and settings of JAX that this program runs under."""

import contextlib
import functools

import jax
import numpy as np

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness
from fbuf.storages import Compressed, Deduplicated
from fbuf.transforms import Augment, Cast, Normalize, NormalizeReward, RewardToGo, Scale
from fbuf.views import Transition
from fbuf.writers import Reservoir, TopK
from tests.support.trees import close, x64

LANES, STEPS, BATCH = 2, 5, 4
STACKS = Transition(n_step=2, stack=2, autoreset="same_step")
LONG = Transition(n_step=3, stack=2, autoreset="same_step")


def make(lanes=LANES, **settings):
    return fbuf.Buffer(16, lanes=lanes, **settings)


BUFFERS = {
    "plain": make(None),
    "lanes": make(episode_end=("truncated",)),
    "prioritized": make(None, sampler=Prioritized(stratified=False, normalize=None)),
    "transition": make(view=Transition(n_step=2, stack=2, pad="repeat", autoreset="same_step")),
    "final": make(None, view=Transition(n_step=2, stack=2, final_observation="final")),
    "next_step": make(view=Transition(n_step=2, autoreset="next_step")),
    "rich": make(sampler=Prioritized(normalize="buffer"), view=LONG),
    "deduplicated": make(
        storage=Deduplicated(keys=("obs", "final", "reward"), blocks=64), sampler=Prioritized(), view=STACKS
    ),
    "host": make(storage=Compressed(keys=("obs", "final")), sampler=Prioritized(on="host"), view=LONG),
    "everything": make(sampler=Prioritized(normalize="buffer", largest="held", uniform=0.1), view=STACKS),
    "distinct": make(None, sampler=Prioritized(replace=False)),
    "ranked": make(sampler=Ranked(uniform=0.1, normalize="buffer"), view=Transition(autoreset="same_step")),
    "transforms": make(
        view=STACKS,
        on_write=(NormalizeReward(), RewardToGo(0.9), Cast("action", "int16")),
        on_read={"a": Augment("obs", 1), "b": Scale(("obs", "next_obs"), offset=1.0), "c": Normalize("obs")},
    ),
    "epoch": make(sampler=Epoch(), view=STACKS),
    "consume": make(sampler=Consume(2), view=STACKS),
    "queue": make(sampler=Consume(order="fifo")),
    "staleness": make(sampler=Staleness(4, version="action", decay="exponential", half_life=2), view=STACKS),
    "topk": make(None, writer=TopK("reward"), sampler=Prioritized()),
    "reservoir": make(writer=Reservoir()),
    "prefetch": make(sampler=Prioritized(), prefetch=1, batch_size=BATCH),
}


def rows(buffer, steps, seed):
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


EXAMPLE = {name: np.zeros(x.shape[1:], x.dtype) for name, x in rows(BUFFERS["plain"], 1, 0).items()}


def given(buffer):
    axes = (STEPS,) if buffer.lanes is None else (STEPS, buffer.lanes)
    arguments = {
        "rows": rows(buffer, STEPS, 0),
        "more": rows(buffer, STEPS, 1),
        "row": jax.tree.map(lambda x: np.asarray(x)[0], rows(buffer, 1, 2)),
        "mask": np.arange(STEPS * (buffer.lanes or 1)).reshape(axes) % 3 != 0,
        "lanes": np.ones(axes[1:], bool),
        "priority": np.ones(axes, np.float32),
        "error": np.array([1.0, -2.0, np.float32(1e30), 0.0], np.float32),
        "beta": np.float32(0.7),
        "slots": np.array([0, 3, -1, 16], np.int32),
        "key": jax.random.key_data(jax.random.key(3)),
    }
    return jax.device_put(arguments)


def every_method(buffer, state, x):
    """Call all methods on `state`, which is empty at first, so that the masked paths run too."""
    prioritized, out = buffer.sampler.prioritized, []
    state, empty = buffer.sample(state, x["key"], BATCH)
    state = buffer.extend(state, x["rows"])
    state = buffer.extend(state, x["more"], mask=x["mask"], priority=x["priority"] if prioritized else None)
    state = buffer.add(buffer.cut(buffer.cut(state, x["lanes"])), x["row"])
    options = {"beta": x["beta"]} if prioritized else {}
    state, batch = buffer.sample(state, x["key"], BATCH, **options)
    if prioritized:
        state = buffer.update_priority(state, batch.index, x["error"])
        state = buffer.update_priority(state, empty.index, x["error"])
        state = buffer.set(state, alpha=x["beta"])
        state = state if buffer.sampler.rebuilds else buffer.set(state, rebuild=True)
    state = buffer.update_rows(state, batch.index, {"reward": x["error"]})
    out += [empty, batch, buffer.peek(state, x["key"], BATCH), buffer.get(state, batch.index), buffer.rows(state)]
    out += [buffer.get(state, x["slots"]), buffer.rows(state, last=3), buffer.stats(state), buffer.can_sample(state)]
    settings = {"storage": buffer.storage, "writer": buffer.writer, "on_write": buffer.on_write}
    settings |= {"sampler": Prioritized(normalize=None), "on_read": Normalize("reward") if buffer.on_read else None}
    other = make(buffer.lanes, **settings)
    out.append(buffer.convert(other, state))
    return state, buffer.clear(state), out


FLAGS = {
    "x64": x64,
    "strict dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "tracer leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}


@contextlib.contextmanager
def flags(*names):
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(FLAGS[name]())
        yield


def plain(tree):
    return jax.tree.map(np.asarray, tree)


@functools.cache
def expected(name):
    buffer = BUFFERS[name]
    return plain(jax.jit(functools.partial(every_method, buffer))(buffer.init(EXAMPLE), given(buffer)))


def check(name, got):
    got, want = (x[2][:-1] if name == "host" else x for x in (got, expected(name)))  # its states name stores
    close(got, want, rtol=1e-5)


def check_all_flags(name):
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags("x64", "strict dtype promotion", "rank promotion", "debug_nans", "tracer leaks"):
        got = plain(jax.jit(functools.partial(every_method, buffer))(state, x))
    check(name, got)
