"""Memory that goes and comes back at the same addresses: the driver's calls, and what reads such memory."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

from benchmarks.load_transformer import load_transformer
from parallel_runtime.gpu_memory import arena as arenas
from parallel_runtime.gpu_memory import cuda_driver
from parallel_runtime.gpu_memory.arena import VirtualRegion, make_arena, place_tensor
from parallel_runtime.gpu_memory.cuda_driver import DriverError
from parallel_runtime.loading.checkpoint import CheckpointReader, open_checkpoint
from parallel_runtime.loading.loaded_weights import LoadedWeights
from tests.tiny_flux import tiny_config, write_diffusers_folder

GRANULARITY = 2 << 20


def test_the_structures_have_the_sizes_that_the_driver_reads():
    """As in cuda.h, on 64 bits: CUmemLocation, CUmemAllocationProp, CUmemAccessDesc."""
    sizes = [ctypes.sizeof(each) for each in (
        arenas._Location, arenas._AllocationProperties, arenas._Access
    )]  # fmt: skip
    assert sizes == [8, 32, 12]
    assert arenas._AllocationProperties.win32HandleMetaData.offset == 16
    assert arenas._AllocationProperties.allocFlags.offset == 24


class FakeDriver:
    """A device that keeps account of what is reserved, allocated and mapped, and refuses what the real one refuses."""

    def __init__(self, memory: int = 1 << 40):
        self.memory = memory
        self.reserved: dict[int, int] = {}
        self.allocated: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.open: set[int] = set()
        self.accessible: set[int] = set()
        self._handles = itertools.count(1)

    @property
    def used(self) -> int:
        return sum(size for handle, size in self.allocated.items() if handle in self.open or handle in self.behind)

    @property
    def behind(self) -> set[int]:
        return {handle for handle, _ in self.mapped.values()}

    def call(self, name: str, *arguments) -> None:
        getattr(self, name)(*arguments)

    def cuDeviceGet(self, device, ordinal) -> None:
        device._obj.value = ordinal

    def cuDeviceGetAttribute(self, value, attribute, device) -> None:
        assert attribute == 102
        value._obj.value = 1

    def cuMemGetAllocationGranularity(self, size, properties, option) -> None:
        assert (properties._obj.type, properties._obj.location.type) == (1, 1)
        size._obj.value = GRANULARITY

    def cuMemAddressReserve(self, address, size, alignment, wish, flags) -> None:
        assert size % GRANULARITY == 0
        address._obj.value = 0x7F0000000000 + sum(self.reserved.values())
        self.reserved[address._obj.value] = size

    def cuMemAddressFree(self, address, size) -> None:
        assert not self.mapped
        assert self.reserved.pop(address) == size

    def cuMemCreate(self, handle, size, properties, flags) -> None:
        assert size % GRANULARITY == 0
        if self.used + size > self.memory:
            raise torch.OutOfMemoryError("no more")
        handle._obj.value = next(self._handles)
        self.allocated[handle._obj.value] = size
        self.open.add(handle._obj.value)

    def cuMemRelease(self, handle) -> None:
        self.open.remove(handle)

    def cuMemMap(self, address, size, offset, handle, flags) -> None:
        assert any(start <= address and address + size <= start + held for start, held in self.reserved.items())
        assert all(address + size <= start or start + held <= address for start, (_, held) in self.mapped.items())
        self.mapped[address] = (handle, size)

    def cuMemUnmap(self, address, size) -> None:
        assert self.mapped.pop(address)[1] == size
        self.accessible.discard(address)

    def cuMemSetAccess(self, address, size, access, count) -> None:
        inside = {start: held for start, (_, held) in self.mapped.items() if address <= start < address + size}
        assert sum(inside.values()) == size
        assert (access._obj.location.type, access._obj.flags, count) == (1, 3, 1)
        self.accessible |= inside.keys()


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "call", fake.call)
    monkeypatch.setattr(arenas, "_CHUNK", 4 << 20)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return fake


def test_a_region_takes_and_gives_back_all_of_it_at_one_address(driver):
    region = VirtualRegion((9 << 20) + 1, torch.device("cuda", 3))
    assert (region.size, driver.used, bool(region._mapped)) == (10 << 20, 0, False)
    address = region.__cuda_array_interface__["data"]
    for _ in range(2):
        region.take()
        region.take()
        assert (driver.used, bool(region._mapped), driver.open) == (10 << 20, True, set())
        assert driver.accessible == driver.mapped.keys()
        assert sorted(size for _, size in driver.mapped.values()) == [2 << 20, 4 << 20, 4 << 20]
        region.give_back()
        assert (driver.used, bool(region._mapped)) == (0, False)
    assert region.__cuda_array_interface__["data"] == address == (next(iter(driver.reserved)), False)
    region.take()
    del region
    assert (driver.used, driver.reserved) == (0, {})


def test_a_device_that_runs_out_half_way_gets_everything_back(driver):
    driver.memory = 6 << 20
    region = VirtualRegion(10 << 20, torch.device("cuda", 0))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        region.take()
    assert (driver.used, bool(region._mapped)) == (0, False)


def test_without_a_driver_the_error_is_one_that_the_arena_falls_back_from(monkeypatch):
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(DriverError, match="cannot be called"):
        cuda_driver._library.__wrapped__()


@pytest.mark.gpu
def test_gpu_memory_comes_back_at_its_address_and_a_recording_still_reads_it():
    device = torch.device("cuda", torch.cuda.current_device())
    size = 3 << 30
    arena = make_arena(size, device)
    assert isinstance(arena, VirtualRegion)
    weight = place_tensor(arena, 512, torch.empty(1024, 1024, dtype=torch.bfloat16))
    last = place_tensor(arena, size - 512, torch.empty(256, dtype=torch.bfloat16))
    values = torch.randn(1024, 1024, device=device).bfloat16()
    weight.copy_(values)
    last.fill_(2)
    given = torch.randn(8, 1024, device=device, dtype=torch.bfloat16)
    expected = given @ values
    for _ in range(2):
        given @ weight
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = given @ weight
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
    address, (before, _) = weight.data_ptr(), torch.cuda.mem_get_info(device)
    arena.give_back()
    assert torch.cuda.mem_get_info(device)[0] >= before + size - (64 << 20)
    arena.take()
    assert weight.data_ptr() == address
    weight.copy_(values)
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_gpu_weights_are_those_of_the_file_also_when_they_come_back(stored, wanted, tmp_path: Path):
    device = torch.device("cuda", torch.cuda.current_device())
    path = write_diffusers_folder(tmp_path / "m", tiny_config(), dtype=getattr(torch, stored))
    checkpoint, dtype = open_checkpoint(path), getattr(torch, wanted)
    expected = load_transformer(checkpoint, dtype, torch.device("cpu")).state_dict()
    weights = LoadedWeights(CheckpointReader(checkpoint, dtype), device)
    for _ in range(2):
        weights.fill(lambda done, total: None)
        assert weights.keeps_addresses
        module = weights.network
        torch.cuda.synchronize()
        assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in module.state_dict().items())
        weights.give_back()
