"""Names of files and generations: the only names that a checkpoint ever opens, writes or removes.

A manifest says names of files too; whatever it says, only these forms are taken for one, so that none has a separator, is
absolute, or leads out of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LOCK = "lock"
LAST = 10**12 - 1
"""The largest number of a generation that a name has room for."""
_MANIFEST = re.compile(r"manifest-([0-9]{12})\.json")
_DATA = re.compile(r"data-([0-9]{12})\.safetensors")
_NEW = re.compile(r"manifest-([0-9]{12})\.json\.new")


def manifest_name(generation: int) -> str:
    """`manifest-000000000007.json`"""
    return f"manifest-{generation:012d}.json"


def data_name(generation: int) -> str:
    """`data-000000000007.safetensors`"""
    return f"data-{generation:012d}.safetensors"


def new_name(generation: int) -> str:
    """What a manifest is called until it is whole."""
    return f"{manifest_name(generation)}.new"


def is_data(name: str) -> bool:
    """Whether it is a data file's name."""
    return _DATA.fullmatch(name) is not None


def is_new(name: str) -> bool:
    """Whether it is the name of a manifest that is not whole."""
    return _NEW.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Whether a checkpoint has files of such a name."""
    return name == LOCK or any(form.fullmatch(name) for form in (_MANIFEST, _DATA, _NEW))


def generations(names: Iterable[str]) -> list[int]:
    """Those that have a manifest, newest first."""
    return sorted((int(found[1]) for found in map(_MANIFEST.fullmatch, names) if found), reverse=True)


def last_number(names: Iterable[str]) -> int:
    """The largest number that any file of ours has, also one that a killed save left; 0: none."""
    found = (form.fullmatch(name) for name in names for form in (_MANIFEST, _DATA, _NEW))
    return max((int(match[1]) for match in found if match), default=0)
