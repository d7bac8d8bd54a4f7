"""Errors name the call, the leaf, the value, what was expected and the code that fixes it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401
import numpy as np
import pytest

import fbuf
from fbuf._buffer.state import COUNTERS
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from tests.support import refusals
from tests.support.refusals import raises
from tests.support.tables import one_of
from tests.support.trees import row_with

CAPACITY, BATCH = 12, 4
EXAMPLE = {"obs": np.zeros(2, np.uint8), "reward": np.float32(0), "next": {"done": np.bool_(False)}}
BUFFER = fbuf.Buffer(capacity=CAPACITY)
LANED = fbuf.Buffer(capacity=CAPACITY, lanes=3)
PRIORITIZED = fbuf.Buffer(capacity=CAPACITY, sampler=Prioritized(), episode_end=("next/done",))
KEY = jax.random.key(0)


def many(count, row):
    return jax.tree.map(lambda x: np.zeros((count, *np.shape(x)), x.dtype), row)


def rows(*axes, **changes):
    """Rows as they should be, but for `changes`; a change to None leaves the leaf out."""
    good = jax.tree.map(lambda x: np.zeros((*axes, *x.shape), x.dtype), EXAMPLE)
    return {name: leaf for name, leaf in {**good, **changes}.items() if leaf is not None}


def index(*axes):
    return fbuf.Index(np.zeros(axes, np.int32), np.ones(axes, np.uint32))


def zeros(*axes, dtype="float32"):
    return np.zeros(axes, dtype)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Named:
    """A node whose leaf is named as a dict's would be."""

    done: Any

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("done"), self.done),), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


