"""Families of environments, recognized by their ids alone, so that presets need not import any package for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

OLD_GAMES = """
    Adventure AirRaid Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling
    Boxing Breakout Carnival Centipede ChopperCommand CrazyClimber Defender DemonAttack DoubleDunk ElevatorAction Enduro
    FishingDerby Freeway Frostbite Gopher Gravitar Hero IceHockey Jamesbond JourneyEscape Kangaroo Krull KungFuMaster
    MontezumaRevenge MsPacman NameThisGame Phoenix Pitfall Pong Pooyan PrivateEye Qbert Riverraid RoadRunner Robotank
    Seaquest Skiing Solaris SpaceInvaders StarGunner Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor
    YarsRevenge Zaxxon
"""
NEW_GAMES = """
    Atlantis2 Backgammon BasicMath Blackjack Casino Crossbow Darkchambers DonkeyKong Earthworld Entombed Et FlagCapture
    Frogger Galaxian Hangman HauntedHouse HumanCannonball Kaboom KeystoneKapers KingKong Klax Koolaid LaserGates
    LostLuggage MarioBros MiniatureGolf MrDo Othello Pacman Pitfall2 SirLancelot SpaceWar Superman Surround Tetris
    TicTacToe3D Trondead Turmoil VideoCheckers VideoChess VideoCube WordZapper
"""
OLD_ATARI = frozenset(OLD_GAMES.split())  # have ids of the versions 0 and 4, too
ATARI = OLD_ATARI.union(NEW_GAMES.split())
MEMBERS = {  # other families with ids of their own; ids of Atari games overlap with them
    "classic-control": "CartPole MountainCar MountainCarContinuous Acrobot Pendulum",
    "toy-text": "Blackjack FrozenLake FrozenLake8x8 CliffWalking CliffWalkingSlippery Taxi",
    "box2d": "LunarLander LunarLanderContinuous BipedalWalker BipedalWalkerHardcore",
    "mujoco": "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Pusher Reacher "
    "Swimmer Walker2d",
    "images": "CarRacing",
}
FAMILY_OF = {name: family for family, names in MEMBERS.items() for name in names.split()}
OWN = ("vectors", "images")  # environments that nobody has seen, by what they observe
FAMILIES = ("classic-control", "toy-text", "box2d", "mujoco", "atari", "mario", *OWN)
ALE_ID = re.compile(r"ALE/(\w+)-v\d+")
OLD_ID = re.compile(r"(\w+?)(?:NoFrameskip|Deterministic)?-v[04]")  # of gym; ale_py registers most of them
ENVPOOL_ID = re.compile(r"(\w+)-v5")
ID = re.compile(r"([\w-]+?)-v\d+")
BULLET_ID = re.compile(r"(\w+?)Bullet(?:Env)?-v\d+")


def is_atari(env: str) -> bool:
    """Returns whether `env` is an Atari game: ALE/Pong-v5, ale_py:ALE/Pong-v5, PongNoFrameskip-v4, envpool:Pong-v5."""
    return _game_of(env) is not None


def is_mario(env: str) -> bool:
    return env.split("-")[0] == "SuperMarioBros"


def name_of(env: str | Callable[..., Any]) -> str:
    """Returns the name of an environment, without module and version: Pong, CartPole, SuperMarioBros; else `env`."""
    if not isinstance(env, str):
        return ""
    if is_mario(env):
        return "SuperMarioBros"
    found = ID.fullmatch(env.rpartition(":")[2])
    return _game_of(env) or (found[1] if found is not None else env)


def family_of(env: str | Callable[..., Any]) -> str:
    """Returns the family of `env`, one of FAMILIES; "vectors" for an environment that is not known."""
    if not isinstance(env, str):
        return OWN[0]
    if is_atari(env) or is_mario(env):
        return "atari" if is_atari(env) else "mario"
    if BULLET_ID.fullmatch(env.rpartition(":")[2]):
        return "mujoco"  # the same bodies in another simulator
    return FAMILY_OF.get(name_of(env), OWN[0])


def _game_of(env: str) -> str | None:
    module, _, name = env.rpartition(":")
    if ale := ALE_ID.fullmatch(name):
        return ale[1]
    if module == "envpool":
        found, games = ENVPOOL_ID.fullmatch(name), ATARI
    elif module in ("", "ale_py", "gymnasium"):
        found, games = OLD_ID.fullmatch(name), OLD_ATARI
    else:
        return None  # an environment of the user's own
    return found[1] if found is not None and found[1] in games else None
