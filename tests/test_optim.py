"""optim.py: Muon and AdamW against torch's, the schedules against their formulas, skipped steps."""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import optim
from forked import run_ranks
from model import Model, ModelConfig

CFG = dict(optimizer="muon", lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, adam_eps=1e-8,
           schedule="linear", start_lr=0.0, final_lr=None, warmup_ratio=0.1, decay_ratio=0.2,
           decay_shape="linear")
TINY = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, intermediate_size=48)


def settings(**changes):
    return SimpleNamespace(**{**CFG, **changes})


class Stacked(nn.Module):
    """Matrices of every kind that Muon meets: wide, tall, square, equal shapes, and a 3-D stack."""
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in dict(wide=(6, 10), tall=(10, 6), square=(8, 8), wide2=(6, 10),
                                experts=(3, 6, 10), norm=(8,)).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_muon_equals_torch_optim_muon(monkeypatch):
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS
    from torch.optim._muon import _zeropower_via_newtonschulz as theirs_of

    def one_by_one(stack):                           # torch's own, so that all else must be equal to the bit
        return torch.stack([theirs_of(g, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, 1e-7)
                            for g in stack]).float()

    g = torch.randn(3, 12, 20, generator=torch.Generator().manual_seed(3))
    difference = optim.orthogonalize(g, dtype=torch.bfloat16).float() - one_by_one(g)
    assert difference.norm() <= 0.08 * one_by_one(g).norm()       # bf16 rounding, five times
    monkeypatch.setattr(optim, "orthogonalize", one_by_one)
    ours, theirs = Stacked(), Stacked()
    optimizer = optim.Optimizer(ours, settings())
    matrices = {n: p for n, p in theirs.named_parameters() if p.ndim == 2}
    stack = [nn.Parameter(m.clone()) for m in theirs.experts.detach()]
    judge = torch.optim.Muon([*matrices.values(), *stack], lr=1e-2, weight_decay=0.1,
                             momentum=optim.MOMENTUM, nesterov=True, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for expert, grad in zip(stack, theirs.experts.grad):
            expert.grad = grad.clone()
        optimizer.step(torch.tensor(1.0), 1e-2)
        judge.step()
    moved = {**{n: (p, getattr(ours, n)) for n, p in matrices.items()},
             "experts": (torch.stack(stack), ours.experts)}
    for name, (wanted, got) in moved.items():
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_orthogonalize_makes_all_singular_values_near_one():
    g = torch.randn(4, 20, 33, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(optim.orthogonalize(g))
    assert 0.6 < values.min() and values.max() < 1.3
    tall = g.mT
    wide = optim.orthogonalize(tall.mT)                    # a tall matrix goes in as its transpose
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    assert ((wide - u @ v).norm(dim=(1, 2)) / (u @ v).norm(dim=(1, 2))).max() < 0.35


def test_the_rest_equals_torch_adamw_and_only_matrices_decay():
    ours, theirs = (Model(ModelConfig(**TINY)).init_weights(0) for _ in range(2))
    optimizer = optim.Optimizer(ours, settings(optimizer="adamw"))
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    rest = [p for p in theirs.parameters() if p.ndim < 2]
    judge = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=rest, weight_decay=0.0)],
                              lr=3e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step(torch.tensor(1.0), 3e-3)
        judge.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_muon_takes_the_matrices_of_the_layers_only():
    model = Model(ModelConfig(**TINY, tie_word_embeddings=False, attention_bias=True))
    optimizer = optim.Optimizer(model, settings())
    muon = set(optimizer.muon.params)
    assert {n.rsplit(".", 2)[1] for n in muon} == {"q_proj", "k_proj", "v_proj", "o_proj",
                                                   "gate_proj", "up_proj", "down_proj"}
    assert all(n.endswith("weight") for n in muon)
    named = sum(len(g["params"]) for g in optimizer.adamw.param_groups) + len(muon)
    assert named == len(list(model.parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_beside_muon_the_embeddings_move_faster(tied):
    moved = {}
    for optimizer in ("muon", "adamw"):
        model = Model(ModelConfig(**TINY, tie_word_embeddings=tied)).init_weights(0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        set_gradients(model, 0)
        optim.Optimizer(model, settings(optimizer=optimizer, weight_decay=0.0)).step(torch.tensor(1.0), 1e-3)
        moved[optimizer] = {n: (p - before[n]).abs().mean().item() for n, p in model.named_parameters()}
    for name in moved["muon"]:
        times = optim.EMBEDDING if "embed_tokens" in name or "lm_head" in name else 1.0
        if name.endswith("norm.weight") or times > 1:
            assert moved["muon"][name] == pytest.approx(times * moved["adamw"][name], rel=1e-3), name
        assert moved["adamw"][name] == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad):
    model = Model(ModelConfig(**TINY)).init_weights(0)
    optimizer = optim.Optimizer(model, settings())
    set_gradients(model, 0)
    optimizer.step(optim.finish_gradients(model, 1.0, 1.0), 1e-2)
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    moments = {n: t.clone() for n, t in optimizer.moments().items()}
    set_gradients(model, 1)
    model.model.layers[0].mlp.up_proj.weight.grad[3, 4] = bad
    optimizer.step(optim.finish_gradients(model, 1.0, 1.0), 1e-2)
    assert all(torch.equal(weights[n], t) for n, t in model.state_dict().items())
    assert all(torch.equal(moments[n], t) for n, t in optimizer.moments().items())
    assert (int(optimizer.skipped), int(optimizer.skipped_in_a_row)) == (1, 1)
    set_gradients(model, 2)
    optimizer.step(optim.finish_gradients(model, 1.0, 1.0), 1e-2)
    assert (int(optimizer.skipped), int(optimizer.skipped_in_a_row)) == (1, 0)
    assert all(state["step"] == 2 for state in optimizer.adamw.state.values())     # skipped ones don't count


def test_clip_scales_first_and_returns_the_norm_before_the_clip():
    model = Stacked()
    set_gradients(model, 0)
    whole = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters()))
    norm = optim.finish_gradients(model, 0.5, clip=1.0)
    assert float(norm) == pytest.approx(0.5 * whole, rel=1e-6)
    assert math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters())) \
        == pytest.approx(1.0, rel=1e-4)
    set_gradients(model, 0)
    optim.finish_gradients(model, 0.5, clip=None)
    assert math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters())) \
        == pytest.approx(0.5 * whole, rel=1e-6)


