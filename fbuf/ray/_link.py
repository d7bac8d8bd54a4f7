"""`RayLink`: calls of a client to the actors of the shards."""

from __future__ import annotations

import importlib
from typing import Any

from fbuf._replay import ReplayClosed
from fbuf.ray._calls import Away


def import_ray() -> Any:
    """Return the module ray. Raises ImportError: it is missing."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f'fbuf.ray: ray is missing ({error}). Run pip install "fbuf[ray]".') from error


class RayLink:
    """Handles of actors. Picklable."""

    def __init__(self, actors: list[Any]):
        self.actors = actors

    def call(self, shard: int, method: str, *args: Any) -> Any:
        """Start a call and return a reference to its result."""
        return getattr(self.actors[shard], method).remote(*args)

    def result(self, reference: Any) -> Any:
        """Wait for a result.

        Raises:
          Away: the actor is restarting.
          ReplayClosed: it has ended.
          Exception: what the call raised there.
        """
        ray = import_ray()
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, Exception) else error from None
        except ray.exceptions.ActorUnavailableError as error:
            raise Away from error
        except ray.exceptions.ActorDiedError as error:
            raise ReplayClosed(f"fbuf.ray: the service was closed, or its actor cannot restart: {error}") from error

    def is_ready(self, reference: Any) -> bool:
        """Return whether `result` would not wait."""
        return bool(import_ray().wait([reference], timeout=0)[0])
