"""What does `fbuf.Replay` cost in a plain Python loop, as most RL code is written: one row added, one batch drawn?

Every library is called as its users call it, from NumPy rows to torch tensors: `Replay.add`, `Replay.sample` and the
prioritized step (a row, a batch, its priorities), beside Stable-Baselines3, cpprb, torchrl and flashbax under the user's own
jit. Then donated jitted calls beside flashbax's, in wall time, and whole runs of a DQN script (torch, CartPole, after
cleanrl's dqn.py) and of SAC with eight environments, which differ in their buffer alone. All other figures are CPU seconds
of all threads, interleaved. Transitions and windows, whose rows hold each observation once, are measured beside SB3's rows.
Expected: `add` at most 4 times SB3's time (3 times for transitions and windows), `sample` at most twice, the run at most 1.1
times (1.05 with transitions), calls of `Host` at most 5 times; the prioritized step at least as fast as cpprb's and
torchrl's; jitted calls, and those of `fbuf.integrations.flashbax`, at least as fast as flashbax's.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks._harness import Absent, absent_row, interleave, load_peer, ratio, row, spread

ADD = "`Replay.add` of one row of five NumPy leaves: its time over the peer's"
SAMPLE = "`Replay.sample(256, to='torch')` of such rows: its time over the peer's"
STEP = (
    "Prioritized step in a Python loop (add 1 row, draw 256 of 10^5, set their priorities): the peer's time over ours"
)
JITTED = "A jitted method, the state donated: flashbax's time over ours"
BARE = "A jitted ring without counters or token, the state donated: flashbax's time over its"
SHIM = "`fbuf.integrations.flashbax`, a jitted call, the state donated: flashbax's time over its"
VIEWS = "`Replay` of the view that is recommended, in a Python loop: its time over that of SB3's buffer of rows"
GYMNASIUM = (
    "Steps of eight environments through `fbuf.gymnasium.Recorder`, as in README: their time over that without it"
)
RUN = "A DQN script (torch, CartPole), its time over that with the peer's buffer"
SAC = "A SAC script (torch, eight environments of Pendulum), its time over that with the peer's buffer"

CAPACITY, BATCH = 100_000, 256
PARTS = 20  # of a run of a script
EXAMPLE = {
    "obs": np.zeros(4, np.float32),
    "next_obs": np.zeros(4, np.float32),
    "action": np.zeros((), np.int32),
    "reward": np.zeros((), np.float32),
    "done": np.zeros((), np.bool_),
}


def rows_of(count: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return [
        {
            "obs": random.random(4).astype(np.float32),
            "next_obs": random.random(4).astype(np.float32),
            "action": np.asarray(random.integers(2), np.int32),
            "reward": np.asarray(random.random(), np.float32),
            "done": np.asarray(random.random() < 0.02),
        }
        for _ in range(count)
    ]


class Ours:
    """`fbuf.Replay`; batches as torch tensors."""

    def __init__(self, prioritized: bool = False, capacity: int = CAPACITY):
        buffer = fbuf.prioritized(capacity) if prioritized else fbuf.Buffer(capacity)
        self.replay = fbuf.Replay(buffer, EXAMPLE)
        self.add, self.names = self.replay.add, tuple(EXAMPLE)

    def fill(self, rows: list[dict[str, np.ndarray]]) -> None:
        self.replay.extend({name: np.stack([r[name] for r in rows]) for name in EXAMPLE})

    def sample(self, size: int = BATCH) -> Any:
        return self.replay.sample(size, to="torch").data

    def step(self) -> Any:
        batch = self.replay.sample(BATCH, to="torch")
        self.replay.update_priority(batch.index, batch.data["reward"] - 1)
        return batch


class SB3:
    """Stable-Baselines3's `ReplayBuffer`, a NumPy ring."""

    names = tuple(EXAMPLE)

    def __init__(self, capacity: int = CAPACITY):
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        box = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.buffer = ReplayBuffer(capacity, box, spaces.Discrete(2), "cpu", handle_timeout_termination=False)

    def add(self, r: dict[str, np.ndarray]) -> None:
        self.buffer.add(r["obs"], r["next_obs"], r["action"], r["reward"], r["done"], [{}])

    def fill(self, rows: list[dict[str, np.ndarray]]) -> None:
        for r in rows:
            self.add(r)

    def sample(self, size: int = BATCH) -> Any:
        batch = self.buffer.sample(size)
        return {
            "obs": batch.observations,
            "next_obs": batch.next_observations,
            "action": batch.actions[:, 0],
            "reward": batch.rewards[:, 0],
            "done": batch.dones[:, 0],
        }


