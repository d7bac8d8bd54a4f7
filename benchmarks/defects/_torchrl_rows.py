"""Run the cases of torchrl about slices, hindsight, n-step returns and ragged rows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from benchmarks.defects import Outcome
from benchmarks.defects._torchrl import modules


def sliced(lengths: list[int], flag: str = "terminated", storage: Any = None, **options: Any) -> Any:
    """Return a buffer of slices of 5 rows, with episodes of these lengths."""
    torch, data, tensordict = modules(trees=False)
    from torchrl.data.replay_buffers.samplers import SliceSampler

    without = options.pop("without", None)
    if without:
        from torchrl.data.replay_buffers.samplers import SliceSamplerWithoutReplacement as SliceSampler  # noqa: F811
    total = sum(lengths)
    end = torch.zeros(total, 1, dtype=torch.bool)
    end[np.cumsum(lengths) - 1] = True
    never = torch.zeros_like(end)
    flags = {"terminated": never, "truncated": never} | {flag: end}
    flags["done"] = end if flag == "terminated" else never
    made = tensordict(
        {
            "t": torch.arange(total),
            "episode_number": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            "next": tensordict(flags, [total]),
        },
        [total],
    )
    sampler = SliceSampler(slice_len=5, **options)
    buffer = data.ReplayBuffer(storage=storage or data.LazyTensorStorage(total), sampler=sampler, batch_size=20)
    buffer.extend(made)
    return buffer


def truncated_only() -> Outcome:
    """Use episodes that only ever truncate, with the default options."""
    buffer = sliced([8, 8, 8], "truncated", strict_length=True)
    batches = [buffer.sample()["episode_number"].reshape(-1, 5) for _ in range(64)]
    crossed = sum(int((b != b[:, :1]).any(dim=1).sum()) for b in batches)
    return Outcome(f"{crossed} of 256 slices cross an end", crossed == 0)


def cut_windows() -> Outcome:
    """Draw slices that may end early from episodes of which some are short."""
    buffer = sliced([3, 9, 2, 12], span=(False, 1), strict_length=False)
    sizes: set[int] = set()
    try:
        for _ in range(200):
            sizes.add(len(buffer.sample()))
    except Exception as error:
        return Outcome(f"span=(False, 1): {type(error).__name__}: {str(error)[:80]}", False)
    return Outcome(f"200 batches of 20 rows have {min(sizes)} to {max(sizes)} rows", len(sizes) == 1)


def short_episodes() -> Outcome:
    buffer = sliced([10, 3, 10, 3], without=True)
    buffer._batch_size = 10
    sizes: list[Any] = []
    for _ in range(4):
        try:
            sizes.append(len(buffer.sample(10)))
        except Exception as error:
            sizes.append(type(error).__name__)
    return Outcome(f"batches of 10 rows have {sizes} rows", sizes == [10] * 4)


def compressed_windows() -> Outcome:
    _, data, _ = modules(trees=False)
    try:
        buffer = sliced([8, 8, 8], storage=data.CompressedListStorage(24))
        return Outcome(f"a batch of {len(buffer.sample())}", True)
    except Exception as error:
        return Outcome(f"{type(error).__name__}: {str(error)[:100]}", False)


def odd_leaves() -> Outcome:
    torch, data, tensordict = modules(trees=False)
    said = []
    for name, leaf in (("bfloat16", torch.ones(4, dtype=torch.bfloat16)), ("no elements", torch.zeros(0))):
        try:
            storage = data.CompressedListStorage(2)
            storage.set(0, tensordict({"x": leaf}, []))
            storage.get(0)
        except Exception as error:
            said.append(f"{name}: {type(error).__name__}")
    return Outcome("; ".join(said) or "both are returned as stored", not said)


def codec() -> Outcome:
    torch, data, tensordict = modules(trees=False)
    got = []

    def compress(tensor: Any) -> Any:
        return tensor.reshape(-1).view(torch.uint8)

    def decompress(*given: Any) -> Any:
        got.append(len(given))
        return given[0]

    storage = data.CompressedListStorage(2, compression_fn=compress, decompression_fn=decompress)
    storage.set(0, tensordict({"x": torch.ones(4, dtype=torch.uint8)}, []))
    try:
        storage.get(0)
    except Exception as error:
        got.append(type(error).__name__)
    return Outcome(
        f"decompression_fn(compressed), as documented, is called with {got[0] if got else 'nothing'} arguments",
        got == [1],
    )


def _goals(first: int, number: int) -> Any:
    torch, _, tensordict = modules(trees=False)
    t = torch.arange(first, first + number, dtype=torch.float32).unsqueeze(-1)
    done = (t % 7) == 6
    following = {
        "done": done,
        "terminated": done,
        "reward": -torch.ones_like(t),
        "desired_goal": torch.full_like(t, 999),
    }
    made = {"position": t, "achieved_goal": t, "desired_goal": torch.full_like(t, 999)}
    return tensordict({**made, "next": tensordict(following, [number])}, [number])


def _hindsight() -> Any:
    _, data, _ = modules(trees=False)
    return data.HERReplayBuffer(
        lambda td: -(td["achieved_goal"] != td["desired_goal"]).float(),
        her_ratio=0.5,
        strategy="final",
        storage=data.LazyTensorStorage(20),
        batch_size=256,
    )


def hindsight_ring() -> Outcome:
    """Sample from a ring of twenty rows, before and after six more are added."""
    buffer = _hindsight()
    try:
        for lot in ((0, 20), (20, 6)):
            buffer.extend(_goals(*lot))
            batch = buffer.sample()
    except Exception as error:
        return Outcome(f"the second sample: {type(error).__name__}: {str(error).splitlines()[0][:90]}", False)
    return _same_episode(batch)


def hindsight_wrapped() -> Outcome:
    """Write rows 0 to 19 and 20 to 25 before the first sample."""
    buffer = _hindsight()
    buffer.extend(_goals(0, 20))
    buffer.extend(_goals(20, 6))
    return _same_episode(buffer.sample())


def _same_episode(batch: Any) -> Outcome:
    goal, own = batch["desired_goal"].ravel(), batch["position"].ravel()
    done = goal != 999
    other = int((goal[done] // 7 != own[done] // 7).sum())
    return Outcome(f"{other} of {int(done.sum())} goals are of another episode", other == 0)


def hindsight_first() -> Outcome:
    """Compare both halves of a batch."""
    buffer = _hindsight()
    buffer.extend(_goals(0, 20))
    done = (buffer.sample()["desired_goal"] != 999).ravel()
    first, second = float(done[:128].float().mean()), float(done[128:].float().mean())
    return Outcome(
        f"relabelled in the first half of a batch: {first:.0%}, in the second: {second:.0%}",
        abs(first - second) < 0.3,
    )


def one_step() -> Outcome:
    torch, _, tensordict = modules(trees=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.data.postprocs import MultiStep
    done = torch.zeros(1, 8, 1, dtype=torch.bool)
    done[0, 5] = True
    zeros = torch.zeros(1, 8, 1)
    following = {"done": done, "terminated": done, "reward": torch.ones(1, 8, 1), "obs": zeros}
    batch = tensordict({"obs": zeros, "next": tensordict(following, [1, 8])}, [1, 8])
    out = MultiStep(gamma=0.5, n_steps=1)(batch)
    stops = [t for t, more in enumerate(out["nonterminal"].ravel().tolist()) if not more]
    return Outcome(f"MultiStep(n_steps=1): rows {stops} of 0 to 7 do not bootstrap (only 5 is terminal)", stops == [5])


def ragged() -> Outcome:
    torch, data, tensordict = modules(trees=False)
    buffer = data.ReplayBuffer(storage=data.LazyStackStorage(8), batch_size=8)
    buffer.extend(
        [tensordict({"tokens": torch.arange(n)} | ({"note": torch.ones(1)} if n % 2 else {}), []) for n in range(1, 7)]
    )
    batch = buffer.sample()
    said = []
    try:
        batch["tokens"]
    except Exception as error:
        said.append(f'batch["tokens"]: {type(error).__name__}')
    if "note" not in list(batch.keys()):
        said.append("a leaf that some rows lack is missing")
    return Outcome("; ".join(said) or "all leaves can be read", not said)
