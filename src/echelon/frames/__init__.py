"""Distributed algorithms as objects, for people who own their loop: they act, store, update and keep models in step."""

from __future__ import annotations

from echelon.frames.a3c import A3C
from echelon.frames.ddpg_apex import DDPGApex
from echelon.frames.dqn_apex import DQNApex
from echelon.frames.impala import IMPALA

__all__ = ["A3C", "IMPALA", "DDPGApex", "DQNApex"]
