"""`nested`: padded leaves as torch's jagged tensors, without the padding.

`batch.lazy.nested(name)` reads ragged leaves from the host. A leaf of `storages.Ragged` with a maximum is in `batch.data`
already, padded, with `<name>_length` beside it: here it is cut, on the device where it lies, in one masked gather.
"""

from __future__ import annotations

from typing import Any

from fbuf._bridge.lazy_rows import length_name
from fbuf._core.pytree import name_of, named_leaves
from fbuf._core.sample import Rows, Sample
from fbuf.torch._dtypes import import_torch
from fbuf.torch._to_torch import as_tensors


def nested(batch: Sample | Rows, name: str | tuple[str, ...]) -> Any:
    """A ragged leaf of a batch as a nested tensor of B rows (layout `torch.jagged`).

    Args:
      batch: From `sample`, `peek`, `get` and the like, of rows in `storages.Ragged`; of JAX arrays, numpy or tensors.
      name: A leaf with a maximum, whose rows `[maximum_0, ...]` differ in their first axis only; or one without, which is
        read from the host: `batch.lazy.nested(name)`.
    Returns:
      A tensor `[B, j, ...]` with B rows. Rows that lack the leaf, and places without a row (`mask` False), have length 0.
    Raises:
      KeyError: there is no such leaf.
      ValueError: rows differ in another axis, or the leaf has no axis that could differ.
      ImportError: torch is missing.
    Cost: one gather of what is kept.

    Example:
      >>> import fbuf, jax, numpy as np
      >>> buffer = fbuf.Buffer(10, storage=fbuf.storages.Ragged(maximum={"tokens": (5,)}))
      >>> state = buffer.init({"tokens": np.zeros(0, np.int32)})
      >>> state = buffer.extend(state, [{"tokens": np.arange(2, dtype=np.int32)}, {"tokens": np.arange(4, dtype=np.int32)}])
      >>> [row.tolist() for row in nested(buffer.rows(state), "tokens").unbind()[:2]]
      [[0, 1], [0, 1, 2, 3]]
    """
    call = "fbuf.torch.nested"
    torch = import_torch(call)
    name = name_of(name)
    leaves = named_leaves(batch.data)
    if length_name(name) not in leaves or name not in leaves:
        if batch.ragged is not None and name in batch.lazy:
            return batch.lazy.nested(name)
        there = [n for n in leaves if length_name(n) in leaves]
        there += [n for n in batch.lazy if n not in there] if batch.ragged is not None else []
        raise KeyError(f"{call}: there is no ragged leaf '{name}' (there are: {', '.join(there) or 'none'}).")
    wanted = as_tensors(torch, call, {n: leaves[n] for n in (name, length_name(name))})
    padded, lengths = wanted.values()
    if lengths.ndim != 2 or padded.ndim < 2:
        raise ValueError(
            f"{call}: leaf '{name}' has shape {list(padded.shape)}; expected a batch of rows [B, maximum, ...]. Of windows "
            f"take the steps apart first."
        )
    kept = lengths[:, 0].clamp(min=0).to(torch.int64)
    present = kept > 0
    for axis in range(1, lengths.shape[1]):
        whole = padded.shape[axis + 1]
        if bool((present & (lengths[:, axis] != whole)).any()):
            raise ValueError(
                f"{call}: rows of leaf '{name}' differ in axis {axis} too; expected {whole} there: a jagged tensor has one "
                f"axis that differs. Use batch.lazy.nested('{name}', torch.strided)."
            )
    steps = torch.arange(padded.shape[1], device=padded.device)
    values = padded[steps < kept[:, None]]
    offsets = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)
