"""Roll out environments with the lines of ENVIRONMENTS.md, and compare what is drawn with bare steps: a function a library.

    PYTHONPATH=. FOLDER/bin/python tests/environments/libraries.py gymnax

A plain script in the libraries' own environment (`install.py`), where a package `tests` of pgx hides this one.
"""

import functools
import sys
from pathlib import Path
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
from comparison import check, check_wrong

LANES, STEPS, LIMIT = 4, 150, 9
KEY = jax.random.key(0)
PAGE = Path(__file__).parents[2] / "fbuf" / "ENVIRONMENTS.md"
_, _, LINES = PAGE.read_text().split("```")[1].partition("\n")
ROWS = {block.split()[1].strip(";"): compile(block, str(PAGE), "exec") for block in LINES.strip().split("\n\n")}
"""The lines of each library under "Rows", by the first word of their comment."""


def run(library, **names):
    """Return all names after the lines of ENVIRONMENTS.md."""
    exec(ROWS[library], {"jnp": jnp}, names)
    return names


def scan(step, carry, steps=STEPS):
    return jax.device_get(jax.lax.scan(step, carry, jax.random.split(jax.random.key(5), steps))[1])


def lanes_of(reset):
    return jax.vmap(reset)(jax.random.split(KEY, LANES))


def replace(*modules):
    """Let modules import that are not installed, and that the environments do not use."""
    sys.modules |= {name: MagicMock() for name in modules}


def counted(age, ended):
    return jnp.where(ended, 0, age + 1)


def gymnax():
    import gymnax

    env, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=15)

    def lane(obs, state, age, key):
        action = jax.random.randint(key, (), 0, 2)
        bare = env.step_env(jax.random.split(key)[0], state, action, params)
        names = run("gymnax", step=env.step, key=key, env_state=state, action=action, params=params, obs=obs)
        terminated, truncated = bare[3].astype(bool), age + 1 >= 15
        truth = dict(reward=bare[2], terminated=terminated, truncated=truncated, next=bare[0], real=True)
        return (names["obs2"], names["env_state"], counted(age, terminated | truncated)), (names["row"], truth)

    def step(carry, key):
        return jax.vmap(lane)(*carry, jax.random.split(key, LANES))

    rows, truth = scan(step, (*lanes_of(lambda key: env.reset(key, params)), jnp.zeros(LANES, int)))
    check("gymnax", rows, truth, final_observation="final")
    check_wrong("gymnax", rows, truth, "next_obs", autoreset="next_step")
    del rows["final"]
    check("gymnax", rows, truth, autoreset="same_step")


def navix():
    replace("distrax", "rlax", "wandb", "wandb.util")  # only its agents need them
    import navix

    env = navix.make("Navix-Empty-5x5-v0", max_steps=LIMIT)
    raw = navix.make("Navix-Empty-5x5-v0", max_steps=LIMIT, disable_autoreset=True)

    def lane(now, age, key):
        action = jax.random.randint(key, (), 0, 3)
        bare, names = raw._step(now, action), run("navix", env=env, now=now, action=action)
        ignored = now.step_type > 0
        age = jnp.where(ignored, 0, age + 1)
        terminated, truncated = (bare.step_type == 2) & ~ignored, (age >= LIMIT) & ~ignored
        truth = dict(reward=bare.reward, terminated=terminated, truncated=truncated)
        truth |= dict(next=bare.observation, real=~ignored)
        return (names["new"], jnp.where(terminated | truncated, 0, age)), (names["row"], truth)

    def step(carry, key):
        return jax.vmap(lane)(*carry, jax.random.split(key, LANES))

    rows, truth = scan(step, (lanes_of(env.reset), jnp.zeros(LANES, int)))
    check("navix", rows, truth, autoreset="next_step")
    check_wrong("navix", rows, truth, "phantom", autoreset="same_step")


