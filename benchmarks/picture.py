"""Draws the README's picture from a game played now: `python -m benchmarks.picture [--game SpaceInvaders] [--out PATH]`.

Left what a prioritized draw gives, read from compressed frames; right what the same rows take in each storage, counted by
`buffer.nbytes`, beside stacks with next stacks kept as arrays. The rows are real (a random policy in eight games); no figure
of a table is read from this picture, those come from `python -m benchmarks`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fbuf
from fbuf.demo._atari import VectorAtari
from fbuf.demo._dqn import LANES, init_params
from fbuf.demo._run import Actor

OUT = Path(__file__).parent / "results" / "picture.png"
STEPS, LOT, STACK, SHOWN = 1000, 100, 4, 2
VIEW = fbuf.views.Transition(n_step=3, stack=STACK, autoreset="same_step")


def rows_of(game: str) -> list[dict[str, Any]]:
    """Lots of rows `[LOT, LANES, ...]`, played by a random policy."""
    env = VectorAtari(game, LANES, seed=0)
    actor = Actor(env, jax.random.key(0))
    params = init_params(jax.random.key(1), env.num_actions)
    return [actor.play(params, LOT, epsilon=1.0) for _ in range(STEPS // LOT)]


def filled(storage: Any, lots: list[dict[str, Any]]) -> tuple[fbuf.Buffer, fbuf.BufferState]:
    """The rows in a buffer of their number, with priorities."""
    sampler = fbuf.samplers.Prioritized()
    buffer = fbuf.Buffer(STEPS * LANES, storage=storage, sampler=sampler, view=VIEW, lanes=LANES)
    state = buffer.init({name: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for name, x in lots[0].items()})
    for rows in lots:
        state = buffer.extend(state, rows)
    return buffer, state


def main(arguments: list[str] | None = None) -> int:
    """Draws it; returns 0."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.add_argument("--game", default="SpaceInvaders")
    parser.add_argument("--out", type=Path, default=OUT, metavar="PATH")
    options = parser.parse_args(arguments)
    lots = rows_of(options.game)
    whole = {name: np.concatenate([rows[name] for rows in lots]) for name in lots[0]}
    stacked = 2 * STACK * int(np.prod(whole["obs"].shape[2:]))  # obs and next_obs
    bars = {"stacks and next\nstacks as arrays": float(stacked)}
    fitted = fbuf.storages.Deduplicated(keys=("obs",)).fit(whole, STEPS * LANES, LANES)
    for storage in (fbuf.storages.Device(), fitted, fbuf.storages.Compressed(keys=("obs",))):
        buffer, state = filled(storage, lots)
        bars[type(storage).__name__] = sum(buffer.nbytes(state).values()) / (STEPS * LANES)

    figure = Figure(figsize=(12.8, 3.2), dpi=90, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1.0))
    fbuf.plot.frames(buffer, state, jax.random.key(3), number=SHOWN, ax=left)
    names, heights = list(bars), list(bars.values())
    colors = ["#999999", "#0072B2", "#009E73", "#D55E00"]
    drawn = right.barh(names, heights, color=colors)
    right.bar_label(drawn, [f" {h:,.0f} B, 1/{stacked / h:,.0f}" if h < stacked else f" {h:,.0f} B" for h in heights])
    right.set(xscale="log", xlim=(min(heights) / 3, stacked * 12), xlabel="bytes a row, all of the state")
    right.set_title(f"{STEPS * LANES:,} rows of {options.game}, random play", fontsize="medium")
    right.invert_yaxis()
    right.spines[["top", "right"]].set_visible(False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)
    print(", ".join(f"{name.replace(chr(10), ' ')}: {height:,.1f} bytes a row" for name, height in bars.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
