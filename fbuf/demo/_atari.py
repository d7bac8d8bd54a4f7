"""Play Atari games in parallel lanes with DQN's preprocessing and one frame per step.

The emulator's vector environment does the work in C++ threads: frame skip, maximum of two frames, grey 84x84. Its frame
stack is off, since the buffer stacks. Its reset in the step *after* an end is off, since that step is not a transition. Its
limit on episode length is off, since it returns a blend of screens at the limit (ale-py 0.12.1), from which a truncated
step bootstraps; this module counts steps and resets lanes by mask.

Source: Mnih et al. 2015 (preprocessing); `ale_py.vector_env.AtariVectorEnv`.
"""

from __future__ import annotations

import difflib
import re

import numpy as np
import numpy.typing as npt

from fbuf._core.lazy_import import import_extra

FRAME_SHAPE = (84, 84)
FRAME_SKIP = 4
_NO_LIMIT = 2**30  # emulator frames; the emulator adds 1 to it in an int32


class VectorAtari:
    """`E` copies of one game. Row t is what was seen and done at t, and what came of it.

    So a loop stores `(obs, action, reward, terminated, truncated)` with the `obs` from *before*
    the step:

        obs = env.reset()
        for _ in range(steps):
            action = policy(obs)
            next_obs, reward, terminated, truncated = env.step(action)
            rows.append((obs, action, reward, terminated, truncated))
            obs = next_obs

    Where an episode ends, the observation returned is the first of the next episode, and
    `final_obs` holds the last one of the episode that ended. Lane `i` of seed `s` plays the same
    game, bit for bit, as the only lane of seed `s + i`, for every number of threads.

    Attributes:
      game: The emulator's name of the game, as `"ms_pacman"`.
      lanes: `E`.
      num_actions: Size of the game's minimal action set; actions are in `[0, num_actions)`.
      final_obs: uint8[E, 84, 84], the observation that the last step led to: in a lane whose
        episode ended the end itself, in the others what `step` returned. Before the first step,
        what `reset` returned. In a truncated lane it is exact; in a terminated one the emulator
        may show a screen from a few emulator frames before the end; nothing bootstraps from it.
    """

    final_obs: npt.NDArray[np.uint8]

    def __init__(
        self,
        game: str,
        lanes: int,
        seed: int,
        *,
        max_steps: int = 27_000,
        noop_max: int = 30,
        sticky: float = 0.0,
        threads: int = 0,
    ) -> None:
        """Open the games; `reset` starts them.

        Args:
          game: Name in any usual spelling: `"Breakout"`, `"MsPacman"`, `"ms_pacman"`.
          lanes: `E`, the number of parallel games.
          seed: Of lane 0; lane `i` has `seed + i`. In `[0, 2**31 - lanes)`.
          max_steps: Steps after which an episode is truncated (27,000 steps are 30 minutes of play).
          noop_max: Largest number of idle frames, drawn by the seed, before each episode.
          sticky: Probability of repeating the last action (0: Mnih et al. 2015; 0.25: Machado et al. 2018).
          threads: Of the emulator; 0: one per core.
        Raises:
          ImportError: ale-py or gymnasium is missing.
          ValueError: an unknown game, no lane, no step, or a seed out of range.
        Cost: a step of 8 lanes is about 1.5 ms on two cores.
        """
        vector_env = import_extra("VectorAtari", "ale_py.vector_env", '"fbuf[demo]"')
        for name, value in (("lanes", lanes), ("max_steps", max_steps)):
            if value < 1:
                raise ValueError(f"VectorAtari: {name} is {value}; expected >= 1. Pass {name}=1.")
        if not 0 <= seed < 2**31 - lanes:
            raise ValueError(f"VectorAtari: seed is {seed}; expected 0 <= seed < 2**31 - lanes. Pass seed=0.")
        self.game = known_name(game)
        self.lanes = lanes
        self._seed = seed
        self._max_steps = max_steps
        self._age = np.zeros(lanes, np.int64)  # steps since the lane's episode began
        self._env = vector_env.AtariVectorEnv(
            self.game,
            lanes,
            num_threads=threads,
            autoreset_mode="SameStep",
            max_num_frames_per_episode=_NO_LIMIT,
            repeat_action_probability=sticky,
            img_height=FRAME_SHAPE[0],
            img_width=FRAME_SHAPE[1],
            grayscale=True,
            stack_num=1,
            frameskip=FRAME_SKIP,
            maxpool=True,
            noop_max=noop_max,
            episodic_life=False,
            reward_clipping=False,
            use_fire_reset=True,
        )
        self.num_actions = int(self._env.single_action_space.n)
        self._started = False

    def reset(self) -> npt.NDArray[np.uint8]:
        """Start every lane again from its seed: uint8[E, 84, 84], the same on every call."""
        obs, _ = self._env.reset(seed=self._seed)
        self._started = True
        self._age[:] = 0
        self.final_obs = obs[:, 0]
        return self.final_obs

    def step(
        self, actions: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Play one action (four emulator frames) in every lane.

        Args:
          actions: int[E], each in `[0, num_actions)`.
        Returns:
          obs: uint8[E, 84, 84], the input of the next action (a first frame after an end).
          reward: float32[E], the change of the game's score, not clipped.
          terminated: bool[E], the game is over.
          truncated: bool[E], the episode was cut at `max_steps`; never where `terminated`.
        Raises:
          RuntimeError: before `reset`.
          ValueError: actions of another shape, type or range.
        """
        if not self._started:
            raise RuntimeError("VectorAtari.step: not started. Call obs = env.reset() first.")
        actions = np.asarray(actions)
        if actions.shape != (self.lanes,) or actions.dtype.kind not in "iu":
            raise ValueError(
                f"VectorAtari.step: actions is {actions.dtype}{list(actions.shape)}; expected int32[{self.lanes}]."
            )
        # A wrong action ends a thread of the emulator, and the step waits for it for ever.
        if actions.min() < 0 or actions.max() >= self.num_actions:
            raise ValueError(
                f"VectorAtari.step: actions lie in [{actions.min()}, {actions.max()}]; "
                f"expected [0, {self.num_actions - 1}]. Draw them below env.num_actions."
            )
        frames, reward, terminated, _, info = self._env.step(actions.astype(np.int32))
        obs = final = frames[:, 0]
        if terminated.any():
            final = np.where(terminated[:, None, None], info["final_obs"][:, 0], obs)
        self._age += 1
        truncated = (self._age >= self._max_steps) & ~terminated
        if truncated.any():
            frames, _ = self._env.reset(options={"reset_mask": truncated})
            obs = frames[:, 0]
        self._age[terminated | truncated] = 0
        self.final_obs = final
        return obs, reward.astype(np.float32), terminated, truncated


def known_name(game: str) -> str:
    """Return the emulator's name of a game: `"MsPacman"` -> `"ms_pacman"`. Raises ValueError without one."""
    from ale_py import roms

    known = roms.get_all_rom_ids()
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", game).lower()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or ["breakout", "pong"]
        raise ValueError(f"VectorAtari: game {game!r} is none of ale_py.roms.get_all_rom_ids(). Try {', '.join(near)}.")
    return name