def xminigrid():
    import xminigrid
    from xminigrid.wrappers import DmEnvAutoResetWrapper, GymAutoResetWrapper

    raw, params = xminigrid.make("MiniGrid-Empty-5x5")
    params = params.replace(max_steps=LIMIT)

    def check_wrapper(wrapper, mode, other, kind):
        env = wrapper(raw)

        def lane(now, age, key):
            action = jax.random.randint(key, (), 0, 3)
            bare = raw.step(params, now, action)
            names = run("xminigrid", env=env, params=params, now=now, action=action)
            ignored = now.last() & (mode == "next_step")
            age = jnp.where(ignored, 0, age + 1)
            terminated, truncated = (bare.discount == 0) & ~ignored, (age >= LIMIT) & ~ignored
            truth = dict(reward=bare.reward, terminated=terminated, truncated=truncated)
            truth |= dict(next=bare.observation, real=~ignored)
            return (names["new"], jnp.where(terminated | truncated, 0, age)), (names["row"], truth)

        def step(carry, key):
            return jax.vmap(lane)(*carry, jax.random.split(key, LANES))

        rows, truth = scan(step, (lanes_of(lambda key: env.reset(params, key)), jnp.zeros(LANES, int)))
        check(f"xminigrid, {wrapper.__name__}", rows, truth, autoreset=mode)
        check_wrong(f"xminigrid, {wrapper.__name__}", rows, truth, kind, autoreset=other)

    check_wrapper(GymAutoResetWrapper, "same_step", "next_step", "missing")
    check_wrapper(DmEnvAutoResetWrapper, "next_step", "same_step", "phantom")


def pgx():
    import pgx
    from pgx.experimental import auto_reset

    env = pgx.make("minatar-breakout")
    step_of = auto_reset(env.step, env.init)

    def lane(state, key):
        action = jax.random.randint(key, (), 0, env.num_actions)
        running = state.replace(terminated=state.terminated & False, truncated=state.truncated & False)
        bare = env.step(running.replace(rewards=state.rewards * 0), action, jax.random.split(key)[0])
        names = run("pgx", step=step_of, env_state=state, action=action, key=key, player=0)
        truth = dict(reward=bare.rewards[0], terminated=bare.terminated, truncated=bare.truncated)
        return names["new"], (names["row"], truth | dict(next=bare.observation, real=True))

    def step(state, key):
        return jax.vmap(lane)(state, jax.random.split(key, LANES))

    rows, truth = scan(step, lanes_of(env.init))
    assert not truth["truncated"].any()
    check("pgx", rows, truth, autoreset="same_step")
    check_wrong("pgx", rows, truth, "missing", autoreset="next_step")


def jumanji():
    replace("huggingface_hub", "requests")  # only Sokoban downloads its levels
    import jumanji
    from jumanji.wrappers import AutoResetWrapper

    raw = jumanji.environments.Snake(6, 6, time_limit=LIMIT)
    env = AutoResetWrapper(raw, next_obs_in_extras=True)

    def lane(state, now, age, key):
        action = jax.random.categorical(key, jnp.where(now.observation.action_mask, 0.0, -1e9))
        bare = raw.step(state, action)[1]
        names = run("jumanji", env=env, env_state=state, now=now, action=action, age=age, time_limit=LIMIT)
        over, new = age + 1 >= LIMIT, names["new"]
        truth = dict(reward=bare.reward, terminated=bare.last() & ~over, truncated=over)
        truth |= dict(next=bare.observation, real=True)
        following = names["env_state"], new, counted(age, bare.last())
        return following, (names["row"], truth, new.last() & (new.discount == 0))

    def step(carry, key):
        return jax.vmap(lane)(*carry, jax.random.split(key, LANES))

    rows, truth, by_discount = scan(step, (*lanes_of(env.reset), jnp.zeros(LANES, int)))
    check("jumanji", rows, truth, final_observation="final")
    rows |= dict(terminated=by_discount, truncated=by_discount & False)
    check_wrong("jumanji, by its discount", rows, truth, "discount", final_observation="final")


