"""Which tier a file and a case of tests belongs to.

A case is of the highest tier that a mark on it names: `pytest.mark.more` or `pytest.mark.exhaustive`, on its module, its
function or one of its parameters. Without such a mark it is quick.
"""

import re
from collections.abc import Iterable
from pathlib import Path

TIERS = ("quick", "more", "exhaustive")
highest = TIERS[-1]
"""The tier above which no cases are made of tables; `conftest` sets it before it collects."""
_MODULE = re.compile(r"^pytestmark = .*\bpytest\.mark\.(more|exhaustive)\b", re.M)


def of_marks(names: Iterable[str]) -> str:
    """Return the tier of what has these marks."""
    return max((name for name in names if name in TIERS), key=TIERS.index, default="quick")


def is_made(tier: str) -> bool:
    """Return whether cases of this tier are made."""
    return TIERS.index(tier) <= TIERS.index(highest)


def of_file(path: Path) -> str:
    """Return the lowest tier of a file's cases, by its line `pytestmark = ...`.

    The file is read and not imported: the higher tiers need packages that the quick one does without.
    """
    return of_marks(_MODULE.findall(path.read_text()))
