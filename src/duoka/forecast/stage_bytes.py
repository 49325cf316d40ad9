"""The bytes of a stage at its peak, as passed from the replay to the report.

This module knows nothing of how the bytes are forecast.
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
"""Labels of the kinds of bytes, whose sum is `reserved_bytes`, with their fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """The bytes of a device at its peak.

    `weight_bytes`, `kv_cache_bytes`, `activation_bytes`, `gradient_bytes` and `optimizer_bytes`
    add up to `allocated_bytes`, the peak of the bytes of blocks in use; the last two are 0 outside
    of training. `reserved_bytes` is the peak of the bytes that the allocator takes from the device,
    cached blocks and rounding included; it never exceeds the budget, because cached segments are
    returned first. `requested_bytes` is the peak of the bytes that tensors request, each rounded to
    512, which is the same on any device; `allocated_bytes` may be larger, because the rest of a
    slightly larger block isn't split off. Before a stage is placed on a device, `device` is empty
    and `budget_bytes` is 0.
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
        """Bytes of each kind without overhead; their sum is `allocated_bytes`."""
        return tuple(size for kind, size in self.kinds.items() if kind != "overhead")

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of each kind; their sum is `reserved_bytes`."""
        return {kind: getattr(self, name) for kind, name in KIND_FIELDS.items()}

    @property
    def overhead_bytes(self) -> int:
        """Bytes reserved but not allocated: segment rounding, fragmentation, cached blocks."""
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
        """Return these bytes with the name and the budget of a device."""
        return replace(self, device=device.name, budget_bytes=device.budget_bytes)
