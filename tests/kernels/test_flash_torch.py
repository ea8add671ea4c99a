import torch

from cs336_systems.kernels.attention import flash_torch
from tests.kernels.attention_cases import FlashKernelTests


class TestFlashTorch(FlashKernelTests):
    name = "flash_torch"
    function = flash_torch.FlashAttentionTorch
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
