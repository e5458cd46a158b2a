"""Names of real kernels, of cuDNN, cuBLAS, CUTLASS, Eigen, NCCL and XLA, each in its class."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.measure import traces

from stoker.measure.kernel_class import CLASSES, LABELS, Kernel, class_of, only_casts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (traces.CONVOLUTION, "products"),
        ("void cutlass_cudnn::Kernel<cutlass_tensorop_f16_s16816dgrad_optimized_f16_128x256>", "products"),
        ("_ZN13cutlass_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock", "products"),
        ("void xmma_cudnn::gemm::kernel<xmma_cudnn::implicit_gemm::wgrad_indexed::Kernel_traits", "products"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn", "products"),
        ("volta_scudnn_128x64_relu_interior_nn_v1", "products"),
        ("turing_fp16_s1688cudnn_fp16_128x128_ldg8_wgrad_idx_exp_interior_nhwc_nt", "products"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, true, false, true>", "products"),
        ("void cudnn::winograd::generateWinogradTilesKernel<0, float, float>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "products"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>", "products"),
        ("void tensorflow::DepthwiseConv2dGPUKernelNHWC<float, 3, 3, 1>", "products"),
        ("gemm_fusion_dot_17", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "products"),
        (traces.BATCH_NORM, "normalization"),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)", "normalization"),
        ("void cudnn::batchnorm_fwtr_nhwc_semiPersist<__half, __half, float, float, 512>", "normalization"),
        ("void cudnn::batchnorm_bwtr_nhwc_semiPersist<__half, __half, float, float, 512>", "normalization"),
        (traces.TRANSPOSE, "transposes"),
        ("void cudnn::ops::nhwcToNchwKernel<__half, __half, float, true, true>", "transposes"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, false>", "transposes"),
        ("void tensorflow::functor::ShuffleInTensor3Simple<float, 2, 1, 0, false>", "transposes"),
        ("wrapped_transpose", "transposes"),
        ("input_transpose_fusion_3", "transposes"),
        (traces.ADD, "elementwise"),
        (traces.CAST, "elementwise"),
        ("Mul_GPU_DT_FLOAT_DT_FLOAT_kernel", "elementwise"),
        ("void tensorflow::functor::ApplyAdamKernel<float>(int, float*, float*)", "elementwise"),
        ("void tensorflow::BiasNHWCKernel<Eigen::half>(int, Eigen::half const*)", "elementwise"),
        ("void tensorflow::functor::ColumnReduceKernel<float*, float*, cub::Sum>", "elementwise"),
        ("void tensorflow::functor::FillPhiloxRandomKernelLaunch<tensorflow::random::NormalDistribution", "elementwise"),
        ("loop_add_fusion_12", "elementwise"),
        ("input_reduce_fusion", "elementwise"),
        ("void cudnn::ops::pooling_bw_kernel_max<__half, float, cudnn::maxpooling_func", "other"),
        ("void xla::gpu::redzone_checker(unsigned char*)", "other"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long)", "collectives"),
        ("MemcpyH2D", "copies"),
        ("MemcpyD2D", "copies"),
        ("[CUDA memcpy HtoD]", "copies"),
        ("cudaMemcpyAsync", "copies"),
        ("cuMemsetD32Async", "copies"),
        ("wrapped_copy", "copies"),
        ("loop_copy_fusion_3", "copies"),
        ("loop_copy_transpose_fusion", "transposes"),
        ("Memset", "copies"),
        ("a_kernel_that_nobody_knows", "other"),
    ],
)  # fmt: skip
def test_kernels_by_name(name: str, expected: str) -> None:
    assert class_of(Kernel(name=name)) == expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("_MklNativeFusedConv2D", "products"),
        ("Conv2DBackpropFilter", "products"),
        ("BatchMatMulV2", "products"),
        ("FusedBatchNormGradV3", "normalization"),
        ("Transpose", "transposes"),
        ("Relu", "elementwise"),
        ("MaxPool", "other"),
        ("CollectiveReduceV2", "collectives"),
    ],
)
def test_a_kernel_without_a_known_name_goes_by_its_operation(op: str, expected: str) -> None:
    assert class_of(Kernel(name="", scope="model/conv2d_1/it", op=op)) == expected


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("model/batch_normalization_13/moments/SquaredDifference", "normalization"),
        ("gradient_tape/model_1/conv1_bn_1/batchnorm/mul/Mul", "normalization"),
        ("model/norm_a_1/Cast", "normalization"),
        ("encoder/layer_norm/add", "normalization"),
        ("model/layernorm1/add", "normalization"),
        ("model/dense/BiasAdd", "elementwise"),
        ("sgd/clip_by_global_norm/mul", "elementwise"),
        ("model/random_normal/add", "elementwise"),
        ("model/normal/add", "elementwise"),
    ],
)
def test_element_wise_work_inside_of_a_normalization_is_normalization(
    scope: str, expected: str
) -> None:
    assert class_of(Kernel(name=traces.ADD, scope=scope, op="AddV2")) == expected


@pytest.mark.parametrize("hlo", ["elementwise", "transposes", "other", None])
def test_a_copy_of_the_driver_is_one_whatever_instruction_it_carries_out(hlo: Any) -> None:
    for name in ("MemcpyD2D", "Memset", "[CUDA memcpy DtoD]"):
        assert class_of(Kernel(name=name, scope="m/norm/slice", hlo=hlo)) == "copies"


def test_what_xla_says_goes_before_a_kernels_name() -> None:
    assert class_of(Kernel(name="fusion_7", hlo="products")) == "products"
    assert class_of(Kernel(name="fusion_7", scope="m/norm/mean", hlo="elementwise")) == (
        "normalization"
    )


def test_casts_are_told_apart_from_arithmetic() -> None:
    assert only_casts(traces.CAST, "Cast")
    assert only_casts("Cast_GPU_DT_HALF_DT_FLOAT_kernel", "")
    assert not only_casts(traces.ADD, "AddV2")


def test_each_class_has_a_label_and_a_weight() -> None:
    assert set(LABELS) == {*CLASSES, "idle"}
