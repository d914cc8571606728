"""Distributed algorithms as objects, for users with their own training loop: act, store, update, synchronize models."""

from __future__ import annotations

from echelon.frames.a3c import A3C
from echelon.frames.ddpg_apex import DDPGApex
from echelon.frames.dqn_apex import DQNApex
from echelon.frames.impala import IMPALA

__all__ = ["A3C", "IMPALA", "DDPGApex", "DQNApex"]
