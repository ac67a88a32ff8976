"""Packed linear layers inside stock models: the adapter's way to `fp32`, `fp16` and `int8` on a CPU.

Contract: `pack_linears` replaces the linear layers of a model that is no longer trained. Each row of a layer's output
is the same bits alone and in any company; what the rest of a stock model does with rows is its own affair.
"""

from __future__ import annotations

from torch import Tensor, nn

from eaglekit.errors import InputError
from eaglekit.models.native import default_backend
from eaglekit.models.portable import PortableBackend
from eaglekit.models.stack import Matrix, Weights


class PackedLinear(nn.Module):
    """An `nn.Linear` with packed weights; see `models/stack.py` for the formats."""

    def __init__(self, linear: nn.Linear, weights: Weights) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = _pack(linear.weight.detach(), weights)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to float32 [..., out_features]."""
        y = self._packed(x.reshape(-1, self.in_features).float())
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def _pack(weight: Tensor, weights: Weights) -> Matrix:
    try:
        return default_backend().matrix(weight, weights)
    except InputError:  # a width that compiled kernels do not take
        return PortableBackend().matrix(weight, weights)


def pack_linears(model: nn.Module, weights: Weights) -> int:
    """Replace every `nn.Linear` below `model` but its output matrix, in place; give their number.

    The output matrix stays: training and drafting read it as a tensor.

    Raises:
        InputError: the format is not available on this machine.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not output:
                setattr(module, name, PackedLinear(child, weights))
                count += 1
    return count