class OursOfSteps:
    """`fbuf.Replay` of one-step transitions, whose rows hold each observation once; batches as torch tensors."""

    def __init__(self, example: dict[str, np.ndarray], capacity: int, lanes: int | None = None):
        final = "final_obs" if "final_obs" in example else None
        view = fbuf.views.Transition(final_observation=final, autoreset="same_step")
        self.replay = fbuf.Replay(fbuf.Buffer(capacity, lanes=lanes, view=view), example)
        self.add, self.names = self.replay.add, tuple(example)

    def sample(self, size: int) -> Any:
        return self.replay.sample(size, to="torch").data


class SB3Lanes:
    """SB3's `ReplayBuffer` for eight environments of Pendulum."""

    names = ("obs", "next_obs", "action", "reward", "done")

    def __init__(self, capacity: int):
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        boxes = (spaces.Box(-most, most, (size,), np.float32) for most, size in ((np.inf, 3), (2.0, 1)))
        self.buffer = ReplayBuffer(capacity, *boxes, "cpu", n_envs=8, handle_timeout_termination=False)

    def add(self, r: dict[str, np.ndarray]) -> None:
        self.buffer.add(r["obs"], r["next_obs"], r["action"], r["reward"], r["done"], [{}] * 8)

    def sample(self, size: int) -> Any:
        batch = self.buffer.sample(size)
        data = {"obs": batch.observations, "next_obs": batch.next_observations, "action": batch.actions}
        return data | {"reward": batch.rewards[:, 0], "done": batch.dones[:, 0]}


class Cpprb:
    """cpprb's rings, and its tree in C++; batches as torch tensors."""

    def __init__(self, prioritized: bool = False):
        import cpprb
        import torch

        kind = cpprb.PrioritizedReplayBuffer if prioritized else cpprb.ReplayBuffer
        fields = {n: {"shape": leaf.shape or 1, "dtype": leaf.dtype} for n, leaf in EXAMPLE.items()}
        self.buffer, self.torch = kind(CAPACITY, fields), torch

    def add(self, r: dict[str, np.ndarray]) -> None:
        self.buffer.add(**r)

    def fill(self, rows: list[dict[str, np.ndarray]]) -> None:
        self.buffer.add(**{name: np.stack([r[name] for r in rows]) for name in EXAMPLE})

    def sample(self) -> Any:
        batch = self.buffer.sample(BATCH)
        return {name: self.torch.from_numpy(leaf) for name, leaf in batch.items()}

    def step(self) -> Any:
        batch = self.buffer.sample(BATCH, beta=0.4)
        tensors = {name: self.torch.from_numpy(leaf) for name, leaf in batch.items() if name in EXAMPLE}
        self.buffer.update_priorities(batch["indexes"], (tensors["reward"][:, 0] - 1).abs().numpy())
        return tensors


class TorchRL:
    """torchrl's `ReplayBuffer` of TensorDicts."""

    def __init__(self, prioritized: bool = False):
        from benchmarks.peers import _torchrl

        kind = _torchrl.Prioritized if prioritized else _torchrl.Uniform
        self.buffer = kind(CAPACITY, EXAMPLE).buffer
        self.step = lambda: _step()
        self.torch, self.dict = _torchrl.torch, _torchrl.TensorDict

        def _step() -> Any:
            batch, drawn = self.buffer.sample(BATCH, return_info=True)
            self.buffer.update_priority(drawn["index"], (batch["reward"] - 1).abs())
            return batch

    def add(self, r: dict[str, np.ndarray]) -> None:
        self.buffer.add(self.dict({name: self.torch.from_numpy(leaf) for name, leaf in r.items()}, []))

    def fill(self, rows: list[dict[str, np.ndarray]]) -> None:
        leaves = {name: self.torch.from_numpy(np.stack([r[name] for r in rows])) for name in EXAMPLE}
        self.buffer.extend(self.dict(leaves, [len(rows)]))

    def sample(self) -> Any:
        return self.buffer.sample(BATCH)


