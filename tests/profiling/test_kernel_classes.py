"""Kernels are told apart by names as profilers show them."""

import re
from pathlib import Path

import pytest

from cs336_systems.bench.profiling.kernel_totals import CLASSES, kernel_class
from cs336_systems.kernels import attention

# A name a line; "..." stands for the end of a long one.
TEXT = {
    "matmul": """
        nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT
        void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(...)
        sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_kernel...
        ampere_sgemm_128x64_tn
        void gemmSN_TN_kernel<float, 128, 16, 2, 4, 6, 7, false, cublasGemvTensorStridedBatched<float const> >()
        void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, true, false>()
        triton_tem_fused_mm_3
        aten::mm
        aten::bmm
        aten::addmm
    """,
    "attention": """
        void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t...
        fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)
        cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x64_4x1x1_kernel0_0
        triton_tem_fused_flex_attention_0
        aten::_scaled_dot_product_flash_attention_for_cpu
        forward_kernel
        dq_kernel
        dkv_kernel
        backward_kernel
        void (anonymous namespace)::forward_kernel<64>((anonymous namespace)::Sizes, (anonymous namespace)::View)
        void (anonymous namespace)::key_gradients<64>((anonymous namespace)::Sizes)
    """,
    "softmax": """
        void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*)
        void at::native::(anonymous namespace)::cunn_SoftMaxBackwardSmem<4, float, float, float, at::native::...
        triton_per_fused__softmax_div_masked_fill_4
        aten::_softmax_backward_data
    """,
    "reduction": """
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float...
        void cub::DeviceReduceSingleTileKernel<cub::Policy1000>(float*)
        triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1
        triton_per_fused_logsumexp_0
        aten::sum
    """,
    "elementwise": """
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>...
        void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<BinaryFunctor<MulFunctor...
        void at::native::unrolled_elementwise_kernel<at::native::(anonymous namespace)::masked_fill_kernel(...)>()
        void at::native::triu_tril_kernel<bool, int, false, 8, false>(at::cuda::detail::TensorInfo<bool, int>)
        triton_poi_fused_mul_silu_2
        triton_poi_fused__scaled_dot_product_flash_attention_clone_3
        aten::mul
        aten::add_
    """,
    "copy": """
        Memcpy HtoD (Pageable -> Device)
        Memset (Device)
        void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<4u>...
        void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<direct_copy_kernel_cuda(...)>(int)
        void at::native::unrolled_elementwise_kernel<at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>
        void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >
        aten::copy_
        aten::cat
    """,
    "communication": """
        ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        nccl:all_reduce
        Memcpy PtoP (Device -> Device)
    """,
    "optimizer": """
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdamMathFunctor<float, 4>>()
        aten::_fused_adamw_
        aten::_foreach_addcdiv_
    """,
    "other": """
        void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>()
        void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900>()
        ## Call CompiledFxGraph fm6gd4lhag ##
        aten::embedding_dense_backward
    """,
}
NAMES = {cls: [name.strip() for name in text.strip().splitlines()] for cls, text in TEXT.items()}


@pytest.mark.parametrize("expected, name", [(cls, name) for cls, names in NAMES.items() for name in names])
def test_the_class_of_a_kernel(expected: str, name: str) -> None:
    assert kernel_class(name, "forward") == expected


def test_every_class_has_names_in_this_test() -> None:
    assert set(NAMES) == set(CLASSES)


def test_kernels_of_this_projects_attention_are_all_known() -> None:
    place = Path(next(iter(attention.__path__)))
    sources = "".join(source.read_text() for source in sorted(place.glob("flash_*_kernels.py")))
    launched = re.findall(r"@(?:triton|gluon)\.jit\(do_not_.*\)\ndef (\w+)", sources)
    for source in sorted((place / "csrc").rglob("*.cu*")):
        launched += re.findall(r"__global__ void __launch_bounds__\(.*?\)\s+(\w+)\(", source.read_text())
    assert len(launched) == 16
    assert {kernel_class(name) for name in launched} == {"attention"}


def test_in_the_optimizer_phase_everything_but_communication_is_optimizer() -> None:
    for cls, names in NAMES.items():
        for name in names:
            assert kernel_class(name, "optimizer") == ("communication" if cls == "communication" else "optimizer")
