"""memory.py: the bytes that it names are those that autograd keeps; the batch rules."""
from types import SimpleNamespace

import pytest
import torch

import memory
from config import UserError
from model import Model, ModelConfig

SMALL = dict(vocab_size=512, hidden_size=192, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, head_dim=32, intermediate_size=512)
B, T = 4, 128


def kept_by_autograd(cfg: ModelConfig, dtype: torch.dtype, recompute: str) -> tuple[int, int]:
    """Bytes of all storages that a forward pass saves: (activations, copies of weights in low precision)."""
    model = Model(cfg).init_weights(0).recomputing(recompute)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(reversed(p.shape)) for p in model.parameters() if p.ndim == 2}
    storages, alive = {}, []

    def pack(t):
        alive.append(t)
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            copy = dtype != torch.float32 and t.dtype == dtype and tuple(t.shape) in shapes \
                and t.grad_fn is not None and t.grad_fn.name() == "TBackward0"
            storages[storage.data_ptr()] = storage.nbytes(), copy
        return t

    ids = torch.randint(0, cfg.vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss, _ = model(ids[:, :-1], labels=ids[:, 1:])
    assert loss.requires_grad
    return tuple(sum(size for size, copy in storages.values() if copy == wanted) for wanted in (False, True))


@pytest.mark.parametrize("recompute", ["none", "attention", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_activations_are_what_autograd_keeps(family, dtype, recompute):
    cfg = ModelConfig(model_type=family, **SMALL)
    found, copies = kept_by_autograd(cfg, dtype, recompute)
    layers = cfg.num_hidden_layers * memory.kept_by_a_layer(cfg, dtype.itemsize, recompute)
    head = cfg.vocab_size * cfg.hidden_size * 4
    ours = B * T * (layers + memory.kept_after_the_layers(cfg, dtype.itemsize)) + head
    assert ours == pytest.approx(found, rel=0.01)
    if recompute == "none":
        named = memory.estimate(cfg, B, T, dtype, "muon")
        assert named["copies"] - cfg.vocab_size * cfg.hidden_size * 2 * (dtype != torch.float32) == copies


def test_a_mask_for_packed_documents_is_kept_once_for_all_layers(monkeypatch):
    monkeypatch.setattr(Model, "lengths", lambda self, documents: None)        # as on a GPU
    kept = []
    for documents in (None, torch.zeros(B, T, dtype=torch.long)):
        model, storages = Model(ModelConfig(**SMALL)).init_weights(0), {}

        def pack(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes(), t
            return t
        ids = torch.zeros(B, T, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(ids, labels=ids, documents=documents)
        kept.append(sum(size for size, _ in storages.values()))
    plain, packed = (memory.estimate(ModelConfig(**SMALL), B, T, torch.float32, "muon", document_mask=on)
                     for on in (False, True))
    assert kept[1] - kept[0] == packed["masks"] == B * T * T * 4 and plain["masks"] == 0


def test_weights_gradients_and_moments_are_what_the_optimizer_holds():
    import optim
    from test_optim import set_gradients, settings
    for name in ("muon", "adamw"):
        cfg = ModelConfig(**SMALL)
        model = Model(cfg).init_weights(0)
        optimizer = optim.Optimizer(model, settings(optimizer=name))
        set_gradients(model, 0)
        gradients = sum(p.grad.nbytes for p in model.parameters())
        optimizer.step(torch.tensor(1.0), 1e-3)
        named = memory.estimate(cfg, B, T, torch.float32, name)
        assert named["parameters"] == sum(p.nbytes for p in model.parameters()) \
            == named["gradients"] == gradients
        assert named["optimizer"] == sum(t.nbytes for t in optimizer.moments().values())


# ---- the batch --------------------------------------------------------------------------------------------

def plan(replicas=1, memory_bytes=2**62, device="cuda", stored=None, **changes):
    values = dict(ModelConfig(**SMALL).__dict__, sequence_length=512, micro_batch_size="auto",
                  global_batch_size=None, gradient_accumulation=None, optimizer="muon", recompute="none",
                  document_mask=False, tokens=10_000_000)
    cfg = type("Config", (ModelConfig,), {})(**SMALL)
    for key, value in {**values, **changes}.items():
        setattr(cfg, key, value)
    batch = memory.plan(cfg, replicas, torch.float32, device, memory_bytes, 20_000_000, stored)
    assert batch.global_batch_size == batch.micro_batch_size * batch.accumulation * replicas
    return batch.micro_batch_size, batch.accumulation, batch.global_batch_size


def test_global_is_micro_times_accumulation_times_replicas():
    assert plan(4, micro_batch_size=8, gradient_accumulation=2) == (8, 2, 64)
    assert plan(3, micro_batch_size=8) == (8, 1, 24)
    assert plan(6, micro_batch_size=2, global_batch_size=24) == (2, 2, 24)
    assert plan(3, global_batch_size=24) == (8, 1, 24)


@pytest.mark.parametrize("replicas,changes,says", [
    (3, dict(global_batch_size=64), "not divisible by 3 replicas: use 63 or 66"),
    (32, dict(global_batch_size=16), "not divisible by 32 replicas: use 32"),
    (2, dict(global_batch_size=64, micro_batch_size=5), "use a global_batch_size of 60 or 70"),
    (2, dict(global_batch_size=64, micro_batch_size=8, gradient_accumulation=3), "gradient_accumulation=3"),
    (1, dict(global_batch_size=8, gradient_accumulation=3), r"use one of \[1, 2, 4, 8\]")])
def test_batches_that_do_not_divide_are_refused_with_the_nearest_that_do(replicas, changes, says):
    with pytest.raises(UserError, match=says):
        plan(replicas, **changes)


def test_auto_takes_the_largest_divisor_that_fits():
    need = sum(memory.estimate(ModelConfig(**SMALL), 12, 512, torch.float32, "muon").values()) \
        * 1.0001 / memory.HEADROOM
    assert plan(memory_bytes=need, global_batch_size=48) == (12, 4, 48)
    assert plan(memory_bytes=need, global_batch_size=50) == (10, 5, 50)
    assert plan(memory_bytes=need * 0.999, global_batch_size=48) == (8, 6, 48)
    assert plan(device="cpu", global_batch_size=64) == (4, 16, 64)            # 2,048 tokens on a CPU
    with pytest.raises(UserError, match="one sequence of 512 tokens needs"):
        plan(memory_bytes=10**6, global_batch_size=8)


def test_auto_everything_follows_the_law_and_the_replicas():
    tokens = 0.292 * (6 * 20e6 * 10e6) ** 0.3271
    for replicas in (1, 3, 8):
        _, _, total = plan(replicas)
        assert total % replicas == 0 and 0.6 < total * 512 / tokens < 1.5


def test_a_resumed_batch_keeps_its_global_size():
    stored = {"global_batch_size": 64, "micro_batch_size": 2, "replicas": 2}
    resumed = dict(global_batch_size=64, stored=stored)
    assert plan(2, micro_batch_size=8, gradient_accumulation=1, **resumed) == (8, 4, 64)
    assert plan(2, **resumed) == (2, 16, 64)               # "auto" stays what it was on as many replicas
    assert plan(2, gradient_accumulation=4, **resumed) == (8, 4, 64)
    assert plan(4, **resumed) == (16, 1, 64)
    assert plan(2, global_batch_size=32, stored=stored) == (2, 8, 32)         # the user forced another
    with pytest.raises(UserError, match=r"use a micro_batch_size of \[1, 2, 4, 8, 16\]"):
        plan(4, micro_batch_size=3, **resumed)
    with pytest.raises(UserError, match=r"as many of them as divide it: \[1, 2, 4"):
        plan(3, **resumed)