ROWS = """
BUFFER.extend(state, rows(5, obs=zeros(5, 2))) => TypeError 'obs' is float32; | with uint8. | or convert the rows
BUFFER.extend(state, rows(5, obs=zeros(5, 2, dtype="int8"))) => TypeError 'obs' is int8; | Cast with x.astype(jnp.uint8), or
BUFFER.extend(state, rows(5, actoin=zeros(5))) => ValueError leaf 'actoin' is not in | expected: next/done, obs, reward
BUFFER.extend(state, rows(5, next={"end": zeros(5, dtype="bool")})) => ValueError 'next/done' is missing and leaf 'next/end' is
BUFFER.extend(state, rows(5, next=Named(zeros(5, dtype="bool")))) => ValueError rows are | expected PyTreeDef | as in `init`
BUFFER.extend(state, rows(5, info={})) => ValueError as in `init`. Leave out 'info', which has no leaf.
BUFFER.extend(state, rows(5, reward=np.array(["a"] * 5))) => TypeError 'reward' is <U1; | Convert it to float32 | Ragged()
BUFFER.extend(state, rows(5, obs=zeros(5, 3, dtype="uint8"))) => ValueError leaf 'obs' has shape [5, 3] | expected [N, 2]
BUFFER.extend(state, rows(obs=zeros(2, dtype="uint8"), next={"done": zeros(1, dtype="bool")})) => ValueError
    leaf 'obs' has shape [2]; expected [N, 2] | Add one row with `add` | or give it the leading axis with x[None]
BUFFER.add(state, rows(5)) => ValueError leaf 'next/done' has shape [5]; expected []. | Add several rows with `extend`.
BUFFER.extend(state, rows(5, reward=zeros(5, 1))) => ValueError 'reward' has shape [5, 1]; expected [N]. | x.squeeze(-1)
BUFFER.extend(state, rows(5, obs=[[0, 0]] * 20)) => ValueError leaf 'obs' is missing | ... 42 in all | np.asarray(x, dtype)
BUFFER.add(BUFFER.init({'obs': [0, 0]}), {'obs': zeros(2)}) => ValueError 'obs/0' is missing | Of the list in the example
BUFFER.add(BUFFER.init({'obs': (8, 8)}), {'obs': zeros(8, 8)}) => ValueError 'obs/0' is missing | of a shape np.zeros(x
BUFFER.extend(state, rows(5, obs=zeros(4, 2, dtype="uint8"))) => ValueError 'obs' has 4 entries on axis 0 | 'next/done' has 5
LANED.extend(laned, rows(3, 5)) => ValueError has 5 entries on axis 1 of [N, E, ...] | this buffer has 3. | x.swapaxes(0, 1).
LANED.extend(laned, rows(5)) => ValueError 'next/done' has shape [5]; expected [N, E]. | stack their rows along axis 1
LANED.add(laned, rows()) => ValueError 'next/done' has shape []; expected [E]. | There are 3 lanes: add one row of each
LANED.extend(laned, rows(3)) => ValueError 'next/done' has shape [3]; expected [N, E]. | with `add`, or | x[None]
BUFFER.add(state, [rows()]) => TypeError Buffer.add: the row is a list; expected one dict. Add several with `extend`.
BUFFER.add(state, rows() | {"next": {"done": 0}}) => TypeError is int32; | Cast with np.bool(x), or initialise with int32.
BUFFER.add(state, rows() | {"reward": 1j}) => TypeError 'reward' is complex64; | Initialise with complex64
fbuf.Buffer(capacity=4).extend(bare, zeros(2, 4)) => ValueError Buffer.extend: the row has shape [2, 4]; expected [N, 3]
"""
ARGUMENTS = """
BUFFER.extend(rows(5), state) => TypeError Buffer.extend: first argument is dict, expected BufferState | extend(state, rows)
BUFFER.sample(KEY, state, BATCH) => TypeError first argument is | expected BufferState | sample(state, key, batch_size)
PRIORITIZED.update_priority(prioritized, zeros(BATCH), index(BATCH)) => TypeError index is | Pass batch.index
BUFFER.convert(state, state) => TypeError Buffer.convert: other is BufferState; expected a Buffer | convert(other, state)
BUFFER.sample(state, KEY, 0) => ValueError Buffer.sample: batch_size is 0; expected an int >= 1
BUFFER.sample(state, KEY, 4.0) => TypeError batch_size is float; expected a Python int
jax.jit(lambda state, n: BUFFER.peek(state, KEY, n))(state, 4) => TypeError batch_size is traced; | Make it static
BUFFER.sample(state, 0, BATCH) => TypeError Buffer.sample: key is int; expected a PRNG key | jax.random.key(0)
BUFFER.sample(state, np.float32(0), BATCH) => TypeError key is float32 | expected one PRNG key
BUFFER.sample(state, jax.random.split(KEY, 3), BATCH) => TypeError for many keys vmap `peek`
BUFFER.sample(state, KEY, BATCH, beta=0.5) => ValueError Buffer.sample: Uniform() has no number 'beta' (it has: none)
BUFFER.update_priority(state, index(BATCH), zeros(BATCH)) => TypeError Uniform() has no priorities | fbuf.samplers.Prioritized()
BUFFER.extend(state, rows(5), priority=zeros(5)) => TypeError Buffer.extend: Uniform() takes no priority | Prioritized()
PRIORITIZED.extend(prioritized, rows(5), priority=zeros(4)) => ValueError Buffer.extend: priority has shape [4]; expected [5]
PRIORITIZED.extend(prioritized, rows(5), priority=np.ma.ones(5)) => TypeError priority is a masked array; | Use its filled()
BUFFER.extend(state, rows(5), mask=zeros(5)) => TypeError Buffer.extend: mask is float32; expected a boolean array of shape [5]
LANED.extend(laned, rows(5, 3), mask=zeros(5, dtype="bool")) => ValueError Buffer.extend: mask has shape [5]; expected [5, 3]
PRIORITIZED.update_priority(prioritized, index(4), zeros(4, 1)) => ValueError td_error has shape [4, 1]; expected [4]
PRIORITIZED.update_priority(prioritized, index(4), zeros(4, dtype="bool")) => TypeError td_error is bool | expected a floating
PRIORITIZED.update_priority(prioritized, index(4, 2, 1), zeros(4, 2, 1)) => ValueError expected [B] or [B, T] | Flatten it
BUFFER.priorities(state) => TypeError Buffer.priorities: Uniform() has no priorities | sampler=fbuf.samplers.Prioritized()
BUFFER.window_index(state, index(4)) => TypeError Row() makes no windows | Use batch.index | views.Sequence
BUFFER.update_rows(state, index(4, 2), {"reward": zeros(4, 3)}) => ValueError 'reward' has 3 entries on axis 1 | the index has 2
BUFFER.get(state, np.ma.arange(4)) => TypeError Buffer.get: index is a masked array; | Use its filled()
BUFFER.get(state, fbuf.Index(np.ma.zeros(4, np.int32), np.zeros(4, np.uint32))) => TypeError index.slot is a masked array
BUFFER.get(state, zeros(4)) => TypeError Buffer.get: index is float32; expected an Index or int32 slots | batch.index
BUFFER.update_rows(state, index(4), {"value": zeros(4)}) => ValueError 'value' is not in this buffer | it has: next/done, obs,
BUFFER.update_rows(state, index(4), {"reward": [0.0] * 4}) => ValueError 'reward/0' is not | array: 'reward': np.asarray(x
BUFFER.update_rows(state, index(4), {}) => ValueError Buffer.update_rows: no fields are given
PRIORITIZED.update_rows(prioritized, index(4), {"next": {"done": zeros(4, dtype="bool")}}) => ValueError
    Buffer.update_rows: leaf 'next/done' ends episodes | Leave it out
BUFFER.update_rows(state, index(4), {"reward": zeros(4, dtype="int32")}) => TypeError 'reward' is int32 | x.astype(jnp.float32)
BUFFER.update_rows(state, index(4), {"reward": jnp.float32(0)}) => ValueError expected [B]. | jnp.broadcast_to(x, (4,))
BUFFER.get(state, slice(3)) => TypeError slice(None, 3, None) | expected an Index or int32 slots | Use last or rows
BUFFER.rows(state, last=True) => ValueError Buffer.rows: last is True; expected an int from 1 to 12
BUFFER.rows(state, last=0) => ValueError Buffer.rows: last is 0; expected an int from 1 to 12
BUFFER.convert(fbuf.Buffer(capacity=13), state) => ValueError capacity is 13; expected 12 | other.extend(other.init(example)
"""


