"""Cards and their ceilings: measured, or assumed to be a share of the datasheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.checks import require
from ..machine.peaks import peak_flops
from .accounting import NUMBER_BYTES

# Share of the datasheet that large bfloat16 products (790 of 989 TFLOP/s) and device copies (4.3 of 4.8 TB/s) reach on
# an H200; assumed for the other cards.
_OF_MATMUL, _OF_BANDWIDTH = 0.8, 0.9
# Bytes/s of 16 lanes of PCIe in one direction, by generation. Copies of pinned memory are assumed to reach
# 85 % of it.
_PCIE = {3: 0.85 * 15.75e9, 4: 0.85 * 31.5e9, 5: 0.85 * 63e9}
# One all-reduce of float32 between two H200 over NVLink, bytes and seconds: results/h200/all-reduce.jsonl.
MEASURED_ALL_REDUCE = ((1e6, 0.05638e-3), (1e7, 0.05454e-3), (1e8, 0.3679e-3), (1e9, 3.087e-3))


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU as a roofline model describes it (Williams et al. 2009), and the link between several."""

    name: str
    memory_gib: float
    """Memory that a process can use."""
    multiprocessors: int
    matmul: float
    """FLOP/s of large products in bfloat16 or float16."""
    matmul_fp32: float
    """FLOP/s of large products in float32, on the plain cores."""
    bandwidth: float
    """Bytes/s of memory, read and written together."""
    attention: tuple[tuple[int, float], ...]
    """FLOP/s of 16-bit flash attention, forward and backward together, by length. Only unmasked pairs count."""
    latency_s: float
    """Seconds of an all-reduce between two GPUs beside the time of its bytes."""
    link: float
    """Bytes/s of a large all-reduce between two GPUs."""
    host_link: float
    """Bytes/s of a copy between pinned host memory and the GPU, in one direction."""

    def peak(self, precision: str) -> float | None:
        """The datasheet's FLOP/s, on which MFU is based."""
        return peak_flops(self.name, precision)

    def check(self, precision: str) -> None:
        """Raise ValueError for a precision that the card does not have, if there is a datasheet."""
        known = [each for each in NUMBER_BYTES if self.peak(each) is not None]
        accepted = f"{' or '.join(known)} on {self.name}"
        require(not known or precision in known, "precision", precision, accepted)

    def attention_rate(self, length: int) -> float:
        """FLOP/s of 16-bit flash attention at a length: interpolated in log(length), proportional below the first."""
        (low, rate), *others = self.attention
        if length <= low:
            return rate * length / low
        for high, above in others:
            if length <= high:
                return rate + (above - rate) * math.log(length / low) / math.log(high / low)
            low, rate = high, above
        return rate


def fit_transfer(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Overhead o (s) and bandwidth w (bytes/s) of time = o + bytes / w, by least squares of relative errors.

    Relative, because times span orders of magnitude and the overhead shows only in the small ones. Raises ValueError
    for fewer than two sizes and for times that do not grow with them; an o below 0 counts as 0.
    """
    if len(set(sizes)) < 2 or any(t <= 0 for t in seconds):
        raise ValueError(
            f"all-reduce times are given for {len(set(sizes))} sizes: they must be for at least two, and above 0"
        )
    # The normal equations of t = o + x / w, weighted by 1 / t^2.
    weights = [1 / t**2 for t in seconds]
    total = math.fsum(weights)
    mean_x = math.fsum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_t = math.fsum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    across = math.fsum(w * (x - mean_x) * (t - mean_t) for w, x, t in zip(weights, sizes, seconds, strict=True))
    slope = across / math.fsum(w * (x - mean_x) ** 2 for w, x in zip(weights, sizes, strict=True))
    if slope <= 0:
        raise ValueError("the all-reduce times must grow with the number of bytes, and do not")
    return max(0.0, mean_t - slope * mean_x), 1 / slope


def _cards() -> dict[str, Card]:
    latency_s, link = fit_transfer(*zip(*MEASURED_ALL_REDUCE, strict=True))

    def by_datasheet(
        name: str, memory_gib: float, multiprocessors: int, bandwidth: float, link: float, pcie: int
    ) -> Card:
        # A T4 has no bfloat16. Attention is assumed to run at half the rate of large products, from 4096 tokens on.
        matmul = _OF_MATMUL * (peak_flops(name, "bf16") or peak_flops(name, "fp16") or math.nan)
        return Card(name=name, memory_gib=memory_gib, multiprocessors=multiprocessors, matmul=matmul,
                    matmul_fp32=_OF_MATMUL * (peak_flops(name, "fp32") or math.nan),
                    bandwidth=_OF_BANDWIDTH * bandwidth, attention=((1024, 0.26 * matmul), (4096, 0.5 * matmul)),
                    latency_s=latency_s, link=link, host_link=_PCIE[pcie])  # fmt: skip

    # Attention of PyTorch (sdpa): results/h200/kernels.jsonl is within 4 %, and 10 % at 1,024 tokens.
    h200 = Card(name="H200", memory_gib=139, multiprocessors=132, matmul=790e12, matmul_fp32=50e12, bandwidth=4.3e12,
                attention=((1024, 206e12), (4096, 391e12), (16384, 434e12)),
                latency_s=latency_s, link=link, host_link=_PCIE[5])  # fmt: skip
    # Links: NVLink at the H200's share of the datasheet (900 GB/s in both directions), or PCIe 4 without NVLink.
    others = [
        by_datasheet("B200", 178, 148, 8.0e12, 2 * link, 5),
        by_datasheet("H100", 79, 132, 3.35e12, link, 5),
        by_datasheet("A100", 79, 108, 2.04e12, link * 600 / 900, 4),
        by_datasheet("L40S", 44, 142, 0.864e12, 20e9, 4),
        by_datasheet("RTX 4090", 23.5, 128, 1.008e12, 10e9, 4),
        by_datasheet("T4", 14.5, 40, 0.32e12, 5e9, 3),
    ]
    cards = {card.name: card for card in (h200, *others)}
    # flash_triton with causal attention at head sizes 64 and 128, their mean: results/h100/attention
    short, *_ = cards["H100"].attention
    cards["H100"] = replace(cards["H100"], attention=(short, (4096, 489e12), (16384, 569e12)))
    return cards


CARDS = _cards()


def get_card(name: str, **ceilings: Any) -> Card:
    """A card by name, with some of its ceilings replaced. Raises ValueError naming an unknown card or bad ceiling.

    With a different rate of products or bandwidth it is another card, without a datasheet. Its attention is faster by
    the same factor as its products.
    """
    another = "plan memory takes another card's --memory_gib, plan step its rates, such as --matmul_tflops"
    require(name in CARDS, "card", name, f"one of {', '.join(CARDS)}; {another}")
    for field, value in ceilings.items():
        require(0 < value < math.inf, field, value, "above 0 and finite")
    card = CARDS[name]
    share = ceilings.get("matmul", card.matmul) / card.matmul
    attention = tuple((length, rate * share) for length, rate in card.attention)
    other = "a card of these ceilings" if ceilings.keys() & {"matmul", "bandwidth"} else name
    return replace(card, **ceilings, attention=attention, name=other)
