"""What D4RL, Minari and others call the leaves of a row, and what views here read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fbuf._typing import View
from fbuf.interop._source import check_name
from fbuf.views import Row, Transition

FINAL = "final_obs"
"""The leaf or subtree with the observation after an episode's last step; zeros in other rows."""
NEXT = "next_obs"
"""What comes after each row: not kept as it is, see `fbuf.datasets._episodes`."""
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

Names = Mapping[str, str] | Sequence[str] | None


def named(call: str, there: Iterable[str], fields: Names) -> dict[str, str]:
    """`{name there: name here}` of the leaves to take.

    Raises:
      ValueError: a field is not there, a name is none, or two leaves would have one.
    """
    there = list(there)
    if isinstance(fields, str):
        raise TypeError(f"{call}: fields is {fields!r}; expected names. Write fields=({fields!r},).")
    if isinstance(fields, Mapping):
        taken = {name: check_name(call, here) for name, here in fields.items()}
    else:
        taken = {name: _known(check_name(call, name)) for name in (there if fields is None else fields)}
    if missing := [name for name in taken if name not in there]:
        raise ValueError(
            f"{call}: fields has '{missing[0]}', which is not there; expected some of: {', '.join(there)}."
        )
    _check_distinct(call, taken)
    return taken


def _known(name: str) -> str:
    first, slash, rest = name.partition("/")
    return KNOWN.get(first, first) + slash + rest


def _check_distinct(call: str, taken: Mapping[str, str]) -> None:
    by_name: dict[str, str] = {}
    for there, here in taken.items():
        above = ["/".join(here.split("/")[:n]) for n in range(1, here.count("/") + 1)]
        clash = next((name for name in (here, *above) if name in by_name), None)
        clash = clash or next((name for name in by_name if name.startswith(here + "/")), None)
        if clash is not None:
            rest = {t: h for t, h in taken.items() if t != there}
            raise ValueError(
                f"{call}: '{by_name[clash]}' and '{there}' would be the leaves '{clash}' and '{here}'; expected other names. "
                f"Name them, or leave one out: fields={rest}."
            )
        by_name[here] = there


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