@functools.cache
def states():
    made = {"state": BUFFER, "laned": LANED, "prioritized": PRIORITIZED}
    bare = jax.eval_shape(fbuf.Buffer(capacity=4).init, np.zeros(3, np.float32))
    return {name: jax.eval_shape(buffer.init, EXAMPLE) for name, buffer in made.items()} | {"bare": bare}


ROW = row_with(np.zeros(2, np.uint8))
STEPS = fbuf.Buffer(8, view=fbuf.views.Transition(autoreset="same_step"))
Unhashable = type("Unhashable", (Uniform,), {"__hash__": None})
Space = type("Space", (), {"shape": None, "dtype": None})  # of Gymnasium: Dict, Tuple and Text have no shape
Unregistered = dataclasses.make_dataclass("Unregistered", ["obs"])
CONFIGURATIONS = """
fbuf.Buffer(capacity=0) => ValueError Buffer: capacity is 0; expected an int >= 1
fbuf.Buffer(capacity=1e6) => ValueError Buffer: capacity is 1000000.0; expected an int >= 1. Write 1000000.
fbuf.Buffer(capacity=-1.0) => ValueError Buffer: capacity is -1.0; expected an int >= 1.
fbuf.Buffer(capacity=2**31) => ValueError expected less than 2^31 - 2^24 (slots are int32)
fbuf.Buffer(capacity=12, lanes=0) => ValueError Buffer: lanes is 0; expected an int >= 1, or None
fbuf.Buffer(capacity=100, lanes=8) => ValueError Buffer: capacity is 100, not a multiple of lanes=8. Use capacity=96 or 104.
fbuf.Buffer(capacity=10, episode_end="done") => TypeError 'done'; expected a tuple of names. Write episode_end=('done',).
fbuf.Buffer(capacity=10, sampler=Uniform) => TypeError Buffer: sampler is the class Uniform; expected a value. Write Uniform().
fbuf.Buffer(capacity=10, storage="compressed") => TypeError Buffer: storage is 'compressed'. Use fbuf.storages.Compressed().
fbuf.Buffer(10, Prioritized()) => TypeError storage is Prioritized(), a sampler; | Write sampler=Prioritized().
fbuf.Buffer(capacity=10, view=(1,)) => TypeError Buffer: view is (1,). Use fbuf.views.Row().
fbuf.Buffer(capacity=4, sampler=Unhashable()) => TypeError Buffer: field 'sampler' is | which does not hash; expected a value
fbuf.Buffer(capacity=8, lanes=2, view=Transition(n_step=3, stack=4, autoreset="same_step")) => ValueError
    reads 7 rows at a time, but there are 4 per lane (capacity / lanes). Use capacity=14 or more.
Prioritized(alpha=-1.0) => ValueError Prioritized: alpha is -1.0; expected a finite Python number >= 0
Prioritized(eps=jnp.zeros(())) => ValueError Anneal it with buffer.set
Prioritized(normalize="max") => ValueError Prioritized: normalize is 'max'; expected "batch"
Transition(n_step=0) => ValueError Transition: n_step is 0; expected an int >= 1
Transition(gamma=1.5) => ValueError Transition: gamma is 1.5; expected a number in [0, 1]
Transition(pad="edge") => ValueError Transition: pad is 'edge'; expected "zero" or "repeat"
Transition(autoreset="nextstep") => ValueError expected "same_step" or "next_step". Did you mean 'next_step'?
Transition(autorest="next_step") => TypeError Transition: there is no option 'autorest'. Did you mean 'autoreset'?
fbuf.Buffer(10, alpha=0.6) => TypeError no option 'alpha'. It is an option of fbuf.samplers.Prioritized, fbuf.samplers.Ranked.
fbuf.Buffer(10, n_step=3) => TypeError Buffer: there is no option 'n_step'. It is an option of fbuf.views.Transition.
fbuf.prioritized(10, lane=2) => TypeError Buffer: there is no option 'lane'. Did you mean 'lanes'?
fbuf.samplers.Prioritized(normalize="bach") => ValueError expected "batch", "buffer" or None. Did you mean 'batch'?
fbuf.storages.Host(on_expired=["mask"]) => ValueError Host: on_expired is ['mask']; expected "raise" or "mask".
fbuf.Replay(fbuf.prioritized(10), {"t": 0}).sample(2, bta=0.4) => ValueError no number 'bta' | Did you mean 'beta'?
fbuf.Replay(fbuf.prioritized(10), {"t": 0}).sample(2, key=KEY) => ValueError no number 'key' | A Replay has its key
fbuf.Replay(fbuf.prioritized(10), {"t": 0}).sample(2, device="cpu") => ValueError 'device' | Replay.batches(..., device=
fbuf.Replay(fbuf.prioritized(10), {"t": 0}).sample(2, to="numpi") => ValueError expected "jax", "num | Did you mean 'numpy'?
Transition() => ValueError autoreset is missing; | Write autoreset="next_step" for gymnasium.vector environments
Transition(autoreset="next_step", final_observation="final") => ValueError expected None with autoreset='next_step'
Host(keys="obs") => TypeError Host: keys is 'obs'; expected a tuple of names. Write keys=('obs',).
Compressed(32) => TypeError Compressed: keys is 32; expected a tuple of names.
fbuf.prioritized(10, 32) => TypeError takes 1 positional argument but 2 were given
Host(slack=-1) => ValueError Host: slack is -1; expected an int >= 0
Compressed(codec=fbuf.storages.Zstd) => TypeError codec is the class Zstd
Deduplicated(blocks=65) => ValueError blocks is 65; expected a multiple of 32
Deduplicated(on_full="grow") => ValueError on_full is 'grow'; expected "retire"
"""
EXAMPLES = """
BUFFER.init({}) => ValueError Buffer.init: the example has no leaves; expected one row
BUFFER.init({"a": KEY}) => TypeError leaf 'a' is a typed PRNG key. Store jax
BUFFER.init({"a": np.float32}) => TypeError leaf 'a' is <class 'numpy.float32'>; expected an array or a number, such as np
BUFFER.init({"a": Space()}) => TypeError leaf 'a' is | expected an array or a number | space.sample()
BUFFER.init(Unregistered(np.zeros(3))) => TypeError the row is a Unregistered, not a pytree; | register_dataclass | asdict(x)
BUFFER.init({"a": np.array("text")}) => TypeError Buffer.init: leaf 'a' is <U4; expected numbers or booleans
fbuf.Replay({"a": 1}, BUFFER) => TypeError The order is Replay(buffer, example)
fbuf.Buffer(8, storage=Compressed(keys=())).init(ROW) => ValueError keys is empty
fbuf.Buffer(8, episode_end=("done",)).init(ROW) => ValueError no leaf named 'done'; rows have action, obs, | episode_end=(...)
fbuf.Buffer(8, episode_end=("reward",)).init(ROW) => TypeError float32[]; expected bool[] a row. Cast with x.astype(bool).
fbuf.Buffer(8, view=Transition(observation="pixels", autoreset="same_step")).init(ROW) => ValueError
    Transition: no leaf named 'pixels'; rows have action, obs, | Write Transition(observation=...)
fbuf.Buffer(8, view=Transition(final_observation="action")).init(ROW) => ValueError Transition: 'action' is
STEPS.init(ROW | {"discount": ROW["reward"]}) => ValueError rows have a leaf 'discount', but the view adds obs, action
STEPS.init(ROW | {"reward": zeros(1)}) => ValueError leaf 'reward' is float32[1]; expected one number a row. | x[..., 0]
STEPS.init(ROW | {"terminated": zeros(1, dtype="bool")}) => ValueError is bool[1]; expected bool[] a row. | x[..., 0]
fbuf.Buffer(8, lanes=4, view=Transition(autoreset="same_step")).init(many(4, ROW)) => TypeError
    Transition: leaf 'terminated' is bool[4]; expected bool[] a row. The example is one row of one lane: jax.tree.map(
STEPS.init(zeros()) => ValueError no leaf named 'obs'; rows have one unnamed array. Write Transition(observation=...)
fbuf.Buffer(8, view=Sequence(2, episode_end=(), episode="id")).init(ROW | {"id": zeros(4, dtype="int32")}) => TypeError
    Sequence: leaf 'id' is int32[4]; expected one integer a row. The example is one row of one lane
Sequence(2, episode_end=(), episode=3) => TypeError fbuf: the name of a leaf is 3; expected a string
BUFFER.can_add(BUFFER.init(EXAMPLE), 2.7) => TypeError Buffer.can_add: n is float32; expected an integer array of shape []
BUFFER.can_add(BUFFER.init(EXAMPLE), -1) => ValueError Buffer.can_add: n is -1; expected rows >= 0
fbuf.Replay(BUFFER, BUFFER.init(EXAMPLE)) => TypeError write replay = Replay(buffer, row); replay.state = state.
fbuf.Replay(BUFFER, EXAMPLE).extend("rows") => ValueError the row is not in this buffer (got: one unnamed array; expected: next/
fbuf.Replay(BUFFER, EXAMPLE).extend([rows(reward=0.5)] * 2) => TypeError rows are a list of 2 dicts; | np.stack
fbuf.Replay(BUFFER, EXAMPLE).extend(rows(2, reward=[np.float64(0)] * 2)) => ValueError array: 'reward': np.asarray(x, dtype)
fbuf.Replay(BUFFER, EXAMPLE).extend(rows(5, reward=np.ma.ones(5, np.float32))) => TypeError 'reward' is a masked array
fbuf.Replay(BUFFER, np.zeros(9999)).add(np.ma.ones(9999)) => TypeError Replay.add: the row is a masked array
fbuf.Replay(LANED, EXAMPLE).cut([0]) => TypeError lanes is int64[1]; expected bool[3]. Write np.isin(np.arange(3), lanes).
fbuf.Replay(BUFFER, EXAMPLE).batches() => TypeError Replay.batches: batch_size is missing. Write batches(batch_size)
BUFFER.init({"a": 1, 0: 2}) => TypeError a dict has keys of several types; expected strings
"""
PARTS = (fbuf.storages, fbuf.samplers, fbuf.views)
SCOPE = {name: getattr(package, name) for package in PARTS for name in package.__all__} | globals()
"""The names that the tables use."""


