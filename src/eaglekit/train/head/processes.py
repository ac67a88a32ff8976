"""The processes that train together: one, or as many as `torchrun` or `accelerate launch` started.

Contract: who starts what follows from the environment that a launcher sets, as accelerate reads it; without a launcher
there is one process and nothing here has an effect. Gradients are averaged by DistributedDataParallel, which keeps the
whole head everywhere, or weights, gradients and optimizer are sharded by FSDP2 (`fully_shard`). Both are taken from
torch: accelerate shards on accelerators alone, and what cannot be tried on a CPU could not be tested here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn

from eaglekit.errors import InputError
from eaglekit.models.load import pick_device

_PATIENCE = timedelta(days=2)  # what the main process does alone, such as making data, may take long


class Processes:
    """See the module.

    Args:
        device: "cpu", "cuda", …, or "auto": an accelerator where there is one. Each process gets one of its own.
        sharded: FSDP2 in place of DistributedDataParallel.

    Attributes:
        count: Processes.
        rank: Number of this one, from 0.
        device: Where this one computes.
        sharded: See above.

    Raises:
        InputError: the device cannot be used, or there is one process and nothing to share.
    """

    def __init__(self, device: str | torch.device = "auto", *, sharded: bool = False) -> None:
        from accelerate import PartialState

        chosen = pick_device(str(device))
        self._state = PartialState(cpu=chosen.type == "cpu", timeout=_PATIENCE)
        self.count: int = self._state.num_processes
        self.rank: int = self._state.process_index
        # Processes on a CPU have numbers, the device has none.
        self.device = chosen if self.count == 1 or chosen.type == "cpu" else torch.device(self._state.device)
        if sharded and self.count == 1:
            raise InputError("--fsdp shards a head over processes, got one; start several: torchrun --nproc-per-node=N")
        self.sharded = sharded

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def wait(self) -> None:
        """Until every process is here."""
        self._state.wait_for_everyone()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """What is done inside is done by the main process, and then by all others, unless it failed.

        Raises:
            InputError: it failed in the main process, which says why.
        """
        if not self.main and not self.from_main(None):
            raise InputError("training cannot begin; the main process says why")
        done = False
        try:
            yield
            done = True
        finally:
            if self.main:
                self.from_main(done)
        self.wait()

    def from_main(self, value: Any) -> Any:
        """The main process's `value`, in every process."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over all processes."""
        if self.count > 1:
            torch.distributed.all_reduce(values)
        return values

    def wrap(self, module: nn.Module) -> nn.Module:
        """`module` with its gradients averaged over processes after each `backward`."""
        if self.count == 1:
            return module
        if self.sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            for parameter in module.parameters():
                torch.distributed.broadcast(parameter.data, 0)  # as the other way does
            return cast(nn.Module, fully_shard(module, mesh=init_device_mesh(self.device.type, (self.count,))))
        places = None if self.device.type == "cpu" else [self.device]
        return nn.parallel.DistributedDataParallel(module, device_ids=places)

    @contextmanager
    def syncing(self, module: nn.Module, now: bool) -> Iterator[None]:
        """Whether the `backward` inside averages gradients, or leaves that to a later one."""
        if self.count == 1 or (now and not self.sharded):
            yield
        elif self.sharded:
            module.set_requires_gradient_sync(now)  # type: ignore[operator]
            yield
        else:
            with module.no_sync():  # type: ignore[operator]
                yield


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; every process has to ask."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
