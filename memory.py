"""
How many bytes a training step takes on one device, by kind, and from that the batch: how many sequences per
forward, how many forwards per optimizer step.
"""
import math
import os
from dataclasses import dataclass

import torch

import optim
from config import UserError
from kernels.loss import CHUNK
from model import Model, ModelConfig

HEADROOM = 0.85        # share of the memory that may be planned: the rest is fragmentation, NCCL, the driver
SHORTEST = 50          # steps of a short run, unless its batch is given: fewer follow no schedule
CPU_TOKENS = 2048      # per forward on a CPU: as fast as more, and takes less memory


# ---- bytes ------------------------------------------------------------------------------------------------

def kept_by_a_layer(cfg: ModelConfig, width: int, recompute: str = "none") -> int:
    """
    Bytes per token that one layer keeps for its backward pass; `width` = bytes of the dtype of the products.
    Norms work in fp32 and keep their input; linear layers keep theirs; attention its queries, keys, values,
    output and log-sum-exps; SwiGLU gate, factor and product.
    """
    D, I, H, G = cfg.hidden_size, cfg.intermediate_size, cfg.num_attention_heads, cfg.num_key_value_heads
    HK, GK = H * cfg.head_dim, G * cfg.head_dim
    norm = D * (4 + width) + 4
    head_norms = (HK + GK) * 4 + (H + G) * 4 if cfg.model_type == "qwen3" else 0
    attention = norm + head_norms + 2 * (HK + GK) * width + H * 4
    mlp = norm + 3 * I * width
    return {"none": attention + mlp, "attention": D * 4 + mlp, "layer": D * 4}[recompute]


def kept_after_the_layers(cfg: ModelConfig, width: int) -> int:
    """Bytes per token: the final norm, and the gradient that the loss makes in its forward pass."""
    return cfg.hidden_size * (4 + width) + 4


def estimate(cfg: ModelConfig, micro_batch_size: int, sequence_length: int, dtype: torch.dtype,
             optimizer: str, recompute: str = "none", document_mask: bool = False,
             lora_rank: int | None = None) -> dict[str, int]:
    """
    Bytes on one device at the peak of a step, by kind. Weights, gradients and moments are fp32; `copies` are
    autocast's weights in `dtype`; `logits` a chunk of them with its softmax, and the gradient of the head
    that the loss makes. With `lora_rank` adapters of all matrices of the layers are trained, by AdamW, and
    these matrices are held in `dtype` alone.
    """
    with torch.device("meta"):
        named = dict(Model(cfg).named_parameters())
    count = sum(p.numel() for p in named.values())
    muon = sum(p.numel() for n, p in named.items() if optimizer == "muon" and optim.is_muon(n, p))
    products = sum(p.numel() for n, p in named.items() if p.ndim == 2)
    tokens, width, weights = micro_batch_size * sequence_length, dtype.itemsize, count * 4
    if lora_rank:
        matrices = [p for n, p in named.items() if p.ndim == 2 and not optim.is_embedding(n)]
        frozen = sum(p.numel() for p in matrices)
        muon, trained = 0, lora_rank * sum(sum(p.shape) for p in matrices)
        weights = frozen * width + (count - frozen + trained) * 4
        count, products = trained, products - frozen
    # one for all layers of a kind; sliding windows need one for a row, packed documents one for each
    masked = int(document_mask) + int(cfg.sliding_window is not None)
    kept, whole = kept_by_a_layer(cfg, width, recompute), kept_by_a_layer(cfg, width)
    return {
        "parameters": weights,
        "gradients": count * 4,
        "optimizer": (count - muon) * 8 + muon * 4,
        "activations": tokens * (cfg.num_hidden_layers * kept + kept_after_the_layers(cfg, width)
                                 + (whole - kept)),                # the layer that is being recomputed
        "masks": masked * micro_batch_size * sequence_length ** 2 * width,
        "copies": products * width if dtype != torch.float32 else 0,
        "logits": 2 * min(tokens, CHUNK) * cfg.vocab_size * 4
        + (0 if lora_rank else cfg.vocab_size * cfg.hidden_size * 4),
    }


def device_memory(device: torch.device) -> int:
    """Bytes of memory of a device in all (not what is free: that differs from launch to launch)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):              # Windows has no sysconf
        return 8 * 2**30


# ---- the batch --------------------------------------------------------------------------------------------

@dataclass
class Batch:
    """micro_batch_size x accumulation x replicas = global_batch_size sequences per optimizer step."""
    micro_batch_size: int
    accumulation: int
    replicas: int
    source: str = ""                # where an automatic size came from, to print

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation * self.replicas


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def law_of_deepseek(parameters: int, tokens: int, sequence_length: int) -> int:
    """Sequences per step, a power of two: arXiv 2401.02954's fit of 0.292 C^0.3271 tokens with C = 6 N D."""
    wanted = 0.292 * (6 * parameters * tokens) ** 0.3271 / sequence_length
    power = 1
    while power * 2 ** 0.5 < wanted:
        power *= 2
    return power