@pytest.mark.parametrize("case", refusals.cases(ROWS) + refusals.cases(ARGUMENTS))
def test_invalid_rows_and_arguments_are_refused(case):
    refusals.check(case, SCOPE, **states())


def test_an_eager_call_names_the_class_of_its_index():
    with pytest.raises(TypeError, match="Buffer.update_priority: index is ndarray; expected the Index"):
        PRIORITIZED.update_priority(PRIORITIZED.init(EXAMPLE), zeros(BATCH), zeros(BATCH))


def test_every_method_refuses_other_states():
    no = Uniform()
    for verb, arguments in {
        "extend": (no, rows(1)),
        "add": (no, rows()),
        "sample": (no, KEY, 1),
        "peek": (no, KEY, 1),
        "update_priority": (no, index(1), zeros(1)),
        "update_rows": (no, index(1), {"reward": zeros(1)}),
        "get": (no, index(1)),
        "convert": (BUFFER, no),
        **dict.fromkeys(("clear", "set", "rows", "stats", "can_sample"), (no,)),
    }.items():
        expected = rf"Buffer\.{verb}: first argument is Uniform, expected BufferState\. The order"
        raises(TypeError, expected, getattr(PRIORITIZED, verb), *arguments)


def test_a_donated_state_is_named():
    state = BUFFER.init(EXAMPLE)
    jax.jit(BUFFER.extend, donate_argnums=0)(state, rows(2))
    for verb in (
        lambda state: BUFFER.sample(state, KEY, BATCH),
        lambda state: BUFFER.extend(state, rows(2)),
        BUFFER.size,
        BUFFER.rows,
        BUFFER.clear,
    ):
        raises(RuntimeError, r"^Buffer\.\w+: the state was donated.*state = step\(state\); after an int", verb, state)


