"""A pytest plugin that runs flashbax's own tests on `fbuf.integrations.flashbax`: `-p tests.support.flashbax_suite`.

flashbax's tests call functions of its modules, which take all sizes in each call. Here each constructs a buffer of these
sizes. What only flashbax has (`sum_tree_state`, `running_index`) is read from the buffer's state.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flashbax import buffers

import fbuf.integrations.flashbax as fbx
from fbuf._core.component import state
from fbuf.samplers import _prioritized

QUEUED = 4  # `sample_sequence_length` of trajectory_queue_test.py, which its calls of `init` and `add` lack


@state
class Tree:
    sampler: object

    @property
    def max_recorded_priority(self):
        return self.sampler.max_priority**self.sampler.alpha

    @property
    def nodes(self):
        return jnp.sum(self.sampler.tree, keepdims=True)


def uniform(current, batch_size=1, length=1, period=1, least=1):
    lanes, rows, _ = current.buffer.geometry
    return fbx.make_trajectory_buffer(lanes, batch_size, length, period, least, max_length_time_axis=rows)


def prioritised(current, batch_size=1, length=None, period=None):
    (lanes, rows, _), view = current.buffer.geometry, current.buffer.view
    length, period = length or view.length, period or view.stride
    return fbx.make_prioritised_trajectory_buffer(lanes, batch_size, length, period, length, max_length_time_axis=rows)


def queue(current, add=1):
    (lanes, rows, _), length = current.buffer.geometry, current.buffer.view.length
    return fbx.make_trajectory_queue(rows, lanes, add, length)


def init(example, lanes, rows, period=None):
    return fbx.make_trajectory_buffer(lanes, 1, 1, 1, 1, max_length_time_axis=rows).init(example)


def prioritised_add(current, batch, length, period, device):
    buffer = prioritised(current, 1, length, period)
    if not current.buffer.sampler.prioritized:  # `init` does not know the length of windows
        current = buffer.init(jax.tree.map(lambda x: x[0, 0], batch))
    return buffer.add(current, batch)


def running_index(current):
    laps = current.state.ring.lap[..., 0].astype(jnp.int32) - 1
    return current.current_index + laps * current.buffer.geometry.length


REPLACED = {
    buffers.flat_buffer: {"make_flat_buffer": fbx.make_flat_buffer},
    buffers.item_buffer: {"make_item_buffer": fbx.make_item_buffer},
    buffers.mixer: {"make_mixer": fbx.make_mixer},
    buffers.prioritised_flat_buffer: {"make_prioritised_flat_buffer": fbx.make_prioritised_flat_buffer},
    buffers.prioritised_item_buffer: {"make_prioritised_item_buffer": fbx.make_prioritised_item_buffer},
    buffers.trajectory_buffer: {
        "make_trajectory_buffer": fbx.make_trajectory_buffer,
        "init": init,
        "add": lambda current, batch: uniform(current).add(current, batch),
        "sample": lambda current, key, *window: uniform(current, *window).sample(current, key),
        "can_sample": lambda current, least: uniform(current, least=least).can_sample(current),
    },
    buffers.prioritised_trajectory_buffer: {
        "make_prioritised_trajectory_buffer": fbx.make_prioritised_trajectory_buffer,
        "prioritised_init": init,
        "prioritised_add": prioritised_add,
        "prioritised_sample": lambda current, key, *window: prioritised(current, *window).sample(current, key),
        "set_priorities": lambda current, *given: prioritised(current).set_priorities(current, *given[:2]),
    },
    buffers.trajectory_queue: {
        "make_trajectory_queue": fbx.make_trajectory_queue,
        "init": lambda example, lanes, rows: fbx.make_trajectory_queue(rows, lanes, 1, QUEUED).init(example),
        "add": lambda current, batch: queue(current).add(current, batch),
        "sample": lambda current, length: queue(current).sample(current),
        "can_sample": lambda current, length, rows: queue(current).can_sample(current),
        "can_add": lambda current, number, rows: queue(current, number).can_add(current),
    },
    buffers.sum_tree: {"get": lambda tree, index: _prioritized.get_leaf(tree.sampler, index.slot)},
    fbx.TrajectoryBufferState: {
        "sum_tree_state": property(lambda current: Tree(current.state.sampler)),
        "running_index": property(running_index),
    },
}
for place, values in REPLACED.items():
    for name, value in values.items():
        setattr(place, name, value)


def pytest_collection_modifyitems(items):
    """Compare in NumPy what flashbax's sweeps compare 24,000 times a case by a call of JAX."""
    for module in {item.module for item in items}:
        if hasattr(module, "is_strictly_increasing"):
            module.is_strictly_increasing = lambda values: bool(np.all(np.diff(np.asarray(values), axis=0) > 0))
