"""Windows and episodes: who is drawn how often, priorities and structure of windows, what beginners get wrong."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._algorithms import sum_tree
from fbuf._indexing import anchors as _anchors
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Episode, Row, Sequence
from tests.support import refusals, same_step
from tests.support.inplace import assert_order
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.uniformity import DRAWS, chi_square_z, drawable

ENDS = ("terminated", "truncated")
WINDOWS = [
    same_step.Sequence(5),
    same_step.Sequence(4, stride=3),
    same_step.Sequence(6, boundary="mask"),
    same_step.Sequence(6, boundary="mask", at=5),
    same_step.Sequence(9, boundary="cross"),
    same_step.Episode(20),
]


def rows_of(lengths, first=0):
    """One lane of whole episodes; `id` counts rows, `episode` episodes."""
    count = sum(lengths)
    end = np.zeros(count, bool)
    end[np.cumsum(lengths) - 1] = True
    return {
        "id": np.arange(first, first + count, dtype=np.int32),
        "episode": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "terminated": end,
        "truncated": np.zeros(count, bool),
    }


EXAMPLE = jax.tree.map(lambda x: x[0], rows_of([1]))


def filled(view, lengths, capacity, sampler=None):
    buffer = fbuf.Buffer(capacity, view=view, sampler=sampler or Uniform())
    return buffer, buffer.extend(buffer.init(EXAMPLE), rows_of(lengths))


def check_chances(view, sampler):
    """Draw from three lanes: one fills a fifth of its ring, one half, one wraps several times."""
    rng = np.random.default_rng(3)
    buffer = fbuf.Buffer(3 * 301, lanes=3, view=view, sampler=sampler)
    mask = rng.random((8, 100, 3)) < np.array([0.08, 0.2, 0.9])
    end = rng.random((8, 100, 3)) < 0.08
    ended = np.cumsum((end & mask).reshape(800, 3), axis=0).reshape(8, 100, 3)
    rows = {
        "id": np.zeros((8, 100, 3), np.int32),
        "episode": (ended - (end & mask)).astype(np.int32),
        "terminated": end,
        "truncated": np.zeros_like(end),
    }

    @jax.jit
    def run(rows, mask, key):
        state, _ = lax.scan(lambda s, x: (buffer.extend(s, x[0], mask=x[1]), None), buffer.init(EXAMPLE), (rows, mask))
        batch = buffer.peek(state, key, DRAWS)
        return state.anchors.flags, state.rows["episode"], batch.index.slot, batch.probability, batch.mask

    flags, episode, slots, probability, drawn = map(np.asarray, run(rows, mask, jax.random.key(0)))
    anchors = (flags & _anchors.ANCHOR) != 0
    by_lane = anchors.reshape(-1, 3).sum(axis=0)
    assert 0 < by_lane[0] < by_lane[1] < by_lane[2] and drawn.all()
    chances = anchors / anchors.sum()
    if sampler.over == "episodes":
        number = (episode * 3 + np.arange(len(anchors)) % 3)[anchors]
        names, which, sizes = np.unique(number, return_inverse=True, return_counts=True)
        chances = np.zeros(len(anchors))
        chances[anchors] = 1 / len(names) / sizes[which]
        assert len(names) > 20 and (sizes.max() > 3 or isinstance(view, Episode))
    assert abs(chi_square_z(np.bincount(slots, minlength=len(anchors)), chances)) < 4
    np.testing.assert_allclose(probability, chances[slots], rtol=1e-6)


ROW = {"obs": np.zeros((4, 3), np.uint8), "terminated": np.bool_(False), "truncated": np.bool_(False)}


EPISODES = Uniform(over="episodes")
test_every_window_or_episode_is_as_likely_as_every_other = checks(
    (check_chances, [(WINDOWS[5], Uniform()), (WINDOWS[1], EPISODES), (WINDOWS[3], EPISODES)]),
    more=[(check_chances, [(WINDOWS[5], EPISODES)])],
)


@pytest.mark.parametrize(
    ("ends", "chances"),
    [((0, 0, 0, 0), (4, 4, 4, 4)), ((1, 0, 0, 0), (2, 6, 6, 6)), ((0, 1, 0), (4, 4, 2)), ((0,), (1,))],
    ids=["one fills the lane", "two", "not full", "one row"],
)
def test_chances_of_episodes_by_hand(ends, chances):
    """`chances` are one in so many."""
    buffer = fbuf.Buffer(4, sampler=Uniform(over="episodes"), episode_end=("done",))
    state = buffer.extend(buffer.init({"done": False}), {"done": np.array(ends, bool)})
    chance = 1 / np.array(chances, np.float32)
    batch = buffer.peek(state, jax.random.key(0), 64)
    assert batch.mask.all() and {*batch.index.slot.tolist()} == {*range(len(ends))}
    np.testing.assert_allclose(batch.probability, chance[np.asarray(batch.index.slot)], rtol=1e-6)
    np.testing.assert_allclose(buffer.summary(state).effective_size, 1 / np.sum(chance**2), rtol=1e-5)


def test_windows_that_the_same_write_overwrites_do_not_open():
    buffer = fbuf.Buffer(5, view=Sequence(3, episode_end=()))
    state = buffer.extend(buffer.init({"t": 0}), {"t": np.arange(4)})
    state = buffer.extend(state, {"t": np.arange(4, 9)})
    drawn = buffer.peek(state, jax.random.key(0), 64).data["t"]
    assert {*map(tuple, drawn.tolist())} == {(4, 5, 6), (5, 6, 7), (6, 7, 8)} and buffer.stats(state)["anchors"] == 3


def test_long_windows_cost_no_more_to_add_to():
    sizes = []
    for view in (same_step.Sequence(10), same_step.Sequence(1000), same_step.Episode(1000)):
        buffer = fbuf.Buffer(4000, view=view)
        anchors = jax.eval_shape(buffer.init, ROW).anchors
        sizes.append(sum(x.size for x in jax.tree.leaves(dataclasses.replace(anchors, flags=None))))
    assert len(set(sizes)) == 1 and sizes[0] < 10


def test_episodes_that_never_end_are_counted_by_remainders():
    buffer = fbuf.Buffer(60, view=Sequence(4, stride=3, episode_end=()))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of([60]))
    late = dataclasses.replace(state.anchors, step=state.anchors.step + jnp.int32(2**30 - 100 - 2**30 % 3))
    state = dataclasses.replace(state, anchors=late)
    for i in range(30):
        state = buffer.extend(state, rows_of([7], 60 + 7 * i))
    assert int(state.anchors.step[0]) < 2**30
    ids = np.asarray(buffer.peek(state, jax.random.key(0), 2000).data["id"])
    step = (2**30 - 100 - 2**30 % 3) % 3
    assert set(np.unique((ids[:, 0] + step) % 3)) == {0} and len(np.unique(ids[:, 0])) in (19, 18)


def test_a_window_takes_a_mixture_of_its_errors():
    buffer, state = filled(same_step.Sequence(4), [20], 20, Prioritized(alpha=1.0, eps=0.0))
    state, batch = buffer.sample(state, jax.random.key(0), 8)
    rng = np.random.default_rng(0)
    error, mask = rng.normal(size=(8, 4)).astype(np.float32), rng.random((8, 4)) < 0.7
    mask[:, 1] = True
    mask[3], error[4, 1] = False, np.nan  # nothing to learn from; not finite
    error[5, 0], mask[5, 0] = np.inf, False  # does not count
    index = fbuf.Index(batch.index.slot.at[:].set(jnp.arange(8)), batch.index.generation)
    after = buffer.update_priority(state, index, error, mask=jnp.asarray(mask), eta=0.7)
    magnitude = np.where(mask, np.abs(np.where(mask, error, 0)), 0)
    number = np.maximum(mask.sum(axis=1), 1)
    want = 0.7 * magnitude.max(axis=1) + 0.3 * magnitude.sum(axis=1) / number
    assert want[3] == 0
    got = sum_tree.get(after.sampler.tree, jnp.arange(8))
    np.testing.assert_allclose(got, np.where(np.arange(8) == 4, 1, want), rtol=1e-6)
    assert int(buffer.stats(after)["refused_nonfinite"]) == 1
    plain = buffer.update_priority(state, index, np.abs(error[:, 1:2]))
    assert int(buffer.stats(plain)["refused_nonfinite"]) == 1


def test_a_priority_given_with_the_row_that_completes_a_window_is_the_windows():
    given = np.arange(1.0, 11.0, dtype=np.float32)
    for view, anchors in (
        (same_step.Sequence(3, boundary="mask"), {0: 3, 1: 4, 2: 5, 3: 6, 4: 6, 5: 6, 6: 9, 7: 10, 8: 10, 9: 10}),
        (same_step.Episode(6), {0: 6, 6: 10}),
    ):
        buffer = fbuf.Buffer(10, view=view, sampler=Prioritized(alpha=1.0, eps=0.0))
        state = buffer.init(EXAMPLE)
        for i in range(0, 10, 2):
            rows = jax.tree.map(lambda x, i=i: x[i : i + 2], rows_of([6, 4]))
            state = buffer.extend(state, rows, priority=given[i : i + 2])
        leaves = np.asarray(sum_tree.get(state.sampler.tree, jnp.arange(10)))
        assert {int(i): float(leaves[i]) for i in np.flatnonzero(leaves)} == anchors, view


CROSSING, DONE = same_step.Sequence(2, boundary="cross"), same_step.Sequence(2, episode_end=("done",))
WRONG = """
same_step.Sequence(0) => ValueError length is 0; expected an int >= 1
same_step.Sequence(4.0) => ValueError length is 4.0; expected an int
same_step.Sequence(4, stride=0) => ValueError stride is 0; expected an int >= 1
same_step.Sequence(4, stride=2**29) => ValueError stride is 536870912; expected less than 2^29
same_step.Sequence(4, dilation=-1) => ValueError dilation is -1
same_step.Sequence(4, burn_in=4) => ValueError length=4 has no row to learn from. Use length=5 or more.
same_step.Sequence(4, burn_in=2, bootstrap=2) => ValueError Use length=5
same_step.Sequence(4, boundary="stay") => ValueError boundary is 'stay'; expected "stop", "mask" or "cross"
same_step.Sequence(4, at=2) => ValueError at is 2; expected 0, or less than 4 with boundary='mask'
same_step.Sequence(4, boundary="mask", at=4) => ValueError at is 4
Sequence(4, autoreset="never") => ValueError autoreset is 'never'
same_step.Sequence(4, episode_end="done") => TypeError Write episode_end=('done',)
same_step.Sequence(4, episode_end=None) => TypeError episode_end is None; expected a tuple of names
same_step.Episode(0) => ValueError max_length is 0
same_step.Episode(4, longer="stop") => ValueError longer is 'stop'; expected "skip" or "cut"
Episode(4, episode_end=()) => ValueError episode_end is (); expected at least one name
Episode(4, autoreset="x") => ValueError autoreset is 'x'
Uniform("rows") => ValueError over is 'rows'; expected "anchors" or "episodes"
fbuf.Buffer(100, lanes=10, view=same_step.Sequence(11)) => ValueError reads 11 rows | Use capacity=110 or more
fbuf.Buffer(8, sampler=Uniform("episodes")) => ValueError nothing ends an episode. Name what does
fbuf.Buffer(8, sampler=Uniform("episodes"), view=CROSSING) => ValueError its windows cross | boundary='stop'
fbuf.Buffer(8, view=same_step.Sequence(2)).init({"obs": 0.0}) => ValueError no leaf named 'terminated'; rows have obs
fbuf.Buffer(8, view=DONE).init(0.0) => TypeError one unnamed array. Add dicts
fbuf.Buffer(8, view=DONE).init({"done": 0.0}) => TypeError 'done' is float32[]; expected bool[] a row. Cast
"""


@pytest.mark.parametrize("case", refusals.cases(WRONG))
def test_invalid_settings_are_refused(case):
    refusals.check(case, globals())


ERRORS = """
update((7, 4)) => ValueError td_error has shape [7, 4]; expected [8, 4]
update((8, 4), np.ones(8, bool)) => ValueError mask has shape [8]; expected [8, 4]
update((8,), np.ones(8, bool)) => ValueError
    td_error has shape [8]; expected [B] without mask, or [B, T] with T up to 4
