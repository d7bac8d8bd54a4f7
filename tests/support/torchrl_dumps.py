"""Dumps as torchrl writes them, made by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

ROOM = 8  # rows of a ring


def write_dump(path: Path, leaves: dict[str, np.ndarray], *, cursor: int, count: int, batch: list[int]) -> Path:
    """Write what `rb.dumps` of a tensordict storage does: leaves `[*batch, ...]` under names with slashes."""
    about: dict[Path, dict[str, Any]] = {path / "storage": {}}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        folder = path / "storage"
        for parent in parents:
            about[folder][parent] = {"type": "TensorDict"}
            folder /= parent
            about.setdefault(folder, {})
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{last}.memmap").write_bytes(np.ascontiguousarray(leaf).tobytes())
        described = {"dtype": f"torch.{leaf.dtype.name}", "shape": list(leaf.shape)}
        about[folder][last] = described | {"device": "cpu", "is_nested": False}
    for folder, entries in about.items():
        entries |= {"shape": batch, "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
        (folder / "meta.json").write_text(json.dumps(entries))
    held = min(count, batch[0]) * math.prod(batch[1:])
    stored = {"metadata": {}, "is_pytree": False, "len": held}
    (path / "storage" / "storage_metadata.json").write_text(json.dumps(stored))
    (path / "writer").mkdir()
    (path / "writer" / "metadata.json").write_text(json.dumps({"cursor": cursor, "write_count": count}))
    return path


def write_ring(path: Path, count: int = 13) -> tuple[Path, np.ndarray]:
    """Write a ring of 8 rows after `count` were written; return its path and the rows that it holds, oldest first."""
    held = np.arange(max(0, count - ROOM), count)
    t = np.zeros(ROOM, np.int64)
    t[held % ROOM] = held
    leaves = {
        "action": t,
        "observation": np.repeat(t[:, None], 3, 1).astype(np.float32),
        "next/reward": t[:, None].astype(np.float32),
        "next/terminated": (t % 5 == 4)[:, None],
        "index": np.arange(ROOM),
    }
    return write_dump(path, leaves, cursor=count % ROOM, count=count, batch=[ROOM]), held


def write_sampler(path: Path, leaves: np.ndarray, alpha: float, eps: float, **more: Any) -> None:
    """Write priorities, to the power alpha."""
    (path / "sampler").mkdir(exist_ok=True)
    about = {"_alpha": alpha, "_beta": 0.9, "_eps": eps, "_max_capacity": float(len(leaves))}
    (path / "sampler" / "sampler_metadata.json").write_text(json.dumps(about | {"_max_priority": [1.0, 0.0]} | more))
    (path / "sampler" / "sumtree.memmap").write_bytes(leaves.astype(np.float64).tobytes())


def edit(path: Path, **entries: Any) -> None:
    """Change entries of a JSON file; `__` in a name leads into an object."""
    about = json.loads(path.read_text())
    for name, value in entries.items():
        at = about
        *parents, last = name.split("__")
        for parent in parents:
            at = at[parent]
        at[last] = value
    path.write_text(json.dumps(about))
