"""What D4RL, Minari and others call the leaves of a row, and what views here read."""

from __future__ import annotations

from collections.abc import Iterable

from fbuf._interfaces.view import View
from fbuf.views import Row, Transition

FINAL = "final_obs"
"""The leaf or subtree with the observation after an episode's last step; zeros in other rows."""
NEXT = "next_obs"
"""What comes after each row: not kept as it is, see `fbuf.datasets._arrays.episodes`."""
KNOWN = {
    "observations": "obs",
    "observation": "obs",
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "terminal": "terminated",
    "terminations": "terminated",
    "timeouts": "truncated",
    "timeout": "truncated",
    "truncations": "truncated",
    "next_observations": NEXT,
    "next_observation": NEXT,
}
"""First parts of names, and what they become."""


def under(name: str, leaves: Iterable[str]) -> list[str]:
    """Leaves that are `name`, or lie in the subtree of that name."""
    return [leaf for leaf in leaves if leaf == name or leaf.startswith(name + "/")]


def default_view(leaves: Iterable[str], rows: int) -> View:
    """`Transition` of what there is, exact at truncations; `Row` where rows are no steps, or there is one alone."""
    leaves = list(leaves)
    if rows < 2 or not (under("obs", leaves) and "reward" in leaves and "terminated" in leaves):
        return Row()
    return Transition(
        action="action" if under("action", leaves) else None,
        truncated="truncated" if "truncated" in leaves else None,
        final_observation=FINAL if under(FINAL, leaves) else None,
    )
