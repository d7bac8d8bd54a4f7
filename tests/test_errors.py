"""Bad input: each refusal names the call, the leaf, what came, what was expected and the code that fixes it.

What can be known of structure, dtype and shape is refused while tracing, so these tests run verbs under
`jax.eval_shape`, which never computes anything. What only values can tell (empty, stale, not finite) is masked and
counted instead, and these tests look at the counters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Device
from fbuf.views import Row, Transition

CAPACITY, BATCH = 12, 4
EXAMPLE = {
    "obs": jnp.zeros((2,), jnp.uint8),
    "reward": jnp.zeros((), jnp.float32),
    "next": {"done": jnp.zeros((), jnp.bool_)},
}
BUFFER = fbuf.Buffer(capacity=CAPACITY)
LANED = fbuf.Buffer(capacity=CAPACITY, lanes=3)
PRIORITIZED = fbuf.Buffer(capacity=CAPACITY, sampler=Prioritized(), episode_end=("next/done",))
KEY = jax.random.key(0)


def rows(*axes: int, **changes: Any) -> dict[str, Any]:
    """Rows as they should be, but for `changes`; a change to None leaves the leaf out."""
    good = jax.tree.map(lambda x: jnp.zeros((*axes, *x.shape), x.dtype), EXAMPLE)
    return {name: leaf for name, leaf in {**good, **changes}.items() if leaf is not None}


def index(*axes: int) -> fbuf.Index:
    return fbuf.Index(jnp.zeros(axes, jnp.int32), jnp.ones(axes, jnp.uint32))


STATE, LANED_STATE = BUFFER.init(EXAMPLE), LANED.init(EXAMPLE)
PRIORITIZED_STATE = PRIORITIZED.init(EXAMPLE)


def refuses(kind: type[Exception], *parts: str, call: Callable[[], Any]) -> None:
    """`call` raises `kind` while tracing, with every one of `parts` in its message."""
    with pytest.raises(kind) as caught:
        jax.eval_shape(call)
    message = str(caught.value).split("\n--------------------")[0]
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert len(message) < 600, message


# ------------------------------------------------------------------------------------------------ structure of rows

ROWS: dict[str, tuple[type[Exception], tuple[str, ...], Callable[[], Any]]] = {
    "missing key": (
        ValueError,
        ("Buffer.extend: leaf 'reward' is missing", "got: next/done, obs", "expected: next/done, obs, reward"),
        lambda: BUFFER.extend(STATE, rows(5, reward=None)),
    ),
    "extra key": (
        ValueError,
        ("Buffer.extend: leaf 'actoin' is not in this buffer", "expected: next/done, obs, reward"),
        lambda: BUFFER.extend(STATE, rows(5, actoin=jnp.zeros((5,), jnp.int32))),
    ),
    "wrong key, nested": (
        ValueError,
        ("leaf 'next/done' is missing and leaf 'next/end' is not in this buffer",),
        lambda: BUFFER.extend(STATE, rows(5, next={"end": jnp.zeros((5,), jnp.bool_)})),
    ),
    "same names, other structure": (
        ValueError,
        ("Buffer.extend: rows are", "expected PyTreeDef", "the example given to `init`"),
        lambda: BUFFER.extend(STATE, rows(5, next=Named(jnp.zeros((5,), jnp.bool_)))),
    ),
    "wrong dtype": (
        TypeError,
        ("Buffer.extend: leaf 'obs' is float32", "initialised with uint8", "x.astype(jnp.uint8)"),
        lambda: BUFFER.extend(STATE, rows(5, obs=jnp.zeros((5, 2), jnp.float32))),
    ),
    "wrong dtype, nested": (
        TypeError,
        ("leaf 'next/done' is float32", "initialised with bool", "x.astype("),
        lambda: BUFFER.extend(STATE, rows(5, next={"done": jnp.zeros((5,), jnp.float32)})),
    ),
    "wrong item shape": (
        ValueError,
        ("Buffer.extend: leaf 'obs' has shape [5, 3]", "expected [N, 2]"),
        lambda: BUFFER.extend(STATE, rows(5, obs=jnp.zeros((5, 3), jnp.uint8))),
    ),
    "no leading axis": (
        ValueError,
        (
            "leaf 'obs' has shape [2]; expected [N, 2]",
            "Add one row with `add`, or give it the leading axis with x[None]",
        ),
        lambda: BUFFER.extend(STATE, rows(obs=jnp.zeros((2,), jnp.uint8), next={"done": jnp.zeros((1,), jnp.bool_)})),
    ),
    "a leading axis too many": (
        ValueError,
        ("Buffer.add: leaf 'next/done' has shape [5]; expected [].", "Add several rows with `extend`."),
        lambda: BUFFER.add(STATE, rows(5)),
    ),
    "a last axis of one": (
        ValueError,
        ("Buffer.extend: leaf 'reward' has shape [5, 1]; expected [N].", "x.squeeze(-1)"),
        lambda: BUFFER.extend(STATE, rows(5, reward=jnp.zeros((5, 1), jnp.float32))),
    ),
    "a list for an array": (
        ValueError,
        ("Buffer.extend: leaf 'obs' is missing", "... 42 in all", "'obs': np.asarray(x, dtype)"),
        lambda: BUFFER.extend(STATE, rows(5, obs=[[0, 0]] * 20)),
    ),
    "lengths differ": (
        ValueError,
        ("leaf 'obs' has 4 entries on axis 0", "leaf 'next/done' has 5", "the same leading axes"),
        lambda: BUFFER.extend(STATE, rows(5, obs=jnp.zeros((4, 2), jnp.uint8))),
    ),
    "lanes differ": (
        ValueError,
        ("has 2 entries on axis 1 of [N, E, ...]", "this buffer has 3", "All leaves need"),
        lambda: LANED.extend(LANED_STATE, rows(5, 2)),
    ),
    "lanes before time": (
        ValueError,
        ("has 5 entries on axis 1 of [N, E, ...]", "this buffer has 3. Time comes first: x.swapaxes(0, 1)."),
        lambda: LANED.extend(LANED_STATE, rows(3, 5)),
    ),
    "lanes left out": (
        ValueError,
        (
            "leaf 'next/done' has shape [5]; expected [N, E].",
            "There are 3 lanes: rows of each side by side, [N, 3, ...].",
        ),
        lambda: LANED.extend(LANED_STATE, rows(5)),
    ),
    "lanes left out of one row": (
        ValueError,
        ("Buffer.add: leaf 'next/done' has shape []; expected [E].", "There are 3 lanes: add one row of each"),
        lambda: LANED.add(LANED_STATE, rows()),
    ),
    "one row of each lane, extended": (
        ValueError,
        ("leaf 'next/done' has shape [3]; expected [N, E].", "Add one row of each lane with `add`, or", "x[None]"),
        lambda: LANED.extend(LANED_STATE, rows(3)),
    ),
    "scalar for array": (
        ValueError,
        ("Buffer.extend: leaf 'reward' has shape []; expected [N]",),
        lambda: BUFFER.extend(STATE, rows(5, reward=0.0)),
    ),
    "scalar of another kind": (
        TypeError,
        ("Buffer.add: leaf 'obs' is", "initialised with uint8"),
        lambda: BUFFER.add(STATE, rows(obs=0.5)),
    ),
}


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """A node whose leaf is named as a dict's would be."""

    def __init__(self, done: Any):
        self.done = done

    def tree_flatten_with_keys(self) -> Any:
        return ((jax.tree_util.GetAttrKey("done"), self.done),), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Named:
        return cls(*children)


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_do_not_fit(case: str) -> None:
    kind, parts, call = ROWS[case]
    refuses(kind, *parts, call=call)


