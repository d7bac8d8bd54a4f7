"""`PackedBatch`: a batch for NumPy or torch, whose small leaves share two arrays.

Each output of a jitted call costs some microseconds on its way to NumPy, and again on its way to torch. Leaves of one and of
four bytes per number are therefore concatenated in the program, and are views of two arrays on the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.sample import Sample

_SMALL = 1 << 16  # bytes; larger leaves are passed on without a copy
_GROUPS: tuple[dict[str, Any], ...] = (
    {"float32": jnp.uint32, "int32": jnp.uint32, "uint32": jnp.uint32},
    {"bool": jnp.uint8, "uint8": jnp.uint8, "int8": jnp.uint8},
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Leaves of a `Sample` in two arrays, and those that are neither small nor of one or four bytes."""

    groups: tuple[Any, ...]
    others: list[Any]
    # per leaf: group (-1: none), first and last element, dtype, shape
    layout: tuple[tuple[int, int, int, Any, tuple[int, ...]], ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})

    def to_numpy(self) -> Sample:
        """Return a batch of read-only arrays."""
        batch: Sample = self.structure.unflatten(self._leaves([np.asarray(g) for g in self.groups], np.asarray))
        return batch

    def to_torch(self) -> Sample:
        """Return a batch of tensors."""
        from fbuf.torch._dtypes import import_torch
        from fbuf.torch._to_torch import to_torch

        torch = import_torch("Replay.sample")
        leaves = self._leaves([np.array(g) for g in self.groups], to_torch)
        batch: Sample = self.structure.unflatten(
            [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        )
        return batch

    def _leaves(self, groups: list[Any], convert: Any) -> list[Any]:
        return [
            groups[group][start:stop].view(dtype).reshape(shape) if group >= 0 else convert(self.others[start])
            for group, start, stop, dtype, shape in self.layout
        ]


def pack(batch: Sample) -> PackedBatch:
    """Concatenate the small leaves of a batch by the bytes of a number. Traced."""
    leaves, structure = jax.tree.flatten(batch)
    parts: tuple[list[Any], ...] = tuple([] for _ in _GROUPS)
    counts, others, layout = [0] * len(_GROUPS), list[Any](), list[Any]()
    for leaf in leaves:
        dtype = np.dtype(leaf.dtype)
        group = next((i for i, known in enumerate(_GROUPS) if dtype.name in known), -1)
        if group < 0 or leaf.size * dtype.itemsize > _SMALL:
            layout.append((-1, len(others), 0, dtype, leaf.shape))
            others.append(leaf)
            continue
        unsigned = _GROUPS[group][dtype.name]
        flat = leaf.astype(unsigned) if dtype.kind == "b" else jax.lax.bitcast_convert_type(leaf, unsigned)
        parts[group].append(flat.reshape(-1))
        layout.append((group, counts[group], counts[group] + leaf.size, dtype, leaf.shape))
        counts[group] += leaf.size
    arrays = tuple(jnp.concatenate(part) if part else jnp.zeros(0, jnp.uint8) for part in parts)
    return PackedBatch(arrays, others, tuple(layout), structure)
