"""Run the cases of torchrl about priorities, draws and writes. Its C++ trees are built if the wheel's do not load."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np

from benchmarks.defects import Outcome

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # it logs every storage that it makes


def modules(trees: bool = True) -> tuple[Any, Any, Any]:
    """(torch, torchrl.data, tensordict.TensorDict)."""
    from benchmarks.peers import _torchrl_tree

    try:
        _torchrl_tree.ensure()  # before torchrl is imported
    except ImportError:
        if trees:
            raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensordict
        import torch
        import torchrl.data as data
    return torch, data, tensordict.TensorDict


def rows(first: int, number: int) -> Any:
    torch, _, tensordict = modules(trees=False)
    return tensordict({"t": torch.arange(first, first + number)}, [number])


def prioritized(capacity: int = 8, number: int = 8, alpha: float = 1.0, beta: float = 1.0, eps: float = 1e-8) -> Any:
    """Return a prioritized buffer with rows 0, 1, ..."""
    _, data, _ = modules()
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    sampler = PrioritizedSampler(capacity, alpha=alpha, beta=beta, eps=eps)
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(capacity), sampler=sampler)
    if number:
        buffer.extend(rows(0, number))
    return buffer


def put(buffer: Any, indices: Any, priorities: Any) -> None:
    torch, *_ = modules()
    buffer.update_priority(torch.tensor(list(indices)), torch.tensor(list(priorities)))


def extension_loads() -> Outcome:
    """Use another process, since this one may have built the trees."""
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from torchrl.data.replay_buffers.samplers import PrioritizedSampler\n"
        "PrioritizedSampler(8, alpha=1.0, beta=1.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return Outcome("works" if done.returncode == 0 else last[:160], done.returncode == 0)


def not_finite() -> Outcome:
    buffer = prioritized()
    put(buffer, [0], [np.nan])
    try:
        drawn = buffer.sample(256)["t"].unique().numel()
        return Outcome(f"{drawn} of 8 rows drawn", drawn == 8)
    except Exception as error:
        said = f"after NaN every sample raises {type(error).__name__}"
    put(buffer, [0], [1.0])
    healed = buffer.sample(256)["t"].unique().numel() == 8
    text = "until that row gets another priority" if healed else "also after that row got another priority"
    return Outcome(f"{said}, {text}", False)


def negative() -> Outcome:
    buffer = prioritized()
    try:
        put(buffer, [0], [-3.0])
        buffer.sample(256)
        return Outcome("rows are drawn as before", True)
    except Exception as error:
        return Outcome(f"-3 is stored; then every sample raises {type(error).__name__}: {str(error)[:60]}", False)


def out_of_range() -> Outcome:
    buffer = prioritized(8, 2)
    try:
        put(buffer, [5], [5.0])
    except Exception as error:
        return Outcome(f"{type(error).__name__}: {str(error)[:80]}", True)
    total = sum(float(buffer.sampler._sum_tree[i]) for i in range(8))
    return Outcome(f"priority of slot 5 in a buffer of two rows is stored; the sum of the leaves is {total:.3g}", False)


def seeded() -> Outcome:
    torch, *_ = modules()
    buffer = prioritized()
    batches = []
    for _ in range(2):
        torch.manual_seed(0)
        batches.append(buffer.sample(64)["t"])
    same = bool((batches[0] == batches[1]).all())
    return Outcome(f"the same batch after torch.manual_seed(0): {same}", same)


def one_tiny_priority() -> Outcome:
    buffer = prioritized(alpha=0.6, beta=0.4)
    put(buffer, range(8), [0.0] + [1.0] * 7)
    batch, info = buffer.sample(256, return_info=True)
    weight = np.asarray(info["priority_weight"])[np.asarray(batch["t"]) > 0]
    return Outcome(f"weights of the others: {weight.min():.2g} to {weight.max():.2g}", weight.min() > 0.5)


def loaded_twice() -> Outcome:
    import tempfile

    buffer = prioritized()
    with tempfile.TemporaryDirectory() as folder:
        buffer.sampler.dumps(folder)
        try:
            for _ in range(2):
                buffer.sampler.loads(folder)
        except Exception as error:
            return Outcome(f"{type(error).__name__}: {error}", False)
    return Outcome("no error", True)


def alpha_zero() -> Outcome:
    buffer = prioritized(alpha=0.0, eps=0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        put(buffer, range(8), [3.0] + [1.0] * 7)
        try:
            buffer.sampler.alpha = 1.0
        except Exception as error:
            return Outcome(f"{type(error).__name__}: {error}", False)
    share = float((buffer.sample(20_000)["t"] == 0).float().mean())
    warned = "with a warning" if said else "without a warning"
    return Outcome(
        f"alpha 0, then 1: priority 3 among seven of 1 has probability {share:.2g}, {warned}", abs(share - 0.3) < 0.02
    )


def counters() -> Outcome:
    _, data, _ = modules(trees=False)
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(4))
    buffer.extend(rows(0, 4))
    buffer.writer._write_count = 2**31 - 2
    for t in range(4, 8):
        buffer.extend(rows(t, 1))
    count = buffer.write_count
    return Outcome(f"after 2^31 rows write_count is {count}", count == 2**31 + 2)


def prefilled() -> Outcome:
    _, data, _ = modules(trees=False)
    one, other = (data.ReplayBuffer(storage=data.LazyTensorStorage(100)) for _ in range(2))
    one.extend(rows(0, 100))
    try:
        data.prefill_replay_buffer(other, one, 100)
    except Exception as error:
        return Outcome(f"{type(error).__name__}: {str(error)[:80]}", False)
    kept = other[:]["t"].unique().numel()
    return Outcome(f"prefill_replay_buffer: {kept} of 100 rows", kept == 100)


def epoch_sizes() -> Outcome:
    _, data, _ = modules(trees=False)
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4)
    buffer.extend(rows(0, 10))
    sizes = [len(buffer.sample()) for _ in range(3)]
    return Outcome(f"batches of {sizes}; documented: the next order fills the last", sizes == [4, 4, 4])


def prefetched() -> Outcome:
    import time

    _, data, _ = modules(trees=False)
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(8), batch_size=8, prefetch=3)
    buffer.extend(rows(0, 8))
    buffer.sample()
    time.sleep(0.5)  # its threads fill the queue
    buffer.extend(rows(8, 8))
    old = sum(bool((buffer.sample()["t"] < 8).any()) for _ in range(6))
    text = f"{old} unmarked batches of overwritten rows"
    return Outcome(text if old else "no batch of overwritten rows", old == 0)