def jaxmarl():
    import jaxmarl

    env = jaxmarl.make("MPE_simple_spread_v3")

    def lane(obs, state, key):
        action = {name: jax.random.randint(jax.random.fold_in(key, i), (), 0, 5) for i, name in enumerate(env.agents)}
        bare = env.step_env(jax.random.split(key)[0], state, action)
        names = run("jaxmarl", env=env, key=key, env_state=state, actions=action, obs=obs, limit=jnp.bool_(True))
        reward = jnp.stack([bare[2][name] for name in env.agents])
        truth = dict(reward=reward, terminated=jnp.bool_(False), truncated=bare[3]["__all__"], next=bare[0], real=True)
        return (names["obs2"], names["env_state"]), (names["row"], truth)

    def step(carry, key):
        return jax.vmap(lane)(*carry, jax.random.split(key, LANES))

    rows, truth = scan(step, lanes_of(env.reset))
    check("jaxmarl", rows, truth, autoreset="same_step")
    check_wrong("jaxmarl", rows, truth, "missing", autoreset="next_step")


def brax():
    from brax.envs.base import State
    from brax.envs.wrappers.training import AutoResetWrapper

    rows, truth, done = _points(
        "brax", State, "pipeline_state", AutoResetWrapper, lambda final, _: {"final_obs": final}
    )
    check_wrong("brax, done as terminated", rows | {"terminated": done}, truth, "discount", autoreset="same_step")


def playground():
    replace("tqdm", "lxml")  # only its robots need them
    from mujoco_playground._src.mjx_env import State
    from mujoco_playground._src.wrapper import BraxAutoResetWrapper

    def keep(final, info):
        return {"AutoResetWrapper_preserve_info": {"final_obs": final, "truncation": info.get("truncation", 0.0)}}

    for full_reset in (False, True):
        wrap = functools.partial(BraxAutoResetWrapper, full_reset=full_reset)
        rows, truth, _ = _points("mujoco_playground", State, "data", wrap, keep)
        lost = {"terminated": rows["terminated"] | rows["truncated"]}  # as without `keep`, if all is reset
        check_wrong("playground, lost limits", rows | lost, truth, "discount", final_observation="final")


def _points(library, state, content, wrap, keep):
    """Check the lines of a library that has brax's wrappers, with what `keep(final_obs, info)` stores in `info`."""
    from brax import envs
    from brax.envs.wrappers import training

    class Point(envs.base.Env):
        """Moves by the action; terminates at |x| > 2."""

        observation_size, action_size, backend = 2, 2, "none"

        def reset(self, rng):
            x = jax.random.uniform(rng, (2,))
            zero = jnp.float32(0)
            return state(**{content: {"x": x}}, obs=x, reward=zero, done=zero, metrics={}, info={})

        def step(self, state, action):
            x = getattr(state, content)["x"] + 0.5 * action
            done = (jnp.abs(x).max() > 2).astype(jnp.float32)
            return state.replace(**{content: {"x": x}}, obs=x, reward=x.sum(), done=done)

    class KeepFinal(envs.base.Wrapper):
        """Keep what the reset at an end replaces."""

        def reset(self, rng):
            state = self.env.reset(rng)
            return state.replace(info=state.info | keep(state.obs, state.info))

        def step(self, state, action):
            state = self.env.step(state, action)
            return state.replace(info=state.info | keep(state.obs, state.info))

    raw = Point()
    env = wrap(KeepFinal(training.EpisodeWrapper(training.VmapWrapper(raw), LIMIT, 1)))

    def step(carry, key):
        state, age = carry
        action = jax.random.uniform(key, (LANES, 2), minval=-1, maxval=1)
        bare, names = jax.vmap(raw.step)(state, action), run(library, env=env, env_state=state, action=action)
        terminated = bare.done > 0
        over = (age + 1 >= LIMIT) & ~terminated
        truth = dict(reward=bare.reward, terminated=terminated, truncated=over, next=bare.obs)
        new, truth["real"] = names["new"], jnp.ones(LANES, bool)
        row = {"final": new.info.get("final_obs")} | names["row"]
        return (new, counted(age, terminated | over)), (row, truth, names["done"])

    first = env.reset(jax.random.split(jax.random.PRNGKey(0), LANES))
    rows, truth, done = scan(step, (first, jnp.zeros(LANES, int)), 400)
    check(library, rows, truth, final_observation="final")
    check(library, rows, truth, autoreset="same_step")
    return rows, truth, done


