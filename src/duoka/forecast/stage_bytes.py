"""The bytes of a stage at the peak, from the replay to the report.

It knows nothing of how they are forecast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from duoka.hardware.device import Device

KIND_FIELDS = {
    "weights": "weight_bytes",
    "KV cache": "kv_cache_bytes",
    "activations": "activation_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "overhead": "overhead_bytes",
}
"""Kinds of bytes that together are what is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """The bytes of a device at its peak.

    `weight_bytes`, `kv_cache_bytes`, `activation_bytes`, `gradient_bytes` and `optimizer_bytes`
    add up to `allocated_bytes`, at the moment of its peak; the last two are those of training.
    `reserved_bytes` is the peak of what the allocator takes from the device, cached blocks and
    rounding included; it never exceeds the budget, since cached memory is given back before that.
    `requested_bytes` is the most that tensors ask for at a time, in multiples of 512, which is the
    same on any device: a block that is hardly larger than what was asked for isn't split, and
    counts whole as allocated. As long as a stage is on no device, `device` is empty and
    `budget_bytes` 0.
    """

    device: str = ""
    weight_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int
    budget_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes by kind whose sum is allocated."""
        return tuple(size for kind, size in self.kinds.items() if kind != "overhead")

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind whose sum is reserved."""
        return {kind: getattr(self, name) for kind, name in KIND_FIELDS.items()}

    @property
    def overhead_bytes(self) -> int:
        """Reserved and not allocated: rounding to segments, fragmentation, cached blocks."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget not reserved at the peak."""
        return self.budget_bytes - self.reserved_bytes

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the budget not requested at the peak; at least `free_bytes`."""
        return self.budget_bytes - self.requested_bytes

    def place_on(self, device: Device) -> StageBytes:
        """Return the bytes with the name and the budget of a device."""
        return replace(self, device=device.name, budget_bytes=device.budget_bytes)
