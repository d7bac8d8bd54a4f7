"""`Chain`: transforms one after another, each with a name, by which it is looked up and replaced.

A chain is a value like its stages: what changes it makes another one, so that a buffer that had it keeps its own. What
stages remember goes by their names, so that a chain with one stage more goes on with what the others know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec, named_leaves, spec_of
from fbuf._interfaces.transform import Context, StatefulTransform, Transform
from fbuf.transforms import _per_window
from fbuf.transforms._map import Map

_ROWS = (3, 2)  # leading axes of rows that shapes are tried with


@component
class Chain:
    """Transforms one after another.

    Attributes:
      stages: Transforms, or pairs (name, transform), or a dict of transforms by name. One without a name goes by its class:
        "scale", "normalize_reward"; the second of a kind is "scale_2".

    A chain is a transform itself. `chain["scale"]` and `chain[0]` are its stages, `len`, `in` (by name) and iteration (over
    pairs) work as one expects, and what changes it gives a new chain.

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

    # ------------------------------------------------------------------------------------------ as a sequence

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
        """With a stage more at the end."""
        return self.insert(len(self), transform, name=name)

    def insert(self, where: str | int, transform: Any, *, name: str | None = None) -> Chain:
        """With a stage more, before that of a name or a place."""
        at = len(self) if where == len(self) else self._place("Chain.insert", where)
        stages: list[Any] = list(self.stages)
        stages.insert(at, transform if name is None else (name, transform))
        return Chain(tuple(stages))

    def replace(self, which: str | int, transform: Any) -> Chain:
        """With another transform in place of a stage, under its name."""
        at = self._place("Chain.replace", which)
        stages = list(self.stages)
        stages[at] = (stages[at][0], transform)
        return Chain(tuple(stages))

    def remove(self, which: str | int) -> Chain:
        """Without a stage."""
        at = self._place("Chain.remove", which)
        return Chain(self.stages[:at] + self.stages[at + 1 :])

    def _place(self, call: str, which: Any) -> int:
        if isinstance(which, str) and which in self.names:
            return self.names.index(which)
        number = isinstance(which, (int, np.integer))
        if number and -len(self) <= which < len(self):
            return int(which) % len(self)
        kind = IndexError if number else KeyError
        raise kind(f"{call}: {which!r} is no stage; expected one of {', '.join(self.names) or 'none, as it is empty'}.")

    # ----------------------------------------------------------------------------------------- as a transform

    def inverse(self) -> Chain:
        """Undoes all stages, the last first; each goes by the name, and the memory, of what it undoes.

        Raises:
          ValueError: a stage cannot be undone; the message says which.
        """
        stages = []
        for name, transform in reversed(self.stages):
            inverse = getattr(transform, "inverse", None)
            if inverse is None:
                raise ValueError(
                    f"Chain.inverse: stage '{name}', {transform!r}, has no inverse; expected stages that can be undone. Leave "
                    f"it out: chain.remove({name!r}).inverse()."
                )
            stages.append((name, inverse()))
        return Chain(tuple(stages))

    @property
    def keyed(self) -> bool:
        return any(_wants_key(transform) for _, transform in self)

    def apply(self, data: PyTree, context: Context) -> PyTree:
        """What becomes of `data`; `context.memory` is a dict by names of stages."""
        number, more, windows = 0, None, context.lead == 2 and not context.writing
        for place, (name, transform) in enumerate(self.stages, 1):
            inner = self._inner(context, name, transform, number)
            if windows and place < len(self):
                if more is None and (context.collapsed or _may_collapse(transform)):
                    more = _per_window.longer(data, inner)
                if more is not None:
                    more = _per_window.after(transform, more, inner)
            data = transform.apply(data, inner)
            if windows and place < len(self):
                context = context._replace(collapsed=_per_window.names(data, more, context))
            number += _wants_key(transform)
        return data

    def write(self, data: PyTree, context: Context) -> tuple[PyTree, dict[str, Any]]:
        """Rows after all stages, each of which first looks at those that come to it; and what the stages know then."""
        memory = {}
        for name, transform in self:
            inner = self._inner(context, name, transform, 0)
            if isinstance(transform, Chain):
                data, memory[name] = transform.write(data, inner)
                continue
            if isinstance(transform, StatefulTransform):
                remembering: StatefulTransform = transform
                memory[name] = remembering.observe(inner.memory, named_leaves(data), context.mask)
                inner = inner._replace(memory=memory[name])
            data = transform.apply(data, inner)
        return data, memory

    def _inner(self, context: Context, name: str, transform: Transform, number: int) -> Context:
        key = context.key
        if key is not None:
            key = jax.random.fold_in(key, number) if _wants_key(transform) else None
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
        """Names of the stages that remember something."""
        return tuple(n for n, t in self._remembering() if not isinstance(t, Chain) or t.remembers)

    def _remembering(self) -> list[tuple[str, StatefulTransform]]:
        return [(name, transform) for name, transform in self if isinstance(transform, StatefulTransform)]

    def opened(self, example: PyTree) -> tuple[dict[str, Any], PyTree]:
        """What the stages know before the first row is written, and what becomes of a row like `example`, as shapes.

        Raises:
          ValueError, TypeError: a stage does not fit the rows that come to it, or loses their leading axes.
        """
        memory: dict[str, Any] = {}
        for name, transform in self:
            if isinstance(transform, Chain):
                memory[name], example = transform.opened(example)
                continue
            if isinstance(transform, StatefulTransform):
                remembering: StatefulTransform = transform
                memory[name] = remembering.init(spec_of(example))
            example = _after(name, transform, example, memory.get(name))
        return memory, example


