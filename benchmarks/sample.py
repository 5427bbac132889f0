"""
Tokens that a 30M model writes, one text and eight at once: our generate beside transformers' and beside
nanoGPT's (--nanogpt=<a checkout>, or a stand-in), which has no cache; fp32 and int8 on a CPU, bf16 on a GPU.
Fresh weights: what they write is noise, and takes as long as sense.
"""
import os
import sys

from benchmarks.race import Contestant, run_race
from benchmarks.train import check_device, check_nanogpt, gpt2, note_memory
from config import HERE

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 6, 384, 6, 50304, 1024    # 30M parameters
PROMPT = list(range(8))
BATCHES = 1, 8
HOW = dict(temperature=0.8, top_k=200)


def races(cfg, folder: str) -> list[dict]:
    import checkpoint
    from model import Model, ModelConfig, shape_for
    check_nanogpt(cfg), check_device(cfg)
    given = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    shape, _ = shape_for(30_000_000, VOCABULARY, given)
    model = Model(ModelConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **shape))
    directory = os.path.join(folder, "model")
    checkpoint.save_model_dir(model.init_weights(0), None, directory)
    cached = [Contestant("model.generate", ours), Contestant("model.generate in int8", ours_int8),
              Contestant("transformers' generate", transformers_generate, ("transformers",))]
    dtype = "fp32" if cfg.device == "cpu" else "bf16"
    if cfg.device == "cuda":
        del cached[1]
    uncached = Contestant("nanoGPT's generate", nanogpt_generate) if cfg.nanogpt else \
        Contestant("nanoGPT's way, a stand-in: no cache", uncached_generate)
    found = []
    for batch in BATCHES:
        rivals = [*cached, uncached] if batch == 1 else cached         # for eight it takes minutes
        work = dict(directory=directory, batch=batch, tokens=cfg.tokens, device=cfg.device, dtype=dtype,
                    nanogpt=os.path.abspath(cfg.nanogpt or ""))
        found.append(run_race(f"{cfg.tokens} tokens, {batch} at once, 30M parameters, GPT-2's vocabulary, "
                              f"{cfg.device}, {dtype}", rivals, cfg, folder, batch * cfg.tokens, "tokens/s",
                              work=work))
    return found


def race(clock, work: dict, generate) -> int:
    """Times `generate(n)`, which returns the ids [batch, prompt and n new ones]."""
    generate(5)                                                        # the first calls set up threads
    with clock:
        ids = generate(work["tokens"])
        new = sum(map(len, ids.tolist())) - len(PROMPT) * work["batch"]      # on a GPU it waits for them
    note_memory(clock, work["device"])
    return new


def ours(clock, out: str, work: dict) -> int:
    import torch
    from model import generate
    from sample import load_model
    model = load_model(work["directory"], work["device"], work["dtype"])
    prompts = [PROMPT] * work["batch"]

    def run(n: int) -> torch.Tensor:
        return torch.tensor([*zip(*prompts), *generate(model, prompts, n, **HOW)]).T
    return race(clock, work, run)


def ours_int8(clock, out: str, work: dict) -> int:
    return ours(clock, out, dict(work, dtype="int8"))


def transformers_generate(clock, out: str, work: dict) -> int:
    sys.path[:] = [path for path in sys.path if path != HERE]          # our kernels/ is no package of theirs
    import torch
    import transformers
    dtype = torch.float32 if work["dtype"] == "fp32" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(work["directory"], dtype=dtype)
    model = model.to(work["device"]).eval()
    ids = torch.tensor([PROMPT] * work["batch"], device=work["device"])

    def generate(n: int) -> torch.Tensor:
        return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=n,
                              min_new_tokens=n, eos_token_id=None, pad_token_id=0, **HOW)
    return race(clock, work, generate)


def nanogpt_generate(clock, out: str, work: dict) -> int:
    sys.path.insert(0, work["nanogpt"])                                # its model.py, not ours
    import torch
    from model import GPT, GPTConfig
    shape = dict(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCABULARY)
    model = GPT(GPTConfig(block_size=CONTEXT, **shape)).to(work["device"]).eval()
    ids = torch.tensor([PROMPT] * work["batch"], device=work["device"])

    def generate(n: int) -> torch.Tensor:
        with torch.autocast(work["device"], torch.bfloat16, enabled=work["dtype"] == "bf16"):
            return model.generate(ids, n, **HOW)
    return race(clock, work, generate)


def uncached_generate(clock, out: str, work: dict) -> int:
    """The whole context through the model for every token, as nanoGPT's generate does."""
    import torch
    model = gpt2(LAYERS, WIDTH, VOCABULARY, CONTEXT, HEADS).to(work["device"])
    if work["dtype"] == "bf16":
        model = model.bfloat16()

    @torch.no_grad()
    def generate(n: int) -> torch.Tensor:
        ids = torch.tensor([PROMPT] * work["batch"], device=work["device"])
        for _ in range(n):
            logits = model(ids[:, -CONTEXT:]) / HOW["temperature"]
            least = logits.topk(HOW["top_k"]).values[:, -1:]
            probabilities = logits.masked_fill(logits < least, -torch.inf).softmax(-1)
            ids = torch.cat((ids, torch.multinomial(probabilities, 1)), 1)
        return ids
    return race(clock, work, generate)
