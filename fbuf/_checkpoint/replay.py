"""What `Replay` saves besides a buffer's state: its key, counters and limit."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import extra as _extra
from fbuf._checkpoint import load as _load
from fbuf._checkpoint import plain
from fbuf._checkpoint.async_save import Saving
from fbuf._checkpoint.device_arrays import DeviceLeaf
from fbuf._checkpoint.save import start_save
from fbuf._formats import checkpoint
from fbuf.limits import Limit, LimitState


class ReplayMetadata(NamedTuple):
    """The contents of a `Replay`."""

    buffer: Buffer
    state: BufferState
    key: jax.Array
    counters: np.ndarray
    strict: bool
    unlimited: bool
    limit: Limit | None
    pace: LimitState | None  # in Python ints


def save(path: Any, replay: ReplayMetadata, keep: int, extra: Any, wait: bool, sync: bool, progress: Any) -> Saving:
    """Save it as `fbuf.save` does."""
    arrays = {
        "replay/key": DeviceLeaf(jax.random.key_data(replay.key), whole=True),
        "replay/counters": replay.counters.copy(),
    }
    note = {
        "impl": str(jax.random.key_impl(replay.key)),
        "strict": replay.strict,
        "unlimited": replay.unlimited,
        "limit": _limit_json(replay.limit, replay.pace),
    }
    settings = {"keep": keep, "sync": sync, "progress": progress}
    return start_save("Replay.save", path, replay.buffer, replay.state, (arrays, note), extra, wait, **settings)


def load(
    path: Any, buffer: Buffer | None, example: Any, verify: Any, resize: Any, extra: Any, progress: Any
) -> tuple[ReplayMetadata, Any]:
    """Return the contents, and the `extra` saved with them.

    Raises:
      SchemaError: the checkpoint holds a buffer, but no `Replay`.
    """
    call = "Replay.load"

    def build(file: checkpoint.Saved) -> tuple[ReplayMetadata, Any]:
        note = file.meta["replay"]
        if note is None:
            raise checkpoint.SchemaError(f"{call}: {file.path} was saved without a key. Load it with fbuf.load(path).")
        limit, pace = _limit(call, file.path, note.get("limit"))
        value = None if extra is None else _extra.unpack(call, file.path, file, file.meta["extra"], extra)
        loaded, state = plain.restore_buffer(call, file, buffer, example, resize, verify)
        data = np.asarray(file.arrays["replay/key"])
        key = jax.random.wrap_key_data(jnp.array(data), impl=note["impl"])
        counters = np.array(file.arrays["replay/counters"])
        replay = ReplayMetadata(loaded, state, key, counters, note["strict"], note["unlimited"], limit, pace)
        return replay, value

    return _load.load_newest(call, path, verify, progress, build)


_NUMBERS = ("samples_per_insert", "min_diff", "max_diff")


def _limit_json(limit: Limit | None, pace: LimitState | None) -> dict[str, Any] | None:
    """Return a limit and its counts as JSON: numbers as they are, fractions as text."""
    if limit is None or pace is None:
        return None
    numbers = {name: getattr(limit, name) for name in _NUMBERS}
    plain = {n: x if x is None or isinstance(x, (int, float)) else str(Fraction(str(x))) for n, x in numbers.items()}
    return {**plain, "min_size": int(limit.min_size), "added": pace.added, "drawn": pace.drawn}


def _limit(call: str, path: Any, note: Any) -> tuple[Limit | None, LimitState | None]:
    if note is None:
        return None, None
    try:
        numbers = {name: Fraction(note[name]) if isinstance(note[name], str) else note[name] for name in _NUMBERS}
        limit = Limit(min_size=note["min_size"], **numbers)
        return limit, limit.init(added=note["added"], drawn=note["drawn"], host=True)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise checkpoint.SchemaError(f"{call}: the limit saved in {path} is invalid ({error}).") from error
