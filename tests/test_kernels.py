"""The operations with a backward pass of their own against plain torch, values and gradients."""
from types import SimpleNamespace

import pytest
import torch

from kernels import rms_norm, rope, swiglu


@pytest.mark.parametrize("shape", [(3, 7, 24), (2, 5, 4, 6), (1, 1)])
def test_rms_norm_and_its_gradients_equal_torchs(shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    expected, got = rms_norm.reference(x, weight, 1e-5), rms_norm.rms_norm(x, weight, 1e-5)
    assert "RMSNorm" in got.grad_fn.name()                 # the one that is tested is the one by hand
    torch.testing.assert_close(got, expected)
    grad = torch.randn(shape)
    for g, w in zip(torch.autograd.grad(got, (x, weight), grad),
                    torch.autograd.grad(expected, (x, weight), grad)):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bf16_is_computed_in_fp32():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 16).bfloat16().requires_grad_(), torch.randn(16).bfloat16()
    got = rms_norm.rms_norm(x, weight, 1e-5)
    expected = rms_norm.reference(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(got, expected.bfloat16())


@pytest.mark.parametrize("batch", [1, 3])
def test_rope_and_its_gradient_equal_the_plain_formula(batch):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, 8, requires_grad=True)
    angles = torch.randn(batch, 1, 5, 4)
    cos, sin = angles.cos().repeat(1, 1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    expected, got = (turn(x.transpose(1, 2), cos, sin) for turn in (rope.reference, rope.rotate))
    assert "Rotate" in got.grad_fn.name()
    torch.testing.assert_close(got, expected)
    grad = torch.randn(3, 4, 5, 8)
    torch.testing.assert_close(torch.autograd.grad(got, x, grad), torch.autograd.grad(expected, x, grad))
    with torch.no_grad():
        torch.testing.assert_close(rope.rotate(x.transpose(1, 2), cos, sin), expected)


def test_swiglu_and_its_gradients_equal_the_plain_formula():
    torch.manual_seed(0)
    gate, up, grad = (torch.randn(3, 5, 7, requires_grad=i < 2) for i in range(3))
    expected, got = swiglu.reference(gate, up), swiglu.swiglu(gate, up)
    assert "SwiGLU" in got.grad_fn.name()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, (gate, up), grad),
                               torch.autograd.grad(expected, (gate, up), grad))


@pytest.mark.slow
def test_compiled_layers_compute_what_plain_ones_do():
    import launch
    from model import Model, ModelConfig
    shape = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, intermediate_size=48)
    plain, compiled = (Model(ModelConfig(**shape)).init_weights(0) for _ in range(2))
    said = []
    launch.compile_layers(compiled.model.layers, SimpleNamespace(device=torch.device("cpu"), say=said.append))
    if said:
        pytest.skip(said[0])
    ids = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = [model(ids[:, :-1], labels=ids[:, 1:])[0] for model in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
