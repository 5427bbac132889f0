"""
AdamW, Muon, learning rate and clip: the decay rule and the split of parameters are here and nowhere else.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon, with the scale of arXiv 2502.16982) moves
every weight matrix of the layers by an orthogonalised momentum; AdamW moves the rest: embeddings, head,
norms, biases, routers. The scale 0.2 sqrt(max(n, m)) gives both the same root mean square per entry, so one
learning rate serves them; beside Muon the embeddings move at EMBEDDING times that rate. docs/LOG.md has the
experiments that these numbers come from.
"""
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)    # quintic that pushes all singular values towards 1 (Muon post)
MOMENTUM = 0.9
EMBEDDING = 3.0                              # times lr, for the embedding and the head beside Muon


# ---- learning rate ----------------------------------------------------------------------------------------

def default_lr(hidden_size: int, optimizer: str, fresh: bool) -> tuple[float, str]:
    """
    The peak learning rate where nobody gave one, and where it comes from. The best one falls like 1 / width
    (for AdamW: arXiv 2203.03466; measured for Muon at this scale from 128 to 768). Weights that have been
    trained before get a tenth of it.
    """
    best = {"muon": 1.2, "adamw": 0.5}[optimizer]
    lr = float(f"{best / hidden_size / (1 if fresh else 10):.3g}")
    why = f"{best} / hidden_size{'' if fresh else ' / 10, as the weights are trained already'}"
    return lr, f"learning rate: {lr} = {why} (optim.py)"


def lr_at(step: int, max_steps: int, cfg) -> float:
    """
    Learning rate of step 0, 1, ..., max_steps - 1: linear warm-up from `start_lr` over `warmup_ratio` of the
    run, `lr`, then a decay to `final_lr` (None = a tenth of lr): over `decay_ratio` of the run in
    `decay_shape` for "wsd", over all that is left for "linear" and "cosine", never for "constant".
    """
    warmup = round(cfg.warmup_ratio * max_steps)
    if step < warmup:
        return cfg.start_lr + (cfg.lr - cfg.start_lr) * (step + 1) / warmup
    decay = {"constant": 0, "wsd": round(cfg.decay_ratio * max_steps)}.get(cfg.schedule, max_steps - warmup)
    shape = cfg.decay_shape if cfg.schedule == "wsd" else cfg.schedule
    t = (step - (max_steps - decay)) / max(decay, 1)
    if decay == 0 or t <= 0:
        return cfg.lr
    t = min(t, 1.0)
    final = cfg.lr / 10 if cfg.final_lr is None else cfg.final_lr
    kept = 0.5 * (1 + math.cos(math.pi * t)) if shape == "cosine" else 1 - t
    return final + (cfg.lr - final) * kept


# ---- gradients --------------------------------------------------------------------------------------------

