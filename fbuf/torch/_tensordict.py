"""Convert batches to tensordicts in torchrl's layout ("TED"), and torchrl's rollouts to rows.

TED nests the results of a step under `next`, with scalars of shape [1], and holds each observation twice. A buffer holds it
once, so rows leave out (`next`, `observation`), except as the true final observation of truncated episodes. An n-step batch
needs `steps_to_next_obs`, because torchrl's value estimators raise gamma to it; only its view knows n.

Source: torchrl's documentation, "TED-format"; `objectives/value/advantages.py` of torchrl 0.14.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fbuf._core.lazy_import import import_extra
from fbuf._core.pytree import PyTree, name_of, named_leaves, nested, under
from fbuf._core.sample import Index, Rows, Sample
from fbuf.torch._dtypes import NARROW, import_torch
from fbuf.torch._from_torch import from_torch
from fbuf.torch._to_torch import as_tensors
from fbuf.views import Hindsight, Transition

_HERE = {"is_first": "is_init", "obs": "observation"}
_NEXT = {"next_obs": "observation", "reward": "reward", "done": "done"}
_SCALARS = ("next/reward", "next/done", "next/terminated", "next/truncated", "is_init")
_INDEX = {"index": "slot", "index_generation": "generation"}


def to_tensordict(
    batch: Sample | Rows, view: Any = None, *, names: Mapping[str | tuple[str, ...], str | None] | None = None
) -> Any:
    """Convert a batch to a `TensorDict` in torchrl's layout; memory is shared as by `to_torch`.

    Keys `[B, ...]`: `observation`, `action`, (`next`, `observation`), (`next`, `reward`), (`next`, `done`), (`next`,
    `terminated`), (`next`, `truncated`), every other leaf under its own name, `index` and `index_generation` (int64; see
    `index_of`), `priority_weight`, `probability`, `mask`. `done`, `terminated` and `truncated` at the root are those of
    the step
    before: False. `is_first` becomes `is_init`. Ragged leaves are nested tensors; text and objects are a `NonTensorStack`.

    Args:
      batch: From `sample`, `peek`, `get`, `rows`; of JAX arrays, numpy or tensors.
      view: The view that made the batch, `buffer.view`; required for transitions. With n_step > 1 the flags cover all n
        steps,
        and `steps_to_next_obs` int64[B, 1] is their number. A truncation exactly at step n is not seen; its bootstrap is
        right.
      names: `{leaf or subtree: its name there}`, None to leave it out. `{"obs": "pixels"}` names (`next`, `pixels`) too.
    Returns:
      A TensorDict of batch size `[B]`, or `[B, T]` for windows, where index and weights are repeated for every step.
    Raises:
      ImportError: torch or tensordict is missing.
      TypeError, ValueError: `batch` is not a batch; transitions without their view; two leaves of one name; else as
        `to_torch`.
    Cost: that of `to_torch`, and about 100 us.

    Example:
      >>> import fbuf, numpy as np
      >>> row = {"obs": np.zeros(3, np.float32), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
      >>> replay = fbuf.Replay(fbuf.Buffer(10, view=fbuf.views.Transition(autoreset="same_step")), row)
      >>> for _ in range(5):
      ...     replay.add(row)
      >>> batch = to_tensordict(replay.sample(4), replay.buffer.view)
      >>> batch.batch_size, batch["next", "reward"].shape
      (torch.Size([4]), torch.Size([4, 1]))
    """
    call = "to_tensordict"
    torch, tensordict = import_torch(call), import_extra(call, "tensordict", "tensordict")
    if not isinstance(batch, (Sample, Rows)):
        raise TypeError(f"{call}: batch is {type(batch).__name__}; expected a Sample or Rows. Pass it whole.")
    if len(jax.tree.leaves(batch.index)) > len(_INDEX):
        raise TypeError(f"{call}: batch is of several buffers or shards; expected one buffer. Use fbuf.torch.to_torch.")
    leaves = as_tensors(torch, named_leaves(batch.data))
    index: dict[str, Any] = {name: getattr(batch.index, of) for name, of in _INDEX.items()} | {"mask": batch.mask}
    if isinstance(batch, Sample):
        index |= {"priority_weight": batch.weight, "probability": batch.probability}
    index = as_tensors(torch, index)
    windows = "learning_mask" in leaves and leaves["learning_mask"].ndim > index["mask"].ndim
    lead = tuple((leaves["learning_mask"] if windows else index["mask"]).shape)
    if windows:
        del index["mask"]  # the data has one of every step
    if isinstance(view, Hindsight):
        view = view.view
    if "discount" in leaves and "next_obs" in leaves:
        leaves = _transitions(torch, call, leaves, view, index["mask"])
    renamed = _renamed(call, leaves, view, names)
    for name in _SCALARS:
        if name in renamed and renamed[name].ndim == len(lead):
            renamed[name] = renamed[name].unsqueeze(-1)
    _add_flags(torch, renamed)
    for name, value in index.items():
        if name in renamed:
            raise ValueError(f"{call}: leaf '{name}' has a reserved name. Rename it: names={{'{name}': 'my_{name}'}}.")
        value = value.to(torch.int64) if name in _INDEX else value
        renamed[name] = value.reshape(value.shape + (1,) * windows).expand(lead)
    out = tensordict.TensorDict(nested(renamed), batch_size=lead)
    for name in batch.lazy if batch.ragged is not None else ():
        if name not in leaves:
            values = batch.lazy[name]
            numbers = all(hasattr(value, "dtype") for value in values)
            out[tuple(name.split("/"))] = batch.lazy.nested(name) if numbers else tensordict.NonTensorStack(*values)
    return out


def index_of(batch: Any) -> Index:
    """Return the `Index` of a batch that `to_tensordict` made, for `update_priority` and `update_rows`.

    Args:
      batch: A TensorDict with `index` and `index_generation`, `[B]` or, for windows, `[B, T]`.
    Returns:
      `Index` of JAX arrays `[B]`.
    Raises:
      ValueError: the keys are missing.
    """
    torch = import_torch("index_of")
    if any(key not in batch.keys() for key in _INDEX):
        raise ValueError("index_of: the TensorDict lacks index or index_generation. Keep those of to_tensordict.")
    slot, generation = (batch[key] if batch[key].ndim < 2 else batch[key][:, 0] for key in _INDEX)
    arrays = from_torch({"slot": slot.to(torch.int32), "generation": generation.to(torch.uint32)})
    return Index(arrays["slot"], arrays["generation"])


def _transitions(torch: Any, call: str, leaves: dict[str, Any], view: Any, mask: Any) -> dict[str, Any]:
    """Replace the first step's flags by those of all n steps."""
    if not isinstance(view, Transition):
        raise ValueError(f"{call}: view is {view!r}; expected that of the batch. Write {call}(batch, buffer.view).")
    n, gamma, discount = view.n_step, view.gamma, leaves["discount"]
    if view.terminated is None:  # every end counts as a truncation
        leaves = {"terminated": torch.zeros_like(mask)} | leaves
    if n == 1:
        return leaves
    cut = leaves[view.truncated].clone() if view.truncated is not None else torch.zeros_like(mask)
    terminated = view.terminated or "terminated"
    ended, steps = leaves[terminated].clone(), torch.full(discount.shape, n, dtype=torch.int64)
    if 0 < gamma:
        ended = (discount == 0) & mask
    if 0 < gamma < 1:
        alive = discount > 0
        took = torch.where(alive, discount, 1).double().log() / math.log(gamma)
        steps = torch.where(alive, took.round().to(torch.int64), n)
        cut = (cut | (steps < n)) & alive
    flags = {terminated: ended, view.truncated or "truncated": cut}
    return leaves | flags | {"steps_to_next_obs": steps.unsqueeze(-1)}


def _renamed(call: str, leaves: dict[str, Any], view: Any, names: Mapping[Any, str | None] | None) -> dict[str, Any]:
    """Return the leaves by their names in the TensorDict."""
    renames = {name_of(name): None if to is None else name_of(to) for name, to in (names or {}).items()}
    rules: dict[str, str | None] = dict(_HERE)
    rules |= {name: f"next/{to}" for name, to in _NEXT.items()}
    for flag in ("terminated", "truncated"):
        rules[flag] = f"next/{flag}"
        if isinstance(flag_name := getattr(view, flag, None), str):
            rules[flag_name] = f"next/{flag}"
    if renames.get("obs"):
        rules["next_obs"] = f"next/{renames['obs']}"
    rules |= renames
    unknown = [name for name in renames if not under(name, leaves)]
    if unknown:
        raise ValueError(f"{call}: names has '{unknown[0]}', but the batch has {', '.join(leaves)}.")
    out: dict[str, Any] = {}
    for leaf, value in leaves.items():
        parts = leaf.split("/")
        tops = ["/".join(parts[:i]) for i in range(len(parts), 0, -1)]
        top = next((top for top in tops if top in rules), None)
        to = leaf if top is None else rules[top]
        if to is None:
            continue
        to += leaf[len(top) :] if top is not None else ""
        if to in out:
            raise ValueError(f"{call}: two leaves get the name '{to}'. Rename one: names={{'{leaf}': ...}}.")
        out[to] = value
    return out


def _add_flags(torch: Any, out: dict[str, Any]) -> None:
    """Add the flags that torchrl expects and the view did not make."""
    ended = out.get("next/terminated")
    if ended is None:
        return
    out.setdefault("next/truncated", torch.zeros_like(ended))
    out.setdefault("next/done", ended | out["next/truncated"])
    for flag in ("done", "terminated", "truncated"):
        out.setdefault(flag, torch.zeros_like(ended))


TED = {
    "observation": "obs",
    "action": "action",
    "next/reward": "reward",
    "next/terminated": "terminated",
    "next/truncated": "truncated",
}
"""The leaves of torchrl's layout that `fields="ted"` takes; `next/observation` is the next row's observation."""
Fields = Mapping[Any, str] | Sequence[Any] | str | None


def from_tensordict(
    batch: Any,
    fields: Fields = "ted",
    *,
    final_observation: str | None = None,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> PyTree:
    """Convert a TensorDict of a torchrl collector or environment to rows for `extend`.

    Args:
      batch: Batch size `[N]`, time first; or `[E, N]` (torchrl's order), whose rows are `[N, E, ...]`. An axis named
        "time" is
        time wherever it is.
      fields: "ted": `observation` as `obs`, `action`, and (`next`, `reward` | `terminated` | `truncated`), scalars without
        their last axis. `{name there: name here}`, where `("next", "reward")` and `"next/reward"` are both names; names;
        None:
        all leaves under their own names. Subtrees count.
      final_observation: Name for (`next`, `observation`), for `Transition(final_observation=name)`, so that truncated
        episodes
        bootstrap from it. It is stored in every row.
      device: As for `from_torch`.
    Returns:
      Nested dicts of JAX arrays that do not share torch's memory. int64 and uint64 become 32 bits wide unless
      `jax_enable_x64` is on, if no value changes.
    Raises:
      ImportError: torch is missing.
      TypeError, ValueError: it is not a TensorDict of rows; a field is missing; an integer does not fit; else as
        `from_torch`.
    Cost: that of `from_torch`, and two passes over 64-bit integers.
    """
    call = "from_tensordict"
    torch = import_torch(call)
    if not (hasattr(batch, "batch_size") and hasattr(batch, "keys")):
        raise TypeError(f"{call}: batch is {type(batch).__name__}; expected a TensorDict. Convert dicts by from_torch.")
    lead = len(batch.batch_size)
    if lead == 0:
        raise ValueError(f"{call}: batch_size is []; expected [N] or [E, N]. Convert one row as batch.unsqueeze(0).")
    found = {name_of(key): value for key, value in batch.items(True, True)}
    chosen = _choose(call, found, fields, final_observation)
    names = list(getattr(batch, "names", None) or [None] * lead)
    time = names.index("time") if "time" in names else lead - 1
    out = {}
    for here, (name, squeeze) in chosen.items():
        value = found[name]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{call}: leaf '{name}' is {type(value).__name__}; expected a tensor. Leave it out.")
        if squeeze and value.ndim == lead + 1 and value.shape[-1] == 1:
            value = value.squeeze(-1)
        value = value.detach().movedim(time, 0)
        if lead > 2:
            value = value.flatten(1, lead - 1)
        out[here] = _narrow(torch, call, name, value)
    return from_torch(nested(out), device=device)


def _choose(
    call: str, found: Mapping[str, Any], fields: Fields, final_observation: str | None
) -> dict[str, tuple[str, bool]]:
    """Return `{name here: (name there, whether to drop its last axis of one)}`."""
    ted = fields == "ted"
    if isinstance(fields, str):
        if not ted:
            raise ValueError(f'{call}: fields is {fields!r}; expected "ted", a dict, a sequence of names, or None.')
        optional = ("action", "next/truncated")
        fields = {name: here for name, here in TED.items() if name not in optional or under(name, found)}
    elif fields is None:
        fields = {name: name for name in found}
    elif not isinstance(fields, Mapping):
        fields = {name: name_of(name) for name in fields}
    pairs = [(name_of(name), name_of(here)) for name, here in fields.items()]
    if final_observation is not None:
        pairs.append(("next/observation", final_observation))
    out: dict[str, tuple[str, bool]] = {}
    for name, here in pairs:
        leaves = under(name, found)
        if not leaves:
            raise ValueError(f"{call}: fields has '{name}', but the TensorDict has {', '.join(found)}.")
        for leaf in leaves:
            to = here + leaf[len(name) :]
            if to in out:
                raise ValueError(f"{call}: two leaves get the name '{to}'. Rename one: fields={{'{leaf}': ...}}.")
            out[to] = (leaf, ted and here in ("reward", "terminated", "truncated"))
    return out


def _narrow(torch: Any, call: str, name: str, value: Any) -> Any:
    """Return integers as wide as JAX holds them. Raises ValueError if a value would change."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in ("int64", "uint64") or jax.config.read("jax_enable_x64"):
        return value
    narrow = value.to(getattr(torch, NARROW[dtype]))
    if not bool((narrow.to(value.dtype) == value).all()):
        raise ValueError(
            f"{call}: leaf '{name}' is {dtype} with values that {NARROW[dtype]} cannot hold. Enable jax_enable_x64."
        )
    return narrow
