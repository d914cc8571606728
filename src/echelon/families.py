"""Families of environments, recognized by their ids alone, so that presets need not import any package for them."""

from __future__ import annotations

import re

NAMES = """
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
GAMES = frozenset(NAMES.split())
ALE_ID = re.compile(r"ALE/\w+-v\d+")
OLD_ID = re.compile(r"(\w+?)(NoFrameskip|Deterministic)?-v[04]")  # of gym, which ale_py registers, too
ENVPOOL_ID = re.compile(r"(\w+)-v5")


def is_atari(env: str) -> bool:
    """Returns whether `env` is an Atari game: ALE/Pong-v5, ale_py:ALE/Pong-v5, PongNoFrameskip-v4, envpool:Pong-v5."""
    module, _, name = env.rpartition(":")
    if module == "envpool":
        found = ENVPOOL_ID.fullmatch(name)
        return found is not None and found[1] in GAMES
    old = OLD_ID.fullmatch(name)
    return ALE_ID.fullmatch(name) is not None or (old is not None and old[1] in GAMES)
