"""Parts of one's own: those that their guide defines, buffers that have them, and rows for these."""

import re

import numpy as np

import fbuf
from tests.support.paths import ROOT
from tests.support.trees import row_with

GUIDE = (ROOT / "fbuf" / "parts" / "README.md").read_text()
LANES, BATCH = 2, 8


def written_in_the_guide():
    """Return what the blocks of the guide define."""
    imports, *blocks = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.S)
    scope = {}
    for number, block in enumerate([imports, *blocks]):
        exec(compile(block, f"guide to parts, block {number}", "exec"), scope)
    return scope


OWN = written_in_the_guide()
ROUNDED = {"storage": OWN["Rounded"](2.0)}
AHEAD = {"prefetch": 1, "batch_size": BATCH}
STACKS = fbuf.views.Transition(n_step=2, stack=3, autoreset="same_step")
BUFFERS = {
    "storage": ROUNDED,
    "sampler": {"sampler": OWN["Lately"]()},
    "view": {"view": OWN["WithLastAction"]()},
    "writer": {"writer": OWN["EveryNth"](3)},
    "transforms": {"on_write": OWN["Clip"](1.0), "on_read": OWN["Clip"](0.5)},
    "codec": {"storage": fbuf.storages.Compressed(keys=("obs",), codec=OWN["Shades"]())},
    "storage, sampler, view": ROUNDED | {"sampler": OWN["Lately"](), "view": OWN["WithLastAction"](), "lanes": LANES},
    "storage with priorities, stacks": ROUNDED
    | {"sampler": fbuf.samplers.Prioritized(), "view": STACKS, "lanes": LANES},
    "storage, drawn ahead": ROUNDED | AHEAD,
    "view, drawn ahead": {"view": OWN["WithLastAction"]()} | AHEAD,
}
EXAMPLE = row_with(np.zeros((4, 4), np.uint8), position=np.zeros(3, np.float32))


def rows_of(count, lanes, seed=0):
    rng, lead = np.random.default_rng(seed), (count,) if lanes is None else (count, lanes)
    return {
        "obs": rng.integers(0, 16, (*lead, 4, 4)).astype(np.uint8) * np.uint8(17),
        "position": rng.uniform(-2, 2, (*lead, 3)).astype(np.float32),
        "action": rng.integers(1, 9, lead).astype(np.int32),
        "reward": rng.normal(size=lead).astype(np.float32) * np.float32(3),
        "terminated": rng.random(lead) < 0.2,
        "truncated": rng.random(lead) < 0.1,
    }


def make(settings):
    return fbuf.Buffer(40, **({"episode_end": ("terminated", "truncated")} | settings))
