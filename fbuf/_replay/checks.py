"""What a `Replay` refuses before it does anything: forms, devices, limits, times."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._interfaces.writer import ReadOnly
from fbuf.limits import Limit

FORMS = ("jax", "numpy", "torch")


def check_form(call: str, to: Any, device: Any = None) -> None:
    """Refuses what is none of `FORMS`, and a device that such arrays cannot be on."""
    if to not in FORMS:
        raise ValueError(f'{call}: to is {to!r}; expected "jax", "numpy" or "torch".')
    if device is None:
        return
    if to == "numpy":
        raise ValueError(
            f'{call}: device is {device!r}, but numpy\'s arrays are in memory. Leave it out, or use to="jax".'
        )
    if to == "jax" and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        raise TypeError(
            f"{call}: device is {device!r}; expected a jax.Device or jax.sharding.Sharding. Use device=jax.devices()[0]."
        )


def check_seed(call: str, seed: Any) -> None:
    """Refuses what is no whole number."""
    whole = isinstance(seed, int) or (
        np.shape(seed) == () and jnp.issubdtype(getattr(seed, "dtype", np.void), jnp.integer)
    )
    if not whole:
        raise TypeError(f"{call}: seed is {seed!r}; expected an int. Write {call}(buffer, example, seed=0).")


def check_limit(call: str, limit: Any, buffer: Buffer, unlimited: bool) -> None:
    """Refuses what is no limit, and one under which nothing could be drawn."""
    if limit is None:
        return
    if not isinstance(limit, Limit):
        raise TypeError(
            f"{call}: limit is {type(limit).__name__}; expected a Limit. Write limit=fbuf.limits.samples_per_insert(8, "
            f"min_size=1000, rows=16, draws=256)."
        )
    if isinstance(buffer.writer, ReadOnly):
        raise ValueError(
            f"{call}: a limit paces adding and drawing, but rows of {buffer!r} stay as they are. Leave it out."
        )
    if limit.min_size > buffer.capacity and not unlimited:
        raise ValueError(
            f"{call}: the limit's min_size is {limit.min_size}, but capacity is {buffer.capacity}: nothing could ever be "
            f"drawn. Use a min_size up to {buffer.capacity}."
        )


def check_seconds(call: str, timeout: Any) -> None:
    """Refuses what is no time to wait."""
    number = isinstance(timeout, (int, float, np.number)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout >= 0):
        raise ValueError(f"{call}: timeout is {timeout!r}; expected seconds >= 0, or None to wait as long as it takes.")
