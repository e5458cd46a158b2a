"""A device's time by class, kernel and layer: parts that add up, whatever overlaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.measure.traces import ADD, CONVOLUTION, Ran, Trace, program, resnet_step

from stoker.measure.device_events import DeviceEvents, Event, read_events
from stoker.measure.device_time import DeviceTime, LayerNames, device_time
from stoker.measure.kernel_class import Kernel

LAYERS = {"conv1": "Conv2D", "norm1": "BatchNormalization"}


def of(trace: Trace, **options: object) -> DeviceTime:
    return device_time(read_events(trace.bytes()), layers=LAYERS, **options)  # type: ignore[arg-type]  # mypy cannot check **


def test_a_step_of_a_convolution_and_a_normalization_adds_up() -> None:
    found = of(resnet_step())

    assert found.devices == ("GPU:0",)
    assert found.window_s == pytest.approx(100e-6)
    assert {name: round(share, 3) for name, share in found.shares.items() if share} == {
        "products": 0.30,
        "normalization": 0.20,
        "elementwise": 0.08,
        "transposes": 0.38,
        # 17 us of copies, of which 16 run at the same time as a kernel.
        "copies": 0.01,
        "idle": 0.03,
    }
    assert found.casts == pytest.approx(0.06)
    assert found.busy == pytest.approx(0.97)


def test_layers_have_what_runs_around_them() -> None:
    (norm, *_) = of(resnet_step()).layers

    assert norm.layer == "norm1"
    assert norm.share == pytest.approx(0.58)
    assert norm.kinds == {
        "transposes": pytest.approx(0.38),
        "normalization": pytest.approx(0.20),
    }
    (around,) = of(resnet_step()).layers_of("transposes")
    assert around.layer == "norm1"


def test_kernels_are_named_with_their_layer_and_how_often_they_ran() -> None:
    first, *_ = of(resnet_step()).kernels

    assert first.name == (
        "tensorflow::functor::SwapDimension1And2InTensor3UsingTiles (FusedBatchNormV3)"
    )
    assert (first.kind, first.layer, first.times) == ("transposes", "norm1", 2)
    assert first.share == pytest.approx(0.38)


def test_it_is_the_same_after_a_file() -> None:
    found = of(resnet_step())

    assert DeviceTime.from_json(found.to_json()) == found


def test_of_several_devices_each_counts_with_its_window() -> None:
    whole = Ran(name=CONVOLUTION, begin_us=0, length_us=100)
    half = [Ran(name=CONVOLUTION, begin_us=at, length_us=25) for at in (0, 75)]

    found = of(Trace().gpu(0, whole).gpu(1, *half))

    assert found.devices == ("GPU:0", "GPU:1")
    assert found.shares["products"] == pytest.approx(0.75)
    assert found.shares["idle"] == pytest.approx(0.25)


def test_a_device_that_only_holds_copies_is_left_out_if_another_one_computes() -> None:
    found = of(
        Trace()
        .gpu(0, Ran(name=CONVOLUTION, begin_us=0, length_us=1))
        .gpu(1, Ran(name="MemcpyH2D", begin_us=0, length_us=1))
    )

    assert found.devices == ("GPU:0",)


def test_fusions_of_xla_go_by_their_program() -> None:
    module = program(
        "step_1",
        {
            "fusion.1": ("model/norm1/moments/mean", ["multiply", "reduce", "parameter"]),
            "fusion.2": ("model/conv1/BiasAdd", ["transpose", "copy", "parameter", "bitcast"]),
            "fusion.3": ("model/conv1/Conv2D", ["convolution", "add"]),
            "fusion.4": ("model/conv1/Cast", ["convert", "parameter"]),
            "all-reduce.5": ("", ["all-reduce"]),
        },
    )
    kernels = {
        "fusion_1": "fusion.1",
        "fusion_2": "fusion.2",
        "fusion_3": "fusion.3",
        "wrapped_convert": "fusion.4",
        "custom_kernel": "all-reduce.5",
    }
    events = [
        Ran(name=name, begin_us=10 * at, length_us=10, op="XlaModule:", hlo=("step_1", instruction))
        for at, (name, instruction) in enumerate(kernels.items())
    ]

    found = of(Trace().program(module).gpu(0, *events))

    assert {name: round(share, 3) for name, share in found.shares.items() if share} == {
        "products": 0.2,
        "normalization": 0.2,
        "elementwise": 0.2,
        "transposes": 0.2,
        "collectives": 0.2,
    }
    assert found.casts == pytest.approx(0.2)
    assert {each.layer for each in found.layers} == {"norm1", "conv1"}


@pytest.mark.parametrize(
    ("opcode", "inner", "kernel", "expected"),
    [
        ("async-start", ["parameter", "all-to-all"], "loop_x", "collectives"),
        ("async-start", ["parameter", "convolution"], "loop_x", "products"),
        ("async-start", ["parameter", "dynamic-slice"], "MemcpyD2D", "copies"),
        ("async-done", ["parameter", "reduce-scatter"], "loop_x", "collectives"),
        # What they run has names of its own.
        ("call", ["parameter", "add"], "sm90_xmma_gemm_f32", "products"),
        ("while", ["parameter", "add"], "MemcpyD2H", "copies"),
        ("async-update", [], "wrapped_transpose", "transposes"),
    ],
)
def test_what_runs_others_has_their_class_or_that_of_the_kernels_name(
    opcode: str, inner: list[str], kernel: str, expected: str
) -> None:
    module = program("step_1", {"it.1": ("model/conv1/x", inner)})
    entry, fused = module.hlo_module.computations
    (instruction,) = entry.instructions
    if inner:
        fused.root_id = fused.instructions[-1].id
    if opcode == "async-done":
        instruction.opcode, instruction.name = "async-start", "it.0"
        instruction.id = 90
        instruction = entry.instructions.add(name="it.1", id=91)
        instruction.operand_ids.append(90)
    if opcode == "async-update":
        del instruction.called_computation_ids[:]
    instruction.opcode = opcode
    event = Ran(name=kernel, begin_us=0, length_us=1, hlo=("step_1", "it.1"))

    assert of(Trace().program(module).gpu(0, event)).shares[expected] == 1.0


def test_of_a_program_that_the_trace_does_not_hold_kernels_keep_their_names() -> None:
    events = Ran(name="wrapped_transpose", begin_us=0, length_us=1, hlo=("lost", "transpose.3"))

    assert of(Trace().gpu(0, events)).shares["transposes"] == 1.0


_KERNELS = (
    Kernel(name=CONVOLUTION, scope="m/conv1/Conv2D"),
    Kernel(name=ADD, scope="m/norm1/add"),
    Kernel(name="MemcpyH2D"),
    Kernel(name="whatever"),
    Kernel(name="wrapped_transpose", scope="m/conv1/x"),
)
_EVENTS = st.lists(
    st.builds(
        lambda begin, length, kernel: Event(
            begin_ps=begin, end_ps=begin + length, kernel=_KERNELS[kernel]
        ),
        st.integers(0, 10**13),
        st.integers(1, 10**12),
        st.integers(0, len(_KERNELS) - 1),
    ),
    min_size=1,
    max_size=40,
)


@given(st.lists(_EVENTS, min_size=1, max_size=3))
def test_shares_and_the_idle_time_are_the_whole(devices: list[list[Event]]) -> None:
    found = device_time(
        [DeviceEvents(device=f"GPU:{at}", events=tuple(each)) for at, each in enumerate(devices)],
        layers=LAYERS,
    )

    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert all(0.0 <= share <= 1.0 for share in found.shares.values())
    assert sum(each.share for each in found.kernels) == pytest.approx(found.busy)
    assert found.busy == pytest.approx(_union(devices) / _windows(devices))


def _windows(devices: list[list[Event]]) -> int:
    return sum(
        max(event.end_ps for event in each) - min(event.begin_ps for event in each)
        for each in devices
    )


def _union(devices: list[list[Event]]) -> int:
    """Time in which anything runs, counted the plain way."""
    total = 0
    for each in devices:
        until = 0
        for event in sorted(each, key=lambda event: event.begin_ps):
            total += max(0, event.end_ps - max(until, event.begin_ps))
            until = max(until, event.end_ps)
    return total


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("sequential/conv/Conv2D", "conv"),
        ("gradient_tape/sequential/block/query/einsum/Einsum", "block/query"),
        ("while/body/_1/sequential/other/query/add", "other/query"),
        ("replica_1/sequential/conv_1/Conv2D", "conv_1"),
        ("sgd/mul", ""),
        ("", ""),
    ],
)
def test_the_layer_of_an_operation(scope: str, layer: str) -> None:
    paths = ["conv", "conv_1", "block", "block/query", "other", "other/query"]

    assert LayerNames(paths, [scope]).layer_of(scope) == layer


def test_where_a_model_is_called_twice_each_name_has_a_number_more() -> None:
    scopes = ["sequential_1/conv_1/Conv2D", "sequential_1/conv_1_1/Conv2D"]
    names = LayerNames(["conv", "conv_1"], scopes)

    assert [names.layer_of(scope) for scope in scopes] == ["conv", "conv_1"]


@pytest.mark.parametrize("name", ["tower_1", "branch", "replica_0", "else", "body", "while_2"])
def test_a_layer_may_be_named_as_tensorflow_names_what_is_around_operations(name: str) -> None:
    names = LayerNames([name, f"{name}/dense", "dense"])

    assert names.layer_of(f"replica_1/gradients/model/{name}/MatMul") == name
    assert names.layer_of(f"model/{name}/dense/MatMul") == f"{name}/dense"
    # Not for a name that is not a layer.
    assert LayerNames(["dense"]).layer_of(f"{name}/model/dense/MatMul") == "dense"


def test_without_layers_the_outer_parts_of_the_name_are_shown() -> None:
    assert LayerNames([]).layer_of("gradient_tape/model/conv1/Conv2D/x") == "model/conv1"
    assert LayerNames([]).layer_of("model/tower_1/Conv2D") == "model/tower_1"
