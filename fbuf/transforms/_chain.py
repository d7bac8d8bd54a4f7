"""Apply transforms in sequence: `Chain` of named stages, and `apply` outside a buffer.

A chain is a value; changes return a new chain. The memory of a stage is stored under its name, so a chain with one more stage
keeps the memory of the others.

A function of a window may return its rows, `[T, item]`, or one value, `[F]`. If F is T, shapes are ambiguous, so stages are
traced again with windows of one more row: leaves that grow have rows. If a function accepts only T rows, shapes decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.arguments import is_int
from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec, named_leaves, spec_of
from fbuf._interfaces.transform import Context, StatefulTransform, Transform
from fbuf.transforms._map import Map

_ROWS = (3, 2)  # leading axes of the rows that shapes are traced with


@component
class Chain(StatefulTransform):
    """Apply transforms in sequence.

    Attributes:
      stages: Transforms, or pairs (name, transform), or a dict of transforms by name. Unnamed stages are named by their class:
        "scale", "normalize_reward"; the second of a kind is "scale_2".

    A chain is a transform itself. `chain["scale"]` and `chain[0]` are its stages; `len`, `in` (by name) and iteration (over
    pairs) are defined. Methods that change it return a new chain.

    Example:
      >>> from fbuf.transforms import Chain, Cast, Scale
      >>> chain = Chain((Scale("obs"), Cast("action", "int32")))
      >>> chain.names, chain["scale"]
      (('scale', 'cast'), Scale(keys=('obs',)))
      >>> chain.insert("cast", Scale("reward", 0.1), name="small").remove("scale").names
      ('small', 'cast')
    """

    stages: tuple[tuple[str, Transform], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", _named(self.stages))

    def __repr__(self) -> str:
        usual = _named([transform for _, transform in self])
        if usual == self.stages:
            return f"Chain(({''.join(f'{transform!r}, ' for _, transform in self)[: -1 if len(self) == 1 else -2]}))"
        return f"Chain({dict(self.stages)!r})"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages, in order."""
        return tuple(name for name, _ in self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[tuple[str, Transform]]:
        return iter(self.stages)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, which: str | int) -> Transform:
        return self.stages[self._place("Chain", which)][1]

    def append(self, transform: Any, *, name: str | None = None) -> Chain:
        """Return the chain with another stage at the end."""
        return self.insert(len(self), transform, name=name)

    def insert(self, where: str | int, transform: Any, *, name: str | None = None) -> Chain:
        """Return the chain with another stage before a name or position."""
        at = len(self) if where == len(self) else self._place("Chain.insert", where)
        stages: list[Any] = list(self.stages)
        stages.insert(at, transform if name is None else (name, transform))
        return Chain(tuple(stages))

    def replace(self, which: str | int, transform: Any) -> Chain:
        """Return the chain with another transform under the name of a stage."""
        at = self._place("Chain.replace", which)
        stages = list(self.stages)
        stages[at] = (stages[at][0], transform)
        return Chain(tuple(stages))

    def remove(self, which: str | int) -> Chain:
        """Return the chain without a stage."""
        at = self._place("Chain.remove", which)
        return Chain(self.stages[:at] + self.stages[at + 1 :])

    def _place(self, call: str, which: Any) -> int:
        if isinstance(which, str) and which in self.names:
            return self.names.index(which)
        number = is_int(which)
        if number and -len(self) <= which < len(self):
            return int(which) % len(self)
        kind = IndexError if number else KeyError
        raise kind(f"{call}: {which!r} is no stage; expected one of {', '.join(self.names) or 'none, as it is empty'}.")

    def inverse(self) -> Chain:
        """Return the chain of inverses in reverse order; each uses the name, and the memory, of its stage.

        Raises:
          ValueError: a stage has no inverse; the message names it.
        """
        stages = []
        for name, transform in reversed(self.stages):
            inverse = transform.inverse()
            if inverse is None:
                raise ValueError(f"Chain: stage '{name}', {transform!r}, has no inverse. Use chain.remove({name!r}).")
            stages.append((name, inverse))
        return Chain(tuple(stages))

    @property
    def keyed(self) -> bool:
        return any(transform.keyed for _, transform in self)

    @property
    def row_by_row(self) -> bool:
        return all(transform.row_by_row for _, transform in self)

    def apply(self, data: PyTree, context: Context) -> PyTree:
        """Apply all stages; `context.memory` is a dict by names of stages."""
        number, more, windows = 0, None, context.lead == 2 and not context.writing
        for place, (name, transform) in enumerate(self.stages, 1):
            inner = self._inner(context, name, transform, number)
            if windows and place < len(self):
                if more is None and (context.collapsed or _may_collapse(transform)):
                    more = _longer_windows(data, inner)
                if more is not None:
                    more = _shapes_after(transform, more, inner)
            data = transform.apply(data, inner)
            if windows and place < len(self):
                context = context._replace(collapsed=_leaves_without_rows(data, more, context))
            number += transform.keyed
        return data

    def write(self, data: PyTree, context: Context) -> tuple[PyTree, dict[str, Any]]:
        """Apply all stages to rows, each after it has observed them; return the rows and the new memory."""
        memory = {}
        for name, transform in self:
            inner = self._inner(context, name, transform, 0)
            if isinstance(transform, Chain):
                data, memory[name] = transform.write(data, inner)
                continue
            if isinstance(transform, StatefulTransform):
                memory[name] = transform.observe(inner.memory, named_leaves(data), context.mask)
                inner = inner._replace(memory=memory[name])
            data = transform.apply(data, inner)
        return data, memory

    def _inner(self, context: Context, name: str, transform: Transform, number: int) -> Context:
        key = context.key
        if key is not None:
            key = jax.random.fold_in(key, number) if transform.keyed else None
        memory = context.memory.get(name) if isinstance(context.memory, Mapping) else None
        return context._replace(key=key, memory=memory)

    def watches(self, spec: Spec) -> tuple[str, ...]:
        named = [name for _, transform in self._remembering() for name in transform.watches(spec)]
        return tuple(dict.fromkeys(named))

    def init(self, spec: Spec) -> dict[str, Any]:
        return {name: transform.init(spec) for name, transform in self._remembering()}

    def observe(self, memory: Any, leaves: Mapping[str, jax.Array], mask: jax.Array) -> dict[str, Any]:
        return {name: transform.observe(memory[name], leaves, mask) for name, transform in self._remembering()}

    def stats(self, memory: Any) -> dict[str, jax.Array]:
        out: dict[str, jax.Array] = {}
        for name, transform in self._remembering():
            out |= {f"{name}_{number}": value for number, value in transform.stats(memory[name]).items()}
        return out

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of the stages with memory."""
        return tuple(n for n, t in self._remembering() if not isinstance(t, Chain) or t.remembers)

    def _remembering(self) -> list[tuple[str, StatefulTransform]]:
        return [(name, transform) for name, transform in self if isinstance(transform, StatefulTransform)]

    def opened(self, example: PyTree) -> tuple[dict[str, Any], PyTree]:
        """Return the memory before the first row, and the shapes of a row like `example` after all stages.

        Raises:
          ValueError, TypeError: a stage does not fit its input, or drops the leading axes.
        """
        memory: dict[str, Any] = {}
        for name, transform in self:
            if isinstance(transform, Chain):
                memory[name], example = transform.opened(example)
                continue
            if isinstance(transform, StatefulTransform):
                memory[name] = transform.init(spec_of(example))
            example = _after(name, transform, example, memory.get(name))
        return memory, example


def _after(name: str, transform: Transform, example: PyTree, memory: Any) -> PyTree:
    """Return the shapes of a row like `example` after a stage."""
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*_ROWS, *leaf.shape), leaf.dtype), example)

    def run(rows: PyTree, memory: Any) -> PyTree:
        context = Context(len(_ROWS), 0, True, jnp.ones(_ROWS, bool), None, memory)
        return transform.apply(rows, context)

    made = jax.eval_shape(run, rows, memory)
    if not jax.tree.leaves(made):
        what = f"stage '{name}' of on_write, {transform!r}, returns {made!r}"
        raise ValueError(f"Buffer: {what}; expected arrays. Return the row.")
    for leaf, shape in ((n, tuple(x.shape)) for n, x in named_leaves(made).items()):
        if shape[: len(_ROWS)] != _ROWS:
            raise ValueError(
                f"Buffer: stage '{name}' of on_write, {transform!r}, returns leaf '{leaf}' of shape {list(shape)} for rows "
                f"with leading axes {list(_ROWS)}. Keep the axes [N, E] of every leaf."
            )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[len(_ROWS) :], leaf.dtype), made)


def _may_collapse(transform: Transform) -> bool:
    """Return whether a transform may return one value per window: functions and custom transforms may."""
    if isinstance(transform, Chain):
        return any(_may_collapse(stage) for _, stage in transform)
    return isinstance(transform, Map) or not type(transform).__module__.startswith("fbuf.transforms.")


def chained(role: str, value: Any) -> Chain | None:
    """Return a chain of None, a transform, several, or a chain.

    Raises:
      TypeError: an element is no transform.
    """
    if value is None or isinstance(value, Chain):
        return value or None
    try:
        several = value if isinstance(value, (tuple, list, Mapping)) else (value,)
        return Chain(several) or None  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"Buffer: {role} is {value!r}. {error}") from None


def _named(stages: Any) -> tuple[tuple[str, Transform], ...]:
    """Return pairs, with generated names for unnamed stages."""
    if isinstance(stages, Mapping):
        stages = tuple(stages.items())
    if isinstance(stages, (str, type)) or not isinstance(stages, (tuple, list)):
        raise TypeError(f"Chain: stages is {stages!r}; expected transforms. Write Chain((Scale('obs'),)).")
    pairs = [stage if _is_pair(stage) else (None, stage) for stage in stages]
    for _, transform in pairs:
        _check(transform)
    chosen = [name for name, _ in pairs if name is not None]
    wrong = next((name for name in chosen if not name or "/" in name or not name.isprintable()), None)
    if wrong is not None:
        raise ValueError(f'Chain: stage name is {wrong!r}; expected printable text without "/".')
    twice = next((name for name in chosen if chosen.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"Chain: two stages are named '{twice}'; expected distinct names. Rename one of them.")
    out, taken = [], set(chosen)
    for name, transform in pairs:
        if name is None:
            base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(transform).__name__).lower()
            name, number = base, 1
            while name in taken:
                number += 1
                name = f"{base}_{number}"
            taken.add(name)
        out.append((name, transform))
    return tuple(out)


def _is_pair(stage: Any) -> bool:
    return isinstance(stage, (tuple, list)) and len(stage) == 2 and isinstance(stage[0], str)


def _check(transform: Any) -> None:
    if isinstance(transform, type):
        raise TypeError(f"Chain: stage is the class {transform.__name__}; expected an instance.")
    if not isinstance(transform, Transform):
        fix = f" Write Map({getattr(transform, '__name__', 'fn')})." if callable(transform) else ""
        raise TypeError(f"Chain: stage is {transform!r}; expected a fbuf.parts.Transform.{fix}")
    try:
        hash(transform)
    except TypeError:
        raise TypeError(f"Chain: stage {transform!r} is not hashable. Make its class a frozen dataclass.") from None


def _longer_windows(data: PyTree, context: Context) -> PyTree:
    """Return the shapes of a batch with windows of one more row."""

    def one(name: str, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        shape = tuple(leaf.shape)
        if name not in context.collapsed and shape[:2] == context.mask.shape:
            shape = (shape[0], shape[1] + 1, *shape[2:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    structure = jax.tree.structure(data)
    return jax.tree.unflatten(structure, [one(name, leaf) for name, leaf in named_leaves(data).items()])


def _shapes_after(transform: Transform, data: PyTree, context: Context) -> PyTree | None:
    """Return the shapes of a stage applied to longer windows; None if it rejects them."""
    batch, length = context.mask.shape

    def run(data: PyTree, key: jax.Array | None, memory: PyTree) -> PyTree:
        mask = jnp.ones((batch, length + 1), bool)
        made = transform.apply(data, context._replace(mask=mask, key=key, memory=memory))
        return jax.tree.map(jnp.asarray, made)

    try:
        return jax.eval_shape(run, data, context.key, context.memory)
    except Exception:  # of any user function
        return None


def _leaves_without_rows(data: PyTree, more: PyTree | None, context: Context) -> frozenset[str]:
    """Return the leaves without rows, by their shapes or by comparison with `more`, made of longer windows."""
    if more is None:
        return frozenset()
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(more).items()}
    found = ((name, jnp.shape(leaf)) for name, leaf in named_leaves(data).items())
    return frozenset(n for n, shape in found if shape[:2] != context.mask.shape or shapes.get(n) == shape)


def apply(
    transform: Transform,
    data: PyTree,
    *,
    lead: int = 1,
    time: int | None = None,
    mask: Any = None,
    key: jax.Array | None = None,
    memory: Any = None,
) -> PyTree:
    """Apply `transform` to a batch, eagerly or under jit.

    Args:
      transform: Any transform or chain: `buffer.on_write.inverse()`.
      data: Leaves `[B, ...]`; with `lead=2` `[B, T, ...]`.
      lead: Leading axes that count rows, 0 for a single row.
      time: Which of them is time, for transforms along time.
      mask: bool[*lead], rows that exist; None: all.
      key: PRNG key, for `keyed` transforms.
      memory: For transforms with memory: `state.transforms.read`, or `.write`, for the whole chain of a buffer.
    Raises:
      ValueError: a key is missing, or leaves do not fit the transform.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> scale = fbuf.transforms.Scale("obs", source="uint8")
      >>> small = fbuf.transforms.apply(scale, {"obs": jnp.array([[0, 51, 255]], jnp.uint8)})
      >>> fbuf.transforms.apply(scale.inverse(), small)["obs"].tolist()
      [[0, 51, 255]]
    """
    leaves = named_leaves(data)
    shapes = [jnp.shape(leaf)[:lead] for leaf in leaves.values()]
    if not shapes or len(shapes[0]) < lead or any(shape != shapes[0] for shape in shapes):
        found = ", ".join(f"'{n}' {list(jnp.shape(x))}" for n, x in leaves.items())
        raise ValueError(f"transforms.apply: leaves are {found or 'missing'}; expected {lead} equal axes. Set lead.")
    if transform.keyed and key is None:
        raise ValueError(f"transforms.apply: {transform!r} needs a key. Write apply(..., key=jax.random.key(0)).")
    if lead == 0:
        data = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], data)
        shapes = [(1,)]
    kept = jnp.ones(shapes[0], bool) if mask is None else jnp.asarray(mask).reshape(shapes[0])
    context = Context(max(lead, 1), time, False, kept, key, memory)
    out = transform.apply(jax.tree.map(jnp.asarray, data), context)
    return jax.tree.map(lambda leaf: leaf[0], out) if lead == 0 else out