@torch.no_grad()
def finish_gradients(model: nn.Module, scale: Tensor | float, clip: float | None) -> Tensor:
    """
    Multiply all gradients by `scale`, then clip their total norm; once per step, when the gradient is
    complete. Returns the norm before the clip, a scalar on the device (no host sync); a non-finite one means
    that the step is to be skipped.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) * scale
    factor = torch.as_tensor(scale, dtype=torch.float32, device=norm.device)
    if clip is not None:
        factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)
    return norm


# ---- Muon -------------------------------------------------------------------------------------------------

def orthogonalize(g: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """
    U V^T of the singular value decomposition of each matrix in g [..., n, m], n <= m, approximately
    (singular values land in about 0.7 to 1.2): `steps` Newton-Schulz iterations of X <- P X with
    P = aI + bA + cA^2 and A = XX^T. In fp32 and for m >= 2n only the small A is iterated, A <- P A P, and X
    is multiplied once, by the product of all P: half the arithmetic at m = 3n, too coarse in bf16. Runs in
    bf16 on accelerators and fp32 on CPU unless `dtype` says otherwise; the result has that dtype.
    """
    dtype = dtype or (torch.float32 if g.device.type == "cpu" else torch.bfloat16)
    x = g.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    wide = dtype == torch.float32 and 2 * x.shape[-2] <= x.shape[-1]
    iterate = newton_schulz_of_gram if wide else newton_schulz
    return iterate(x.reshape(-1, *x.shape[-2:]), steps).reshape(x.shape)


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """x [count, n, m]; the multiplications by a, b, c are part of the products."""
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        A = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(A, A, A, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz_of_gram(x: Tensor, steps: int) -> Tensor:
    a, b, c = NEWTON_SCHULZ
    A, product = torch.bmm(x, x.mT), None                          # [count, n, n]
    for step in range(steps):
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        product = P if product is None else torch.bmm(P, product)
        if step < steps - 1:
            A = torch.bmm(torch.bmm(P, A), P)
    return torch.bmm(product, x)


class Muon:
    """
    Momentum, Nesterov, orthogonalisation, decoupled weight decay. Matrices of equal shape (a tall one counts
    as its wide transpose) are orthogonalised in one batch; over several processes each batch is shared out
    by owner and gathered.
    """
    def __init__(self, params: dict[str, Tensor], weight_decay: float, rank: int = 0, world: int = 1):
        self.params, self.weight_decay, self.rank, self.world = params, weight_decay, rank, world
        self.momentum = {name: torch.zeros_like(p) for name, p in params.items()}
        self.groups: dict[tuple[int, int], list[str]] = {}
        for name, p in params.items():
            self.groups.setdefault((min(p.shape[-2:]), max(p.shape[-2:])), []).append(name)

    @torch.no_grad()
    def step(self, lr: float, finite: Tensor) -> None:
        for (n, m), names in self.groups.items():
            wide = []                                              # matrices [count, n, m] of this shape
            for name in names:
                p, momentum = self.params[name], self.momentum[name]
                momentum.copy_(torch.where(finite, momentum.lerp(p.grad, 1 - MOMENTUM), momentum))
                u = p.grad.lerp(momentum, MOMENTUM)
                wide.append((u.mT if p.shape[-2] > p.shape[-1] else u).reshape(-1, n, m))
            update = self._orthogonalize(torch.cat(wide)) * (0.2 * math.sqrt(m))
            for name, part in zip(names, update.split([len(w) for w in wide])):
                p = self.params[name]
                part = (part.mT if p.shape[-2] > p.shape[-1] else part).reshape(p.shape).to(p.dtype)
                p.copy_(torch.where(finite, p * (1 - lr * self.weight_decay) - lr * part, p))

    def _orthogonalize(self, stack: Tensor) -> Tensor:
        if self.world == 1:
            return orthogonalize(stack)
        share = -(-len(stack) // self.world)                       # matrices per owner, the last's padded
        mine = stack.new_zeros(share, *stack.shape[1:])
        part = stack[self.rank * share:(self.rank + 1) * share]
        mine[:len(part)] = part
        mine = orthogonalize(mine)
        everything = mine.new_empty(share * self.world, *stack.shape[1:])
        dist.all_gather(list(everything.chunk(self.world)), mine)  # every rank calls this, in the same order
        return everything[:len(stack)]


# ---- both -------------------------------------------------------------------------------------------------

def is_embedding(name: str) -> bool:
    """Whether it has a row for each entry of the vocabulary."""
    return name.endswith(("embed_tokens.weight", "lm_head.weight"))


def is_muon(name: str, p: Tensor) -> bool:
    """Whether Muon moves this parameter: the matrices of the layers, except routers and what lora.py adds."""
    others = ("mlp.gate.weight", "bias", "lora_A.weight", "lora_B.weight", ".rows")
    return p.ndim >= 2 and not is_embedding(name) and not name.endswith(others)


class Optimizer:
    """
    One step for all parameters of `model`. Weight decay on matrices only. With a non-finite gradient norm
    the step changes nothing; `skipped` (all) and `skipped_in_a_row` are counted on the device.
    """
    def __init__(self, model: nn.Module, cfg, rank: int = 0, world: int = 1):
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        muon = {n: p for n, p in named.items() if cfg.optimizer == "muon" and is_muon(n, p)}
        self.named, self.device = named, next(iter(named.values())).device
        self.muon = Muon(muon, cfg.weight_decay, rank, world)
        rest = [(n, p) for n, p in named.items() if n not in muon]
        kinds: dict[tuple[float, float], list[Tensor]] = {}        # (times lr, weight decay) -> parameters
        for name, p in rest:
            times = EMBEDDING if muon and is_embedding(name) else 1.0
            kinds.setdefault((times, cfg.weight_decay if p.ndim >= 2 else 0.0), []).append(p)
        groups = [dict(params=p, times=times, weight_decay=decay) for (times, decay), p in kinds.items()]
        self.adamw = torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.adam_eps,
                                       fused=True)
        self.skipped = torch.zeros((), device=self.device)
        self.skipped_in_a_row = torch.zeros((), device=self.device)

    def step(self, norm: Tensor, lr: float) -> None:
        """Move every parameter by its gradient, drop the gradients; nothing moves if `norm` isn't finite."""
        finite = norm.isfinite()
        self.adamw.found_inf = (~finite).float()              # read by the fused kernel: skip without a sync
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["times"]
        self.adamw.step()
        self.muon.step(lr, finite)
        self.skipped += self.adamw.found_inf
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * self.adamw.found_inf
        for p in self.named.values():
            p.grad = None

    def moments(self) -> dict[str, Tensor]:
        """The state to save: "<parameter name>.<moment>" -> tensor."""
        out = {f"{name}.momentum": t for name, t in self.muon.momentum.items()}
        for name, p in self.named.items():
            state = self.adamw.state.get(p, {})
            out.update({f"{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq") if key in state})
        return out

    def load_moments(self, moments: dict[str, Tensor], updates: int) -> list[str]:
        """
        Take saved moments; `updates` = steps that were really applied. Returns the names of the parameters
        that have none and start fresh.
        """
        fresh = []
        for name, p in self.named.items():
            kinds = ("momentum",) if name in self.muon.momentum else ("exp_avg", "exp_avg_sq")
            saved = [moments.get(f"{name}.{kind}") for kind in kinds]
            if any(t is None for t in saved):
                fresh.append(name)
            elif name in self.muon.momentum:
                self.muon.momentum[name].copy_(saved[0])
            else:
                state = {kind: t.to(p.device, p.dtype, copy=True) for kind, t in zip(kinds, saved)}
                self.adamw.state[p] = {"step": torch.tensor(float(updates), device=p.device), **state}
        return fresh if updates else []


class LossScale:
    """
    fp16 loses small gradients: there the loss (a sum over `labels` tokens) is multiplied by `value`, which
    halves when a gradient is not finite and doubles after 2,000 finite steps, all on the device. In other
    precisions `value` stays 1.
    """
    def __init__(self, enabled: bool, device: torch.device, labels: int):
        self.enabled = enabled
        self.value = torch.tensor(2.0**16 / labels if enabled else 1.0, device=device)
        self.finite_steps = torch.zeros((), device=device)

    def update(self, norm: Tensor) -> None:
        if self.enabled:
            finite = norm.isfinite()
            grow = finite & (self.finite_steps >= 1999)
            self.value = torch.where(finite, torch.where(grow, self.value * 2, self.value), self.value / 2)
            self.finite_steps = torch.where(finite & ~grow, self.finite_steps + 1, 0.0)
