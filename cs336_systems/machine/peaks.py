"""Peak matrix rates of GPUs from their datasheets. Needs no PyTorch."""

import re

# Dense matrix rates in TFLOP/s, without sparsity. fp32 is the rate of the CUDA cores. The first name that occurs in the
# device's name wins, so longer names come before shorter ones.
_PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("GB200", dict(fp8=5000, bf16=2500, fp16=2500, tf32=1250, fp32=80)),
    ("B200", dict(fp8=4500, bf16=2250, fp16=2250, tf32=1100, fp32=75)),
    ("H200 NVL", dict(fp8=1671, bf16=835, fp16=835, tf32=417, fp32=60)),
    ("H200", dict(fp8=1979, bf16=989, fp16=989, tf32=494, fp32=67)),
    ("H100 PCIe", dict(fp8=1513, bf16=756, fp16=756, tf32=378, fp32=51)),
    ("H100 NVL", dict(fp8=1671, bf16=835, fp16=835, tf32=417, fp32=60)),
    ("H100", dict(fp8=1979, bf16=989, fp16=989, tf32=494, fp32=67)),
    ("A100", dict(bf16=312, fp16=312, tf32=156, fp32=19.5)),
    ("L40S", dict(fp8=733, bf16=362, fp16=362, tf32=183, fp32=91.6)),
    ("L4", dict(fp8=242, bf16=121, fp16=121, tf32=60, fp32=30.3)),
    ("A10G", dict(bf16=70, fp16=70, tf32=35, fp32=31)),
    ("RTX 4090", dict(fp8=330, bf16=165, fp16=165, tf32=82.6, fp32=82.6)),
    ("RTX 3090", dict(bf16=71, fp16=71, tf32=35.6, fp32=35.6)),
    ("T4", dict(fp16=65, fp32=8.1)),
    ("V100", dict(fp16=125, fp32=15.7)),
)

# A part of a card: a MIG instance (H100 80GB HBM3 MIG 1g.10gb) or a virtual GPU (A100-4C, T4-8Q).
_PART = re.compile(r"\bMIG\b|-\d+[ABCQ](?:ME)?\b")


def known_name(device_name: str) -> str | None:
    """The name in the table of peaks for a driver's device name. None for unknown GPUs and for parts of a GPU.

    No datasheet has the peak of a part, and a virtual GPU's share of its card changes with its neighbours.
    """
    if _PART.search(device_name):
        return None
    for name, _ in _PEAK_TFLOPS:
        # Exclude the slower or different RTX 4090 Laptop GPU, RTX 4090 D and RTX 3090 Ti.
        if re.search(rf"\b{re.escape(name)}\b(?! (?:Ti|D|Laptop|Max-Q|SUPER)\b)", device_name):
            return name
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """Datasheet peak in FLOP/s of products in fp32, tf32, bf16, fp16 or fp8. None if unknown or for a part of a GPU."""
    name = known_name(device_name)
    rate = None if name is None else dict(_PEAK_TFLOPS)[name].get(precision)
    return None if rate is None else rate * 1e12
