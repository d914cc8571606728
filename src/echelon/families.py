"""Families of environments, recognized by their ids alone, so that presets need not import any package for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

GAMES = """
    Adventure AirRaid Alien Amidar Assault Asterix Asteroids Atlantis Atlantis2 Backgammon BankHeist BasicMath
    BattleZone BeamRider Berzerk Blackjack Bowling Boxing Breakout Carnival Casino Centipede ChopperCommand CrazyClimber
    Crossbow Darkchambers Defender DemonAttack DonkeyKong DoubleDunk Earthworld ElevatorAction Enduro Entombed Et
    FishingDerby FlagCapture Freeway Frogger Frostbite Galaxian Gopher Gravitar Hangman HauntedHouse Hero
    HumanCannonball IceHockey Jamesbond JourneyEscape Kaboom Kangaroo KeystoneKapers KingKong Klax Koolaid Krull
    KungFuMaster LaserGates LostLuggage MarioBros MiniatureGolf MontezumaRevenge MrDo MsPacman NameThisGame Othello
    Pacman Phoenix Pitfall Pitfall2 Pong Pooyan PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest SirLancelot
    Skiing Solaris SpaceInvaders SpaceWar StarGunner Superman Surround Tennis Tetris TicTacToe3D TimePilot Trondead
    Turmoil Tutankham UpNDown Venture VideoCheckers VideoChess VideoCube VideoPinball WizardOfWor WordZapper YarsRevenge
    Zaxxon
"""
ATARI = frozenset(GAMES.split())
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
    found = (ENVPOOL_ID if module == "envpool" else OLD_ID).fullmatch(name)
    return found[1] if found is not None and found[1] in ATARI else None
