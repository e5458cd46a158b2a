"""Traces as a GPU's profiler writes them, made of the real protocol buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

TRANSPOSE = (
    "void tensorflow::functor::SwapDimension1And2InTensor3UsingTiles<Eigen::half, 256, 32, 32, "
    "false>(Eigen::half const*, tensorflow::functor::Dimension<3>, Eigen::half*)"
)
CONVOLUTION = (
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"
    "_warpgroupsize1x1x1_g1_execute_segment_k_off_kernel__5x_cudnn"
)
BATCH_NORM = (
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, 512, true, 1, true>(cudnnTensorStruct, "
    "__half const*, cudnnTensorStruct, __half*, float const*, float const*, float, float)"
)
CAST = (
    "void Eigen::internal::EigenMetaKernel<Eigen::TensorEvaluator<Eigen::TensorAssignOp<"
    "Eigen::TensorMap<Eigen::Tensor<Eigen::half, 1, 1, long>, 16, Eigen::MakePointer>, "
    "Eigen::TensorConversionOp<Eigen::half, Eigen::TensorMap<Eigen::Tensor<float const, 1, 1, long>"
    ", 16, Eigen::MakePointer> const> const> const, Eigen::GpuDevice>, long>(...)"
)
ADD = (
    "void Eigen::internal::EigenMetaKernel<Eigen::TensorEvaluator<Eigen::TensorAssignOp<"
    "Eigen::TensorMap<Eigen::Tensor<float, 1, 1, long>, 16, Eigen::MakePointer>, "
    "Eigen::TensorCwiseBinaryOp<Eigen::internal::scalar_sum_op<float const, float const>, ...> "
    "const> const, Eigen::GpuDevice>, long>(...)"
)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One event: on which stream, when, what."""

    name: str
    begin_us: float
    length_us: float
    stream: int = 13
    op: str = ""
    """`model/conv1/Conv2D:Conv2D`."""
    hlo: tuple[str, str] | None = None
    """Program and instruction."""


class Trace:
    """An XSpace that is filled bit by bit."""

    def __init__(self) -> None:
        self.space = xplane_pb2.XSpace()
        self.space.planes.add(name="/host:CPU")

    def gpu(self, number: int, *events: Ran) -> Trace:
        """A GPU's plane, with a line for each stream, and the sums that some versions add."""
        plane = self.space.planes.add(name=f"/device:GPU:{number}")
        lines: dict[int, Any] = {}
        for event in events:
            if event.stream not in lines:
                kind = "MemcpyH2D" if event.name.startswith("Memcpy") else "Kernel"
                name = f"Stream #{event.stream}({kind})"
                lines[event.stream] = plane.lines.add(
                    id=event.stream, name=name, timestamp_ns=1_000
                )
            self._add(plane, lines[event.stream], event)
        sums = plane.lines.add(id=99, name="TensorFlow Ops", timestamp_ns=1_000)
        for event in events:
            self._add(plane, sums, event)
        return self

    def program(self, module: hlo_pb2.HloProto) -> Trace:
        """A compiled program, as XLA registers it."""
        plane = next(
            (each for each in self.space.planes if each.name == "/host:metadata"), None
        ) or self.space.planes.add(name="/host:metadata")
        key = len(plane.event_metadata) + 1
        plane.stat_metadata[1].name = "Hlo Proto"
        plane.event_metadata[key].name = f"{module.hlo_module.name}({key})"
        plane.event_metadata[key].stats.add(metadata_id=1, bytes_value=module.SerializeToString())
        return self

    def bytes(self) -> bytes:
        """The form in the file."""
        return self.space.SerializeToString()

    def _add(self, plane: Any, line: Any, event: Ran) -> None:
        made = line.events.add(
            metadata_id=_event(plane, event.name),
            offset_ps=round(event.begin_us * 1e6),
            duration_ps=round(event.length_us * 1e6),
        )
        made.stats.add(metadata_id=_stat(plane, "correlation_id"), uint64_value=len(line.events))
        if event.op:
            # As CUPTI's collector does it: the text is the name of another statistic.
            made.stats.add(metadata_id=_stat(plane, "tf_op"), ref_value=_stat(plane, event.op))
        if event.hlo is not None:
            module, instruction = event.hlo
            made.stats.add(metadata_id=_stat(plane, "hlo_module"), str_value=module)
            made.stats.add(metadata_id=_stat(plane, "hlo_op"), str_value=instruction)


def _event(plane: Any, name: str) -> int:
    return _key(plane.event_metadata, name)


def _stat(plane: Any, name: str) -> int:
    return _key(plane.stat_metadata, name)


def _key(table: Any, name: str) -> int:
    for key, metadata in table.items():
        if metadata.name == name:
            return int(key)
    key = len(table) + 1
    table[key].id, table[key].name = key, name
    return key


def program(name: str, fusions: dict[str, tuple[str, Sequence[str]]]) -> hlo_pb2.HloProto:
    """A compiled program of fusions: instruction -> TensorFlow's operation, opcodes inside."""
    proto = hlo_pb2.HloProto()
    module = proto.hlo_module
    module.name = name
    entry = module.computations.add(name="entry", id=1)
    for number, (instruction, (scope, opcodes)) in enumerate(fusions.items(), start=2):
        inner = module.computations.add(name=f"fused_{number}", id=number)
        for place, opcode in enumerate(opcodes):
            inner.instructions.add(name=f"{instruction}.{place}", opcode=opcode, id=place)
        made = entry.instructions.add(name=instruction, opcode="fusion", id=number)
        made.called_computation_ids.append(number)
        made.metadata.op_name = scope
    return proto


def resnet_step(*, persistent: bool = False) -> Trace:
    """A step of 100 us with a convolution and a normalization, as a GPU without XLA runs it."""
    conv, norm = "model/conv1/Conv2D:Conv2D", "model/norm1/FusedBatchNormV3:FusedBatchNormV3"
    around = [] if persistent else [(40, 18), (78, 20)]
    return Trace().gpu(
        0,
        Ran(name=CONVOLUTION, begin_us=0, length_us=30, op=conv),
        Ran(name=CAST, begin_us=30, length_us=6, op="model/conv1/Cast:Cast"),
        *(Ran(name=TRANSPOSE, begin_us=at, length_us=us, op=norm) for at, us in around),
        Ran(name=BATCH_NORM, begin_us=58, length_us=20, op=norm),
        # It runs at the same time as kernels; only its last microsecond counts for itself.
        Ran(name="MemcpyH2D", begin_us=20, length_us=17, stream=14),
        Ran(name="Mul_GPU_DT_FLOAT_DT_FLOAT_kernel", begin_us=98, length_us=2, op="sgd/mul:Mul"),
    )
