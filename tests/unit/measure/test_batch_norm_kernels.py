"""Kernel names, as in published traces, show how a GPU computed BatchNormalization."""

from __future__ import annotations

import pytest

from stoker.measure.kernel_class import batch_norm_kernels

CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32"
RELU = "void tensorflow::functor::ReluGradHalfKernelVector(Eigen::half const*, int)"
FORWARD = (
    "void cudnn::batchnorm_fwtr_nhwc_semiPersist<__nv_bfloat16, float, 512>(cudnnTensorStruct)"
)
BACKWARD = "void cudnn::batchnorm_bwtr_nhwc_semiPersist<__half, __half, float>(cudnnTensorStruct)"
PLANAR = (
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct)",
    "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)",
    "void cudnn::detail::bn_fw_tr_1CHW_kernel_new<float, float, true, 4>(float)",
    "_ZN5cudnn21bn_bw_1C11_kernel_newIfEEv",
    "void cudnn::bn_bw_1C11_singleread_specialized<float, 512>(float)",
)
SWAP = (
    "void tensorflow::functor::SwapDimension1And2InTensor3UsingTiles<unsigned short, 256>(int)",
    "void cudnn::ops::nhwcToNchwKernel<__half, __half, float>(int)",
)
SQUARES = "SquaredDifference_GPU_DT_FLOAT_DT_FLOAT_kernel"


def test_cudnns_kernel_for_nhwc_is_known() -> None:
    found = batch_norm_kernels([CONVOLUTION, FORWARD, RELU, BACKWARD, FORWARD])

    assert found.is_persistent
    assert found.way == "nhwc"
    assert found.nhwc == (
        "cudnn::batchnorm_fwtr_nhwc_semiPersist",
        "cudnn::batchnorm_bwtr_nhwc_semiPersist",
    )
    assert "cudnn::batchnorm_bwtr_nhwc_semiPersist" in found.text()


@pytest.mark.parametrize("name", PLANAR)
@pytest.mark.parametrize("swap", SWAP)
def test_kernels_for_nchw_are_not_it_whatever_else_ran(name: str, swap: str) -> None:
    found = batch_norm_kernels([FORWARD, swap, name])

    assert not found.is_persistent
    assert found.way == "nchw"
    assert len(found.transposes) == 1
    assert "with transposes" in found.text()


def test_keras_by_single_operations_is_told_apart() -> None:
    found = batch_norm_kernels([CONVOLUTION, SQUARES, RELU])

    assert found.way == "in_pieces"
    assert SQUARES in found.text()


@pytest.mark.parametrize("names", [[], [CONVOLUTION, RELU], [*SWAP, CONVOLUTION]])
def test_a_model_without_batch_normalization_has_none(names: list[str]) -> None:
    found = batch_norm_kernels(names)

    assert (found.way, found.is_persistent, found.nhwc) == ("none", False, ())
    assert "no kernel" in found.text()
