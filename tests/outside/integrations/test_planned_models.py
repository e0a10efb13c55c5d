"""`python -m zero_fn plan` for models of transformers: all of them run on fake tensors, and what is to be pasted trains."""

import json

import pytest
import torch

import zero_fn as zf
from tests.outside.examples.programs import ROOT
from tests.outside.integrations.architectures import CAUSAL, LLAMA
from tests.support.profiles import by_night
from zero_fn.planning.activations import live_bytes
from zero_fn.planning.configurations import Training, compute_of
from zero_fn.planning.machines import DEVICES, Machine
from zero_fn.planning.models import model_of
from zero_fn.planning.pasted import deepspeed_of, program_of
from zero_fn.planning.plan_command import _scale_rows, planned, training_of


def _config(folder, name, **entries):
    (folder / "config.json").write_text(json.dumps({"model_type": name, **CAUSAL[name], **entries}))
    return str(folder)


@pytest.mark.parametrize("name", by_night(CAUSAL, ("llama", "mixtral")))
def test_every_causal_model_runs_on_fake_tensors(name, tmp_path):
    model = model_of(_config(tmp_path, name), 16, 2)
    without, with_ = compute_of(model, Training(2, Machine(DEVICES["h100"])))
    assert without is not None and model.tokens == 32
    matrices = sum(p.numel() for p in model.module.parameters() if p.ndim == 2 and p.requires_grad)
    assert without.flops > 2 * matrices and without.nbytes > 32 * 64 * 4, "at least the products and the logits"
    if with_ is not None:  # layers that repeat
        assert with_.nbytes < without.nbytes and with_.flops > without.flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_attention_and_of_experts_are_counted_once(dtype, tmp_path):
    """Attention was left out; gradients of experts were counted as if each token met all of them, and not in float32."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "num_local_experts": 4
    }  # fmt: skip
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    model = model_of(_config(tmp_path, "mixtral", **sizes, **heads), 16, 2)
    without, _ = compute_of(model, Training(2, Machine(DEVICES["h100"]), computes_in=dtype))
    layer = 4 * 32 * 32 + 4 * 32 + 2 * 3 * 32 * 64  # elements that a token meets: attention, the router, two experts
    scores = 2 * 16 * 32  # of a token: queries by keys, and values
    assert without is not None
    assert without.flops == 32 * (6 * (2 * layer + 96 * 32) + 2 * (2 + 5) * scores)


def test_dropout_of_attention_needs_no_scores(tmp_path):
    """They were counted: with dropout attention on the CPU is not fused, on accelerators it is."""
    needed = [
        compute_of(model_of(_config(tmp_path, "gpt2", attn_pdrop=each), 64, 2), Training(2, Machine(DEVICES["h100"])))
        for each in (0.0, 0.1)
    ]
    assert needed[0] == needed[1]


def test_a_model_of_real_values_needs_what_was_planned(tmp_path):
    model = model_of(_config(tmp_path, "llama", num_hidden_layers=4), 16, 2)
    (without, _), inputs = compute_of(model, Training(1, Machine(DEVICES["h100"]))), dict(model.inputs or {})
    real = type(model.module)(model.module.config).to(torch.bfloat16).train()
    found = live_bytes(real, {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in inputs.items()})
    assert without is not None and without.flops == found["flops"]
    assert without.nbytes == pytest.approx(found["nbytes"], rel=0.05), "a mask that is not needed with values"


_ROWS = ("replicate", "shard_optimizer", "shard_grads", "shard_params", "hybrid", "shard_params, shard_grads outer")


@pytest.mark.nightly
def test_what_is_to_be_pasted_trains(tmp_path, ranks):
    """Of each placement the program, with "cpu" for "cuda"; and its config of DeepSpeed is one that is taken."""
    folder = _config(tmp_path, "llama", num_hidden_layers=3)
    programs, configs = {}, {}
    for states, names in (("fp32", _ROWS), ("8bit", ("shard_params", "hybrid"))):
        options = [folder, "--ranks", "4", "--per-node", "2", "--sequence", "16", "--all", "--states", states]
        found, model, training = planned(options), model_of(folder, 16, 1), training_of(options)
        assert found.program == program_of(found.rows[0], model, training)
        rows = {row.proposal.transform: row for row in found.rows if row.recompute}
        assert set(rows) == set(_ROWS)
        for name in names:
            programs[name, states] = program_of(rows[name], model, training)
            configs[name, states] = deepspeed_of(rows[name], training, 1)
    assert isinstance(configs.pop(("hybrid", "fp32")), str) and isinstance(configs.pop(("hybrid", "8bit")), str)
    assert "states8bit" in str(configs.pop(("shard_params", "8bit")))
    losses = ranks(4, deadline_s=120).run(_train, programs, configs)
    assert all(loss == losses[0] for loss in losses)
    assert all(len(set(each)) > 1 for each in losses[0].values()), "values change"


def _train(programs, configs):
    found = {}
    for name, program in programs.items():
        torch.manual_seed(0)
        names = {}
        exec(program.replace('"cuda"', '"cpu"'), names)
        model, optimizer = names["model"], names["optimizer"]
        tokens, losses = torch.arange(16)[None], []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        found[name] = losses
        if name in configs:
            mesh = names["mesh"]
            setup = zf.from_deepspeed(torch.nn.Linear(4, 4), configs[name], mesh if mesh.ndim > 1 else mesh["dp"])
            assert setup.optimizer is not None
    return found


@pytest.mark.nightly
def test_a_plan_for_the_host_and_the_disk_is_taken_as_a_config(tmp_path, ranks):
    folder = _config(
        tmp_path, "llama", **{**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    )
    memory = ["--memory", "22MB", "--reserve", "1KB", "--ranks", "2", "--sequence", "16"]
    on_host, on_disk = planned([folder, *memory]), planned([folder, *memory, "--host", "0", "--disk", "1TB"])
    for found, device in ((on_host, "cpu"), (on_disk, "nvme")):
        assert found.rows[0].proposal.fits and "zf.offload(model" in found.program, found.program
        assert not isinstance(found.deepspeed, str)
        assert found.deepspeed["zero_optimization"]["offload_optimizer"]["device"] == device
        ranks(2).run(_taken, found.deepspeed, str(tmp_path))


def _taken(config, folder):
    from tests.support.ranks import axis

    for each in config["zero_optimization"].values():
        if isinstance(each, dict) and "nvme_path" in each:
            each["nvme_path"] = folder
    zf.from_deepspeed(torch.nn.Linear(4, 4), config, axis())


@pytest.mark.nightly
def test_the_page_scale_has_the_numbers_of_the_command():
    page = (ROOT / "docs" / "guides" / "scale.md").read_text()
    rows = _scale_rows(planned(["70B", "--ranks", "16384"]).scale)
    assert len(rows) == 7
    for row in rows:
        assert f"| {' | '.join(row)} |" in page