class Flashbax:
    """flashbax's functions under jit; batches as torch tensors."""

    def __init__(self, prioritized: bool = False):
        import torch
        from flashbax.buffers.flat_buffer import make_flat_buffer
        from flashbax.buffers.prioritised_flat_buffer import make_prioritised_flat_buffer

        make = make_prioritised_flat_buffer if prioritized else make_flat_buffer
        self.buffer: Any = make(CAPACITY, 1, BATCH)
        self.torch, self.key = torch, jax.random.key(0)
        self.state = self.buffer.init(jax.tree.map(jax.numpy.asarray, EXAMPLE))
        self._add = jax.jit(self.buffer.add, donate_argnums=0)

        def draw(state: Any, key: jax.Array) -> Any:
            key, now = jax.random.split(key)
            return key, self.buffer.sample(state, now)

        self._sample = jax.jit(draw)
        if prioritized:
            self._update = jax.jit(self.buffer.set_priorities, donate_argnums=0)

    def add(self, r: dict[str, np.ndarray]) -> None:
        self.state = self._add(self.state, r)

    def fill(self, rows: list[dict[str, np.ndarray]]) -> None:
        for r in rows[:2000]:
            self.add(r)

    def _draw(self) -> Any:
        self.key, batch = self._sample(self.state, self.key)
        return batch

    def sample(self) -> Any:
        return jax.tree.map(self.torch.from_dlpack, self._draw().experience.first)

    def step(self) -> Any:
        batch = self._draw()
        tensors = jax.tree.map(self.torch.from_dlpack, batch.experience.first)
        self.state = self._update(self.state, batch.indices, (tensors["reward"] - 1).abs().numpy())
        return tensors


PEERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "SB3": ("stable_baselines3", SB3),
    "cpprb": ("cpprb", Cpprb),
    "torchrl": ("torchrl", TorchRL),
    "flashbax": ("flashbax", Flashbax),
}


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for the three calls and the whole run."""
    if isinstance(torch := load_peer("torch"), Absent):
        return [absent_row(RUN, "torch", torch)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = 2 if quick else 15
        report = calls(rounds, quick) + recommended(rounds, quick)
        report += jitted(rounds, 20 if quick else 200) + recorded(1 if quick else 7, 200 if quick else 5_000)
        return report + runs(1 if quick else 7, 1_500 if quick else 50_000)
    finally:
        torch.set_num_threads(threads)


def calls(rounds: int, quick: bool) -> list[dict[str, Any]]:
    """`add`, `sample` and the prioritized step, each library's in turn."""
    rows, report = rows_of(1000), []
    filled = rows * (2 if quick else CAPACITY // len(rows))
    questions = (
        (ADD, "add", False, {"SB3": "<= 4"}, 640),
        (SAMPLE, "sample", False, {"SB3": "<= 2"}, 100),
        (STEP, "step", True, {"cpprb": ">= 1", "torchrl": ">= 1"}, 50),
    )
    for question, method, prioritized, targets, often in questions:
        sides: dict[str, Any] = {"fbuf": Ours(prioritized)}
        for name, (module, make) in PEERS.items():
            if prioritized and name == "SB3":
                continue
            peer: Any = load_peer(module)
            try:
                sides[name] = peer if isinstance(peer, Absent) else make(*([True] if prioritized else []))
            except ImportError as error:
                sides[name] = Absent(name, str(error))
        present = {name: side for name, side in sides.items() if not isinstance(side, Absent)}
        for side in present.values():
            side.fill(filled)
        thunks = {name: _thunk(side, method, rows) for name, side in present.items()}
        timings = interleave(thunks, rounds=rounds, warmup=130, calls=often, clock=time.process_time)
        for name, side in sides.items():
            if isinstance(side, Absent):
                report.append(absent_row(question, name, side))
            elif name != "fbuf":
                ours, theirs = timings["fbuf"], timings[name]
                over = ratio(theirs, ours) if prioritized else ratio(ours, theirs)
                target = targets.get(name)
                report.append(row(question, name, ours=spread(ours), peer=spread(theirs), ratio=over, target=target))
    return report


PAIRS = ("terminated", "truncated")
SAC_ROW = {
    "obs": np.zeros(3, np.float32),
    "final_obs": np.zeros(3, np.float32),
    "action": np.zeros(1, np.float32),
    "reward": np.float32(0),
    "terminated": np.bool_(False),
    "truncated": np.bool_(False),
}
STEP_ROW = {name: EXAMPLE[name] for name in ("obs", "action", "reward")} | {name: np.bool_(False) for name in PAIRS}
DEVICE, HOST = fbuf.storages.Device(), fbuf.storages.Host()
# Storage, sampler, view, lanes, rows of an entry of a batch.
CASES: dict[str, tuple[Any, Any, Any, int | None, int]] = {
    f"{kind}, Transition, n = {steps}{'' if lanes is None else f', {lanes} lanes'}": (
        DEVICE,
        sampler,
        fbuf.views.Transition(n_step=steps, autoreset="same_step"),
        lanes,
        1,
    )
    for kind, sampler in (("uniform", fbuf.samplers.Uniform()), ("prioritized", fbuf.samplers.Prioritized()))
    for steps, lanes in ((1, None), (3, None), (1, 8))
}
CASES |= {
    f"{kind}, Sequence(16)": (DEVICE, sampler, fbuf.views.Sequence(16, autoreset="same_step"), None, 16)
    for kind, sampler in (("uniform", fbuf.samplers.Uniform()), ("prioritized", fbuf.samplers.Prioritized()))
}
CASES |= {
    f"{kind}, Transition, n = 1, Host": (HOST, sampler, fbuf.views.Transition(autoreset="same_step"), None, 1)
    for kind, sampler in (("uniform", fbuf.samplers.Uniform()), ("prioritized", fbuf.samplers.Prioritized()))
}


def recommended(rounds: int, quick: bool) -> list[dict[str, Any]]:
    """`add`, `sample` and one of each, of full buffers: transitions and windows beside SB3's rows, as many as are drawn."""
    if isinstance(peer := load_peer("stable_baselines3"), Absent):
        return [absent_row(VIEWS, case, peer) for case in CASES]
    theirs, rows, report = SB3(), rows_of(1000), []
    theirs.fill(rows * (2 if quick else CAPACITY // len(rows)))
    for case, (storage, sampler, view, lanes, entry) in CASES.items():
        lead = () if lanes is None else (lanes,)
        steps = [
            {name: np.broadcast_to(r.get(name, False), (*lead, *leaf.shape)).copy() for name, leaf in STEP_ROW.items()}
            | {"terminated": np.broadcast_to(r["done"], lead).copy()}
            for r in rows
        ]
        buffer = fbuf.Buffer(CAPACITY, lanes=lanes, storage=storage, view=view, sampler=sampler)
        replay, number = fbuf.Replay(buffer, STEP_ROW), iter(range(10**9))
        laps = 2 if quick else CAPACITY // (lanes or 1) // len(rows)
        replay.extend({name: np.concatenate([np.stack([s[name] for s in steps])] * laps) for name in STEP_ROW})
        sides: dict[str, tuple[Any, Any, list[Any]]] = {
            "fbuf": (replay.add, lambda replay=replay: replay.sample(BATCH, to="torch").data, steps),
            "SB3": (theirs.add, lambda entry=entry: theirs.sample(BATCH * entry), rows),
        }
        for what, most, often in (("add", 3.0, 640), ("sample", None, 100), ("add + sample", None, 100)):

            def call(side: str, what: str = what, sides: Any = sides, number: Any = number) -> Any:
                add, sample, given = sides[side]
                if what != "sample":
                    add(given[next(number) % len(given)])
                return sample() if what != "add" else None

            thunks = {side: partial(call, side) for side in sides}
            timings = interleave(thunks, rounds=rounds, warmup=300, calls=often, clock=time.process_time)
            ours, peers = timings["fbuf"], timings["SB3"]
            drawn = most or (2.5 if sampler.prioritized else 1.5)
            target = f"<= {5.0 if storage is HOST else drawn}"
            over = ratio(ours, peers)
            name = f"{case}: {what}"
            report.append(row(VIEWS, name, ours=spread(ours), peer=spread(peers), ratio=over, target=target))
    return report


def jitted(rounds: int, often: int) -> list[dict[str, Any]]:
    """`add`, `extend` and `sample` of uniform buffers, and the prioritized step."""
    flashbax = load_peer("flashbax")
    if isinstance(flashbax, Absent):
        return [absent_row(JITTED, "flashbax", flashbax)]
    report = []
    shim = importlib.import_module("fbuf.integrations.flashbax")
    for kind, methods in (("flat", ("add", "extend", "sample")), ("prioritized", ("step",))):
        sides = {"flashbax": _their_methods(flashbax, kind)}
        sides |= {JITTED: _our_methods(kind), SHIM: _their_methods(shim, kind)}
        for name in methods:
            thunks = {side: made[name] for side, made in sides.items()}
            timings = interleave(thunks, rounds=rounds, warmup=20, calls=often)
            theirs, case = timings["flashbax"], f"{kind}, {name}"
            for question, least in ((JITTED, 1.5 if name == "add" else 1.0), (SHIM, 1.0)):
                ours = timings[question]
                over, target = ratio(theirs, ours), f">= {least}"
                report.append(row(question, case, ours=spread(ours), peer=spread(theirs), ratio=over, target=target))
    thunks = {"flashbax": _their_methods(flashbax, "flat")["add"], BARE: _bare_add()}
    timings = interleave(thunks, rounds=rounds, warmup=20, calls=often)
    theirs, ours = timings["flashbax"], timings[BARE]
    report.append(row(BARE, "flat, add", ours=spread(ours), peer=spread(theirs), ratio=ratio(theirs, ours)))
    return report


def _bare_add() -> Callable[[], Any]:
    """Return the least that `add` can be: each leaf written at a cursor. It bounds what any buffer reaches."""
    item = jax.tree.map(jnp.asarray, EXAMPLE)

    @partial(jax.jit, donate_argnums=0)
    def add(state: Any, item: Any) -> Any:
        rows, at = state
        rows = jax.tree.map(lambda held, x: jax.lax.dynamic_update_index_in_dim(held, x, at, 0), rows, item)
        return rows, jnp.where(at + 1 == CAPACITY, 0, at + 1)

    state = [(jax.tree.map(lambda x: jnp.zeros((CAPACITY, *x.shape), x.dtype), item), jnp.int32(0))]

    def call() -> Any:
        state[0] = add(state[0], item)
        return state[0]

    return call


def _our_methods(kind: str) -> dict[str, Callable[[], Any]]:
    buffer = fbuf.Buffer(CAPACITY) if kind == "flat" else fbuf.prioritized(CAPACITY)

    def sample(state: Any, key: jax.Array) -> Any:
        return buffer.sample(state, key, BATCH)

    def step(state: Any, item: Any, key: jax.Array) -> Any:
        state, batch = sample(buffer.add(state, item), key)
        return buffer.update_priority(state, batch.index, batch.data["reward"]), batch

    return _methods(buffer.init(EXAMPLE), buffer.add, buffer.extend, sample, step)


def _their_methods(flashbax: Any, kind: str) -> dict[str, Callable[[], Any]]:
    make = flashbax.make_flat_buffer if kind == "flat" else flashbax.make_prioritised_flat_buffer
    settings: dict[str, Any] = {"max_length": CAPACITY, "min_length": 2, "sample_batch_size": BATCH}
    settings |= {} if kind == "flat" else {"device": jax.default_backend()}
    buffer, several = make(**settings), make(**settings, add_sequences=True)

    def sample(state: Any, key: jax.Array) -> Any:
        return state, buffer.sample(state, key)

    def step(state: Any, item: Any, key: jax.Array) -> Any:
        state, batch = sample(buffer.add(state, item), key)
        return buffer.set_priorities(state, batch.indices, batch.experience.first["reward"]), batch

    return _methods(buffer.init(jax.tree.map(jnp.asarray, EXAMPLE)), buffer.add, several.add, sample, step)


def _methods(state: Any, add: Any, extend: Any, sample: Any, step: Any) -> dict[str, Callable[[], Any]]:
    """Return the methods as jitted calls in place of one state, which holds 10 batches."""
    held = [state]
    item = jax.tree.map(jnp.asarray, EXAMPLE)
    items = jax.tree.map(lambda x: jnp.zeros((BATCH, *x.shape), x.dtype), item)
    arguments = {"add": (item,), "extend": (items,), "sample": (jax.random.key(0),), "step": (item, jax.random.key(0))}
    jits = {
        name: jax.jit(method, donate_argnums=0)
        for name, method in (("add", add), ("extend", extend), ("sample", sample), ("step", step))
    }

    def call(name: str) -> Any:
        after = jits[name](held[0], *arguments[name])
        held[0] = after if name in ("add", "extend") else after[0]
        return held[0] if name in ("add", "extend") else after

    for _ in range(10):
        call("extend")
    return {name: partial(call, name) for name in jits}


def _thunk(side: Any, method: str, rows: list[dict[str, np.ndarray]]) -> Callable[[], Any]:
    if method == "sample":
        return getattr(side, method)
    number, after = iter(range(10**9)), (lambda: None) if method == "add" else side.step

    def call() -> Any:
        side.add(rows[next(number) % len(rows)])
        return after()

    return call


def runs(rounds: int, steps: int) -> list[dict[str, Any]]:
    """Whole runs of the scripts with our buffer and with SB3's, which take turns after each part of a run."""
    for module in ("gymnasium", "stable_baselines3"):
        if isinstance(peer := load_peer(module), Absent):
            return [absent_row(RUN, f"{steps:,} steps", peer)]
    report = []
    scripts: dict[str, tuple[dict[str, Callable[[], Iterator[None]]], str]] = {
        f"{steps:,} steps": (
            {
                "fbuf": lambda: dqn(partial(Ours, capacity=10_000), steps),
                "SB3": lambda: dqn(partial(SB3, capacity=10_000), steps),
            },
            "<= 1.1",
        ),
        f"{steps:,} steps, Transition": (
            {
                "fbuf": lambda: dqn(partial(OursOfSteps, STEP_ROW, capacity=10_000), steps),
                "SB3": lambda: dqn(partial(SB3, capacity=10_000), steps),
            },
            "<= 1.05",
        ),
        f"{steps // 25:,} steps of each, Transition": (
            {
                "fbuf": lambda: sac(partial(OursOfSteps, SAC_ROW, capacity=80_000, lanes=8), steps // 25),
                "SB3": lambda: sac(partial(SB3Lanes, capacity=80_000), steps // 25),
            },
            "<= 1.05",
        ),
    }
    for case, (sides, target) in scripts.items():
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(1 + rounds):
            parts = {name: partial(next, side(), None) for name, side in sides.items()}
            timings = interleave(parts, rounds=PARTS, warmup=0, clock=time.process_time)
            for end in parts.values():
                end()  # closes its environments
            for name in seconds if number else ():  # the first runs compile
                seconds[name].append(sum(timings[name]))
        ours, theirs = seconds["fbuf"], seconds["SB3"]
        over = ratio(ours, theirs)
        report.append(
            row(SAC if "each" in case else RUN, case, ours=spread(ours), peer=spread(theirs), ratio=over, target=target)
        )
    return report


def recorded(rounds: int, steps: int) -> list[dict[str, Any]]:
    """Random steps of README's environments, with its buffer and without one."""
    if isinstance(gymnasium := load_peer("gymnasium"), Absent):
        return [absent_row(GYMNASIUM, "CartPole-v1", gymnasium)]

    def run(records: bool) -> None:
        envs, random = gymnasium.make_vec("CartPole-v1", num_envs=8), np.random.default_rng(0)
        if records:
            view = fbuf.gymnasium.view(envs, n_step=3, gamma=0.98)
            buffer = fbuf.Buffer(20_000, sampler=fbuf.samplers.Prioritized(alpha=0.6, beta=0.4), view=view, lanes=8)
            envs = fbuf.gymnasium.Recorder(envs, fbuf.Replay(buffer, fbuf.gymnasium.spec(envs), seed=0))
        envs.reset(seed=0)
        for _ in range(steps):
            envs.step(random.integers(2, size=8))
        envs.close()

    thunks = {"fbuf": lambda: run(True), "none": lambda: run(False)}
    timings = interleave(thunks, rounds=rounds, warmup=1, clock=time.process_time)
    ours, theirs = timings["fbuf"], timings["none"]
    case = f"CartPole-v1, {steps:,} steps of each"
    return [row(GYMNASIUM, case, ours=spread(ours), peer=spread(theirs), ratio=ratio(ours, theirs))]


def dqn(
    make: Callable[[], Any], steps: int, *, train_every: int = 10, batch: int = 128, starts: int = 1000
) -> Iterator[None]:
    """One run of DQN as in cleanrl's dqn.py; yields after each of `PARTS` parts."""
    buffer = make()
    gymnasium, torch = importlib.import_module("gymnasium"), importlib.import_module("torch")
    torch.manual_seed(1)
    random = np.random.default_rng(1)
    env = gymnasium.make("CartPole-v1")

    def network() -> Any:
        nn = torch.nn
        return nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))

    online, target = network(), network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=2.5e-4)
    obs, _ = env.reset(seed=1)
    for step in range(steps):
        epsilon = max(0.05, 1 - 0.95 * step / (0.5 * steps))
        if random.random() < epsilon:
            action = int(random.integers(2))
        else:
            with torch.no_grad():
                action = int(online(torch.from_numpy(obs)).argmax())
        next_obs, reward, terminated, truncated, _ = env.step(action)
        values = {
            "obs": obs,
            "next_obs": next_obs,
            "action": np.int32(action),
            "reward": np.float32(reward),
            "done": np.bool_(terminated),
            "terminated": np.bool_(terminated),
            "truncated": np.bool_(truncated),
        }
        buffer.add({name: values[name] for name in buffer.names})
        obs = next_obs
        if terminated or truncated:
            obs, _ = env.reset()
        if step > starts and step % train_every == 0:
            data = buffer.sample(batch)
            with torch.no_grad():
                best = target(data["next_obs"]).max(dim=1).values
                goal = data["reward"] + best * _discount(data)
            value = online(data["obs"]).gather(1, data["action"].long()[:, None])[:, 0]
            loss = torch.nn.functional.mse_loss(goal, value)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step > starts and step % 500 == 0:
            target.load_state_dict(online.state_dict())
        if (step + 1) % (steps // PARTS) == 0:
            yield
    env.close()


def _discount(data: dict[str, Any]) -> Any:
    return data["discount"] if "discount" in data else 0.99 * (1 - data["done"].float())


def sac(make: Callable[[], Any], steps: int, *, batch: int = 256, starts: int = 20) -> Iterator[None]:
    """One run of SAC with a fixed temperature, and one update a step of eight environments; yields after each part."""
    buffer = make()
    gymnasium, torch = importlib.import_module("gymnasium"), importlib.import_module("torch")
    torch.manual_seed(1)
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    envs = gymnasium.make_vec("Pendulum-v1", 8, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    nn, alpha = torch.nn, 0.1

    def network(inputs: int, outputs: int) -> Any:
        return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))

    actor, critics, targets = network(3, 2), [network(4, 1) for _ in range(2)], [network(4, 1) for _ in range(2)]
    for critic, target in zip(critics, targets, strict=True):
        target.load_state_dict(critic.state_dict())
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    of_critics = torch.optim.Adam([p for critic in critics for p in critic.parameters()], lr=1e-3)

    def act(obs: Any) -> tuple[Any, Any]:
        mean, log_std = actor(obs).chunk(2, dim=1)
        noise = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = noise.rsample()
        action = torch.tanh(raw)
        return 2 * action, (noise.log_prob(raw) - torch.log(1 - action**2 + 1e-6)).sum(dim=1)

    def least(networks: list[Any], obs: Any, action: Any) -> Any:
        pair = torch.cat([obs, action], dim=1)
        return torch.minimum(*(net(pair)[:, 0] for net in networks))

    obs, _ = envs.reset(seed=1)
    for step in range(steps):
        with torch.no_grad():
            action = act(torch.from_numpy(obs))[0].numpy()
        next_obs, reward, terminated, truncated, info = envs.step(action)
        final = next_obs
        if truncated.any():
            final = np.where(
                truncated[:, None], np.stack([next_obs[0] if x is None else x for x in info["final_obs"]]), next_obs
            )
        values = {"obs": obs, "next_obs": final, "action": action, "reward": reward.astype(np.float32)}
        values |= {"done": terminated, "terminated": terminated, "truncated": truncated, "final_obs": final}
        buffer.add({name: values[name] for name in buffer.names})
        obs = next_obs
        if (step + 1) % (steps // PARTS) == 0:
            yield
        if step < starts:
            continue
        data = buffer.sample(batch)
        with torch.no_grad():
            following, log = act(data["next_obs"])
            goal = data["reward"] + _discount(data) * (least(targets, data["next_obs"], following) - alpha * log)
        pair = torch.cat([data["obs"], data["action"]], dim=1)
        loss = sum(torch.nn.functional.mse_loss(critic(pair)[:, 0], goal) for critic in critics)
        of_critics.zero_grad()
        loss.backward()
        of_critics.step()
        drawn, log = act(data["obs"])
        loss = (alpha * log - least(critics, data["obs"], drawn)).mean()
        of_actor.zero_grad()
        loss.backward()
        of_actor.step()
        with torch.no_grad():
            for critic, target in zip(critics, targets, strict=True):
                for ours, theirs in zip(target.parameters(), critic.parameters(), strict=True):
                    ours.lerp_(theirs, 0.005)
    envs.close()


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))
