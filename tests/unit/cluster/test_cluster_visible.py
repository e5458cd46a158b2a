"""Which GPUs a process may use: CUDA_VISIBLE_DEVICES is read as CUDA reads it, and --gpus writes it."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from stoker.cluster.doctor.gpus import Gpus, GpuState
from stoker.cluster.doctor.visible import choose_gpus, unused_slices, visible_gpus, visible_names
from stoker.core.errors import ConfigError
from stoker.core.nvml import MigSlice

GPU = GpuState(
    index=0,
    name="NVIDIA H100",
    uuid="GPU-11aa",
    compute_capability=(9, 0),
    memory_bytes=80 << 30,
    used_bytes=0,
    pci="00000000:01:00.0",
)
SLICES = (
    MigSlice(uuid="MIG-5f", name="NVIDIA H100 MIG 3g.40gb", memory_bytes=40 << 30),
    MigSlice(uuid="MIG-6e", name="NVIDIA H100 MIG 3g.40gb", memory_bytes=40 << 30),
)
STATES = (
    GPU,
    replace(GPU, index=1, uuid="GPU-11bb"),
    replace(GPU, index=2, uuid="GPU-22cc"),
    replace(GPU, index=3, uuid="GPU-33dd", mig=True, slices=SLICES),
)
GPUS = Gpus(driver="580.65.06", cuda=(13, 0), states=STATES)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ["GPU-11aa", "GPU-11bb", "GPU-22cc", "GPU-33dd"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-22cc", "GPU-11aa"]),
        ("1,-1,2", ["GPU-11bb"]),
        ("0,7,1", ["GPU-11aa"]),
        ("GPU-22cc", ["GPU-22cc"]),
        ("GPU-2,1", ["GPU-22cc", "GPU-11bb"]),
        ("GPU-11,2", []),  # two GPUs begin so
        (" 1 , 2 ", ["GPU-11bb", "GPU-22cc"]),
        ("MIG-6e", ["MIG-6e"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str | None, shown: list[str]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}

    found = visible_gpus(STATES, environ)

    assert [state.uuid if mig is None else mig.uuid for state, mig in found] == shown


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        (" 2 , MIG-6e", ("2", "MIG-6e")),
        ("1,-1,2", ("1",)),
        ("0,7,1", ("0",)),
    ],
)
def test_visible_gpus_are_named_as_cuda_visible_devices_names_them(
    value: str | None, names: tuple[str, ...]
) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}

    assert visible_names(STATES, environ) == names


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0,2", "0,2"),
        ("2, 0", "2,0"),
        ("01", "1"),
        ("GPU-22cc", "GPU-22cc"),
        ("GPU-2", "GPU-22cc"),
        ("0,GPU-22", "GPU-11aa,GPU-22cc"),
        ("MIG-5f", "MIG-5f"),
        ("MIG-5f,MIG-6e", "MIG-5f,MIG-6e"),
    ],
)
def test_the_chosen_gpus_are_those_that_cuda_then_shows(text: str, value: str) -> None:
    variables = choose_gpus(text, GPUS)

    assert variables == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": value}
    assert len(visible_gpus(STATES, variables)) == text.count(",") + 1


@pytest.mark.parametrize("text", ["none", "", " "])
@pytest.mark.parametrize("gpus", [GPUS, Gpus(unread="NVML Shared Library Not Found")])
def test_none_hides_every_gpu_even_without_a_driver(text: str, gpus: Gpus) -> None:
    assert choose_gpus(text, gpus) == {"CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "--gpus must name GPUs of this machine. Received: '4'. Available: 0 (GPU-11aa,"),
        ("GPU-99", "--gpus must name GPUs of this machine. Received: 'GPU-99'."),
        ("MIG-9", "--gpus must name GPUs of this machine. Received: 'MIG-9'."),
        ("GPU-11", "Received: 'GPU-11', which 2 GPUs match."),
        ("0,0", "--gpus must name each GPU once. Received: '0,0'."),
        ("0,00", "--gpus must name each GPU once."),
        ("0,GPU-11aa", "--gpus must name each GPU once."),
        (
            "3",
            "GPU 3 is divided into MIG slices, which are chosen by UUID. Received: '3'. Available:",
        ),
        ("0,", "--gpus must list GPU indices or UUIDs, separated by commas. Received: '0,'."),
        ("-1", "--gpus must list GPU indices or UUIDs"),
        ("0-2", "--gpus must list GPU indices or UUIDs"),
        ("all", "--gpus must list GPU indices or UUIDs"),
        ("0,none", "--gpus must list GPU indices or UUIDs"),
        ("GPU-", "--gpus must list GPU indices or UUIDs"),
        ("GPU-1;rm", "--gpus must list GPU indices or UUIDs"),
        ("²", "--gpus must list GPU indices or UUIDs"),
        ("9" * 30, "--gpus must list GPU indices or UUIDs"),
    ],
)
def test_a_wrong_list_is_one_clear_error(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_gpus(text, GPUS)

    assert said in raised.value.line()


def test_without_a_driver_a_gpu_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", missing)

    with pytest.raises(ConfigError, match=r"needs an NVIDIA driver that answers.*no such library"):
        choose_gpus("0", Gpus(unread="no such library"))


def missing(name: str) -> None:
    raise OSError(name)


def test_with_cudas_driver_library_alone_only_the_form_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    unread = Gpus(unread="NVML Shared Library Not Found")

    assert choose_gpus("0,GPU-8932", unread)["CUDA_VISIBLE_DEVICES"] == "0,GPU-8932"
    with pytest.raises(ConfigError, match="once"):
        choose_gpus("1,1", unread)


def test_a_process_gets_one_mig_slice() -> None:
    assert unused_slices(choose_gpus("MIG-5f,MIG-6e", GPUS)) == 1
    assert unused_slices(choose_gpus("MIG-5f", GPUS)) == 0
    assert unused_slices(choose_gpus("0,1", GPUS)) == 0