@pytest.mark.parametrize("case", refusals.cases(CONFIGURATIONS) + refusals.cases(EXAMPLES))
def test_invalid_configurations_and_examples_are_refused(case):
    refusals.check(case, SCOPE)


sampler = one_of(
    Uniform(),
    more=[Prioritized(replace=False, normalize="buffer"), Ranked(uniform=0.5, normalize="buffer")],
    exhaustive=[Uniform(over="episodes"), Epoch(), Consume(2), Prioritized(), Prioritized(on="host"), Staleness(4)],
)


def test_an_empty_sample_is_masked_and_counted(sampler):
    buffer = fbuf.Buffer(
        capacity=CAPACITY, sampler=sampler, view=fbuf.views.Transition(n_step=2, stack=2, autoreset="same_step")
    )
    state, batch = buffer.sample(buffer.init(ROW), KEY, BATCH)
    assert not bool(buffer.can_sample(state))
    for leaf in jax.tree.leaves((batch.data, batch.probability, batch.weight, batch.mask, batch.index.generation)):
        assert not np.any(leaf)
    assert np.all(np.asarray(batch.index.slot) == CAPACITY)
    if sampler.prioritized:  # the indices of masked rows are skipped and not counted as refused
        state = buffer.update_priority(state, batch.index, np.ones(BATCH, np.float32))
    stats = jax.device_get(buffer.stats(state))
    assert {name: int(stats[name]) for name in COUNTERS if stats[name]} == {"empty_samples": 1}
