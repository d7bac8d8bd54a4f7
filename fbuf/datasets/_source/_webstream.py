"""A file over HTTP as one stream, however many connections it takes.

A connection that fails is made again at the next byte, with `If-Range`, and what tells the file from others is compared, so
that bytes of two files are never joined; who reads notices a pause. A server that knows no ranges sends the whole file
again, and what was read already is read past.
"""

from __future__ import annotations

from fbuf.datasets._source._entry import Entry
from fbuf.datasets._source._errors import SourceChanged
from fbuf.datasets._source._retry import Again, Retry, Tries
from fbuf.datasets._source._web import Answer, PastTheEnd, get

_SKIP = 1 << 16


class WebStream:
    """The bytes of `entry` from `start` on.

    Args:
      validator: Of whoever read the bytes before `start`.
      encoding: See `_web.get`.
    """

    def __init__(
        self, entry: Entry, retry: Retry, start: int = 0, validator: str | None = None, encoding: str = "identity"
    ) -> None:
        self._entry, self._retry, self._encoding = entry, retry, encoding
        self._tries = Tries(retry, entry.address)
        self._answer: Answer | None = None
        self._left: int | None = None  # of the body at hand
        self._ended = False
        self.position, self.total, self.validator = start, entry.size, validator

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; none: the end. Raises SourceError."""
        while not self._ended:
            try:
                data = self._next(size)
            except Again as error:
                self._drop()
                self._tries.failed(error, f", byte {self.position}")
                continue
            if not data:
                self.close()
            self.position += len(data)
            self._tries.gained(len(data))
            return data
        return b""

    def close(self) -> None:
        """Ends it; nothing more is read."""
        self._ended = True
        self._drop()

    def _next(self, size: int) -> bytes:
        if self.total is not None and self.position >= self.total:
            return b""
        if self._answer is None and not self._connect():
            return b""
        assert self._answer is not None
        most = min(
            n for n in (size, self._left, None if self.total is None else self.total - self.position) if n is not None
        )
        data = self._answer.read(most) if most else b""
        if self._left is not None:
            self._left -= len(data)
        if not data:
            if self.total is None and self._left is None:  # nobody said how long it is: this is its end
                self.total = self.position
                return b""
            of = "" if self.total is None else f" of {self.total}"
            raise Again(f"the connection ended at byte {self.position}{of}")
        return data

    def _connect(self) -> bool:
        """Asks for the next byte; False: there is none, and that is as it should be."""
        here = self._entry.address
        try:
            answer = get(here, self._retry.timeout, self.position, self.validator, self._encoding)
        except PastTheEnd as end:
            if end.total == self.position and self.total in (None, self.position):
                return False
            raise SourceChanged(
                f"{here}: asked for byte {self.position}, the server has {end.total}; expected {self.total}. It is another "
                f"file by now: list again."
            ) from None
        self._answer = answer
        if self.validator is not None and answer.validator is not None and answer.validator != self.validator:
            self.close()
            raise SourceChanged(
                f"{here}: at byte {self.position} the server has {answer.validator}; expected {self.validator}, of the bytes "
                f"before. It is another file by now: list again."
            )
        if self.total is not None and answer.total is not None and answer.total != self.total:
            raise Again(f"the server says that it has {answer.total} bytes; expected {self.total}")
        self.validator = self.validator or answer.validator
        self.total = answer.total if self.total is None else self.total
        self._left = answer.length
        self._skip(answer)
        return True

    def _skip(self, answer: Answer) -> None:
        at = answer.begin
        while at < self.position:
            data = answer.read(min(_SKIP, self.position - at))
            if not data:
                raise Again(f"the connection ended at byte {at}, read again on the way to {self.position}")
            at += len(data)
        if self._left is not None:
            self._left -= at - answer.begin

    def _drop(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None
