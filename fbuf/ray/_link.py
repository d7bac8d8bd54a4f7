"""`RayLink`: calls of a client to the actors of the shards."""

from __future__ import annotations

from typing import Any

from fbuf._core.lazy_import import import_extra
from fbuf._replay import ReplayClosed
from fbuf.ray._calls import Away


def import_ray() -> Any:
    """Return the module ray. Raises ImportError: it is missing."""
    return import_extra("fbuf.ray", "ray", '"fbuf[ray]"')


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
          Away: the actor is restarting, or the result was lost with its machine.
          ReplayClosed: it has ended.
          Exception: what the call raised there.
        """
        ray = import_ray()
        errors = ray.exceptions
        try:
            return ray.get(reference)
        except errors.RayError as error:
            cause = error.cause if isinstance(error, errors.RayTaskError) else error
            if isinstance(cause, (errors.ActorUnavailableError, errors.ObjectLostError)):
                raise Away from error
            if isinstance(cause, errors.ActorDiedError):
                raise ReplayClosed(f"fbuf.ray: the service was closed, or its actor cannot restart: {cause}") from error
            raise cause if isinstance(cause, Exception) else error from None

    def is_ready(self, reference: Any) -> bool:
        """Return whether `result` would not wait."""
        return bool(import_ray().wait([reference], timeout=0)[0])
