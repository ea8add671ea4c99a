"""The problems of the handout, in its order: those of 2025, then what 2026 adds."""

from . import attention, flash, fully_sharded, memory, precision, profiling, several_gpus
from .calculations import CALCULATIONS
from .checkpointing import GRADIENT_CHECKPOINTING
from .leaderboard_2026 import LEADERBOARD_2026

PROBLEMS = (
    *profiling.PROBLEMS,
    *precision.PROBLEMS,
    *memory.PROBLEMS,
    *attention.PROBLEMS,
    *flash.PROBLEMS,
    *several_gpus.PROBLEMS,
    GRADIENT_CHECKPOINTING,
    *fully_sharded.PROBLEMS,
    *CALCULATIONS,
    LEADERBOARD_2026,
)
