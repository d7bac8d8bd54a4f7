"""`from_tensordict`: torchrl's rollouts as rows.

Its layout ("TED") has every observation twice, as `observation` and as (`next`, `observation`) of the step before. A buffer
holds each once, so the second is left behind unless it is asked for, as the true final observation of truncated episodes.

Source: torchrl's documentation, "TED-format".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fbuf._core.pytree import PyTree, name_of, nested
from fbuf.torch._dtypes import NARROW, import_torch
from fbuf.torch._from_torch import from_torch

_TED = {
    "observation": "obs",
    "action": "action",
    "next/reward": "reward",
    "next/terminated": "terminated",
    "next/truncated": "truncated",
}
Fields = Mapping[Any, str] | Sequence[Any] | str | None


def from_tensordict(
    batch: Any,
    fields: Fields = "ted",
    *,
    final_observation: str | None = None,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> PyTree:
    """Rows for `extend` from a TensorDict, as a torchrl collector or environment hands it out.

    Args:
      batch: Batch size `[N]`, time first; or `[E, N]` (torchrl's order), whose rows come as `[N, E, ...]`. An axis named
        "time" is taken for time wherever it is.
      fields: "ted": `observation` as `obs`, `action`, and (`next`, `reward` | `terminated` | `truncated`), scalars without
        their last axis. `{name there: name here}`, where `("next", "reward")` and `"next/reward"` both are names there;
        names; None: all leaves under their own names. Subtrees count.
      final_observation: A name: rows get (`next`, `observation`) under it, for `Transition(final_observation=name)`, so that
        truncated episodes bootstrap from it. It is stored in every row.
      device: As for `from_torch`.
    Returns:
      Nested dicts of JAX arrays that torch's memory does not reach. int64 and uint64 become 32 bits wide unless
      `jax_enable_x64` is on, if no value changes.
    Raises:
      ImportError: torch is missing.
      TypeError, ValueError: it is no TensorDict of rows; a field is missing; an integer does not fit; else as `from_torch`.
    Cost: that of `from_torch`, and two passes over integers of 64 bits.
    """
    call = "from_tensordict"
    torch = import_torch(call)
    if not (hasattr(batch, "batch_size") and hasattr(batch, "keys")):
        raise TypeError(
            f"{call}: batch is {type(batch).__name__}; expected a TensorDict. For dicts of tensors use from_torch(tree)."
        )
    lead = len(batch.batch_size)
    if lead == 0:
        raise ValueError(f"{call}: batch_size is []; expected [N] or [E, N]. Of one row make batch.unsqueeze(0).")
    there = {"/".join(_path(key)): value for key, value in batch.items(True, True)}
    wanted = _chosen(call, there, fields, final_observation)
    names = list(getattr(batch, "names", None) or [None] * lead)
    time = names.index("time") if "time" in names else lead - 1
    out = {}
    for here, (name, squeeze) in wanted.items():
        value = there[name]
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{call}: leaf '{name}' is {type(value).__name__}; expected a tensor. Leave it out: fields={{...}}."
            )
        if squeeze and value.ndim == lead + 1 and value.shape[-1] == 1:
            value = value.squeeze(-1)
        value = value.detach().movedim(time, 0)
        if lead > 2:
            value = value.flatten(1, lead - 1)
        out[here] = _fitting(torch, call, name, value)
    rows: PyTree = from_torch(nested(out), device=device)
    return rows


def _path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _chosen(
    call: str, there: Mapping[str, Any], fields: Fields, final_observation: str | None
) -> dict[str, tuple[str, bool]]:
    """Name here to (name there, whether its last axis of one goes)."""
    ted = fields == "ted"
    if isinstance(fields, str):
        if not ted:
            raise ValueError(f'{call}: fields is {fields!r}; expected "ted", a dict, a sequence of names, or None.')
        optional = ("action", "next/truncated")
        fields = {name: here for name, here in _TED.items() if name not in optional or _leaves(name, there)}
    elif fields is None:
        fields = {name: name for name in there}
    elif not isinstance(fields, Mapping):
        fields = {name: name_of(name) for name in fields}
    pairs = [(name_of(name), name_of(here)) for name, here in fields.items()]
    if final_observation is not None:
        pairs.append(("next/observation", final_observation))
    out: dict[str, tuple[str, bool]] = {}
    for name, here in pairs:
        leaves = _leaves(name, there)
        if not leaves:
            raise ValueError(f"{call}: fields has '{name}', but the TensorDict has {', '.join(there)}.")
        for leaf in leaves:
            to = here + leaf[len(name) :]
            if to in out:
                raise ValueError(f"{call}: two leaves get the name '{to}'. Rename one: fields={{'{leaf}': ...}}.")
            out[to] = (leaf, ted and here in ("reward", "terminated", "truncated"))
    return out


def _leaves(name: str, there: Mapping[str, Any]) -> list[str]:
    return [leaf for leaf in there if leaf == name or leaf.startswith(name + "/")]


def _fitting(torch: Any, call: str, name: str, value: Any) -> Any:
    """Integers as wide as JAX holds them, where no value changes."""
    came = str(value.dtype).removeprefix("torch.")
    if came not in ("int64", "uint64") or jax.config.read("jax_enable_x64"):
        return value
    narrow = value.to(getattr(torch, NARROW[came]))
    if not bool((narrow.to(value.dtype) == value).all()):
        raise ValueError(
            f"{call}: leaf '{name}' is {came} with values that {NARROW[came]} cannot hold. Turn jax_enable_x64 on, or leave it "
            f"out of fields."
        )
    return narrow
