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
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            loss += one_chunk(hidden[rows].to(dtype), head, labels[rows],
                              None if grad_hidden is None else grad_hidden[rows], grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        # in place: autograd then refuses a second backward through the same graph, as it should
        return (None if grad_hidden is None else grad_hidden.mul_(grad),
                None if grad_weight is None else grad_weight.mul_(grad).to(ctx.weight_dtype),
                None, None, None)


def one_chunk(rows: Tensor, head: Tensor, targets: Tensor, grad_rows: Tensor | None,
              grad_weight: Tensor | None) -> Tensor:
    """The loss of some rows; writes their gradient, adds to that of the head. Its logits end with it."""
    logits = (rows @ head.T).float()                                   # [chunk, V], from here on in place
    valid = targets != -100
    targets = targets.where(valid, 0)[:, None]
    log_softmax = torch.log_softmax(logits, -1, out=logits)
    loss = -(log_softmax.gather(1, targets)[:, 0] * valid).sum()
    if grad_rows is None and grad_weight is None:
        return loss
    probabilities = log_softmax.exp_()
    probabilities.scatter_add_(1, targets, probabilities.new_full(targets.shape, -1.0))
    error = probabilities.to(rows.dtype)                               # d loss / d logits of the valid rows
    if grad_rows is not None:
        grad_rows.copy_((error @ head) * valid[:, None])
    if grad_weight is not None:
        add_product(grad_weight, error.T, rows * valid[:, None])
    return loss


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without a matrix for the product where the dtypes allow it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


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
