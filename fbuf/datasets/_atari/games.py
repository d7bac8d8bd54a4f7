"""Names of the DQN replay data set: sixty games, five runs each.

Listed here, so that `available` needs no network and a typing error is told before anything is asked of one.
Source: Agarwal, Schuurmans, Norouzi 2020, "An Optimistic Perspective on Offline Reinforcement Learning", appendix.
"""

from __future__ import annotations

import difflib

RUNS = 5
GAMES: tuple[str, ...] = tuple(
    (
        "AirRaid Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling Boxing "
        "Breakout Carnival Centipede ChopperCommand CrazyClimber DemonAttack DoubleDunk ElevatorAction Enduro "
        "FishingDerby Freeway Frostbite Gopher Gravitar Hero IceHockey Jamesbond JourneyEscape Kangaroo Krull "
        "KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix Pitfall Pong Pooyan PrivateEye Qbert Riverraid "
        "RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders StarGunner Tennis TimePilot Tutankham UpNDown "
        "Venture VideoPinball WizardOfWor YarsRevenge Zaxxon"
    ).split()
)


def available() -> tuple[str, ...]:
    """Ids of the Atari DQN replay data set: 60 games, runs 1 to 5. Nothing is asked of a network.

    Which pieces a run has is listed where they lie: `fbuf.datasets.atari_dqn` does that.

    Example:
      >>> import fbuf.datasets
      >>> ids = fbuf.datasets.available()
      >>> len(ids), ids[0], ids[-1]
      (300, 'AirRaid/1', 'Zaxxon/5')
    """
    return tuple(f"{game}/{run}" for game in GAMES for run in range(1, RUNS + 1))


def split(call: str, dataset_id: str) -> tuple[str, int]:
    """Game and run of an id.

    Raises:
      ValueError: there is no such data set; the text names near ones.
    """
    ids = available()
    if dataset_id in ids:
        game, _, run = dataset_id.partition("/")
        return game, int(run)
    game, _, run = str(dataset_id).partition("/")
    folded = {"".join(c for c in name.lower() if c.isalnum()): name for name in GAMES}
    wanted = "".join(c for c in game.lower() if c.isalnum())
    near = difflib.get_close_matches(wanted, folded, n=3, cutoff=0.6)
    number = run if run in {str(n) for n in range(1, RUNS + 1)} else "1"
    hints = [f"{folded[name]}/{number}" for name in near] or ["Pong/1", "Breakout/1"]
    raise ValueError(
        f"{call}: id is {dataset_id!r}; expected '<Game>/<run>' with a run from 1 to {RUNS}. Near: {', '.join(hints)}. "
        f"All: fbuf.datasets.available()."
    )
