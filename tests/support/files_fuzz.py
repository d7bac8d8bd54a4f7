"""Coverage-guided fuzzing of the manifest parser: `python -m tests.support.files_fuzz -runs=1000000` (needs atheris).

Each input is read as a whole manifest and as a body under a valid first line. Only fbuf's own errors may follow.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["fbuf._files", "json"]):
    from fbuf import _files
    from fbuf._files._errors import VersionError
    from fbuf._files._parsing import Damaged, decode

from tests.support.files import PATH
from tests.support.files_hostile import NAME, base, signed

BASE = base()
BODY = BASE.contents()[NAME].split(b"\n")[1]


def one(data: bytes) -> None:
    """Read one input."""
    for text in (data, signed(data)):
        try:
            decode(text, 2)
        except (Damaged, VersionError):
            continue
        BASE.put(NAME, text)
        try:
            with _files.read(PATH, disk=BASE) as saved:
                for array in saved.arrays.values():
                    np.asarray(array)
        except _files.StoreCorrupted:
            pass


def main() -> None:
    """Start from a valid manifest."""
    corpus = Path(tempfile.mkdtemp(prefix="fbuf-fuzz-"))
    (corpus / "whole").write_bytes(BASE.contents()[NAME])
    (corpus / "body").write_bytes(BODY)
    atheris.Setup([*sys.argv, "-max_len=4096", "-rss_limit_mb=4096", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
