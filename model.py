"""
Every forward pass. One decoder whose pieces are chosen by ModelConfig, with Hugging Face's names throughout:
the state dict of a Model is the state dict of Qwen3ForCausalLM or LlamaForCausalLM, and ModelConfig's fields
are their config's.

    model = Model(ModelConfig(vocab_size=4096))
    logits = model(ids)                              ids [B, T] int64 -> [B, T, V]
    loss_sum, valid = model(ids, labels=labels)      labels[b, t] = the token to predict at t; -100 = none

Nothing here knows about processes, devices or files. Shapes in comments: B batch, T tokens, D model, H
heads, G key/value heads, K head dimension, V vocabulary.
"""
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from config import UserError
from kernels.int8 import Int8Linear
from kernels.loss import linear_cross_entropy
from kernels.rms_norm import rms_norm
from kernels.rope import rotate
from kernels.swiglu import swiglu


@dataclass
class ModelConfig:
    model_type: Literal["qwen3", "llama"] = "qwen3"  # qwen3 normalises queries and keys, llama does not
    vocab_size: int | None = None          # rows of the embedding; None = the tokenizer's, up to x 64
    hidden_size: int = 384                 # D, width of the residual stream
    num_hidden_layers: int = 6             # depth
    num_attention_heads: int = 6           # H, query heads
    num_key_value_heads: int = 2           # G, key/value heads; must divide H
    head_dim: int = 64                     # K, width of one head
    intermediate_size: int = 1024          # width of the MLP
    max_position_embeddings: int = 1024    # longest context; from scratch = sequence_length
    rope_theta: float = 10000.0            # base of the rotary frequencies
    rope_scaling: dict | None = None       # {"rope_type": "linear" | "llama3" | "yarn", "factor": ...}
    rms_norm_eps: float = 1e-6             # added to the mean square before the root
    tie_word_embeddings: bool = True       # the output head is the input embedding
    attention_bias: bool = False           # biases on the four attention projections
    mlp_bias: bool = False                 # biases in the MLP (llama only)
    sliding_window: int | None = None      # tokens a position can look back, itself included; None = all
    layer_types: list[str] | None = None   # per layer "full_attention" or "sliding_attention"; None = alike
    initializer_range: float = 0.02        # standard deviation of fresh weights


# ---- positions --------------------------------------------------------------------------------------------

