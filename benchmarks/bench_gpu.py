"""What does an accelerator change? `python -m benchmarks --gpu`: its answers within `BUDGET` seconds, the most telling first.

First whether it is right: the same keys give the same batches as on this machine's CPU, a step is in place, and batches go to
torch without a copy. Then the measurements of other benchmarks at the sizes that matter here. Every row is written as soon
as it is known; `_budget` runs the sections. Without ale-py, frames show a moving square.
On a CPU `--gpu --quick` runs the same code at small sizes; its figures answer nothing.

Expected: the prioritized step at 10^6 rows and B = 65,536 at least 5x flashbax's and torchrl's CUDA tree; reads of
`Deduplicated` at most 1.2x a gather; the DQN step with `Compressed(prefetch=1)` at most 1.10x that with `Device`; batches in
torch without a copy.
"""

import functools
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks import _agreement, _atari, bench_deduplicated, bench_dqn_step, bench_priorities, bench_sample
from benchmarks._budget import Section
from benchmarks._harness import Absent, absent_row, interleave, load_peer, ratio, row, spread
from benchmarks._launches import launches
from benchmarks.peers import _torchrl_tree
from fbuf._core.pytree import tree_bytes
from fbuf.testing import measure

BUDGET = 450  # seconds, from start to report
BUILD = 60  # seconds to wait for torchrl's trees
TORCH = "Batch of 256 stacks of 4 frames to torch on the same device: time over that of a copy"
SHARED = "Batches in torch share the arrays' memory"
INPLACE = "Temporary bytes of a donated step over the buffer's bytes"
LAUNCHES = "Kernels a step starts"

Rows = Iterator[dict[str, Any]]


def correct(quick: bool) -> Rows:
    """Is it right here? Batches, one step in place, and torch."""
    if jax.default_backend() != "cpu":
        _build_trees()
    yield from _agreement.rows(quick)
    yield from inplace(quick, fbuf.storages.Device(), {"Prioritized": fbuf.samplers.Prioritized()})
    yield shared_with_torch(_stacks(100, 8))


def inplace(quick: bool, storage: Any, samplers: dict[str, Any]) -> Rows:
    """Rows of a whole step with each sampler; compiled, not run. Bytes that no result reuses count too."""
    capacity, example = (1_000 if quick else 100_000), {"obs": np.zeros((84, 84), np.uint8), "reward": np.float32(0)}
    rows = {name: jnp.zeros((32, *np.shape(leaf)), leaf.dtype) for name, leaf in example.items()}
    for name, sampler in samplers.items():
        buffer = fbuf.Buffer(capacity, sampler=sampler, storage=storage)
        state = jax.eval_shape(buffer.init, example)
        memory, size = measure(_step(buffer, rows), state, jax.random.key(0)), tree_bytes(state)
        used = memory.temporary + max(size - memory.reused, 0)
        case = f"{name}, {type(storage).__name__}"
        yield row(INPLACE, case, ours=used, peer=size, ratio=used / size, target="<= 0.25")


def _step(buffer: fbuf.Buffer, rows: Any) -> Callable[..., Any]:
    """Write, draw 32 and, if there are priorities, set them."""

    def step(state: Any, key: jax.Array) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows), key, 32)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.ones(32))
        return state, batch

    return step


def priorities(quick: bool) -> Rows:
    """The prioritized step in a scan against flashbax."""
    capacity, rounds = (10**4, 2) if quick else (10**6, 15)
    peer = load_peer("flashbax.buffers.sum_tree")
    for batch in (256,) if quick else (65_536, 256):
        yield from bench_priorities.scanned([capacity], batch, rounds, 1e4, peer)


def priorities_called(quick: bool) -> Rows:
    """The prioritized step one call at a time against every tree; torchrl's may have to be built."""
    capacity, rounds = (10**4, 2) if quick else (10**6, 15)
    late = ""
    try:
        _build_trees().wait(BUILD)
    except subprocess.TimeoutExpired:
        late = f"its trees were not built within {BUILD} s"
    trees = bench_priorities.load_trees(late)
    for batch in (256,) if quick else (65_536, 256):
        yield from bench_priorities.dispatched(capacity, batch, rounds, trees)


@functools.cache
def _build_trees() -> subprocess.Popen[bytes]:
    """Build torchrl's trees, where they must be, while other sections run; it takes a minute, with CUDA's compiler longer."""
    return _torchrl_tree.start_build()


def deduplicated(quick: bool) -> Rows:
    """Reads of two games' frames against the bare gather."""
    count, rounds = (2_000, 2) if quick else (20_000, 15)
    for game in ("Breakout",) if quick else ("Breakout", "MsPacman"):
        frames = _frames(game, count)
        storage = fbuf.storages.Deduplicated(keys=("obs",)).fit({"obs": frames}, capacity=count)
        target = None if quick else bench_deduplicated.read_target()
        batch_size = 8 if quick else 256
        yield bench_deduplicated.measure_read(_case(game), [frames], storage, rounds, batch_size, target)


def dqn(quick: bool) -> Rows:
    """The demo's training step with frames on the device, deduplicated, and compressed on the host."""
    names = ("deduplicated", "compressed", "compressed, prefetch=1", "none")
    yield from bench_dqn_step.measure(*((4_000, 2) if quick else (40_000, 30)), names)