def _after(name: str, transform: Transform, example: PyTree, memory: Any) -> PyTree:
    """Shapes of a row that was like `example`."""
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*_ROWS, *leaf.shape), leaf.dtype), example)

    def run(rows: PyTree, memory: Any) -> PyTree:
        context = Context(len(_ROWS), 0, True, jnp.ones(_ROWS, bool), None, memory)
        return transform.apply(rows, context)

    made = jax.eval_shape(run, rows, memory)
    for leaf, shape in ((n, tuple(x.shape)) for n, x in named_leaves(made).items()):
        if shape[: len(_ROWS)] != _ROWS:
            raise ValueError(
                f"Buffer: stage '{name}' of on_write, {transform!r}, makes leaf '{leaf}' of shape {list(shape)} out of rows "
                f"with leading axes {list(_ROWS)}; expected those first. Keep the axes [N, E] of every leaf."
            )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[len(_ROWS) :], leaf.dtype), made)


def _wants_key(transform: Transform) -> bool:
    return bool(getattr(transform, "keyed", False))


def _may_collapse(transform: Transform) -> bool:
    """Whether it may make one value of a window: a function may, and what is not ours."""
    if isinstance(transform, Chain):
        return any(_may_collapse(stage) for _, stage in transform)
    return isinstance(transform, Map) or not type(transform).__module__.startswith("fbuf.transforms.")


def chained(role: str, given: Any) -> Chain | None:
    """A chain of what a user gives: None, a transform, several, or a chain.

    Raises:
      TypeError: something of it is no transform.
    """
    if given is None or isinstance(given, Chain):
        return given or None
    try:
        several = given if isinstance(given, (tuple, list, Mapping)) else (given,)
        return Chain(several) or None  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"Buffer: {role} is {given!r}. {error}") from None


def _named(stages: Any) -> tuple[tuple[str, Transform], ...]:
    """Pairs, with names for those that have none."""
    if isinstance(stages, Mapping):
        stages = tuple(stages.items())
    if isinstance(stages, (str, type)) or not isinstance(stages, (tuple, list)):
        raise TypeError(
            f"Chain: stages is {stages!r}; expected transforms. Write Chain((Scale('obs'), Augment('obs')))."
        )
    pairs = [stage if _is_pair(stage) else (None, stage) for stage in stages]
    for _, transform in pairs:
        _check(transform)
    given = [name for name, _ in pairs if name is not None]
    wrong = next((name for name in given if not name or "/" in name or not name.isprintable()), None)
    if wrong is not None:
        raise ValueError(
            f'Chain: a stage has the name {wrong!r}; expected printable text without "/", as what a stage remembers is kept '
            f"under it. Write {{'scale': Scale(...)}}."
        )
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"Chain: two stages have the name '{twice}'; expected another for each. Rename one of them.")
    out, taken = [], set(given)
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
        raise TypeError(
            f"Chain: a stage is the class {transform.__name__}; expected a value. Write {transform.__name__}(...)."
        )
    if not isinstance(transform, Transform):
        fix = f" Write Map({getattr(transform, '__name__', 'fn')})." if callable(transform) else ""
        raise TypeError(
            f"Chain: a stage is {transform!r}, which has no `apply`; expected a transform (fbuf.parts.Transform).{fix}"
        )
    try:
        hash(transform)
    except TypeError:
        raise TypeError(
            f"Chain: stage {transform!r} does not hash; expected a value. Make its class a frozen dataclass of values."
        ) from None
