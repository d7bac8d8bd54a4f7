"""Record environments of Gymnasium: the example row, the view, and a wrapper that writes rows correctly at all ends.

Rows have the leaves `obs`, `action`, `reward`, `terminated` and `truncated`. In every autoreset mode the row after an end
holds the final observation, as in Gymnasium's default, NEXT_STEP. Views with `autoreset="next_step"` use that row as the
next observation and never draw it. Needs `pip install "fbuf[gymnasium]"`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fbuf._buffer import checks
from fbuf._core.pytree import PyTree, Spec, named_leaves, under
from fbuf._indexing.anchors import CUT, has
from fbuf._replay import Replay
from fbuf.views import Transition

__all__ = ["Recorder", "spec", "view"]

__dir__ = __all__.copy  # without the imports


def spec(envs: Any) -> dict[str, PyTree]:
    """Return one row of `gymnasium.vector.VectorEnv` or `gymnasium.Env`, for `Replay` or `Buffer.init`.

    Leaves are zeros of one environment's shapes and of the dtypes that JAX uses. Without x64, `Discrete` is int32 and a
    float64 `Box` is float32; replace a leaf to store more bits. Spaces `Dict` and `Tuple` are dicts and tuples of leaves.
    Leaves of your own are added with `|`, and given to `Recorder.step`.

    Args:
      envs: Environments with spaces `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, and `Dict` and `Tuple` of them.
    Raises:
      TypeError: a space has no fixed shape (`Text`, `Sequence`, `Graph`).

    Example:
      >>> import fbuf, gymnasium, numpy as np
      >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=4)
      >>> row = fbuf.gymnasium.spec(envs) | {"carry": np.zeros(8, np.float32)}
      >>> {name: (leaf.shape, leaf.dtype.name) for name, leaf in row.items()}["obs"]
      ((4,), 'float32')
    """
    observation = getattr(envs, "single_observation_space", envs.observation_space)
    action = getattr(envs, "single_action_space", envs.action_space)
    flag = np.zeros((), bool)
    return {
        "obs": _zeros(observation),
        "action": _zeros(action),
        "reward": np.zeros((), np.float32),
        "terminated": flag,
        "truncated": flag,
    }


def view(envs: Any, **settings: Any) -> Transition:
    """Return `views.Transition(autoreset="next_step", **settings)`, which reads the rows of a `Recorder`.

    Other views need `autoreset="next_step"` too: `views.Sequence(16, autoreset="next_step")`.

    Args:
      envs: As for `spec`, in any autoreset mode.
      **settings: Of `views.Transition`: `n_step`, `gamma`, `stack`, ...

    Example:
      >>> import fbuf, gymnasium
      >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=4)
      >>> fbuf.gymnasium.view(envs, n_step=3).autoreset
      'next_step'
    """
    _mode(envs)
    return Transition(autoreset="next_step", **settings)


class Recorder:
    """Wrap environments so that `step` and `reset` write their rows to a `Replay`. Apply other wrappers first.

    `step` writes one row per environment. Where autoreset is SAME_STEP, or the caller resets after an end (DISABLED, or a
    single `gymnasium.Env`), one more row holds the final observation of the environments that ended. `reset` cuts the
    running episodes (`Replay.cut`), of all environments or of those in `options["reset_mask"]`. All other attributes are
    those of the environments; `close` leaves the replay open.

    Under a limit, `step` and `reset` wait like `Replay.add`. After a call that raised, or was interrupted, `reset` is
    required: it cuts every running episode, so that no transition joins rows before and after.

    Args:
      envs: A `gymnasium.vector.VectorEnv` of E environments, or a `gymnasium.Env`.
      replay: Of rows like `spec(envs)`, with `lanes=E` (`lanes=None` for an `Env`) and a view with
        `autoreset="next_step"`. It may hold rows already; the first `reset` cuts their episodes.
      obs: The last observation that `step` or `reset` returned before `replay.save`, to continue without `reset` where the
        environments also continue: after `Replay.load(path, cut=False)` the rows are those of a run that was not interrupted.
    Raises:
      ValueError: the replay or `obs` does not fit; or the autoreset mode is unknown.

    Example:
      >>> import fbuf, gymnasium
      >>> envs = gymnasium.make_vec("CartPole-v1", num_envs=4)
      >>> buffer = fbuf.Buffer(1000, view=fbuf.gymnasium.view(envs), lanes=4)
      >>> replay = fbuf.Replay(buffer, fbuf.gymnasium.spec(envs))
      >>> envs = fbuf.gymnasium.Recorder(envs, replay)
      >>> obs, info = envs.reset(seed=0)
      >>> for _ in range(10):
      ...     obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
      >>> len(replay)
      40

      Continue from a checkpoint, with environments that were not reset:

      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saving = replay.save(folder, extra={"obs": obs})
      ...     replay, extra = fbuf.Replay.load(folder, extra=True, cut=False)
      >>> envs = fbuf.gymnasium.Recorder(envs.envs, replay, obs=extra["obs"])
      >>> obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
      >>> len(replay)
      44
    """

    def __init__(self, envs: Any, replay: Replay, *, obs: PyTree = None):
        if not isinstance(replay, Replay):
            raise TypeError(
                f"Recorder: replay is {type(replay).__name__}; expected a Replay. Write Recorder(envs, fbuf.Replay(buffer, "
                f"spec(envs)))."
            )
        buffer = replay.buffer
        lanes = envs.num_envs if hasattr(envs, "single_action_space") else None
        if buffer.lanes != lanes:
            kind = "one gymnasium.Env" if lanes is None else f"{lanes} environments"
            raise ValueError(f"Recorder: the buffer has lanes={buffer.lanes}, but envs is {kind}. Write lanes={lanes}.")
        if not buffer.view.rule.reset_rows:
            raise ValueError(
                f"Recorder: the view is {buffer.view!r}, which would draw the rows that hold final observations. Write "
                f'view=fbuf.gymnasium.view(envs), or a view with autoreset="next_step".'
            )
        rows = checks.given_spec(buffer, replay.state)[0]
        missing = [name for name in named_leaves(spec(envs)) if name not in rows]
        if missing:
            raise ValueError(
                f"Recorder: rows have no leaf '{missing[0]}'. Write Replay(buffer, fbuf.gymnasium.spec(envs))."
            )
        self.envs, self.replay = envs, replay
        self._mode = _mode(envs)
        self._reward_dtype = rows["reward"].dtype
        self._obs: PyTree = None  # None: not reset since the start or the last error
        self._row: dict[str, PyTree] = {}
        self._ended = np.zeros(() if lanes is None else lanes, bool)  # whose final observation is not written yet
        if obs is not None:
            self._continue(obs, rows)

    def _continue(self, obs: PyTree, rows: Spec) -> None:
        """Continue after the newest rows of the replay, with `obs` of the same time."""
        replay, lead = self.replay, self._ended.shape
        expected = {name: (*lead, *rows[name].shape) for name in under("obs", rows)}
        got = {name: np.shape(leaf) for name, leaf in named_leaves({"obs": obs}).items()}
        if got != expected:
            raise ValueError(
                f"Recorder: obs has the shapes {got}; expected {expected}. Pass what step or reset returned."
            )
        state = replay.state
        newest = jax.device_get(replay.rows(last=1))
        row = jax.tree.map(lambda leaf: np.array(leaf[0]), newest.data)
        self._ended = np.asarray(newest.mask[0] & (row["terminated"] | row["truncated"]))
        assert state.anchors is not None
        if (self._ended & np.reshape(has(state.anchors.tail_flags[-1], CUT), lead)).any():
            raise ValueError(
                "Recorder: obs continues episodes, but the replay was cut. Write Replay.load(path, cut=False), or reset()."
            )
        if self._ended.any() and replay.buffer.on_write is not None:
            raise ValueError(
                "Recorder: obs continues after the end of an episode, but rows changed on_write. Save after another step."
            )
        self._row, self._obs = row, _copied(obs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "step_", "reset_", "send", "recv")):
            raise AttributeError(f"Recorder: '{name}' would bypass the replay; expected step or reset.")
        return getattr(self.envs, name)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[PyTree, dict[str, Any]]:
        """Reset the environments; see `gymnasium.vector.VectorEnv.reset`. Write pending final observations, and cut.

        Example:
          >>> import fbuf, gymnasium
          >>> env = gymnasium.make("CartPole-v1")
          >>> replay = fbuf.Replay(fbuf.Buffer(100, view=fbuf.gymnasium.view(env)), fbuf.gymnasium.spec(env))
          >>> env = fbuf.gymnasium.Recorder(env, replay)
          >>> obs, info = env.reset(seed=0)
          >>> obs.shape
          (4,)
        """
        mask = np.array((options or {}).get("reset_mask", np.ones_like(self._ended)))
        obs, self._obs = self._obs, None
        if obs is None and not mask.all():
            raise RuntimeError("Recorder.reset: reset_mask leaves out environments that are not running. Call reset().")
        result: tuple[PyTree, dict[str, Any]] = self.envs.reset(seed=seed, options=options)
        following = _copied(result[0])
        if obs is None:
            if len(self.replay):
                self.replay.cut()
        else:
            self._add_final(obs, mask & self._ended)
            if (mask & ~self._ended).any():
                self.replay.cut(mask & ~self._ended)
        self._ended &= ~mask
        self._obs = following
        return result

    def step(self, action: PyTree, **leaves: Any) -> tuple[PyTree, Any, Any, Any, dict[str, Any]]:
        """Step the environments; see `gymnasium.vector.VectorEnv.step`. Write a row for each.

        Args:
          action: `[E, ...]`, as the environments expect it.
          **leaves: `[E, ...]`, leaves of the row that are not Gymnasium's, of the time of `action`.
        Raises:
          RuntimeError: `reset` is required.

        Example:
          >>> import fbuf, gymnasium, numpy as np
          >>> env = gymnasium.make("CartPole-v1")
          >>> example = fbuf.gymnasium.spec(env) | {"carry": np.zeros(8, np.float32)}
          >>> replay = fbuf.Replay(fbuf.Buffer(100, view=fbuf.gymnasium.view(env)), example)
          >>> env = fbuf.gymnasium.Recorder(env, replay)
          >>> obs, info = env.reset(seed=0)
          >>> obs, reward, terminated, truncated, info = env.step(1, carry=np.ones(8, np.float32))
          >>> replay.rows(last=1).data["carry"].shape
          (1, 8)
        """
        if self._obs is None:
            raise RuntimeError("Recorder.step: the environments are not running. Call reset() first.")
        if self._mode == "Disabled" and self._ended.any():
            raise RuntimeError(
                "Recorder.step: environments ended and were not reset. Call reset(), for some environments with "
                'options={"reset_mask": terminated | truncated}.'
            )
        obs, self._obs = self._obs, None
        result: tuple[PyTree, Any, Any, Any, dict[str, Any]] = self.envs.step(action)
        following, reward, terminated, truncated, info = result
        following = _copied(following)  # the environments may reuse their array
        self._row = dict(
            obs=obs,
            action=_copied(action),
            reward=np.asarray(reward, self._reward_dtype),
            terminated=np.asarray(terminated),
            truncated=np.asarray(truncated),
            **leaves,
        )
        self.replay.add(self._row)
        self._ended = np.logical_or(terminated, truncated)
        if self._mode == "SameStep" and self._ended.any():
            self._add_final(self._final_obs(info), self._ended)
            self._ended = np.zeros_like(self._ended)
        self._obs = following
        return result

    def _add_final(self, obs: PyTree, mask: Any) -> None:
        """Write a row with the final observation where `mask`; its other leaves are those of the row before."""
        if mask.any():
            row = self._row | {"obs": obs, "reward": np.zeros_like(self._row["reward"])}
            self.replay.add(row | dict.fromkeys(("terminated", "truncated"), np.zeros_like(mask)), mask=mask)

    def _final_obs(self, info: dict[str, Any]) -> PyTree:
        """Return the final observations `[E, ...]`, of any content where no episode ended."""
        from gymnasium.vector.utils import concatenate, create_empty_array

        if "final_obs" not in info:
            raise ValueError("Recorder.step: SAME_STEP, but no 'final_obs' in info. Use AutoresetMode.NEXT_STEP.")
        final, space = info["final_obs"], self.envs.single_observation_space
        if not isinstance(final, np.ndarray) or final.dtype.kind != "O":
            return _copied(final)
        some = final[self._ended.argmax()]
        items = [obs if ended else some for obs, ended in zip(final, self._ended, strict=True)]
        return concatenate(space, items, create_empty_array(space, len(items)))


def _copied(element: PyTree) -> PyTree:
    """Return an element of a space with copies of its arrays, in dicts of any kind where `spec` has dicts."""
    if isinstance(element, dict):
        return {name: _copied(inner) for name, inner in element.items()}
    return tuple(map(_copied, element)) if isinstance(element, tuple) else np.array(element)


def _mode(envs: Any) -> str:
    """Return the autoreset mode: "NextStep", "SameStep" or "Disabled"."""
    if not hasattr(envs, "single_action_space"):
        return "Disabled"
    mode, inner = None, envs
    while mode is None and inner is not None:  # `metadata` may be shared by environments of different modes
        mode, inner = getattr(inner, "autoreset_mode", None), getattr(inner, "env", None)
    if mode is None:
        mode = envs.metadata.get("autoreset_mode")
    mode = getattr(mode, "value", mode)
    if mode not in ("NextStep", "SameStep", "Disabled"):
        raise ValueError(
            f"fbuf.gymnasium: the autoreset mode of envs is {mode!r}; expected an AutoresetMode. Set "
            f"envs.metadata['autoreset_mode']."
        )
    return str(mode)


def _zeros(space: Any) -> PyTree:
    """Return an element of the space, all zeros, in the dtypes that JAX uses."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: _zeros(inner) for name, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_zeros(inner) for inner in space)
    if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise TypeError(
            f"fbuf.gymnasium.spec: {space} has no fixed shape; expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or "
            f"Tuple. Wrap the environments so that they return arrays."
        )
    return np.zeros(space.shape, jax.dtypes.canonicalize_dtype(space.dtype))
