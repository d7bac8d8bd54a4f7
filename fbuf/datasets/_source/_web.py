"""One request over HTTP and its answer: which bytes of which file these are, and what may be tried again.

The standard library's client: proxies of the environment, certificates and redirects are its business. Bodies are taken as
they are sent: a file that is stored compressed is announced by some servers as an encoding, and its hash is that of the
stored bytes. Redirects go to HTTP only, and never from HTTPS back to HTTP. requests, httpx and aiohttp would bring a dozen
packages for the same three headers.
"""

from __future__ import annotations

import email.message
import email.utils
import functools
import http.client
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from fbuf.datasets._source._errors import SourceError
from fbuf.datasets._source._retry import Again

_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_NO_RANGE = re.compile(r"bytes \*/(\d{1,18})")
_FIX = {
    401: "It is not public.",
    403: "It is not public, or not from here.",
    404: "It is not there, or no longer: list again.",
    410: "It is not there any longer: list again.",
}


class Refused(SourceError):
    """The server answered, and asking again would change nothing. `status`: its code."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Answer:
    """The body of one answer, and what its headers say.

    Attributes:
      begin: The first byte's place in the file.
      total: Bytes of the whole file; None: not said.
      length: Bytes of this body; None: not said.
      validator: A strong ETag, else the date of the last change, else None.
    """

    def __init__(self, url: str, response: Any, start: int) -> None:
        headers: email.message.Message = response.headers
        self._response = response
        self.validator = _validator(headers)
        self.begin, self.total = 0, _whole(headers.get("Content-Length"))
        self.length = self.total
        if response.status == 206:
            found = _RANGE.fullmatch((headers.get("Content-Range") or "").strip())
            if not found or int(found[1]) != start or int(found[2]) < start:
                self.close()
                raise Again(f"asked for bytes from {start} on, it sent '{headers.get('Content-Range')}'")
            self.begin, self.total = start, None if found[3] == "*" else int(found[3])
        elif response.status != 200:
            self.close()
            raise Refused(f"{url}: the server answered {response.status}; expected 200 or 206.", response.status)

    def read(self, size: int) -> bytes:
        """What has arrived, at most `size` bytes; none: the body ended. Raises Again."""
        try:
            return bytes(self._response.read1(size))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Again(_said(error)) from error

    def close(self) -> None:
        """Ends the connection."""
        self._response.close()


class PastTheEnd(Exception):
    """The file has no byte there. `total`: how many it has, if that was said."""

    def __init__(self, total: int | None) -> None:
        super().__init__(total)
        self.total = total


def get(url: str, timeout: float, start: int = 0, validator: str | None = None, encoding: str = "identity") -> Answer:
    """Asks once for a file from byte `start` on.

    Args:
      validator: If the file has another by now, the whole of it is sent.
      encoding: Accept-Encoding: "gzip" for a bucket, which would unpack files marked so otherwise.
    Raises:
      Again: this time it failed. Refused: it will again. PastTheEnd: there is no such byte.
    """
    headers = {"User-Agent": "fbuf", "Accept-Encoding": encoding}
    if start:
        headers["Range"] = f"bytes={start}-"
        if validator is not None:
            headers["If-Range"] = validator
    try:
        response = _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise _status(url, error, start) from None
    except SourceError:
        raise
    except (http.client.InvalidURL, ValueError) as error:
        raise Refused(f"{url}: no address that can be asked ({error}).") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise Refused(f"{url}: the server's certificate does not verify: {reason}.") from None
        if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
            raise Refused(f"{url}: there is no such host ({reason.strerror}).") from None
        raise Again(_said(reason)) from error
    return Answer(url, response, start)


def _status(url: str, error: urllib.error.HTTPError, start: int) -> Exception:
    code = error.code
    if code == 416 and start:
        found = _NO_RANGE.fullmatch((error.headers.get("Content-Range") or "").strip())
        return PastTheEnd(int(found[1]) if found else None)
    if code in _AGAIN:
        return Again(f"the server answered {code} {error.reason}", _after(error.headers.get("Retry-After")))
    return Refused(f"{url}: the server answered {code} {error.reason}. {_FIX.get(code, '')}".rstrip(), code)


def _after(value: str | None) -> float | None:
    """Seconds that a Retry-After asks for: a number, or a date."""
    if value is None:
        return None
    if re.fullmatch(r"\d{1,9}", value.strip()):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _validator(headers: email.message.Message) -> str | None:
    etag = headers.get("ETag")
    if etag and not etag.startswith("W/"):  # a weak one says that it means the same, not that it has the same bytes
        return etag
    return headers.get("Last-Modified")


def _whole(value: str | None) -> int | None:
    return int(value) if value is not None and re.fullmatch(r"\d{1,18}", value.strip()) else None


def _said(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "nothing came within the timeout"
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        old, new = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if new not in ("http", "https") or (old == "https" and new != "https"):
            fp.close()
            raise Refused(
                f"{req.full_url}: the server redirects to {newurl[:200]!r}; expected an address as safe.", code
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
        _Redirects,
    ):
        opener.add_handler(handler())
    return opener