def largest_micro(cfg, dtype: torch.dtype, device: str, memory: int, limit: int, **masks_or_lora) -> int:
    """Most sequences per forward, at most `limit`, that fit `memory` bytes."""
    def need(micro: int) -> int:
        return sum(estimate(cfg, micro, cfg.sequence_length, dtype, cfg.optimizer, cfg.recompute,
                            **masks_or_lora).values())

    def fits(micro: int) -> bool:
        slow = device == "cpu" and micro > 1 and micro * cfg.sequence_length > CPU_TOKENS
        return not slow and need(micro) <= HEADROOM * memory

    if not fits(1):
        raise UserError(f"one sequence of {cfg.sequence_length} tokens needs about {need(1) / 2**30:.1f} GB "
                        f"on a device of {memory / 2**30:.1f} GB: lower sequence_length or the model size, "
                        f"or set recompute=layer")
    low, high = 1, limit
    while low < high:                                          # memory grows with micro: bisect
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def plan(cfg, replicas: int, dtype: torch.dtype, device: str, memory: int, parameters: int,
         stored: dict | None = None, run_length: int | None = None, **masks_or_lora) -> Batch:
    """
    The batch of a run. `memory` is the smallest device's of all ranks, so that every rank plans the same.
    `stored` is the batch of the run that is resumed; its global size already stands in cfg, unless the user
    forced another. `run_length`: the sequences of the whole run, where they are few; a batch that nobody
    gave leaves SHORTEST steps or more. `masks_or_lora`: estimate()'s document_mask and lora_rank. UserError
    where sizes do not divide, with those that do.
    """
    micro, total, wanted, source = cfg.micro_batch_size, cfg.global_batch_size, cfg.gradient_accumulation, ""
    kept = stored is not None and total == stored["global_batch_size"]
    if total is None and micro != "auto":
        return Batch(micro, wanted or 1, replicas)
    if total is None:
        law = law_of_deepseek(parameters, cfg.tokens or 20 * parameters, cfg.sequence_length)
        why = "from 0.292 C^0.3271 (arXiv 2401.02954)"
        if run_length is not None and law > run_length / SHORTEST:
            law = 2 ** max(0, math.floor(math.log2(run_length / SHORTEST)))
            why = f"so that the run has {SHORTEST} steps"
        total = max(1, round(law / replicas)) * replicas
        source = f"global batch: {total} sequences = {total * cfg.sequence_length:,} tokens, {why}"
    if total % replicas:
        lower = total // replicas * replicas
        near = f"{lower} or {lower + replicas}" if lower else f"{replicas}"
        hint = f"start as many of them as divide it: {divisors(total)}" if kept else f"use {near}"
        raise UserError(f"global_batch_size={total} is not divisible by {replicas} replicas: {hint}")
    share = total // replicas                                  # sequences per replica and step
    if micro == "auto" and wanted:
        if share % wanted:
            raise UserError(f"global_batch_size={total} over {replicas} replicas is {share} sequences each, "
                            f"not divisible by gradient_accumulation={wanted}: use one of {divisors(share)}")
        micro = share // wanted
    elif micro == "auto":
        micro = stored["micro_batch_size"] if stored and stored["replicas"] == replicas else 0
        if not micro or share % micro:
            most = largest_micro(cfg, dtype, device, memory, share, **masks_or_lora)
            micro = max(d for d in divisors(share) if d <= most)
    if share % micro:
        step = micro * replicas
        lower = total // step * step
        near = " or ".join(str(n) for n in (lower, lower + step) if n)
        hint = f"a micro_batch_size of {divisors(share)}" if kept else \
            f"a global_batch_size of {near}, or a micro_batch_size of {divisors(share)}"
        raise UserError(f"global_batch_size={total} is not divisible by micro_batch_size={micro} x "
                        f"{replicas} replicas: use {hint}")
    accumulation = share // micro
    if wanted not in (None, accumulation):
        if not kept:
            raise UserError(f"global_batch_size={total} = micro_batch_size={micro} x {replicas} replicas x "
                            f"{accumulation}, but gradient_accumulation={wanted}: drop one of the three")
        source = f"gradient_accumulation is {accumulation} now: the global batch stays {total} sequences"
    return Batch(micro, accumulation, replicas, source)