def test_a_bare_array_is_a_row_too() -> None:
    buffer = fbuf.Buffer(capacity=4)
    state = buffer.init(jnp.zeros((3,), jnp.float32))
    with pytest.raises(ValueError, match=r"Buffer.extend: the row has shape \[2, 4\]; expected \[N, 3\]"):
        buffer.extend(state, jnp.zeros((2, 4), jnp.float32))


@pytest.mark.parametrize(
    "verb",
    [
        lambda state: BUFFER.sample(state, KEY, BATCH),
        lambda state: BUFFER.extend(state, rows(2)),
        BUFFER.size,
        BUFFER.rows,
        BUFFER.clear,
    ],
)
def test_a_donated_state_is_named(verb: Callable[[Any], Any]) -> None:
    state = BUFFER.init(EXAMPLE)
    jax.jit(BUFFER.extend, donate_argnums=0)(state, rows(2))
    with pytest.raises(RuntimeError, match=r"^Buffer\.\w+: the state was donated.*state = step\(state\)"):
        verb(state)


def test_errors_leave_the_state_usable() -> None:
    state = BUFFER.extend(STATE, rows(3))
    with pytest.raises(TypeError):
        BUFFER.extend(state, rows(5, obs=jnp.zeros((5, 2), jnp.float32)))
    assert int(BUFFER.size(BUFFER.extend(state, rows(2)))) == 5


