"""What CUDA must agree on with the CPU. Run where there is one: pytest -m gpu"""
import pytest
import torch

import checkpoint
import optim
import sample
from model import generate
from test_model import some_ids, tiny
from test_optim import settings
from test_train import corpus, go, metrics, weights  # noqa: F401  (corpus is a fixture)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_loss_and_gradients_equal_the_cpus():
    ids, found = some_ids(2, 40), []
    for device in ("cpu", "cuda"):
        model = tiny().to(device)
        loss, _ = model(ids[:, :-1].to(device), labels=ids[:, 1:].to(device))
        loss.backward()
        found.append((loss.item(), [p.grad.cpu() for p in model.parameters()]))
    (loss, gradients), (cuda_loss, cuda_gradients) = found
    assert cuda_loss == pytest.approx(loss, rel=1e-5)
    for a, b in zip(gradients, cuda_gradients):
        assert (a - b).norm() <= 1e-4 * a.norm()


def test_greedy_text_equals_the_cpus():
    """Past the context's end, too, with and without a graph of the step."""
    prompts = [some_ids(5).tolist(), some_ids(9, seed=2).tolist()]
    texts = [list(generate(tiny(max_position_embeddings=16).to(device), prompts, 40, temperature=0,
                           replayed=replayed))
             for device, replayed in (("cpu", False), ("cuda", False), ("cuda", True))]
    assert texts[0] == texts[1] == texts[2]


def test_a_step_that_is_not_finite_changes_nothing():
    model = tiny().to("cuda")
    optimizer = optim.Optimizer(model, settings())
    for bad in (False, True):
        before = {n: t.clone() for n, t in model.state_dict().items()}
        for p in model.parameters():
            p.grad = torch.full_like(p, float("nan") if bad else 1e-3)
        optimizer.step(optim.finish_gradients(model, 1.0, 1.0), 1e-2)
        moved = [not torch.equal(before[n], t) for n, t in model.state_dict().items()]
        assert not any(moved) if bad else all(moved)
    assert int(optimizer.skipped) == 1


@pytest.mark.parametrize("options", [dict(dtype="fp32", compile=False), dict(dtype="bf16", compile=False),
                                     dict(dtype="bf16", compile=True), dict(dtype="fp16", compile=False)],
                         ids=lambda options: "-".join(map(str, options.values())))
def test_training_gives_the_cpus_losses(corpus, options):  # noqa: F811
    cpu = go(corpus, out_dir="cpu")
    gpu = go(corpus, out_dir="gpu", **{**options, "device": "cuda:0"})
    assert torch.get_float32_matmul_precision() == "highest"           # as the caller had it
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=1e-4 if options["dtype"] == "fp32" else 0.02)
    assert weights("gpu").keys() == weights("cpu").keys() and metrics("gpu")[0]["peak-gpu-memory"] > 0


def test_a_run_goes_on_from_the_cpu_on_the_gpu_and_is_sampled(corpus):  # noqa: F811
    whole = go(corpus, out_dir="whole")
    go(corpus, out_dir="moved", max_steps=3)
    rest = go(corpus, out_dir="moved", device="cuda:0", dtype="fp32", compile=False)
    assert rest["steps"] == 6 and rest["losses"] == pytest.approx(whole["losses"][3:], rel=0.05)
    assert checkpoint.published_step("moved") == 6
    assert isinstance(sample.generate(sample.load_model("moved", "cuda"), "def", 5), str)
