"""
A linear layer with 8-bit weights, for generating text on a CPU.

    y[n, o] = b[o] * a[n] * sum over i of (high[n, i] + low[n, i] / 254) * w8[o, i]  +  bias[o]

w8 is the weight in int8 with one scale b per output, made once. The input, with one scale a per token (so
that what else is in the batch changes nothing), is two int8 numbers, together as good as 15 bits: with one,
SmolLM2-135M loses 0.035 nats, with two 0.001. Sums are exact, in int32. Both halves go through one product:
it reads a quarter of the bytes of fp32, and reading the weights is what a token costs at small batches. The
head of a 30M model (50,304 x 384), one core with AVX512-VNNI: 1.7 ms instead of 5.6 for one token, 3.1
instead of 12.7 for eight.
"""
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import UserError


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O, I] -> int8 of the same shape and a scale [O] for each row: its largest becomes 127."""
    scale = largest(weight) / 127
    return (weight / scale).round().to(torch.int8), scale[:, 0]


def largest(x: Tensor) -> Tensor:
    """[N, I] -> the largest magnitude of each row, [N, 1]; never 0."""
    return torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).clamp_(min=1e-30)


def reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """int8_linear but for the rounding of x."""
    return F.linear(x, weight * scale[:, None], bias)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] fp32, weight [O, I] int8, scale [O], bias [O] or None -> [..., O] fp32."""
    rows = x.flatten(0, -2)
    x_scale = largest(rows) / 127
    rows = rows / x_scale
    high = rows.round()
    low = (rows - high).mul_(254).round_()                               # the rest is at most 1/2: 127
    y = torch._int_mm(torch.cat((high, low)).to(torch.int8), weight.T).float()
    N = len(rows)
    y = y[:N].add_(y[N:], alpha=1 / 254).mul_(x_scale).mul_(scale)
    return (y if bias is None else y.add_(bias)).unflatten(0, x.shape[:-1])


class Int8Linear(nn.Module):
    """Takes the place of an nn.Linear with `weight` [O, I] and `bias` [O] or None. Not for training."""
    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        check_products(weight.device)
        quantized, scale = quantize(weight.detach().float())
        self.register_buffer("weight", quantized)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @classmethod
    def joined(cls, *linears: nn.Linear) -> "Int8Linear":
        """One layer for those that read the same input, which is then quantized once; outputs in a row."""
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        return cls(torch.cat([linear.weight for linear in linears]), bias)

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.scale, self.bias)


@functools.cache
def check_products(device: torch.device) -> None:
    """
    UserError where 8-bit products are not exact: without 8-bit dot products (AVX-VNNI, AVX512-VNNI) x86 adds
    pairs in 16 bits, which overflow silently.
    """
    if device.type != "cpu":
        raise UserError(f"dtype=int8 is for the CPU, not for device={device.type}: use bf16 there")
    for rows in (1, 8):
        most = torch.full((rows, 256), 127, dtype=torch.int8)
        if not (torch._int_mm(most, most.new_full((256, 64), 127)) == 127 * 127 * 256).all():
            raise UserError("dtype=int8 needs a CPU with exact 8-bit dot products (AVX512-VNNI, AVX-VNNI), "
                            "and on this one they overflow: use fp32")
