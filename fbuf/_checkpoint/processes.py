"""Let the processes of `jax.distributed` agree: by collectives over all devices, which every process must enter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
_TEXT = 64


class Processes:
    """All processes, as `fbuf._formats.checkpoint.Group`.

    If one is killed, the others raise what the collective raises, or are ended by `jax.distributed`.
    """

    def __init__(self, call: str):
        self._call = call
        self.index, self.count = jax.process_index(), jax.process_count()

    def first(self, work: Callable[[], str]) -> str:
        """Return in every process the text of `work` in the first one. Raises RuntimeError elsewhere if it failed."""
        if self.index == 0:
            try:
                text = work()
            except Exception:
                _sent("")
                raise
            return _sent(f"+{text}")[1:]
        text = _sent("")
        if not text:
            raise RuntimeError(f"{self._call}: process 0 failed. Its error says why.")
        return text[1:]

    def each(self, work: Callable[[], T]) -> T:
        """Return the result of `work` once all processes have one. Raises RuntimeError if it failed in another."""
        try:
            made = work()
        except Exception:
            self.gather(0)
            raise
        failed = np.flatnonzero(self.gather(1) == 0)
        if failed.size:
            raise RuntimeError(f"{self._call}: process {failed[0]} failed. Its error says why.")
        return made

    def gather(self, number: int) -> np.ndarray[Any, Any]:
        """Return the numbers of all processes, int32[processes]."""
        return np.asarray(multihost_utils.process_allgather(np.int32(number))).reshape(-1)


def _sent(text: str) -> str:
    """Return the text of the first process."""
    letters = np.frombuffer(text.ljust(_TEXT).encode(), np.uint8).astype(np.int32)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(letters)).astype(np.uint8)).decode().rstrip()


def spans_processes(mesh: Any) -> bool:
    """Return whether the devices of a mesh belong to several processes; of no mesh, None, they do not."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1
