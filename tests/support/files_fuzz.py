"""Fuzzing of the manifest's parser, guided by coverage: `python -m tests.fuzz_files -runs=1000000` (needs atheris).

Any bytes, once as a whole manifest and once as a second line with the right first one: only fbuf's own errors may come of
them. What is accepted is read, too. Prints libFuzzer's report; any other error ends it with a stack and the input.
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

from tests.checkpoints import PATH, Memory, save
from tests.test_files_hostile import NAME, signed

BASE = Memory()
save(PATH, 3, BASE)
save(PATH, 4, BASE, keep=1)
BODY = BASE.contents()[NAME].split(b"\n")[1]


def one(data: bytes) -> None:
    """One input."""
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
    """Begins with a true manifest."""
    corpus = Path(tempfile.mkdtemp(prefix="fbuf-fuzz-"))
    (corpus / "whole").write_bytes(BASE.contents()[NAME])
    (corpus / "body").write_bytes(BODY)
    atheris.Setup([*sys.argv, "-max_len=4096", "-rss_limit_mb=4096", str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
