"""
The gate of an MLP with a backward pass of its own: y = silu(gate) up.

Keeps the two factors only, silu(gate) is computed again, in place: as fast as the plain formula on a CPU,
with a quarter less to keep for each MLP (the linear layer behind keeps y).
"""
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grad)


def reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., I] of one dtype -> [..., I]. A compiler fuses the reference better than this."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _SwiGLU.apply(gate, up)
    return reference(gate, up)
