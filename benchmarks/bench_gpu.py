"""What does an accelerator change? `python -m benchmarks --gpu`: every question of an accelerator in at most ten minutes.

The sections are measurements of other benchmarks at the sizes that matter here, batches handed to torch, and the in-place
proof on this backend. No section starts after `LIMIT` seconds. Without ale-py, frames show a moving square.
On a CPU `--gpu --quick` runs the same code at small sizes; its figures answer nothing.

Expected: the prioritized step at 10^6 rows and B = 65,536 at least 5x flashbax's and torchrl's CUDA tree; reads of
`Deduplicated` at most 1.2x a gather; the DQN step with `Compressed(prefetch=1)` at most 1.10x that with `Device`; batches in
torch without a copy.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks import _atari, bench_deduplicated, bench_dqn_step, bench_priorities, bench_sample
from benchmarks._harness import Absent, absent_row, interleave, load_peer, ratio, row, spread
from fbuf._core.pytree import tree_bytes
from fbuf.testing import measure

LIMIT = 480  # seconds after which no section starts: the longest takes about two minutes
TORCH = "Batch of 256 stacks of 4 frames to torch on the same device: time over that of a copy"
INPLACE = "Temporary bytes of a donated step over the buffer's bytes"

Rows = list[dict[str, Any]]


def inplace(quick: bool) -> Rows:
    """Rows of a whole step with each sampler and device storage; compiled, not run. Bytes that no result reuses count too."""
    capacity, example = (1_000 if quick else 100_000), {"obs": np.zeros((84, 84), np.uint8), "reward": np.float32(0)}
    rows = {name: jnp.zeros((32, *np.shape(leaf)), leaf.dtype) for name, leaf in example.items()}
    samplers = {
        "Uniform": fbuf.samplers.Uniform(),
        "Prioritized": fbuf.samplers.Prioritized(),
        "Epoch": fbuf.samplers.Epoch(),
        "Consume": fbuf.samplers.Consume(),
    }
    report = []
    for storage in (fbuf.storages.Device(), fbuf.storages.Deduplicated(keys=("obs",), blocks=2**17)):
        for name, sampler in samplers.items():
            buffer = fbuf.Buffer(capacity, sampler=sampler, storage=storage)
            state = jax.eval_shape(buffer.init, example)

            def step(state: Any, key: jax.Array, buffer: fbuf.Buffer = buffer) -> Any:
                state, batch = buffer.sample(buffer.extend(state, rows), key, 32)
                if isinstance(buffer.sampler, fbuf.samplers.Prioritized):
                    state = buffer.update_priority(state, batch.index, jnp.ones(32))
                return state, batch

            memory, size = measure(step, state, jax.random.key(0)), tree_bytes(state)
            used = memory.temporary + max(size - memory.reused, 0)
            case = f"{name}, {type(storage).__name__}"
            report.append(row(INPLACE, case, ours=used, peer=size, ratio=used / size, target="<= 0.25"))
    return report


def priorities(quick: bool) -> Rows:
    """The prioritized step: in a scan against flashbax, then one call at a time against every tree."""
    capacity, rounds = (10**4, 2) if quick else (10**6, 15)
    trees = bench_priorities.load_trees()
    report: Rows = []
    for batch in (256,) if quick else (256, 65_536):
        report += bench_priorities.scanned([capacity], batch, rounds, 1e4, trees["flashbax"])
        report += bench_priorities.dispatched(capacity, batch, rounds, trees)
    return report


def deduplicated(quick: bool) -> Rows:
    """Reads of two games' frames against the bare gather."""
    count, rounds = (2_000, 2) if quick else (20_000, 15)
    report = []
    for game in ("Breakout",) if quick else ("Breakout", "MsPacman"):
        frames = _frames(game, count)
        storage = fbuf.storages.Deduplicated(keys=("obs",)).fit({"obs": frames}, capacity=count)
        target = None if quick else bench_deduplicated.read_target()
        batch_size = 8 if quick else 256
        report.append(bench_deduplicated.measure_read(_case(game), [frames], storage, rounds, batch_size, target))
    return report


def samples(quick: bool) -> Rows:
    """`sample` of rows and of stacks against the bare gather."""
    capacity, batch, rounds = (500, 8, 2) if quick else (184_000, 256, 15)
    return [bench_sample.measure(case, capacity, batch, rounds) for case in (bench_sample.ROW, bench_sample.STACKED)]


def torch_batches(quick: bool) -> Rows:
    """Batches to torch: where their memory is, and the time against a copy of the same batch."""
    peer = load_peer("torch")
    if isinstance(peer, Absent):
        return [absent_row(TORCH, "obs and next_obs", peer)]
    capacity, batch_size, rounds = (500, 8, 2) if quick else (20_000, 256, 15)
    buffer, state = bench_sample.filled(bench_sample.STACKED, capacity)
    batch = jax.jit(buffer.peek, static_argnums=2)(state, jax.random.key(0), batch_size).data
    try:
        tensors = fbuf.torch.to_torch(batch)
    except ValueError as error:  # this torch cannot use the device
        return [absent_row(TORCH, "obs and next_obs", Absent("torch", str(error).splitlines()[0]))]
    shared = all(tensors[name].data_ptr() == leaf.unsafe_buffer_pointer() for name, leaf in batch.items())

    def copied() -> Any:
        tensors = fbuf.torch.to_torch(batch, copy=True)
        if tensors["obs"].is_cuda:
            peer.cuda.synchronize()
        return tensors

    sides = {"shared": lambda: fbuf.torch.to_torch(batch), "copied": copied}
    timings = interleave(sides, rounds=rounds, calls=8)
    mine, theirs = timings["shared"], timings["copied"]
    note = "every leaf shares memory" if shared else "NOT SHARED: some leaf was copied"
    return [
        row(TORCH, "obs and next_obs", ours=spread(mine), peer=spread(theirs), ratio=ratio(mine, theirs), note=note),
        row("Batches in torch share the arrays' memory", "obs and next_obs", ratio=float(shared), target=">= 1"),
    ]


SECTIONS: dict[str, Callable[[bool], Rows]] = {
    "in place": inplace,
    "torch": torch_batches,
    "deduplicated": deduplicated,
    "sample": samples,
    "DQN step": bench_dqn_step.main,
    "prioritized": priorities,  # last: it may have to build torchrl's trees
}


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
