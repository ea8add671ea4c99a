"""The problems of the handout, in its order: those of 2025, then what 2026 adds."""

from . import additions, attention, flash, memory, precision, profiling, several_gpus

PROBLEMS = (
    *profiling.PROBLEMS,
    *precision.PROBLEMS,
    *memory.PROBLEMS,
    *attention.PROBLEMS,
    *flash.PROBLEMS,
    *several_gpus.PROBLEMS,
    *additions.PROBLEMS,
)
