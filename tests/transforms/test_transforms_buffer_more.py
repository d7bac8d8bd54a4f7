"""Buffers with transforms: loops, storages, memory, data sets, files and export."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Epoch, Prioritized
from fbuf.storages import Memmap, Ragged
from fbuf.testing import measure
from fbuf.transforms import Augment, NormalizeReward, Rename, RewardToGo, Scale
from fbuf.views import Episode, Transition
from tests.support import pieces
from tests.support.inplace import assert_order
from tests.support.tables import one_of
from tests.support.transforms import EXAMPLE, ON_READ, ON_WRITE
from tests.support.trees import same

pytestmark = pytest.mark.more

settings = one_of({"prefetch": 1, "batch_size": 8})


@pytest.mark.in_place
def test_steps_are_in_place(settings):
    parts = {"on_write": ON_WRITE, "on_read": ON_READ, "sampler": Prioritized()}
    view = Transition(autoreset="same_step")
    assert_order(fbuf.Buffer(200_000, lanes=2, view=view, **parts, **settings), "ses", EXAMPLE)


@pytest.mark.in_place
@pytest.mark.parametrize("scale", [Scale("obs"), Scale("obs", 2 / 255, -1.0)], ids=["factor", "offset"])
def test_scale_costs_no_copy(scale):
    """It is one kernel, which makes the batch."""

    def sampling(on_read):
        buffer = fbuf.Buffer(1000, on_read=on_read)
        state = jax.eval_shape(buffer.init, {"obs": jax.ShapeDtypeStruct((84, 84), np.uint8)})
        return (lambda state, key: buffer.sample(state, key, 64)), state, jax.ShapeDtypeStruct((2,), jnp.uint32)

    plain, (fn, *args), pixels = measure(*sampling(None)), sampling(scale), 64 * 84 * 84
    memory = measure(fn, *args)
    assert memory.made - plain.made <= 4 * pixels
    assert memory.temporary <= plain.temporary + pixels + 4096  # the uint8 batch is no result any more
    text = jax.jit(fn, donate_argnums=0).lower(*args).compile().as_text()
    own = r"= f32\[64,84,84\]\S* "
    entry = text[text.index("ENTRY") :].splitlines()
    made = [line for line in entry if re.search(own + r"(?!get-tuple-element|bitcast|parameter)\w", line)]
    assert len(made) == 1, made
    called = re.search(own + r"call\(.*to_apply=(%[\w.-]+)", made[0])
    if called:  # older releases of XLA cut a kernel into parts for several threads in a function of its own
        body = text[text.index(f"\n{called[1]} (") :]
        made = re.findall(r"ROOT .*", body[: body.index("\n}")])
    assert len(made) == 1 and re.search(own + r"fusion\(", made[0]), made


def test_windows_to_the_end_of_episodes():
    view = Episode(4, episode_end=("done",), autoreset="same_step")
    buffer = fbuf.Buffer(20, view=view, on_read=RewardToGo(1.0, episode_end=("done",), complete="all"))
    rows = {"reward": jnp.arange(1.0, 8.0), "done": jnp.array([0, 0, 1, 0, 1, 0, 0], bool)}
    batch = buffer.peek(buffer.extend(buffer.init({"reward": 0.0, "done": False}), rows), jax.random.key(0), 32)
    found = {tuple(x) for x in np.asarray(batch.data["reward_to_go"]).tolist()}
    assert found == {(6.0, 5.0, 3.0, 0.0), (9.0, 5.0, 0.0, 0.0)}
    np.testing.assert_array_equal(batch.data["all"], batch.data["mask"])


def test_ragged_rows_are_transformed_after_they_are_read():
    buffer = fbuf.Buffer(8, storage=Ragged(), on_read=(Scale("reward", 2.0), NormalizeReward()))
    state = buffer.init({"text": "", "reward": 0.0})
    state = buffer.extend(state, [{"text": "a", "reward": 1.0}, {"text": "b", "reward": 3.0}])
    batch = buffer.sample(state, jax.random.key(0), 4)[1]
    want = {"a": 2.0, "b": 6.0}
    assert batch.data["reward"].tolist() == [want[x] for x in batch.lazy["text"]]
    assert float(buffer.stats(state)["normalize_reward_std"]) == 1.0
    larger, grown = buffer.grow(state)
    assert float(larger.stats(grown)["normalize_reward_std"]) == 1.0


def test_statistics_of_data_sets_are_taken_when_opened(tmp_path):
    rows = pieces.make(tmp_path)
    buffer, state = fbuf.datasets.open(tmp_path, on_read=NormalizeReward())
    reward = np.asarray(rows["reward"], np.float64)
    np.testing.assert_allclose(buffer.stats(state)["normalize_reward_mean"], reward.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(buffer.stats(state)["normalize_reward_std"], reward.std(), rtol=1e-5)
    with pytest.raises(ValueError, match="on_write is .* of a stored data set"):
        dataclasses.replace(buffer, on_write=Scale("reward"))


def test_files_are_resumed(tmp_path):
    storage = Memmap(str(tmp_path / "rows"))
    buffer = fbuf.Buffer(4, storage=storage, on_write=Rename({"r": "reward"}), on_read=NormalizeReward())
    state = buffer.extend(buffer.init({"r": 0.0}), {"r": jnp.arange(6.0)})
    buffer.flush(state)
    del state
    state = buffer.resume({"r": 0.0})
    assert float(buffer.stats(state)["normalize_reward_mean"]) == 3.5  # of the rows that are held
    state = buffer.extend(state, {"r": jnp.array([9.0])})
    assert float(buffer.last(state, 1).data["reward"][0]) == 9.0


def test_a_prefetched_batch_is_the_one_peek_gave():
    buffer = fbuf.Buffer(10, on_read=(NormalizeReward(), Augment("x", 1)), prefetch=1, batch_size=4)
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(5, 3, 3)).astype(np.float32), "reward": rng.normal(size=5).astype(np.float32)}
    state = buffer.extend(buffer.init({"x": np.zeros((3, 3), np.float32), "reward": 0.0}), rows)
    state, first = buffer.sample(state, jax.random.key(0))
    same(first.data, buffer.peek(state, jax.random.fold_in(jax.random.key(0), 1)).data)
    want = buffer.peek(state, jax.random.key(1))
    state, _ = buffer.sample(state, jax.random.key(1))
    state = buffer.extend(state, {**rows, "reward": rows["reward"] * 100})
    assert not np.array_equal(buffer.peek(state, jax.random.key(1)).data["reward"], want.data["reward"])
    same(buffer.sample(state, jax.random.key(2))[1].data, want.data)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Largest(fbuf.parts.StatefulTransform):
    name: str = "reward"

    def watches(self, spec):
        return (self.name,)

    def init(self, spec):
        return jnp.float32(0)

    def observe(self, memory, leaves, mask):
        return jnp.maximum(memory, jnp.max(jnp.where(mask, jnp.abs(leaves[self.name]), jnp.float32(0))))

    def stats(self, memory):
        return {"is": memory}

    def apply(self, data, context):
        return data | {self.name: data[self.name] / context.memory}


def test_custom_transforms():
    rows = {"reward": jnp.array([-9.0, 1.0, 4.0])}
    for settings in ({"on_read": Largest()}, {"on_write": Largest()}):
        buffer = fbuf.Buffer(4, sampler=Epoch(shuffle=False), **settings)
        state = buffer.extend(buffer.init({"reward": 0.0}), rows, mask=jnp.array([False, True, True]))
        assert float(buffer.stats(state)["largest_is"]) == 4.0
        assert buffer.sample(state, jax.random.key(0), 2)[1].data["reward"].tolist() == [0.25, 1.0]