def rope_frequencies(cfg: ModelConfig) -> tuple[Tensor, float]:
    """
    Inverse frequencies [K/2] in fp32 and the factor on cos and sin. `rope_scaling` follows Hugging Face's
    definitions: "linear" divides by `factor`; "llama3" (Llama 3.1) divides only wavelengths longer than the
    old context and blends in between; "yarn" (arXiv 2309.00071) blends by dimension and scales cos and sin
    by 0.1 ln(factor) + 1.
    """
    K, base, scaling = cfg.head_dim, cfg.rope_theta, cfg.rope_scaling or {}
    inverse = 1.0 / base ** (torch.arange(0, K, 2, dtype=torch.int64).float() / K)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inverse, 1.0
    needed = ["factor", "low_freq_factor", "high_freq_factor"] if kind == "llama3" else ["factor"]
    missing = [key for key in needed if key not in scaling]
    if missing:
        raise UserError(f"rope_scaling of type {kind} needs {' and '.join(missing)} too, and has "
                        f"{sorted(scaling)}")
    factor = float(scaling["factor"])
    if kind == "linear":
        return inverse / factor, 1.0
    old = scaling.get("original_max_position_embeddings") or cfg.max_position_embeddings
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        wavelength = 2 * math.pi / inverse
        smooth = ((old / wavelength - low) / (high - low)).clamp(0, 1)    # 0: long waves, stretched
        return inverse / factor * (1 - smooth) + inverse * smooth, 1.0
    if kind == "yarn":
        def dimension(rotations: float) -> float:
            """The (fractional) pair of dimensions that turns `rotations` times over the old context."""
            return K * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(base))
        low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, K - 1)
        ramp = ((torch.arange(K // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
        inverse = inverse * (1 - ramp) + inverse / factor * ramp
        return inverse, float(scaling.get("attention_factor") or _yarn_factor(scaling, factor))
    raise UserError(f"rope_scaling has rope_type={kind!r}; this model knows linear, llama3 and yarn")


def _yarn_factor(scaling: dict, factor: float) -> float:
    def scale(by: float, mscale: float = 1.0) -> float:
        return 1.0 if by <= 1 else 0.1 * mscale * math.log(by) + 1.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(factor, scaling["mscale"]) / scale(factor, scaling["mscale_all_dim"])
    return scale(factor)


# ---- cache ------------------------------------------------------------------------------------------------

class Cache:
    """
    Keys and values of the tokens seen so far, allocated once: [B, G, capacity, K] per layer. Rows are
    aligned at their right end: row b's first `padding[b]` slots are empty and are never attended to.
    While `at` is set, an int64 tensor [1], a step of one token works on fixed shapes and addresses: it
    writes into slot at[0] and looks at the whole capacity through a mask.
    """
    def __init__(self, model: "Model", batch: int, capacity: int, padding: Tensor | None = None):
        cfg, weight = model.cfg, model.model.embed_tokens.weight
        self.at: Tensor | None = None
        shape = (batch, cfg.num_key_value_heads, capacity, cfg.head_dim)
        empty = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self.keys = [empty.clone() for _ in model.model.layers]
        self.values = [empty.clone() for _ in model.model.layers]
        self.capacity, self.length, self.padding = capacity, 0, padding

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, G, T, K] behind what is there; returns everything stored so far for that layer."""
        if self.at is not None:
            return (self.keys[layer].index_copy_(2, self.at, k),
                    self.values[layer].index_copy_(2, self.at, v))
        end = self.length + k.shape[2]
        assert end <= self.capacity, f"cache of {self.capacity} slots asked to hold {end}"
        self.keys[layer][:, :, self.length:end] = k
        self.values[layer][:, :, self.length:end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]


# ---- layers -----------------------------------------------------------------------------------------------

class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv 1910.07467)."""
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        # cast once here, or autocast would make a copy for each of the linear layers that follow
        return rms_norm(x, self.weight.to(x.dtype), self.eps).to(compute_dtype(x))


def compute_dtype(x: Tensor) -> torch.dtype:
    """What matrix products run in: autocast's dtype, without autocast x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Attention(nn.Module):
    """
    Causal self-attention with grouped key/value heads (arXiv 2305.13245); qwen3 normalises each query and
    key head.
    """
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        D, H, G, K, bias = (cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim,
                            cfg.attention_bias)
        self.layer, self.head_dim, self.grouped = layer, K, G != H
        kind = cfg.layer_types[layer] if cfg.layer_types else "sliding_attention"
        self.window = cfg.sliding_window
        self.sliding = self.window is not None and kind == "sliding_attention"
        self.q_proj = nn.Linear(D, H * K, bias=bias)
        self.k_proj = nn.Linear(D, G * K, bias=bias)
        self.v_proj = nn.Linear(D, G * K, bias=bias)
        self.o_proj = nn.Linear(H * K, D, bias=bias)
        self.qkv_proj, self.sizes = None, (H * K, G * K, G * K)          # in_int8() puts the three in one
        if cfg.model_type == "qwen3":
            self.q_norm, self.k_norm = RMSNorm(K, cfg.rms_norm_eps), RMSNorm(K, cfg.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], masks: dict, cache: Cache | None) -> Tensor:
        B, T, _ = x.shape
        if self.qkv_proj is None:
            parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            parts = self.qkv_proj(x).split(self.sizes, -1)
        q, k, v = (part.view(B, T, -1, self.head_dim) for part in parts)  # [B, T, H or G, K]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = rotate(q.transpose(1, 2), *rope), rotate(k.transpose(1, 2), *rope), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        if masks["lengths"] is None:
            y = attention(q, k, v, masks["sliding" if self.sliding else "full"], self.grouped)
        else:
            y = apart(q, k, v, masks["lengths"], self.window if self.sliding else None, self.grouped)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> Tensor:
    """q [B, H, T, K], k and v [B, G, keys, K] -> [B, H, T, K]. Without a mask: causal, or one query."""
    causal = mask is None and q.shape[2] == k.shape[2]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def apart(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None, grouped: bool) -> Tensor:
    """
    The same for documents of these lengths, which follow one another through the rows of the batch: each by
    itself. A mask makes a CPU multiply all pairs of positions, and throw away those between documents.
    """
    B, _, T, _ = q.shape
    parts = [x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (q, k, v)]    # [n, H or G, K] each
    found = []
    for part in zip(*parts):
        n, mask = len(part[0]), None
        if window is not None and n > window:
            ago = torch.arange(n)[:, None] - torch.arange(n)
            mask = additive((0 <= ago) & (ago < window), q.dtype)
        found.append(attention(*(x.transpose(0, 1)[None] for x in part), mask, grouped)[0].transpose(0, 1))
    return torch.cat(found).view(B, T, *found[0].shape[1:]).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=cfg.mlp_bias)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=cfg.mlp_bias)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=cfg.mlp_bias)
        self.gate_up_proj = None                                         # in_int8() puts the two in one

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(swiglu(gate, up))


class Layer(nn.Module):
    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.recompute = "none"
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg, layer)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg)

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor], masks: dict, cache: Cache | None) -> Tensor:
        return x + self.self_attn(self.input_layernorm(x), rope, masks, cache)

    def block(self, x: Tensor, rope: tuple[Tensor, Tensor], masks: dict, cache: Cache | None) -> Tensor:
        x = self.attend(x, rope, masks, cache)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], masks: dict, cache: Cache | None) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.block(x, rope, masks, cache)
        if self.recompute == "layer":
            return recomputed(self.block, x, rope, masks, cache, use_reentrant=False)
        x = recomputed(self.attend, x, rope, masks, cache, use_reentrant=False)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """
    The part that Hugging Face calls `model`: embedding, layers, final norm. No forward of its own: Model has
    it.
    """
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        # with a weight of its own: the constructor's random one costs seconds, on the meta device too
        weight = torch.empty(cfg.vocab_size, cfg.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=False)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


# ---- the model --------------------------------------------------------------------------------------------

class Model(nn.Module):
    """
    A causal language model. `tokenizer` is None until load_model or a training script puts one there.
    """
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        check(cfg)
        self.cfg, self.tokenizer = cfg, None
        self.model = Decoder(cfg)
        self.lm_head = None
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.set_positions()

    def set_positions(self) -> None:
        """
        Compute what the rotary embedding needs from cfg. No buffer: a cast of the model must not round it.
        """
        with torch.device("cpu"):
            self.rope_inverse, self.rope_factor = rope_frequencies(self.cfg)

    def recomputing(self, what: Literal["none", "attention", "layer"]) -> "Model":
        """
        Trade time for memory in training: drop what the attention, or the whole layer, keeps for its
        backward pass.
        """
        for layer in self.model.layers:
            layer.recompute = what
        return self

    @property
    def head(self) -> nn.Parameter:
        """The output matrix [V, D]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> "Model":
        """
        Fresh weights: N(0, initializer_range), the projections that write into the residual stream (o_proj,
        down_proj) smaller by sqrt(2 x layers) (GPT-2's rule), norms 1, biases 0. Each tensor has its own
        generator, seeded by `seed` and its name, so a tensor's values depend on no other tensor, device or
        number of processes.
        """
        for name, p in self.named_parameters():
            if p.ndim < 2:
                p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            std = self.cfg.initializer_range
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.cfg.num_hidden_layers)
            key = seed * 0x9E3779B1 + zlib.crc32(name.encode())
            generator = torch.Generator().manual_seed(key % 2**63)
            p.copy_(torch.randn(p.shape, generator=generator) * std)
        return self

    @torch.no_grad()
    def extend_vocabulary(self, vocab_size: int, new_ids: Iterable[int], used: int) -> "Model":
        """
        At least `vocab_size` rows in the embedding and the head, in place, and in those of `new_ids` and all
        that are added the mean of the first `used` rows, those of the tokens that the model knows: new tokens
        begin as likely as an average one. Before lora.adapt() and before an optimizer holds the parameters.
        """
        V, new_ids = max(vocab_size, self.cfg.vocab_size), list(new_ids)
        for table in (self.model.embed_tokens, self.lm_head):
            if table is not None:
                old = table.weight
                mean = old[:used].mean(0, dtype=torch.float32).to(old.dtype)
                if V > len(old):
                    rows = torch.cat((old, mean.expand(V - len(old), -1)))         # [V, D]
                    table.weight = nn.Parameter(rows, requires_grad=old.requires_grad)
                table.weight[new_ids] = mean
        self.model.embed_tokens.num_embeddings = V
        if self.lm_head is not None:
            self.lm_head.out_features = V
        self.cfg = replace(self.cfg, vocab_size=V)
        return self

    def masks(self, T: int, documents: Tensor | None, cache: Cache | None, dtype: torch.dtype) -> dict:
        """
        Additive masks [B or 1, 1, T, keys] in `dtype` (0 = seen, -inf = not) for the two kinds of layers,
        built once per forward. None where the plain causal mask, or no mask at all (one cached query), is
        enough: the fast path of SDPA. `lengths` instead of masks where documents are computed apart.
        """
        past, device = (cache.length if cache is not None else 0), self.head.device
        padded = cache is not None and cache.padding is not None
        fixed = cache is not None and cache.at is not None
        keys, window = cache.capacity if fixed else past + T, self.cfg.sliding_window
        sliding = window is not None and keys > window
        plain = documents is None and not padded and not fixed and (past == 0 or T == 1)
        lengths = None if documents is None or cache is not None else self.lengths(documents)
        if lengths or (plain and not sliding):
            return {"full": None, "sliding": None, "lengths": lengths}
        query = cache.at[:, None] if fixed else past + torch.arange(T, device=device)[:, None]  # [T, 1] slots
        key = torch.arange(keys, device=device)[None, :]                 # [1, keys] slots
        seen = (key <= query)[None, None]                                # [1, 1, T, keys]
        if padded:
            # an empty slot still sees itself: a softmax over nothing would be NaN
            seen = seen & ((key >= cache.padding[:, None])[:, None, None, :] | (key == query))
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
        full = None if plain else additive(seen, dtype)
        near = additive(seen & (query - key < window), dtype) if sliding else full
        return {"full": full, "sliding": near, "lengths": None}

    def lengths(self, documents: Tensor) -> list[int] | None:
        """
        Of the documents [B, T], one after another; None on a GPU, for which they would be many small pieces
        of work, and for layers that are compiled, which would be so anew for other lengths.
        """
        if documents.device.type != "cpu" or self.model.layers[0]._compiled_call_impl is not None:
            return None
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        per_row = [row.unique().numel() for row in documents]
        if begins.sum(1).tolist() != per_row:                            # a document in several pieces
            return None
        edges = begins.flatten().nonzero()[:, 0].tolist() + [documents.numel()]
        return [end - begin for begin, end in zip(edges, edges[1:])]

    def hidden(self, ids: Tensor, documents: Tensor | None = None, positions: Tensor | None = None,
               cache: Cache | None = None) -> Tensor:
        """
        ids [B, T] -> the final normed states [B, T, D]. `positions` [B, T] default to 0, 1, 2, ... (after
        the cache).
        """
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T, device=ids.device)[None]
            if cache is not None:
                positions = positions + (cache.length if cache.at is None else cache.at)
                if cache.padding is not None:
                    positions = (positions - cache.padding[:, None]).clamp(min=0)
        if self.rope_inverse.device != ids.device:
            self.rope_inverse = self.rope_inverse.to(ids.device)
        x = self.model.embed_tokens(ids)
        angles = positions[:, None, :, None].float() * self.rope_inverse          # [B or 1, 1, T, K/2]
        cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
        rope = [torch.cat(halves, -1).to(compute_dtype(x)) for halves in ((cos, cos), (-sin, sin))]
        masks = self.masks(T, documents, cache, compute_dtype(x))
        for layer in self.model.layers:
            # past a cache uncompiled: torch.compile would specialise on its lengths
            x = (layer if cache is None else layer.forward)(x, rope, masks, cache)
        if cache is not None:
            cache.length += T
        return self.model.norm(x)

    def forward(self, ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None,
                positions: Tensor | None = None,
                cache: Cache | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """
        ids [B, T] int64; documents [B, T]: a position sees only tokens with its own document number. Without
        labels: logits [B, T, V]. With labels [B, T] (the target at each position, already shifted by
        data.py, -100 = none): (sum of the cross-entropies in nats, number of labels that counted).
        """
        x = self.hidden(ids, documents, positions, cache)
        if labels is None:
            return self.logits(x)
        return linear_cross_entropy(x.flatten(0, 1), self.head, labels.flatten()), (labels != -100).sum()

    def logits(self, x: Tensor) -> Tensor:
        """x [..., D] from hidden() -> [..., V]."""
        if isinstance(self.lm_head, Int8Linear):
            return self.lm_head(x)
        return F.linear(x, self.head)

    def in_int8(self) -> "Model":
        """
        Its matrices in 8 bits, in place: to generate on a CPU, not to train or to save. The embedding stays
        as it is.
        """
        self.lm_head = Int8Linear(self.head)
        for layer in self.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            attention.qkv_proj = Int8Linear.joined(attention.q_proj, attention.k_proj, attention.v_proj)
            attention.o_proj = Int8Linear.joined(attention.o_proj)
            mlp.gate_up_proj = Int8Linear.joined(mlp.gate_proj, mlp.up_proj)
            mlp.down_proj = Int8Linear.joined(mlp.down_proj)
            attention.q_proj = attention.k_proj = attention.v_proj = mlp.gate_proj = mlp.up_proj = None
        return self


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a position is seen, else -inf: what SDPA would make of a boolean mask, in each layer anew."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def check(cfg: ModelConfig) -> None:
    """UserError for a shape that cannot be built, with the numbers."""
    H, G, K = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
    if cfg.vocab_size is None:
        raise UserError("vocab_size is not set: give the number of rows of the embedding")
    if H % G:
        divisors = [d for d in range(1, H + 1) if H % d == 0]
        raise UserError(f"num_attention_heads={H} is not divisible by num_key_value_heads={G}: use one of "
                        f"{divisors}")
    if K % 2:
        raise UserError(f"head_dim={K} is odd; rotary positions turn pairs of dimensions: use an even "
                        f"number")
    if cfg.model_type == "llama" and cfg.sliding_window is not None:
        raise UserError("model_type=llama has no sliding window in Hugging Face's definition: use "
                        "model_type=qwen3")
    if cfg.layer_types is not None:
        known = {"full_attention", "sliding_attention"}
        if len(cfg.layer_types) != cfg.num_hidden_layers or set(cfg.layer_types) - known:
            raise UserError(f"layer_types needs one of {sorted(known)} for each of num_hidden_layers="
                            f"{cfg.num_hidden_layers} layers, got {len(cfg.layer_types)}: {cfg.layer_types}")
        if "sliding_attention" in cfg.layer_types and cfg.sliding_window is None:
            raise UserError("layer_types asks for sliding_attention but sliding_window is not set: give its "
                            "tokens")


# ---- size -------------------------------------------------------------------------------------------------

def count_parameters(cfg: ModelConfig) -> int:
    """Exact number of parameters, without building anything (a tied head counts once)."""
    with torch.device("meta"):
        return sum(p.numel() for p in Model(cfg).parameters())


def flops_per_token(cfg, parameters: int) -> float:
    """
    Forward and backward, attention counted in full: 6 N + 12 L H K T (PaLM, arXiv 2204.02311, appendix B).
    """
    attention = cfg.num_hidden_layers * cfg.num_attention_heads * cfg.head_dim * cfg.sequence_length
    return 6 * parameters + 12 * attention


def _layer_parameters(D: int, H: int, G: int, K: int, I: int) -> int:
    return 2 * D * H * K + 2 * D * G * K + 3 * D * I + 2 * D + 2 * K


def _key_value_heads(H: int) -> int:
    """
    About a third of the query heads and a divisor of them, at least 2 from 4 heads up; all where no divisor
    fits.
    """
    return max((d for d in range(2, max(2, H // 3) + 1) if H % d == 0 and H >= 4), default=H)


def shape_for(params: int, vocab_size: int, given: dict | None = None) -> tuple[dict, list[str]]:
    """
    The shape of a model of about `params` parameters: a dict of the shape fields and a list of warnings.

    Fields in `given` stay as they are; of all others the combination is taken that is nearest to published
    small models (width / depth near 64 up to 1,024 wide and rising after, MLP near 8/3 of the width,
    head_dim 64) among those within 1.5 % of the budget, or the nearest one. UserError where the embedding
    alone exceeds the budget.
    """
    given, warnings = dict(given or {}), []
    tied = given.get("tie_word_embeddings", True)
    K = given.get("head_dim", 64)
    best = None
    widths = [*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 16384 + 1, 256)]
    for D in [given["hidden_size"]] if "hidden_size" in given else widths:
        embedding = vocab_size * D * (1 if tied else 2)
        if embedding >= params and "hidden_size" not in given:
            break
        H = given.get("num_attention_heads", max(1, D // K))
        G = given.get("num_key_value_heads", _key_value_heads(H))
        ideal_depth = max(4.0, D / 64 if D <= 1024 else 16 * (D / 1024) ** 0.5)
        ideal_mlp = 8 / 3 * D
        depths = range(4, int(2 * ideal_depth) + 1)
        grain = 16 if D <= 256 else 32 if D < 512 else 64
        for L in [given["num_hidden_layers"]] if "num_hidden_layers" in given else depths:
            free = (params - embedding - D) / L - _layer_parameters(D, H, G, K, 0)
            I = given.get("intermediate_size", max(grain, round(free / (3 * D) / grain) * grain))
            total = embedding + D + L * _layer_parameters(D, H, G, K, I)
            miss = abs(total - params) / params
            ungrouped = 0.5 if G == H > 3 else 0
            taste = abs(math.log(L / ideal_depth)) + 2 * abs(math.log(I / ideal_mlp)) + ungrouped
            rank = (miss > 0.015, miss if miss > 0.015 else taste)
            if best is None or rank < best[0]:
                best = rank, total, dict(hidden_size=D, num_hidden_layers=L, num_attention_heads=H,
                                         num_key_value_heads=G, head_dim=K, intermediate_size=I)
    matrices = 1 if tied else 2                                # of the vocabulary
    if best is None or matrices * vocab_size * best[2]["hidden_size"] >= params:
        smallest = given.get("hidden_size", 64)
        layers = smallest + 4 * _layer_parameters(smallest, 1, 1, K, 3 * smallest)
        fits = max(params - layers, 0) // (matrices * smallest)
        raise UserError(f"params={params:,} is smaller than the embedding of vocab_size={vocab_size:,} alone "
                        f"({matrices * vocab_size * smallest:,} at {smallest} wide): use more params, or a "
                        f"tokenizer of at most {fits:,} entries")
    _, total, shape = best
    share = matrices * vocab_size * shape["hidden_size"] / total
    if share > 0.5:
        warnings.append(f"the embedding takes {share:.0%} of the {total:,} parameters "
                        f"(vocab_size={vocab_size:,}): a smaller tokenizer would leave more for the layers")
    if abs(total - params) > 0.02 * params:
        warnings.append(f"params={params:,} was asked for; the nearest shape has {total:,}")
    return shape, warnings


# ---- generation -------------------------------------------------------------------------------------------

def pick(logits: Tensor, seen: list[Tensor], generator: torch.Generator | None = None,
         temperature: float = 0.8, top_k: int | None = None, top_p: float | None = None,
         min_p: float | None = None, repetition_penalty: float = 1.0) -> Tensor:
    """
    Next ids [B] from logits [B, V], in this order: the penalty divides positive and multiplies negative
    logits of ids in `seen` (arXiv 1909.05858), temperature (0 = the largest logit, nothing below applies),
    the `top_k` largest (0 = all), those with at least `min_p` times the largest probability, the smallest
    set of probability `top_p` (arXiv 1904.09751).
    """
    logits = logits.float()
    if repetition_penalty != 1.0:
        for row, ids in zip(logits, seen):
            values = row[ids]
            row[ids] = torch.where(values > 0, values / repetition_penalty, values * repetition_penalty)
    if temperature == 0:
        return logits.argmax(-1)
    choices = None
    if top_k and top_k < logits.shape[-1]:
        logits, choices = logits.topk(top_k)                             # [B, k]
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature      # no overflow at tiny temperatures
    probabilities = logits.softmax(-1)
    if min_p is not None:
        least = min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.where(probabilities >= least, 0)
    if top_p is not None:
        enough = top_p * probabilities.sum(-1, keepdim=True)
        ranked, order = probabilities.topk(min(1024, probabilities.shape[-1]))
        if (ranked.sum(-1, keepdim=True) < enough).any():                # seldom, and 10 times as slow
            ranked, order = probabilities.sort(descending=True)
        probabilities = ranked.where(ranked.cumsum(-1) - ranked < enough, 0)
        choices = order if choices is None else choices.gather(1, order)
    index = draw(probabilities, generator)
    return (index if choices is None else choices.gather(1, index))[:, 0]


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """
    [B, n], which need not add up to 1 -> [B, 1] indices. multinomial() makes n random numbers: on a CPU that
    takes 15 times as long as to add up the row and look up one. UserError where they are NaN.
    """
    if probabilities.device.type != "cpu":
        return torch.multinomial(probabilities, 1, generator=generator)
    edges = probabilities.cumsum(-1, dtype=torch.float64)
    if edges[:, -1].isnan().any():
        raise UserError("the model's logits are NaN: its training diverged, or its weights overflow in this "
                        "dtype (try fp32)")
    point = torch.rand(len(edges), 1, dtype=torch.float64, generator=generator) * edges[:, -1:]
    return torch.searchsorted(edges, point, right=True)                  # right: never where it is 0


def context(ids: list[int], limit: int) -> list[int]:
    """
    The tokens that the model sees when it continues `ids`: all of them up to `limit`; beyond it the oldest
    half of the window is dropped at once, each time the window is full. A function of the text alone, so a
    cache cannot change it.
    """
    if len(ids) <= limit:
        return ids
    half = max(limit // 2, 1)
    dropped = -(-(len(ids) - limit) // half) * half
    return ids[dropped:]


class Replay:
    """
    The step of one token behind a cache, always on the same memory: a CUDA graph, which launches its hundreds
    of small kernels at once. (On other devices the same step without a graph, for tests.)
    """
    def __init__(self, model: Model, cache: Cache):
        self.model, self.cache, self.graph = model, cache, None
        device, batch = model.head.device, len(cache.keys[0])
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.at = torch.full((1,), cache.length, device=device)
        if device.type == "cuda":
            side = torch.cuda.Stream()                         # what is made once must not enter the graph
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.compute()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.compute()

    def compute(self) -> None:
        length, self.cache.at = self.cache.length, self.at
        self.logits = self.model.logits(self.model.hidden(self.ids, cache=self.cache)[:, -1])
        self.cache.length, self.cache.at = length, None

    def step(self, ids: Tensor) -> Tensor:
        """ids [B, 1] -> logits [B, V], which the next step overwrites."""
        self.ids.copy_(ids)
        self.at.fill_(self.cache.length)
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()
        self.cache.length += 1
        return self.logits


@torch.inference_mode()
def generate(model: Model, prompts: list[list[int]], max_new_tokens: int, vocab_size: int | None = None,
             generator: torch.Generator | None = None, cached: bool = True, replayed: bool | None = None,
             **how) -> Iterator[list[int]]:
    """
    Yields a list of B new ids, `max_new_tokens` times; stop by leaving the loop. Ids from `vocab_size` on
    (padding of the embedding) are never drawn. `replayed`: steps of one token by Replay; None = on CUDA.
    `cached=False` runs the whole context each time: slow, the reference for the cache.
    """
    device, limit = model.head.device, model.cfg.max_position_embeddings
    replayed = device.type == "cuda" if replayed is None else replayed
    texts, cache, replay = [list(p) for p in prompts], None, None
    for _ in range(max_new_tokens):
        windows = [context(text, limit) for text in texts]
        longest = max(map(len, windows))
        if not cached or cache is None or any(len(w) != n + 1 for w, n in zip(windows, held)):
            empty = [longest - len(w) for w in windows]
            padding = torch.tensor(empty, device=device) if any(empty) else None
            room = min(limit, longest + max_new_tokens)
            cache, replay = Cache(model, len(texts), room, padding), None
            fresh = torch.tensor([[0] * e + w for e, w in zip(empty, windows)], device=device)
            logits = model.logits(model.hidden(fresh, cache=cache)[:, -1])
        else:
            fresh = torch.tensor([text[-1:] for text in texts], device=device)
            replay = replay or (Replay(model, cache) if replayed else None)
            logits = replay.step(fresh) if replay else model.logits(model.hidden(fresh, cache=cache)[:, -1])
        held, logits = [len(w) for w in windows], logits[:, :vocab_size]                   # [B, V]
        penalised = how.get("repetition_penalty", 1.0) != 1.0
        seen = [torch.tensor(sorted(set(w)), device=device) for w in windows] if penalised else []
        new = pick(logits, seen, generator, **how).tolist()
        for text, id in zip(texts, new):
            text.append(id)
        yield new