def test_schedules_follow_their_formulas():
    def curve(**changes):
        cfg = settings(lr=1.0, **changes)
        return [optim.lr_at(step, 100, cfg) for step in range(100)]

    for schedule in ("linear", "cosine", "wsd", "constant"):
        assert curve(schedule=schedule)[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert curve(schedule="constant")[10:] == [1.0] * 90
    linear = curve(schedule="linear")
    assert linear[10] == 1.0 and linear[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert curve(schedule="cosine", final_lr=0.0)[55] == pytest.approx(0.5)
    wsd = curve(schedule="wsd", final_lr=0.2)
    assert wsd[10:81] == [1.0] * 71 and wsd[90] == pytest.approx(0.2 + 0.8 * 0.5)
    assert curve(schedule="wsd", decay_shape="cosine", final_lr=0.0)[90] == pytest.approx(0.5)
    assert curve(schedule="linear", start_lr=0.5, warmup_ratio=0.04)[:4] \
        == pytest.approx([0.625, 0.75, 0.875, 1.0])


def sharded_muon():
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = Stacked()
    optimizer = optim.Optimizer(model, settings(), rank, world)
    for step in range(2):
        set_gradients(model, step)
        optimizer.step(torch.tensor(1.0), 1e-2)
    return {n: p.detach() for n, p in model.named_parameters()}


def test_muon_shared_out_over_ranks_equals_one_process():
    alone = sharded_muon()
    for result in run_ranks(sharded_muon, 4, group=True):
        for name, p in result.items():
            torch.testing.assert_close(p, alone[name], rtol=1e-5, atol=1e-6)


def test_moments_survive_a_round_trip():
    models = [Model(ModelConfig(**TINY)).init_weights(0) for _ in range(2)]
    first, second = (optim.Optimizer(m, settings()) for m in models)
    for step in range(3):
        set_gradients(models[0], step)
        first.step(torch.tensor(1.0), 1e-2)
    models[1].load_state_dict(models[0].state_dict())
    second.load_moments(first.moments(), updates=3)
    for model, optimizer in zip(models, (first, second)):
        set_gradients(model, 9)
        optimizer.step(torch.tensor(1.0), 1e-2)
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters()))
    assert second.load_moments(first.moments(), updates=3) == []
    other = optim.Optimizer(models[1], settings(optimizer="adamw"))
    fresh = other.load_moments(first.moments(), updates=3)
    assert set(fresh) == set(first.muon.params)            # AdamW finds no moments of its own where Muon was


def test_loss_scale_halves_on_overflow_and_doubles_after_2000_finite_steps():
    scale = optim.LossScale(True, torch.device("cpu"), 1024)
    assert float(scale.value) == 64
    scale.update(torch.tensor(float("inf")))
    assert float(scale.value) == 32
    for _ in range(2001):
        scale.update(torch.tensor(1.0))
    assert float(scale.value) == 64
    off = optim.LossScale(False, torch.device("cpu"), 1024)
    off.update(torch.tensor(float("inf")))
    assert float(off.value) == 1


@pytest.mark.parametrize("shape", [(3, 8, 24), (5, 12, 24), (16, 40), (2, 3, 4, 12)])
def test_newton_schulz_of_the_gram_matrix_equals_the_plain_one(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x = g / g.norm(dim=(-2, -1), keepdim=True)
    a, b, c = optim.NEWTON_SCHULZ
    for _ in range(5):
        A = x @ x.mT
        x = a * x + (b * A + c * A @ A) @ x
    torch.testing.assert_close(optim.orthogonalize(g), x, rtol=1e-3, atol=1e-4)
