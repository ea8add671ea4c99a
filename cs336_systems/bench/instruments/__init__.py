"""Instruments that the benchmarks measure with: clocks, traces, memory counters."""
