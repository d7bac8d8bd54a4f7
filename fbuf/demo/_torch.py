"""The same network in torch, on batches that cross by DLPack: each is checked for zero copy and for the same output.

One thread of torch is enough for a batch now and then; more would fight with XLA's for the cores.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import numpy as np

import fbuf
from fbuf.demo import _dqn

# Both compute in float32 and differ in the order of their sums only; an accelerator may use less precise convolutions.
_TOLERANCE = {"cpu": 1e-4}
_TOLERANCE_ELSEWHERE = 2e-2


class Check(NamedTuple):
    """What one batch showed."""

    leaves: int  # arrays that crossed, all without a copy
    nbytes: int  # theirs
    handover: float  # s, `to_torch` of the whole batch
    difference: float  # largest |q_jax - q_torch|


def available() -> bool:
    """Whether torch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def check(batch: fbuf.Sample, q: jax.Array, params: _dqn.Params) -> Check:
    """Hands a batch to torch and runs the network there.

    Args:
      batch: From `sample` or `peek`, `[B]`.
      q: float32[B, num_actions], the network's output in JAX for `batch.data["obs"]`.
      params: Of the network; copied, for the training step will donate them.
    Returns:
      The figures.
    Raises:
      RuntimeError: a leaf was copied, or the outputs differ.
    """
    import torch

    import fbuf.torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        jax.block_until_ready(batch)
        start = time.perf_counter()
        tensors = fbuf.torch.to_torch(batch)
        handover = time.perf_counter() - start

        leaves = jax.tree_util.tree_leaves_with_path(batch)
        for (path, array), tensor in zip(leaves, jax.tree.leaves(tensors), strict=True):
            if tensor.data_ptr() != array.unsafe_buffer_pointer():
                raise RuntimeError(
                    f"demo: leaf '{jax.tree_util.keystr(path, simple=True, separator='/')}' was copied on its way to "
                    f"torch; expected the same memory. Please report this."
                )
        weights = fbuf.torch.to_torch(params, copy=True)
        with torch.no_grad():
            q_torch = q_values(weights, tensors.data["obs"]).cpu().numpy()
    finally:
        torch.set_num_threads(threads)

    q_jax = np.asarray(q)
    difference = float(np.max(np.abs(q_torch - q_jax)))
    platform = next(iter(q.devices())).platform
    largest = _TOLERANCE.get(platform, _TOLERANCE_ELSEWHERE) * max(1.0, float(np.max(np.abs(q_jax))))
    if not difference <= largest:  # NaN fails too
        raise RuntimeError(
            f"demo: the network's outputs in JAX and torch differ by {difference:.3g}; expected at most {largest:.3g}. "
            f"Please report this."
        )
    return Check(len(leaves), sum(x.nbytes for _, x in leaves), handover, difference)


def q_values(weights: Any, stacks: Any) -> Any:
    """`_dqn.q_values` in torch: kernels are (height, width, in, out) there and (out, in, height, width) here."""
    from torch.nn import functional

    x = stacks.float() / 255.0
    for name, (_, stride) in _dqn.CONVOLUTIONS.items():
        kernel = weights[name]["kernel"].permute(3, 2, 0, 1)
        x = functional.relu(functional.conv2d(x, kernel, weights[name]["bias"], stride))
    x = x.permute(0, 2, 3, 1).flatten(1)  # channels last, as they were when the next kernel was learnt
    x = functional.relu(x @ weights["hidden"]["kernel"] + weights["hidden"]["bias"])
    return x @ weights["out"]["kernel"] + weights["out"]["bias"]
