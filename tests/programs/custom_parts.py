"""Parts of one's own in one jitted step: a sampler, a storage of float16, a view with the step before, a transform."""

import jax
import jax.numpy as jnp

import fbuf
from fbuf import parts


@parts.component
class Recent(parts.NthSampler):
    share: float = 0.5
    in_order = True

    def pick(self, key, batch_size, total):
        newest = jnp.maximum(1, (total * self.share).astype(jnp.int32))
        nth = total - 1 - jax.random.randint(key, (batch_size,), 0, newest)
        return nth, jnp.full(batch_size, 1 / newest, jnp.float32)


@parts.component
class Half(parts.ArrayStorage):
    def allocate(self, capacity, spec):
        small = {n: jnp.float16 if leaf.dtype == jnp.float32 else leaf.dtype for n, leaf in spec.items()}
        return {n: jnp.zeros((capacity, *leaf.shape), small[n]) for n, leaf in spec.items()}

    def put(self, arrays, slot, leaves):
        return arrays | {n: arrays[n].at[slot].set(x.astype(arrays[n].dtype), mode="drop") for n, x in leaves.items()}

    def take(self, arrays, name, slot, leaf):
        return arrays[name][slot].astype(leaf.dtype)


@parts.component
class WithLast(parts.FieldsView):
    rule = parts.AnchorRule("with_last", back=1)

    def fields(self, spec, anchors, slot):
        return {name: (name, slot) for name in spec} | {"last_obs": ("obs", parts.earlier(anchors, slot, 1))}


def main() -> None:
    change = fbuf.transforms.Map(lambda row: row | {"change": row["obs"] - row["last_obs"]})
    own = {"storage": Half(), "sampler": Recent(share=0.25), "view": WithLast(), "on_read": change}
    buffer = fbuf.Buffer(64, episode_end=("done",), **own)
    state = buffer.init({"obs": 0.0, "done": False})

    def step(state, t, key):
        state = buffer.extend(state, {"obs": t * 1.0, "done": t % 8 == 7})
        return buffer.sample(state, key, 256)

    fbuf.testing.assert_inplace(jax.jit(step, donate_argnums=0), state, jnp.arange(8), jax.random.key(0))
    for i in range(20):
        state, batch = jax.jit(step, donate_argnums=0)(state, 8 * i + jnp.arange(8), jax.random.key(i))
    obs, first = batch.data["obs"], batch.data["obs"] % 8 == 0
    assert (batch.data["change"] == jnp.where(first, obs, 1)).all() and first.any()
    assert obs.min() >= 144 and batch.mask.all() and state.rows.arrays["obs"].dtype == jnp.float16
