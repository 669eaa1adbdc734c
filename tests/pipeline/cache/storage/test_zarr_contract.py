"""Our store of a disk keeps Zarr's contract: Zarr's own tests of stores, run over it."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import cpu
from zarr.testing.stateful import ZarrStoreStateMachine
from zarr.testing.store import StoreTests

from xret.pipeline.cache.storage.zarr_stores import DiskStore


class TestDiskStore(StoreTests[DiskStore, cpu.Buffer]):
    store_cls, buffer_cls = DiskStore, cpu.Buffer

    async def get(self, store, key):
        return self.buffer_cls.from_bytes((store.root / key).read_bytes())

    async def set(self, store, key, value):
        path = store.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value.to_bytes())

    @pytest.fixture
    def store_kwargs(self, tmp_path):
        return {"root": str(tmp_path)}

    def test_store_repr(self, store):
        assert str(store) == f"file://{store.root.as_posix()}"

    def test_store_supports_writes(self, store):
        assert store.supports_writes

    def test_store_supports_listing(self, store):
        assert store.supports_listing


@pytest.mark.slow
def test_any_order_of_calls(tmp_path):
    def machine():
        place = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        place.mkdir()
        return ZarrStoreStateMachine(DiskStore(place))

    run_state_machine_as_test(machine, settings=settings(max_examples=40, deadline=None))
