"""The step's measurement, on a model that a CPU times in a moment."""

import pytest

from cs336_systems.bench.train_step import measure, step_config
from cs336_systems.config import ModelConfig


@pytest.mark.parametrize("variant", ["cs336", "hf_llama"])
def test_a_row_says_what_ran_and_its_rates_follow_from_its_time(variant: str) -> None:
    model = ModelConfig(vocab_size=300, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)
    config = step_config(model, batch_size=2, device="cpu", max_steps=100)
    row = measure(config, variant, warmup=1, steps=4)
    assert (row.case, row.variant, row.status) == ("train-step", variant, "ok")
    assert row.config == config.to_dict()
    mean = row.metrics["step_ms"]["mean"]
    assert 0 < mean < 1e3 * row.metrics["startup_s"]
    assert row.metrics["tokens_per_s"] == pytest.approx(2 * 16 / (mean / 1e3))
    assert row.metrics["mfu"] is None  # a CPU's peak is not known
