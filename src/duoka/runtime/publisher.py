"""Publishing a process's memory about once a second, for `duoka top` (`report.live`)."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from duoka.forecast.stage_bytes import StageBytes
from duoka.models.cache_argument import CACHE_NAMES
from duoka.planner.plan import Plan
from duoka.report import live

from . import devices

_SECONDS = 1.0
# Busy shares are averaged over so many samples: one step may take as long as a sample.
_LOOKS = 5
_DEEPEST = 6
ByDevice = Callable[[], Mapping[str, float]]


class BusyShares:
    """The share of the last seconds in which each device was computing."""

    def __init__(self, busy_seconds: ByDevice) -> None:
        self._busy_seconds = busy_seconds
        self._looks: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=_LOOKS + 1)

    def __call__(self) -> dict[str, float]:
        """Take a sample; return the shares since the earliest kept sample, empty at first."""
        self._looks.append((time.monotonic(), self._busy_seconds()))
        (start, earlier), (now, seconds) = self._looks[0], self._looks[-1]
        if now == start:
            return {}
        return {
            name: min(1.0, max(0.0, total - earlier.get(name, 0.0)) / (now - start))
            for name, total in seconds.items()
        }


class Publisher:
    """Publishes the memory of a model on its devices, by kind, beside the plan's forecast.

    Create it right after the weights are loaded: all bytes allocated then count as weights. A
    thread publishes from `start` to `close`. KV caches are found among the arguments of the model's
    calls, gradients and optimizer states in the optimizer; all other bytes count as activations.

    Parameters
    ----------
    plan : Plan
    model : nn.Module
    names : iterable of str
        The plan's devices that this process uses.
    optimizer : Optimizer, optional
    busy_shares : callable, optional
        Returns the busy share of each device.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        names: Iterable[str],
        *,
        optimizer: Optimizer | None = None,
        busy_shares: ByDevice | None = None,
    ) -> None:
        stages = {stage.device: stage for stage in plan.forecast.devices}
        self._forecasts = {n: stages[n] for n in names if devices.peak_bytes(n) is not None}
        self._weights = {name: devices.memory_now(name)[0] for name in self._forecasts}
        self._uuids = {
            name: plan.fleet.device(name).uuid or devices.uuid(name) for name in self._forecasts
        }
        self._model_name = plan.model
        self.model = model
        self._optimizer = optimizer
        self._busy_shares = busy_shares or dict
        self._caches: WeakSet[Any] = WeakSet()
        self._hook = model.register_forward_pre_hook(self._note_caches, with_kwargs=True)
        self._name = f"{id(self):x}"
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="duoka-publisher", daemon=True)

    def start(self) -> Self:
        """Start the publishing thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the thread, and withdraw the last publication."""
        self._hook.remove()
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        live.withdraw_memory(self._name)

    def _publish(self) -> None:
        """Publish every second until closed."""
        # No failure here may disturb the process: a full disk, a directory of another user, a cache
        # that changes while its tensors are listed.
        with suppress(Exception):
            live.read_memory()  # removes the files of killed processes
        while not self._is_closed.is_set():
            with suppress(Exception):
                live.publish_memory(self.look(), self._name)
            self._is_closed.wait(_SECONDS)

    def look(self) -> list[live.LiveDevice]:
        """Return each device's memory now, by kind, with its forecast and busy share."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        kinds = {
            "kv_cache_bytes": _bytes_by_device(tuple(self._caches)),
            "gradient_bytes": _bytes_by_device([p.grad for g in groups for p in g["params"]]),
            "optimizer_bytes": _bytes_by_device(self._optimizer.state if self._optimizer else ()),
        }
        shares = self._busy_shares()
        return [
            live.LiveDevice(
                pid=os.getpid(),
                model=self._model_name,
                uuid=self._uuids[name],
                measured=self._measure(name, {kind: kinds[kind][name] for kind in kinds}),
                forecast=forecast,
                busy_share=shares.get(name),
            )
            for name, forecast in self._forecasts.items()
        ]

    def _measure(self, name: str, kinds: dict[str, int]) -> StageBytes:
        """Return a device's bytes now; bytes that belong to no other kind are activations."""
        allocated, reserved = devices.memory_now(name)
        weights = min(self._weights[name], allocated)
        return StageBytes(
            device=name,
            weight_bytes=weights,
            **kinds,
            activation_bytes=max(allocated - weights - sum(kinds.values()), 0),
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            requested_bytes=allocated,
            budget_bytes=self._forecasts[name].budget_bytes,
        )

    def _note_caches(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Before each call of the model, remember the caches among its arguments."""
        for name in (*CACHE_NAMES, "step"):
            cache = kwargs.get(name)
            with suppress(TypeError):  # None, or older code's tuple: neither takes a weak reference
                self._caches.add(getattr(cache, "cache", cache))


def _bytes_by_device(values: Any) -> Counter[str]:
    """Return the bytes of all tensors in nested containers, by device."""
    sizes: Counter[str] = Counter()
    for tensor in _tensors(values):
        sizes[str(tensor.device)] += tensor.nbytes
    return sizes


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors of caches or of an optimizer's states, in any containers."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, (type, nn.Module)) or depth > _DEEPEST:
        return
    if not isinstance(value, (Mapping, list, tuple)):
        value = getattr(value, "__dict__", ())
    for item in list(value.values() if isinstance(value, Mapping) else value):
        yield from _tensors(item, depth + 1)