update((4, 8)) => ValueError td_error has shape [4, 8]; expected [8, 4] | Time comes second: x.swapaxes(0, 1)
update((3, 8), np.ones((3, 8), bool)) => ValueError td_error has shape [3, 8]; expected [8, 3]
buffer.update_rows(state, index, {"id": np.ones((8, 4), np.int32)}) => ValueError
    leaf 'id' has shape [8, 4], rows of windows, but index names anchors | Pass the index that window_index makes of batch.index
update((8, 5)) => ValueError td_error has shape [8, 5]; expected | makes windows of 4 rows
row.update_priority(held, index, np.ones((8, 4)), mask=np.ones((8, 4), bool)) => ValueError
    expected [B] without mask: Row() makes no windows
another(same_step.Sequence(4, episode_end=("truncated",))) => ValueError made by another buffer
another(same_step.Sequence(5)) => ValueError made by another buffer
another(same_step.Transition()) => ValueError made by another buffer
"""


def test_invalid_errors_of_windows_and_other_states_are_refused():
    buffer, state = filled(same_step.Sequence(4), [20], 20, Prioritized())
    row, held = filled(Row(), [20], 20, Prioritized())
    key = jax.random.key(0)
    index = buffer.peek(state, key, 8).index

    def update(shape, mask=None, **options):
        buffer.update_priority(state, index, np.ones(shape), mask=mask, **options)

    names = {"update": update, "buffer": buffer, "state": state, "row": row, "held": held, "index": index}
    names["another"] = lambda view: dataclasses.replace(buffer, view=view).peek(state, key, 8)
    refusals.check_all(ERRORS, globals() | names)
    for eta in (2, -1, None, "a", np.array(2.0), jnp.float32(7), [0.5]):
        for shape in ((8,), (8, 4)):
            raises(ValueError, "eta is .*; expected one number from 0 to 1", update, shape, eta=eta)


def learnt(view, ends):
    count = len(ends)
    end = np.array([letter == "t" for letter in ends])
    buffer = fbuf.Buffer(count, view=view)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of([count]) | {"terminated": end})
    batch = buffer.peek(state, jax.random.key(0), 64)
    newest = int(np.argmax(np.where(batch.mask, batch.data["id"][:, 0], -1)))
    return np.asarray(batch.data["learning_mask"])[newest].tolist()


def test_burn_in_bootstrap_and_reset_rows_are_not_learnt_from():
    view = same_step.Sequence(5, burn_in=1, bootstrap=2)
    assert learnt(view, "------") == [False, True, True, False, False]
    assert learnt(view, "-----") == [True, True, True, False, False]
    assert learnt(view, "-----t") == [False, True, True, True, True]
    assert learnt(Sequence(3, autoreset="next_step"), "-t-") == [True, True, False]
    crossing = Sequence(4, boundary="cross", autoreset="next_step")
    assert learnt(crossing, "-t--") == [True, True, False, True]


def test_windows_of_a_lane_that_gave_up_rows_miss_what_came_before():
    view = same_step.Transition(stack=2, observation="id", action=None, reward="episode")
    rows, stacked = fbuf.Buffer(8), fbuf.Buffer(8, view=view)
    state = rows.extend(rows.init(EXAMPLE), rows_of([6]) | {"terminated": np.zeros(6, bool)})
    state = state.replace(ring=fbuf._core.slots.evict(state.ring, jnp.array([2], jnp.int32)))
    assert np.flatnonzero(drawable(rows.convert(stacked, state))).tolist() == [3, 4]


Step = collections.namedtuple("Step", "obs done")
STEP = Step(np.zeros(2, np.float32), np.bool_(False))


def batch_of(view, row):
    buffer = fbuf.Buffer(20, view=view)
    return jax.eval_shape(lambda: buffer.peek(buffer.init(row), jax.random.key(0), 5).data)


def test_rows_keep_their_structure_where_the_view_adds_nothing():
    assert jax.tree.structure(batch_of(fbuf.views.Row(), STEP)) == jax.tree.structure(STEP)
    for row in (STEP, STEP._asdict(), np.zeros(2, np.float32)):
        windows = batch_of(fbuf.views.Sequence(4, episode_end=()), row)
        assert jax.tree.structure(windows) == jax.tree.structure(row)
        assert jax.tree.leaves(windows)[0].shape[:2] == (5, 4)


def test_a_view_that_adds_fields_puts_rows_that_are_not_dicts_under_row():
    view = same_step.Sequence(4, episode_end=("done",))
    windows = batch_of(view, STEP)
    assert set(windows) == {"row", "mask", "is_first", "learning_mask"} and windows["row"].obs.shape == (5, 4, 2)
    assert set(batch_of(view, STEP._asdict())) == {"obs", "done", "mask", "is_first", "learning_mask"}
    for adds in ({"burn_in": 1}, {"bootstrap": 1}, {"boundary": "mask"}, {"autoreset": "next_step"}):
        assert set(batch_of(fbuf.views.Sequence(4, episode_end=(), **adds), STEP)) == set(windows), adds


def test_a_name_that_the_view_adds_is_refused_with_a_fix():
    flat, nested = (fbuf.Buffer(20, view=same_step.Sequence(4, episode_end=(name,))) for name in ("done", "step/done"))
    for name in ("mask", "is_first", "learning_mask"):
        row = {name: np.float32(0), "done": np.bool_(False)}
        for made in (row, row | {name: {"x": np.float32(0)}}):
            raises(
                ValueError, rf"leaf '{name}.*', but the view adds mask.*Rename it, or nest the rows", flat.init, made
            )
        assert nested.init({"step": row}).rows["step"].keys() == row.keys()


@pytest.mark.more
def test_episodes_of_one_row():
    rows = rows_of([2, 3, 3]) | {"terminated": np.isin(np.arange(8), (1, 4))}
    for longest in (1, 2):
        buffer = fbuf.Buffer(20, view=Episode(longest, longer="cut", autoreset="next_step"))
        state = buffer.extend(buffer.init(EXAMPLE), rows)
        ids = np.asarray(buffer.peek(state, jax.random.key(0), 100).data["id"])
        assert set(ids[:, 0].tolist()) == {0, 3, 6}


CHANCES = [(WINDOWS[i], Uniform(over="episodes")) for i in (0, 2)] + [(WINDOWS[i], Uniform()) for i in (1, 3, 4)]


test_chances_of_windows_and_episodes = checks(
    more=[(check_chances, CHANCES)],
    exhaustive=[(check_chances, [(Sequence(1, episode_end=ENDS, autoreset="same_step"), Uniform(over="episodes"))])],
)


@pytest.mark.exhaustive
@pytest.mark.in_place
def test_steps_of_episodes_are_in_place():
    view = Episode(12, longer="cut", autoreset="same_step")
    buffer = fbuf.Buffer(400_000, lanes=2, view=view, sampler=Uniform("episodes"), episode_end=ENDS)
    for steps in (0, 4):
        assert_order(buffer, "es", ROW, steps=steps)
