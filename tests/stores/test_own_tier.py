"""A tier from outside the project: an object store, through public imports alone."""

import torch
from torch import nn

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.devices import Machine
from gigagrad.stores import FieldSpec, Store, Tier, register_tier

BUCKETS: dict[str, dict[str, bytes]] = {}


class ObjectStore(Store):
    def __init__(self, bucket: dict[str, bytes], field: FieldSpec) -> None:
        super().__init__(field.shape, field.dtype, field.axes)
        self._bucket, self._name = bucket, field.name
        self._put(torch.zeros(field.shape, dtype=field.dtype))

    def _put(self, whole: torch.Tensor) -> None:
        self._bucket[self._name] = whole.numpy().tobytes()

    def _get(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._bucket[self._name]), dtype=self.dtype).reshape(self.shape)

    def read(self, box: Box) -> torch.Tensor:
        return self._get()[..., box.y0 : box.y1, box.x0 : box.x1]

    def write(self, box: Box, crop: torch.Tensor) -> None:
        whole = self._get()
        whole[..., box.y0 : box.y1, box.x0 : box.x1] = crop
        self._put(whole)

    def add(self, box: Box, crop: torch.Tensor) -> None:
        self.write(box, self.read(box) + crop)

    def flush(self) -> None: ...

    def close(self) -> None:
        self._bucket.pop(self._name, None)


class Bucket(Tier):
    name, place = "bucket", "a bucket"

    def __init__(self, where: str, room_bytes: int | None) -> None:
        self._where = where

    def room_bytes(self) -> int:
        return 2**30

    def open(self, needed_bytes: int, machine: Machine) -> "Bucket":
        return self

    def open_store(self, field: FieldSpec) -> Store:
        return ObjectStore(BUCKETS.setdefault(self._where, {}), field)

    def close(self) -> None:
        BUCKETS.pop(self._where, None)


def test_fields_in_a_tier_from_outside_change_no_bit() -> None:
    register_tier("bucket", Bucket)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 1, 1))
    image, target = torch.rand(1, 200, 240), torch.rand(1, 200, 240)
    found = []
    for scratch, tier in ((None, "memory"), ("bucket:here", "bucket")):
        model.zero_grad()
        engine = gg.compile(model, nn.functional.mse_loss, tile=(100, 100), scratch=scratch)
        engine.plan(image, target)
        state = engine.state_dict()
        for choice in state["choices"].values():
            choice |= {"kept": [[field, tier] for field, _ in choice["kept"]], "memory_format": "contiguous"}
        engine.load_state_dict(state)
        engine.backward(image, target)
        found.append([p.grad for p in model.parameters()])
    assert engine.plan(image, target).bytes_in("bucket") > 0
    assert not BUCKETS
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
