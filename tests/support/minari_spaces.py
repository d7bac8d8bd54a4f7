"""Spaces of observations and actions, as Minari has them."""

import numpy as np
from gymnasium import spaces


def spaces_of(kind):
    if kind == "plain":
        return spaces.Box(-np.inf, np.inf, (4,), np.float64), spaces.Discrete(200)
    pair = spaces.Tuple((spaces.Discrete(200), spaces.MultiBinary(5)))
    parts = {"image": spaces.Box(0, 255, (40, 36, 3), np.uint8), "pair": pair}
    parts |= {"mission": spaces.Text(9)} if kind == "text" else {}
    return spaces.Dict(parts), spaces.Tuple((spaces.Box(-9, 9, (2, 3), np.float32), spaces.MultiDiscrete([200, 200])))
