"""`python -m zero_fn deepspeed check` prints what becomes of a config and what a model needs by it, or why it is refused."""

import json
import re

from tests.units.deepspeed.test_cuts import Planned
from zero_fn.__main__ import main

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3},
}


def new_model():
    return Planned()


def checked(folder, capsys, config, *options):
    file = folder / "ds_config.json"
    file.write_text(json.dumps(config))
    status = main(["deepspeed", "check", str(file), *options])
    return (status, *capsys.readouterr())


def test_a_config_that_would_be_taken_is_a_table(tmp_path, capsys):
    status, out, _ = checked(tmp_path, capsys, CONFIG)
    assert status == 0
    assert re.search(r"zero_optimization.stage +3 +zf.shard_params\n", out)
    assert "taken for auto: optimizer.params.lr = 5e-05" in out
    status, out, _ = checked(tmp_path, capsys, CONFIG, "--auto", "optimizer.params.lr=1e-3")
    assert (status, "taken for auto" in out) == (0, False)
    assert re.search(r"optimizer.params.lr +0.001 ", out)


def test_one_that_would_be_refused_ends_with_1_and_the_reasons(tmp_path, capsys):
    for more, reason in (
        ({"gradient_cliping": 1.0}, "gradient_clipping, or remove it"),
        ({"train_batch_size": 31}, '"train_batch_size": 16'),
        ({"train_batch_size": 16, "sequence_parallel_size": 3}, "a divisor of 8 ranks"),
    ):
        status, out, err = checked(tmp_path, capsys, {**CONFIG, **more}, "--ranks", "8")
        assert (status, out) == (1, "")
        assert reason in err
    assert main(["deepspeed", "check", str(tmp_path / "nowhere.json")]) == 1


def test_a_model_is_planned_as_the_config_places_it(tmp_path, capsys):
    model = f"{__name__}:new_model"
    numel = sum(parameter.numel() for parameter in Planned().parameters())
    totals = []
    for more in ({}, {"tensor_parallel": {"autotp_size": 2}}, {"zero_optimization": {"stage": 0}}):
        status, out, _ = checked(tmp_path, capsys, {**CONFIG, **more}, "--model", model, "--ranks", "4")
        assert status == 0
        totals.append(out.rpartition("\n\n")[2])
    assert totals[0] != totals[1] != totals[2]
    assert f"{4 * numel / 1e6:.3f} MB" in totals[2], totals[2]
    for device, where in (("cpu", "in cpu()"), ("none", "")):
        zero = {"stage": 2, "offload_optimizer": {"device": device}}
        out = checked(tmp_path, capsys, {**CONFIG, "zero_optimization": zero}, "--model", model)[1]
        assert (where in out) and (device == "none") == ("in cpu()" not in out)
    assert checked(tmp_path, capsys, CONFIG, "--model", "nowhere")[0] == 1