def dm_env():
    from dm_env import auto_reset_environment, restart, termination, transition, truncation

    class Walk(auto_reset_environment.AutoResetEnvironment):
        """A walk that terminates at 3 and -3, of at most `LIMIT` steps."""

        observation_spec = action_spec = None  # not called
        episode = 0

        def observed(self):
            return np.array([self.position, self.age, self.episode], np.float32)

        def _reset(self):
            self.position, self.age, self.episode = 0, 0, self.episode + 1
            return restart(self.observed())

        def _step(self, action):
            self.position, self.age = self.position + 2 * action - 1, self.age + 1
            kind = termination if abs(self.position) == 3 else truncation if self.age == LIMIT else transition
            return kind(float(self.position), self.observed())

    actions = np.random.default_rng(0).integers(0, 2, (LANES, STEPS))
    rows, truth = [], []
    for lane in actions:
        env, bare = Walk(), Walk()
        now, real = env.reset(), bare.reset().first()
        for action in lane:
            names = run("dm_env", env=env, now=now, action=action)
            now, step = names["new"], bare._step(action) if real else bare._reset()
            rows.append(names["row"])
            terminated = real and abs(bare.position) == 3
            truncated = real and bare.age == LIMIT and not terminated
            reward = step.reward if real else 0.0
            truth.append(
                dict(reward=reward, terminated=terminated, truncated=truncated, next=bare.observed(), real=real)
            )
            real = not (terminated or truncated)
    rows, truth = (
        jax.tree.map(lambda *x: np.reshape(x, (LANES, STEPS, *np.shape(x[0]))).swapaxes(0, 1), *r)
        for r in (rows, truth)
    )
    check("dm_env", rows, truth, autoreset="next_step")
    check_wrong("dm_env", rows, truth, "phantom", autoreset="same_step")


def ale_py():
    """The rows of `xla()` in a scan, and Python's steps of the same environments."""
    from ale_py.vector_env import AtariVectorEnv

    settings = dict(stack_num=1, noop_max=1, max_num_frames_per_episode=60, reward_clipping=False)
    envs, bare = (AtariVectorEnv("breakout", LANES, img_height=21, img_width=21, **settings) for _ in range(2))
    handle, reset, step_of = envs.xla()
    handle, (obs, _) = reset(handle, seed=0)
    _next_step("ale-py", step_of, handle, obs, bare, bare.reset(seed=0)[0], 4)


def envpool():
    replace("envpool.entry")  # it registers all environments, and most need packages of assets
    import envpool
    import envpool.classic_control.registration  # noqa: F401

    def make():
        return envpool.make_gymnasium("CartPole-v1", num_envs=LANES, seed=3, max_episode_steps=20)

    envs, bare = make(), make()
    handle, _, _, step_of = envs.xla()
    _next_step("envpool", step_of, handle, envs.reset()[0], bare, bare.reset()[0], 2)


def _next_step(name, step_of, handle, obs, bare, expected, actions):
    np.testing.assert_array_equal(np.asarray(obs), expected)
    action = np.random.default_rng(0).integers(0, actions, (STEPS, LANES)).astype(np.int32)

    def step(carry, action):
        handle, obs = carry
        names = run("xla()", step=step_of, handle=handle, action=action, obs=obs)
        return (names["handle"], names["obs2"]), names["row"]

    rows = jax.device_get(jax.jit(lambda *carry: jax.lax.scan(step, carry, action)[1])(handle, jnp.asarray(obs)))
    truth = {name: [] for name in ("reward", "terminated", "truncated", "next", "real")}
    ended = np.zeros(LANES, bool)
    for each in action:
        following, reward, terminated, truncated, _ = bare.step(each)
        values = np.array(reward), np.array(terminated), np.array(truncated), np.array(following), ~ended
        for column, value in zip(truth.values(), values, strict=True):
            column.append(value)
        ended = values[1] | values[2]
    truth = {name: np.stack(column) for name, column in truth.items()}
    check(name, rows, truth, autoreset="next_step")
    check_wrong(name, rows, truth, "phantom", autoreset="same_step")


if __name__ == "__main__":
    for library in sys.argv[1:]:
        globals()[library]()
