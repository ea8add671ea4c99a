"""Classes of kernels, by the name of the kernel on a GPU or of the operator on a CPU.

The table is read from the top; the first pattern found in the name counts. It knows the names of PyTorch, cuBLAS,
cuDNN, CUTLASS, NCCL, Triton, TorchInductor and this project's own kernels.
"""

import re

_PATTERNS: tuple[tuple[str, str], ...] = (
    # The prefix of a TorchInductor kernel names the kind of its loop, the rest the operators that it comes from or
    # stands beside. A reduction fused around a softmax counts as the softmax.
    ("attention", r"^triton_tem_\w*flex"),
    ("softmax", r"^triton_(red|per)_fused\w*softmax"),
    ("elementwise", r"^triton_poi_"),
    ("reduction", r"^triton_(red|per)_"),
    ("matmul", r"^triton_(tem|mm)_"),
    ("communication", r"nccl|^c10d::|all_reduce|all_gather|reduce_scatter"),
    ("optimizer", r"multi_tensor_apply|fused_adam|FusedAdam|_foreach_|distributed_fused"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|efficient_attention|flex_attention|(?i:attention)|::mha_"),
    # This project's Triton and CUDA kernels; \b, because others have _forward_kernel in their names.
    ("attention", r"\b(forward|backward|dq|dkv)_kernel\b|\b(row_statistics|key_gradients|query_gradients)\b"),
    ("softmax", r"(?i:softmax)"),
    ("matmul", r"cutlass|(?i:gemm)|(?i:gemv)|cublas|nvjet|xmma|wgmma|(?i:splitk)|mkldnn::_linear|mkl::_mkl_linear"),
    ("matmul", r"^aten::(mm|bmm|addmm|baddbmm|addbmm|addmv|mv|dot|linear|matmul|einsum)$"),
    ("copy", r"(?i:memcpy)|(?i:memset)|copy_kernel|CatArray|FillFunctor|_copy_from"),
    ("copy", r"^aten::(copy_|cat|stack|clone|contiguous|to|_to_copy|fill_|zero_|zeros|zeros_like|ones|full)$"),
    ("reduction", r"reduce_kernel|DeviceReduce|(?i:layer_?norm)|(?i:rms_?norm)|segmented_reduce"),
    ("reduction", r"^aten::(sum|mean|amax|amin|max|min|argmax|logsumexp|norm|linalg_vector_norm|var|prod|cumsum)$"),
    ("elementwise", r"elementwise|triu_tril|tril_kernel|triu_kernel"),
    (
        "elementwise",
        r"^aten::(add|sub|rsub|mul|div|neg|pow|square|sqrt|rsqrt|exp|log|silu|sigmoid|tanh|abs|where|masked_fill|"
        r"bitwise_not|logical_not|tril|triu|lt|le|gt|ge|eq|ne|clamp|maximum|minimum|reciprocal|lerp|addcmul|addcdiv|"
        r"silu_backward)_?$",
    ),
)
CLASSES = ("matmul", "attention", "softmax", "reduction", "elementwise", "copy", "communication", "optimizer", "other")


def kernel_class(name: str, phase: str = "") -> str:
    """The class of a kernel, one of CLASSES. In the phase `optimizer`, everything but communication is optimizer."""
    for found, pattern in _PATTERNS:
        if re.search(pattern, name):
            return "optimizer" if phase == "optimizer" and found != "communication" else found
    return "optimizer" if phase == "optimizer" else "other"
