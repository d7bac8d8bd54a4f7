"""Number the writes of a client, send them again, and recognise duplicates. Pure Python, without Ray.

The calls of one client to one shard are numbered 1, 2, 3, ... A shard applies call n iff n = max(done + 1, oldest): `done` is
the last call it applied, `oldest` the first that the client can still send. A call up to `done` is a duplicate. Any other
follows one that is missing; the client then sends again from `done` + 1. `done` is saved with the rows, so a restarted shard
knows which calls its rows come from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_MOST = 10_000  # clients of which a ledger knows the calls


class Away(Exception):
    """The shard is restarting; the call may have been applied or not."""


class Receipt(NamedTuple):
    """What a shard knows of the calls of a client."""

    done: int  # the last call applied
    safe: int  # the last one in a checkpoint


class Ledger:
    """The calls that a shard applied, by client."""

    def __init__(self, saved: np.ndarray[Any, Any] | None = None):
        self._done = {} if saved is None else _by_client(saved)
        self._safe = dict(self._done)

    def is_next(self, client: int, number: int, oldest: int) -> bool:
        """Return whether to apply the call."""
        return number == max(self._done.get(client, 0) + 1, oldest)

    def has_gap(self, client: int, number: int) -> bool:
        """Return whether calls before this one were lost."""
        return number > self._done.get(client, 0) + 1

    def finish(self, client: int, number: int) -> None:
        """Note that the call was applied, or refused for good."""
        self._done.pop(client, None)  # the newest are last
        self._done[client] = number
        if len(self._done) > _MOST:
            self._done.pop(next(iter(self._done)))

    def receipt(self, client: int) -> Receipt:
        """Return what to answer the client."""
        return Receipt(self._done.get(client, 0), self._safe.get(client, 0))

    def arrays(self) -> np.ndarray[Any, Any]:
        """Return int64[clients, 2], to be saved with the rows."""
        return np.array(list(self._done.items()), np.int64).reshape(-1, 2)

    def saved(self, calls: np.ndarray[Any, Any]) -> None:
        """Note that the calls of these `arrays` are in a checkpoint."""
        self._safe = _by_client(calls)


def _by_client(calls: np.ndarray[Any, Any]) -> dict[int, int]:
    return {int(client): int(done) for client, done in calls}


class Outbox:
    """The calls of one client to one shard that may have to be sent again.

    Args:
      send: Sends (number, oldest, payload) and returns a reference to the receipt.
      in_flight: Calls without a receipt, at most.
      durable: Keep calls until they are in a checkpoint, else until they are applied.
    """

    def __init__(self, send: Callable[[int, int, Any], Any], in_flight: int, durable: bool):
        self._send, self._in_flight, self._durable = send, in_flight, durable
        self._calls: dict[int, Any] = {}  # payloads by number, in order
        self._sent: deque[tuple[int, Any]] = deque()  # references without a receipt, in order
        self._last = 0
        self._next = 1  # to be sent

    def __len__(self) -> int:
        """Return how many calls have no receipt."""
        return len(self._sent) + self._last + 1 - self._next

    @property
    def oldest(self) -> int:
        """The first call that can still be sent."""
        return next(iter(self._calls), self._last + 1)

    @property
    def kept(self) -> int:
        """The number of calls that can still be sent."""
        return len(self._calls)

    def post(self, payload: Any) -> None:
        """Add a call, and send what may be sent."""
        self._last += 1
        self._calls[self._last] = payload
        self.pump()

    def pump(self) -> None:
        """Send calls while fewer than `in_flight` are without a receipt."""
        while self._next <= self._last and len(self._sent) < self._in_flight:
            number, self._next = self._next, self._next + 1
            self._sent.append((number, self._send(number, self.oldest, self._calls[number])))

    def receive(self, result: Callable[[Any], Receipt]) -> None:
        """Wait for the oldest receipt.

        Raises:
          Away: the shard is restarting; call `resend` later.
          Exception: the shard refused the call for good.
        """
        number, reference = self._sent[0]
        try:
            receipt = result(reference)
        except Exception as error:
            if not isinstance(error, Away):
                self._sent.popleft()
            raise
        self._sent.popleft()
        self.note(receipt, number)

    def note(self, receipt: Receipt, number: int | None = None) -> None:
        """Forget what is applied (saved); send again from the first that is missing up to `number`, by default the last."""
        upto = receipt.safe if self._durable else receipt.done
        while self._calls and self.oldest <= upto:
            self._calls.pop(self.oldest)
        self._next = max(self._next, self.oldest)
        if receipt.done < (self._last if number is None else number):
            self._sent.clear()
            self._next = max(receipt.done + 1, self.oldest)

    def resend(self) -> None:
        """Send again every call without a receipt."""
        if self._sent:
            self._next = max(self._sent[0][0], self.oldest)
            self._sent.clear()
            self.pump()