def samples(quick: bool) -> Rows:
    """`sample` of rows and of stacks against the bare gather."""
    capacity, batch, rounds = (500, 8, 2) if quick else (184_000, 256, 15)
    for case in (bench_sample.ROW, bench_sample.STACKED):
        yield bench_sample.measure(case, capacity, batch, rounds)


def counted(quick: bool) -> Rows:
    """Kernels of a uniform step on vectors, and of a prioritized n-step step on stacks."""
    capacity = 1_000 if quick else 125_000
    vectors = {"obs": np.zeros(17, np.float32), "action": np.zeros(6, np.float32)}
    flags = {"terminated": np.bool_(False), "truncated": np.bool_(False)}
    frames = {"obs": np.zeros((84, 84), np.uint8), "action": np.int32(0), "reward": np.float32(0), **flags}
    view = fbuf.views.Transition(n_step=3, stack=4, autoreset="same_step")
    cases = (
        ("uniform, 17 + 6 floats", fbuf.Buffer(capacity), vectors),
        ("prioritized, n=3, stacks of 4 frames", fbuf.prioritized(capacity, view=view), frames),
    )
    for case, buffer, example in cases:
        rows = jax.tree.map(lambda leaf: jnp.zeros((32, *np.shape(leaf)), leaf.dtype), example)
        number = launches(jax.jit(_step(buffer, rows), donate_argnums=0), buffer.init(example))
        note = "this backend reports none" if number is None else ""
        yield row(LAUNCHES, case, ours=number, note=note)


def torch_batches(quick: bool) -> Rows:
    """Batches to torch: the time against a copy of the same batch."""
    capacity, batch_size, rounds = (500, 8, 2) if quick else (20_000, 256, 15)
    batch = _stacks(capacity, batch_size)
    shared = shared_with_torch(batch)
    yield shared
    if shared["ratio"] is None:
        return
    import torch

    def copied() -> Any:
        tensors = fbuf.torch.to_torch(batch, copy=True)
        if tensors["obs"].is_cuda:
            torch.cuda.synchronize()
        return tensors

    sides = {"shared": lambda: fbuf.torch.to_torch(batch), "copied": copied}
    timings = interleave(sides, rounds=rounds, calls=8)
    mine, theirs = timings["shared"], timings["copied"]
    yield row(TORCH, "obs and next_obs", ours=spread(mine), peer=spread(theirs), ratio=ratio(mine, theirs))


def shared_with_torch(batch: Any) -> dict[str, Any]:
    """Whether every leaf has the same memory there."""
    case, peer = f"{len(batch)} leaves on {jax.devices()[0].platform}", load_peer("torch")
    if isinstance(peer, Absent):
        return absent_row(SHARED, case, peer, ">= 1")
    try:
        tensors = fbuf.torch.to_torch(batch)
    except ValueError as error:  # this torch cannot use the device
        return absent_row(SHARED, case, Absent("torch", str(error).splitlines()[0]), ">= 1")
    copied = [name for name, leaf in batch.items() if tensors[name].data_ptr() != leaf.unsafe_buffer_pointer()]
    note = f"copied: {', '.join(copied)}" if copied else ""
    return row(SHARED, case, ratio=1 - len(copied) / len(batch), target=">= 1", note=note)


def _stacks(capacity: int, batch_size: int) -> Any:
    """The data of a batch of stacks."""
    buffer, state = bench_sample.filled(bench_sample.STACKED, capacity)
    return jax.jit(buffer.peek, static_argnums=2)(state, jax.random.key(0), batch_size).data


SAMPLERS = {
    "Uniform": fbuf.samplers.Uniform(),
    "Prioritized": fbuf.samplers.Prioritized(),
    "Epoch": fbuf.samplers.Epoch(),
    "Consume": fbuf.samplers.Consume(),
}


def inplace_on_device(quick: bool) -> Rows:
    """Every sampler, rows as arrays."""
    yield from inplace(quick, fbuf.storages.Device(), SAMPLERS)


def inplace_deduplicated(quick: bool) -> Rows:
    """Every sampler, frames as blocks."""
    yield from inplace(quick, fbuf.storages.Deduplicated(keys=("obs",), blocks=2**17), SAMPLERS)


SECTIONS: dict[str, Section] = {
    "correct": Section(correct, 80),
    "prioritized": Section(priorities, 35),
    "prioritized, calls": Section(priorities_called, 45),
    "deduplicated": Section(deduplicated, 35),
    "DQN step": Section(dqn, 80),
    "torch": Section(torch_batches, 10),
    "launches": Section(counted, 15),
    "sample": Section(samples, 15),
    "in place": Section(inplace_on_device, 30),
    "in place, deduplicated": Section(inplace_deduplicated, 45),
}
"""In their order; seconds are guesses for an H100, compilation included."""


def _frames(game: str, count: int) -> np.ndarray:
    if isinstance(load_peer("ale_py"), Absent):
        return np.stack(list(_squares(count)))
    return _atari.frames(game, count)[0]


def _case(game: str) -> str:
    return "a moving square (ale-py is missing)" if isinstance(load_peer("ale_py"), Absent) else game


def _squares(count: int) -> Iterator[np.ndarray]:
    for t in range(count):
        frame = np.zeros((84, 84), np.uint8)
        frame[3 * t % 70 : 3 * t % 70 + 9, 7 * t // 5 % 70 : 7 * t // 5 % 70 + 9] = 1 + t % 200
        yield frame
