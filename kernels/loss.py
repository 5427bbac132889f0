"""
Cross-entropy of a linear head, without ever holding all the logits.

    logits = hidden @ weight.T             [N, V], made `chunk` rows at a time and thrown away
    loss   = sum over rows with a label of  logsumexp(logits) - logits[label]

The gradient of this loss needs nothing but softmax(logits) - onehot(label), so both gradients are made in
the forward pass, chunk by chunk, and the backward pass only multiplies them by the gradient of the loss (a
scalar). Saved for the backward: grad_hidden [N, D] and grad_weight [V, D]; peak extra memory: a few
[chunk, V] matrices instead of [N, V].
"""
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1024       # rows; with V = 50,304 in fp32 a chunk of logits is 206 MB


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int,
                dtype: torch.dtype) -> Tensor:
        hidden_needs, weight_needs = ctx.needs_input_grad[:2]
        head = weight.to(dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if hidden_needs else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if weight_needs else None
        for rows, targets, start in zip(hidden.split(chunk), labels.split(chunk),
                                        range(0, len(hidden), chunk)):
            rows = rows.to(dtype)
            logits = (rows @ head.T).float()                           # [chunk, V]
            valid = targets != -100
            targets = targets.where(valid, 0)[:, None]
            largest = logits.amax(-1, keepdim=True)
            picked = logits.gather(1, targets) - largest
            exp = logits.sub_(largest).exp_()                          # in place: one [chunk, V] matrix
            total = exp.sum(-1, keepdim=True)
            loss += ((total.log() - picked)[:, 0] * valid).sum()
            if hidden_needs or weight_needs:
                probabilities = exp.mul_(valid[:, None] / total)
                probabilities.scatter_add_(1, targets, -valid[:, None].float())
                error = probabilities.to(dtype)                        # d loss / d logits
                if hidden_needs:
                    grad_hidden[start:start + chunk] = error @ head
                if weight_needs:
                    grad_weight += error.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        return (None if grad_hidden is None else (grad_hidden * grad).to(grad_hidden.dtype),
                None if grad_weight is None else (grad_weight * grad).to(ctx.weight_dtype), None, None, None)


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same sum in two lines of plain torch, all logits at once."""
    return F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=-100, reduction="sum")


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = CHUNK) -> Tensor:
    """
    Sum of the cross-entropies (nats, fp32 scalar) of a linear head.

    hidden [N, D], weight [V, D], labels [N] int64 with -100 = no loss. The products run in the autocast
    dtype if autocast is on, else in hidden's dtype; logits, softmax and the sum in fp32.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if not torch.is_grad_enabled():                                    # no gradients to make in the forward
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk, dtype)