# ---------------------------------------------------------------------------------------------------- arguments

ARGUMENTS: dict[str, tuple[type[Exception], tuple[str, ...], Callable[[], Any]]] = {
    "swapped, extend": (
        TypeError,
        ("Buffer.extend: first argument is dict, expected BufferState", "extend(state, rows)"),
        lambda: BUFFER.extend(rows(5), STATE),
    ),
    "swapped, add": (
        TypeError,
        ("Buffer.add: first argument is dict", "add(state, row)"),
        lambda: BUFFER.add(rows(), STATE),
    ),
    "swapped, sample": (
        TypeError,
        ("Buffer.sample: first argument is", "expected BufferState", "sample(state, key, batch_size)"),
        lambda: BUFFER.sample(KEY, STATE, BATCH),
    ),
    "swapped, key and batch_size": (
        TypeError,
        ("Buffer.sample: batch_size is", "expected a Python int", "sample(state, key, batch_size)"),
        lambda: BUFFER.sample(STATE, BATCH, KEY),
    ),
    "swapped, update_priority": (
        TypeError,
        ("Buffer.update_priority: index is", "Pass batch.index"),
        lambda: PRIORITIZED.update_priority(PRIORITIZED_STATE, jnp.zeros((BATCH,), jnp.float32), index(BATCH)),
    ),
    "swapped, convert": (
        TypeError,
        ("Buffer.convert: other is BufferState; expected a Buffer", "convert(other, state)"),
        lambda: BUFFER.convert(STATE, STATE),
    ),
    "batch_size 0": (
        ValueError,
        ("Buffer.sample: batch_size is 0; expected an int >= 1",),
        lambda: BUFFER.sample(STATE, KEY, 0),
    ),
    "batch_size negative": (ValueError, ("batch_size is -1",), lambda: BUFFER.peek(STATE, KEY, -1)),
    "batch_size a float": (
        TypeError,
        ("batch_size is float; expected a Python int",),
        lambda: BUFFER.sample(STATE, KEY, 4.0),  # type: ignore[arg-type]
    ),
    "batch_size a bool": (TypeError, ("batch_size is bool",), lambda: BUFFER.sample(STATE, KEY, True)),
    "a seed for a key": (
        TypeError,
        ("Buffer.sample: key is int; expected a PRNG key", "jax.random.key(0)"),
        lambda: BUFFER.sample(STATE, 0, BATCH),  # type: ignore[arg-type]
    ),
    "an unknown option": (
        ValueError,
        ("Buffer.sample: Uniform() has no number 'beta' (it has: none)",),
        lambda: BUFFER.sample(STATE, KEY, BATCH, beta=0.5),
    ),
    "an unknown number": (
        ValueError,
        ("Buffer.set:", "has no number 'gamma' (it has: alpha, beta, eps)"),
        lambda: PRIORITIZED.set(PRIORITIZED_STATE, gamma=0.5),
    ),
    "priorities for Uniform": (
        TypeError,
        ("Buffer.update_priority: Uniform() has no priorities", "sampler=fbuf.samplers.Prioritized()"),
        lambda: BUFFER.update_priority(STATE, index(BATCH), jnp.zeros((BATCH,), jnp.float32)),
    ),
    "priority= for Uniform": (
        TypeError,
        ("Buffer.extend: priority is given, but Uniform() has no priorities", "Prioritized()"),
        lambda: BUFFER.extend(STATE, rows(5), priority=jnp.ones((5,), jnp.float32)),
    ),
    "priority= of another shape": (
        ValueError,
        ("Buffer.extend: priority has shape [4]; expected [5]",),
        lambda: PRIORITIZED.extend(PRIORITIZED_STATE, rows(5), priority=jnp.ones((4,), jnp.float32)),
    ),
    "mask= of another dtype": (
        TypeError,
        ("Buffer.extend: mask is float32; expected a boolean array of shape [5]",),
        lambda: BUFFER.extend(STATE, rows(5), mask=jnp.ones((5,), jnp.float32)),
    ),
    "mask= of another shape": (
        ValueError,
        ("Buffer.extend: mask has shape [5]; expected [5, 3]",),
        lambda: LANED.extend(LANED_STATE, rows(5, 3), mask=jnp.ones((5,), jnp.bool_)),
    ),
    "td_error of another shape": (
        ValueError,
        ("Buffer.update_priority: td_error has shape [4, 1]; expected [4]",),
        lambda: PRIORITIZED.update_priority(PRIORITIZED_STATE, index(4), jnp.zeros((4, 1), jnp.float32)),
    ),
    "td_error of another dtype": (
        TypeError,
        ("Buffer.update_priority: td_error is bool", "expected a floating or integer array of shape [4]"),
        lambda: PRIORITIZED.update_priority(PRIORITIZED_STATE, index(4), jnp.zeros((4,), jnp.bool_)),
    ),
    "an index of two axes": (
        ValueError,
        ("Buffer.update_priority: index has shape [4, 2]; expected [B]", "x.reshape(-1)"),
        lambda: PRIORITIZED.update_priority(PRIORITIZED_STATE, index(4, 2), jnp.zeros((4, 2), jnp.float32)),
    ),
    "slots for an index": (
        TypeError,
        ("Buffer.update_rows: index is", "expected the Index of a batch", "batch.index"),
        lambda: BUFFER.update_rows(STATE, jnp.zeros((4,), jnp.int32), {"reward": jnp.zeros((4,), jnp.float32)}),
    ),
    "get with floats": (
        TypeError,
        ("Buffer.get: index is float32; expected an Index or int32 slots", "batch.index"),
        lambda: BUFFER.get(STATE, jnp.zeros((4,), jnp.float32)),
    ),
    "update_rows of a missing field": (
        ValueError,
        ("Buffer.update_rows: leaf 'value' is not in this buffer", "it has: next/done, obs, reward", "Write {'"),
        lambda: BUFFER.update_rows(STATE, index(4), {"value": jnp.zeros((4,), jnp.float32)}),
    ),
    "update_rows of nothing": (
        ValueError,
        ("Buffer.update_rows: no fields are given",),
        lambda: BUFFER.update_rows(STATE, index(4), {}),
    ),
    "update_rows of an episode's end": (
        ValueError,
        ("Buffer.update_rows: leaf 'next/done' says where episodes end", "Leave it out"),
        lambda: PRIORITIZED.update_rows(PRIORITIZED_STATE, index(4), {"next": {"done": jnp.zeros((4,), jnp.bool_)}}),
    ),
    "update_rows of another dtype": (
        TypeError,
        ("Buffer.update_rows: leaf 'reward' is int32", "initialised with float32", "x.astype(jnp.float32)"),
        lambda: BUFFER.update_rows(STATE, index(4), {"reward": jnp.zeros((4,), jnp.int32)}),
    ),
    "update_rows of another length": (
        ValueError,
        ("Buffer.update_rows: leaf 'reward' has 3 entries on axis 0 of [B, ...]", "the index has 4"),
        lambda: BUFFER.update_rows(STATE, index(4), {"reward": jnp.zeros((3,), jnp.float32)}),
    ),
    "update_rows with one value": (
        ValueError,
        ("Buffer.update_rows: leaf 'reward' has shape []; expected [B].", "jnp.broadcast_to(x, (4,))"),
        lambda: BUFFER.update_rows(STATE, index(4), {"reward": jnp.float32(0)}),
    ),
    "get of a slice": (
        TypeError,
        ("Buffer.get: index is slice(None, 3, None)", "jnp.arange(start, stop)", "last(state, n)"),
        lambda: BUFFER.get(STATE, slice(3)),
    ),
    "last of none": (
        ValueError,
        ("Buffer.last: n is 0; expected an int from 1 to 12",),
        lambda: BUFFER.last(STATE, 0),
    ),
    "last of more than a lane": (
        ValueError,
        ("Buffer.last: n is 5; expected an int from 1 to 4",),
        lambda: LANED.last(LANED_STATE, 5),
    ),
    "convert to another capacity": (
        ValueError,
        ("Buffer.convert: other.capacity is 13; expected 12", "other.extend(other.init(example), rows)"),
        lambda: BUFFER.convert(fbuf.Buffer(capacity=13), STATE),
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_do_not_fit(case: str) -> None:
    kind, parts, call = ARGUMENTS[case]
    refuses(kind, *parts, call=call)


@pytest.mark.parametrize(
    "verb",
    [
        "extend",
        "add",
        "sample",
        "peek",
        "update_priority",
        "update_rows",
        "clear",
        "set",
        "get",
        "rows",
        "last",
        "stats",
    ]
    + ["can_sample", "convert"],
)
def test_every_verb_refuses_what_is_no_state(verb: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "extend": (rows(1),),
        "add": (rows(),),
        "sample": (KEY, 1),
        "peek": (KEY, 1),
        "update_priority": (index(1), jnp.zeros((1,), jnp.float32)),
        "update_rows": (index(1), {"reward": jnp.zeros((1,), jnp.float32)}),
        "get": (index(1),),
        "last": (1,),
    }
    with pytest.raises(
        TypeError, match=rf"Buffer\.{verb}: first argument is Uniform, expected BufferState\. The order"
    ):
        if verb == "convert":
            PRIORITIZED.convert(BUFFER, Uniform())  # type: ignore[arg-type]
        else:
            getattr(PRIORITIZED, verb)(Uniform(), *arguments.get(verb, ()))


def test_a_traced_batch_size() -> None:
    with pytest.raises(TypeError, match=r"batch_size is traced; expected a Python int\. Make it static"):
        jax.jit(lambda n: BUFFER.peek(STATE, KEY, n))(4)


# -------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: fbuf.Buffer(capacity=0), ValueError, "Buffer: capacity is 0; expected an int >= 1"),
        (lambda: fbuf.Buffer(capacity=1e6), ValueError, "Buffer: capacity is 1000000.0; expected an int >= 1"),
        (lambda: fbuf.Buffer(capacity=True), ValueError, "capacity is True"),
        (lambda: fbuf.Buffer(capacity=2**31), ValueError, "expected less than 2^31 - 2^24 (slots are int32)"),
        (lambda: fbuf.Buffer(capacity=12, lanes=0), ValueError, "Buffer: lanes is 0; expected an int >= 1, or None"),
        (
            lambda: fbuf.Buffer(capacity=100, lanes=8),
            ValueError,
            "Buffer: capacity is 100, not a multiple of lanes=8. Use capacity=96 or 104.",
        ),
        (lambda: fbuf.Buffer(capacity=3, lanes=8), ValueError, "not a multiple of lanes=8. Use capacity=8."),
        (
            lambda: fbuf.Buffer(capacity=10, episode_end="done"),
            TypeError,
            "Buffer: episode_end is 'done'; expected a tuple. Write episode_end=('done',).",
        ),
        (
            lambda: fbuf.Buffer(capacity=10, sampler=Uniform),
            TypeError,
            "Buffer: sampler is the class Uniform; expected a value. Write Uniform().",
        ),
        (
            lambda: fbuf.Buffer(capacity=10, view=fbuf.views.Sequence),
            TypeError,
            "Buffer: view is the class Sequence; expected a value. Write Sequence(...).",
        ),
        (
            lambda: fbuf.Buffer(capacity=10, storage="compressed"),
            TypeError,
            "Buffer: storage is 'compressed'; expected a part of fbuf.storages. Write Buffer(..., "
            "storage=fbuf.storages.Compressed()).",
        ),
        (lambda: fbuf.Buffer(10, view="sequence"), TypeError, "Write Buffer(..., view=fbuf.views.Sequence(...))."),
        (lambda: fbuf.Buffer(10, 32), TypeError, "Buffer: storage is 32; expected a part of fbuf.storages."),
        (
            lambda: fbuf.Buffer(10, Prioritized()),
            TypeError,
            "Buffer: storage is Prioritized(), a sampler; expected a storage. Write sampler=Prioritized().",
        ),
        (lambda: fbuf.Buffer(capacity=10, view=object), TypeError, "Buffer: view is the class object"),
        (lambda: fbuf.Buffer(capacity=10, view=(1,)), TypeError, "Buffer: view is (1,), which has no `"),
        (
            lambda: fbuf.Buffer(capacity=8, lanes=2, view=Transition(n_step=3, stack=4)),
            ValueError,
            "looks at 7 rows at a time, but there is room for 4 a lane (capacity / lanes = 4). Use capacity=14 or more.",
        ),
        (
            lambda: Prioritized(alpha=-1.0),
            ValueError,
            "Prioritized: alpha is -1.0; expected a finite Python number >= 0",
        ),
        (lambda: Prioritized(beta=float("nan")), ValueError, "Prioritized: beta is nan"),
        (
            lambda: Prioritized(eps=jnp.zeros(())),
            ValueError,
            "Numbers that change go through buffer.set(state, eps=...)",
        ),
        (lambda: Prioritized(normalize="max"), ValueError, "Prioritized: normalize is 'max'; expected \"batch\""),
        (lambda: Transition(n_step=0), ValueError, "Transition: n_step is 0; expected an int >= 1"),
        (lambda: Transition(stack=0), ValueError, "Transition: stack is 0; expected an int >= 1, or None"),
        (lambda: Transition(gamma=1.5), ValueError, "Transition: gamma is 1.5; expected a number in [0, 1]"),
        (lambda: Transition(pad="edge"), ValueError, 'Transition: pad is \'edge\'; expected "zero" or "repeat"'),
        (lambda: Transition(autoreset="none"), ValueError, "Transition: autoreset is 'none'; expected \"same_step\""),
        (
            lambda: Transition(autoreset="next_step", final_observation="final"),
            ValueError,
            "Drop one of the two",
        ),
    ],
)
def test_configurations_that_cannot_be(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make()


ROW = {
    "obs": jnp.zeros((2,), jnp.uint8),
    "action": jnp.zeros((), jnp.int32),
    "reward": jnp.zeros((), jnp.float32),
    "terminated": jnp.zeros((), jnp.bool_),
    "truncated": jnp.zeros((), jnp.bool_),
}


@pytest.mark.parametrize(
    ("buffer", "example", "kind", "message"),
    [
        (BUFFER, {}, ValueError, "Buffer.init: the example has no leaves; expected one row"),
        (
            BUFFER,
            {"a": jax.random.key(0)},
            TypeError,
            "leaf 'a' is a typed PRNG key; expected a plain array. Store jax",
        ),
        (BUFFER, {"a": np.array("text")}, TypeError, "Buffer.init: leaf 'a' is <U4; expected numbers or booleans"),
        (BUFFER, {"a": object()}, TypeError, "leaf 'a' is object; expected numbers or booleans"),
        (
            fbuf.Buffer(capacity=8, episode_end=("done",)),
            ROW,
            ValueError,
            "Buffer.init: episode_end names 'done', but rows have action, obs, reward, terminated, truncated",
        ),
        (
            fbuf.Buffer(capacity=8, episode_end=("reward",)),
            ROW,
            TypeError,
            "Buffer.init: episode_end leaf 'reward' is float32[]; expected bool[] a row. Cast with x.astype(bool).",
        ),
        (
            fbuf.Buffer(capacity=8, view=Transition(observation="pixels")),
            ROW,
            ValueError,
            "Transition: observation is 'pixels', but rows have action, obs, reward, terminated, truncated. "
            "Name the leaf: Transition(observation=...).",
        ),
        (
            fbuf.Buffer(capacity=8, view=Transition(truncated="cut")),
            ROW,
            ValueError,
            "Name the leaf: Transition(truncated=...), or None if there is none.",
        ),
        (
            fbuf.Buffer(capacity=8, view=Transition(terminated="reward")),
            ROW,
            TypeError,
            "Transition: leaf 'reward' is float32[]; expected bool[] a row. Cast with x.astype(bool).",
        ),
        (
            fbuf.Buffer(capacity=8, view=Transition(final_observation="action")),
            ROW,
            ValueError,
            "Transition: 'action' is",
        ),
        (
            fbuf.Buffer(capacity=8, view=Transition()),
            {**ROW, "discount": ROW["reward"]},
            ValueError,
            "Transition: rows have a leaf 'discount', a name this view makes itself",
        ),
    ],
)
def test_examples_that_do_not_fit(buffer: fbuf.Buffer, example: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        buffer.init(example)


def test_a_field_that_does_not_hash() -> None:
    unhashable = type("Unhashable", (Uniform,), {"__hash__": None})()
    with pytest.raises(TypeError, match=r"Buffer: field 'sampler' is .* which does not hash; expected a value"):
        fbuf.Buffer(capacity=4, sampler=unhashable)


# ------------------------------------------------------------------------------------- values: masked and counted


def counts(buffer: fbuf.Buffer, state: Any) -> dict[str, int]:
    names = ("refused_nonfinite", "refused_out_of_range", "refused_stale", "refused_closed", "empty_samples")
    return {name: int(buffer.stats(state)[name]) for name in names if int(buffer.stats(state)[name])}


@pytest.fixture(params=[Uniform(), Prioritized()], ids=str)
def sampler(request: pytest.FixtureRequest) -> Any:
    """The other samplers are in tests/exhaustive."""
    return request.param


@pytest.fixture(params=[Transition(n_step=2, stack=2)], ids=str)
def view(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_an_empty_sample_is_masked_and_counted(sampler: Any, view: Any) -> None:
    buffer = fbuf.Buffer(capacity=CAPACITY, sampler=sampler, view=view)
    state, batch = buffer.sample(buffer.init(ROW), KEY, BATCH)
    assert not bool(buffer.can_sample(state))
    for leaf in jax.tree.leaves((batch.data, batch.probability, batch.weight, batch.mask, batch.index.ticket)):
        assert not np.any(leaf)
    assert np.all(batch.index.slot == CAPACITY)
    assert counts(buffer, state) == {"empty_samples": 1}
    if sampler.prioritized:  # and what it gave is skipped without being counted as anyone's mistake
        after = buffer.update_priority(state, batch.index, jnp.ones((BATCH,), jnp.float32))
        assert counts(buffer, after) == {"empty_samples": 1}


def prioritized(view: Any = None) -> tuple[fbuf.Buffer, Any]:
    buffer = fbuf.Buffer(capacity=CAPACITY, sampler=Prioritized(alpha=1.0, eps=0.0), view=view or Row())
    many = jax.tree.map(lambda x: jnp.zeros((8, *x.shape), x.dtype), ROW)
    return buffer, buffer.extend(buffer.init(ROW), many)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_priorities_that_are_not_finite_are_refused_one_by_one(bad: float) -> None:
    buffer, state = prioritized()
    where = buffer.get(state, jnp.arange(3, dtype=jnp.int32)).index
    after = buffer.update_priority(state, where, jnp.array([2.0, bad, 4.0], jnp.float32))
    assert counts(buffer, after) == {"refused_nonfinite": 1}
    assert after.sampler.tree[:4].tolist() == [2.0, 1.0, 4.0, 1.0]
    assert float(after.sampler.max_priority) == 4.0


def test_priorities_that_are_not_finite_are_refused_by_extend() -> None:
    buffer, state = prioritized()
    more = jax.tree.map(lambda x: jnp.zeros((3, *x.shape), x.dtype), ROW)
    after = buffer.extend(state, more, priority=jnp.array([jnp.nan, 3.0, jnp.inf], jnp.float32))
    assert counts(buffer, after) == {"refused_nonfinite": 2}
    # as if none was given: the largest so far, which the other one raises only afterwards
    assert after.sampler.tree[8:11].tolist() == [1.0, 3.0, 1.0]


@pytest.mark.parametrize("slot", [-1, CAPACITY, CAPACITY + 5, 2**31 - 1, -(2**31)])
def test_priorities_out_of_range_are_refused(slot: int) -> None:
    buffer, state = prioritized()
    where = fbuf.Index(jnp.array([slot, 1], jnp.int32), jnp.array([1, 1], jnp.uint32))
    after = buffer.update_priority(state, where, jnp.array([7.0, 5.0], jnp.float32))
    assert counts(buffer, after) == {"refused_out_of_range": 1}
    assert float(after.sampler.tree.max()) == float(after.sampler.tree[:CAPACITY].sum()) == 12.0
    assert float(after.sampler.max_priority) == 5.0


@pytest.mark.parametrize("ticket", [0, 1])
def test_priorities_of_rows_never_written_are_refused(ticket: int) -> None:
    buffer, state = prioritized()
    where = fbuf.Index(jnp.array([CAPACITY - 1], jnp.int32), jnp.array([ticket], jnp.uint32))
    after = buffer.update_priority(state, where, jnp.array([7.0], jnp.float32))
    assert counts(buffer, after) == {"refused_stale": 1}
    assert float(after.sampler.tree[:CAPACITY].sum()) == 8.0


def test_stale_indices_are_refused() -> None:
    buffer, state = prioritized()
    state, batch = buffer.sample(state, KEY, BATCH)
    more = jax.tree.map(lambda x: jnp.ones((CAPACITY, *x.shape), x.dtype), ROW)
    state = buffer.extend(state, more)  # every row it named is gone
    after = buffer.update_priority(state, batch.index, jnp.full((BATCH,), 9.0, jnp.float32))
    assert counts(buffer, after) == {"refused_stale": BATCH}
    assert float(after.sampler.max_priority) == 1.0
    after = buffer.update_rows(after, batch.index, {"reward": jnp.full((BATCH,), 9.0, jnp.float32)})
    assert counts(buffer, after) == {"refused_stale": 2 * BATCH}
    assert np.all(buffer.rows(after).data["reward"] == 1.0)
    assert not np.any(buffer.get(after, batch.index).mask)


def test_rows_that_cannot_be_drawn_yet_are_refused() -> None:
    buffer, state = prioritized(Transition(n_step=2))
    newest = buffer.last(state, 1).index  # its successor has not come
    after = buffer.update_priority(state, newest, jnp.array([9.0], jnp.float32))
    assert counts(buffer, after) == {"refused_closed": 1}


def test_clear_makes_every_index_stale() -> None:
    buffer, state = prioritized()
    state, batch = buffer.sample(state, KEY, BATCH)
    state = buffer.clear(state)
    state = buffer.extend(state, jax.tree.map(lambda x: jnp.zeros((8, *x.shape), x.dtype), ROW))
    after = buffer.update_priority(state, batch.index, jnp.ones((BATCH,), jnp.float32))
    assert counts(buffer, after) == {"refused_stale": BATCH}


# ------------------------------------------------------------------------------------------------ storages


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: fbuf.storages.Host(keys="obs"), TypeError, "Host: keys is 'obs'; expected a tuple of names"),
        (lambda: fbuf.storages.Host(on_expired="zero"), ValueError, "Host: on_expired is 'zero'; expected \"raise\""),
        (lambda: fbuf.storages.Host(slack=-1), ValueError, "Host: slack is -1; expected an int >= 0"),
        (lambda: fbuf.storages.Compressed(keys="obs"), TypeError, "Compressed: keys is 'obs'; expected a tuple"),
        (lambda: fbuf.storages.Deduplicated(keys="obs"), TypeError, "Write keys=('obs',)."),
        (lambda: fbuf.storages.Deduplicated(blocks=65), ValueError, "blocks is 65; expected a multiple of 32"),
        (lambda: fbuf.storages.Deduplicated(on_full="grow"), ValueError, "on_full is 'grow'; expected \"retire\""),
    ],
)
def test_host_settings_that_cannot_be(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make()


@pytest.mark.parametrize("storage", [Device(), fbuf.storages.Deduplicated(keys=("obs",))])
def test_device_init_traces(storage: Any) -> None:
    """Host storages refuse to; see tests/test_host.py."""
    buffer = fbuf.Buffer(capacity=CAPACITY, storage=storage)
    shapes = jax.eval_shape(buffer.init, EXAMPLE)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), buffer.init(EXAMPLE)
    )
