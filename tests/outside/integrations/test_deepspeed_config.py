"""A DeepSpeed config in a ZeroTrainer: what it says beside the arguments, the numbers of replicas, runs that go on.

Then a model that is read straight into shards: the numbers of a plain one, and no whole copy.
"""

import gc
import io
import json
import os
import sys
import threading
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.outside.examples.programs import printed
from tests.outside.integrations.architectures import model_named
from tests.outside.integrations.worlds import (
    OWN,
    Counting,
    Overflowing,
    adapted,
    arguments,
    at_night,
    configured,
    llama,
    lora,
    numbers,
    on_meta,
    on_two_ranks,
    read,
    require_close,
    require_equal,
    start,
    stock_trainer,
    written,
    zero,
    zero_trainer,
)
from tests.support.programs import parameters
from tests.support.ranks import axis
from tests.support.resident import give_memory_back, in_new_process
from tests.support.wholes import full
from tests.units.deepspeed import test_keys as made
from zero_fn.deepspeed.placement import placed_by
from zero_fn.deepspeed.settings import settings_of
from zero_fn.streamed import Streamed

HOST = {"device": "cpu"}


@on_two_ranks
def test_a_config_trains_to_the_numbers_of_replicas(folder):
    wanted = numbers(stock_trainer(folder, llama()))
    ours = configured(folder, zero(2, offload_optimizer=HOST))
    require_close(numbers(ours), wanted)
    assert zf.inspect.is_transformed(ours.model)
    assert ours.settings.micro_batch_size == 2


@at_night
def test_other_configs_train_to_the_numbers_of_replicas(folder):
    disk = {"device": "nvme", "nvme_path": folder}
    microbatches = {"gradient_accumulation_steps": 2, "max_steps": 2}
    for config, options in ((zero(3, offload_optimizer=disk, offload_param=disk), {}), (zero(3), microbatches)):
        wanted = numbers(stock_trainer(folder, llama(), **options))
        require_close(numbers(configured(folder, config, **options)), wanted)


@at_night
def test_stages_2_and_3_of_a_config_reduce_each_microbatch(folder):
    """Between two of them a rank holds no whole gradients."""
    for stage, times in ((1, 1), (2, 3)):
        calls = []
        for microbatches in (1, 3):
            ours = configured(folder, zero(stage), gradient_accumulation_steps=microbatches, max_steps=1)
            with zf.traffic() as sent:
                ours.train()
            calls.append(sent.calls["reduce-scatter"])
        assert calls[1] == times * calls[0] > 0, (stage, calls)


@at_night
def test_a_config_brings_its_optimizer_rates_and_masters(folder):
    """Optimizer and scheduler of the config, on weights of 16 bits; resumed to the bit, on a disk too."""
    options = {"save_strategy": "steps", "save_steps": 2, "bf16": True, "warmup_steps": 2, "max_steps": 5}
    disk = {"device": "nvme", "nvme_path": folder}
    narrow = {"stage3_gather_16bit_weights_on_model_save": True}  # the run goes on from float32 all the same
    for config, kind in (
        ({**zero(2), **OWN}, torch.optim.AdamW),
        ({**zero(3, offload_optimizer=disk, **narrow), **OWN}, Streamed),
    ):
        ours = configured(folder, config, llama().bfloat16(), **options)
        wanted = numbers(ours)
        rates = [value for name, value in wanted if name == "learning_rate"]
        assert rates == pytest.approx([0.0, 0.0, 0.01, 0.01, 0.01 * 2 / 3]), "DeepSpeed's, logged after a step"
        assert all(parameter.dtype == torch.float32 for parameter in ours.model.parameters())
        assert type(ours.optimizer.optimizer) is kind
        again = configured(folder, config, llama().bfloat16(), **options)
        assert numbers(again, resume_from_checkpoint=f"{folder}/checkpoint-2") == wanted


@at_night
def test_a_trainer_reports_what_a_config_asks_for_and_computes_as_it_says(folder):
    """Lines and files beside the Trainer's own logs; autocast and recomputation change what they change elsewhere."""
    reports = {"steps_per_print": 2, "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    again = {"activation_checkpointing": {"cpu_checkpointing": True}, "wall_clock_breakdown": True}
    wanted = numbers(configured(folder, zero(2)))
    with redirect_stdout(io.StringIO()) as out:
        assert numbers(configured(folder, zero(2) | reports | again)) == wanted
    dist.barrier()
    if not dist.get_rank():
        lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
        assert [line.partition(":")[0] for line in lines] == ["step 2", "step 4"]
        assert "backward" in lines[0]
        assert len(Path(folder, "job.csv").read_text().splitlines()) >= 1 + 4
    mixed = numbers(configured(folder, zero(2) | {"torch_autocast": {"enabled": True}}))
    require_close(mixed, wanted, 1e-1)
    assert mixed != wanted
    summed = numbers(configured(folder, zero(2) | {"gradient_allreduce_op": "sum"}))
    norms, doubled = ([value for name, value in each if name == "grad_norm"] for each in (wanted, summed))
    assert doubled[0] == pytest.approx(2 * norms[0], rel=1e-4)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@at_night
def test_a_step_that_overflows_is_skipped(folder, dtype):
    """A step that overflows on one rank is skipped on both, and moves no rate."""
    options = {dtype: True, "max_steps": 3, "save_strategy": "steps", "save_steps": 1, "warmup_steps": 0}
    options["remove_unused_columns"] = False
    config = {**zero(2), "gradient_clipping": 0.5}
    ours = configured(folder, config, Overflowing(llama(), 2, 1), **options)
    values = []
    own = ours.training_step

    def seen(*args):
        values.append(parameters(ours.model))
        return own(*args)

    ours.training_step = seen
    ours.train()
    first, second, third = values
    assert not all(torch.equal(first[name], value) for name, value in second.items())
    require_equal(third, second)
    assert ours.lr_scheduler.last_epoch == 2
    assert ours.skipped_steps == 1
    again = configured(folder, config, Overflowing(llama(), 9, 1), **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert again.skipped_steps == 1, "it is not counted anew"
    assert (ours.accelerator.scaler is not None) == (dtype == "fp16")
    if dtype == "fp16":
        assert ours.accelerator.scaler.get_scale() == 128.0
        assert Path(folder, "checkpoint-3", "scaler.pt").is_file()


def _in_files(folder):
    from safetensors.torch import load_file

    return {name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("entry", "dtype", "is_asked", "build"),
    [
        ("stage3_gather_16bit_weights_on_model_save", "bf16", True, llama),
        ("stage3_gather_fp16_weights_on_model_save", "fp16", True, lora),
        ("gather_16bit_weights_on_model_save", None, True, llama),
        ("stage3_gather_16bit_weights_on_model_save", "bf16", False, llama),
    ],
    ids=["bf16", "fp16 and adapters", "float32", "not asked for"],
)
@at_night
def test_a_config_saves_in_16_bits_if_it_computes_in_them_and_says_so(folder, entry, dtype, is_asked, build):
    options = {dtype: True} if dtype else {}
    ours = configured(folder, zero(3, **{entry: is_asked}), build(), **options)
    ours.save_model(f"{folder}/out")
    found = _in_files(f"{folder}/out")
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype or "", torch.float32)
    wanted = {p.full_tensor().to(narrow if is_asked else torch.float32) for p in ours.model.parameters()}
    assert found and {value.dtype for value in found.values()} == {value.dtype for value in wanted}
    assert all(any(torch.equal(value, other) for other in wanted) for value in found.values())


@at_night
def test_a_config_without_a_dtype_computes_in_that_of_the_arguments(folder):
    def computes_in(more, **options):
        config = {"zero_optimization": {"stage": 3}} | more
        return configured(folder, config, **options).settings.computing.compute

    for options, wanted in (({"bf16": True}, torch.bfloat16), ({"bf16_full_eval": True}, None), ({}, None)):
        assert computes_in({}, **options) == wanted
    for said in (True, "auto"):  # under the other name that DeepSpeed has for it
        assert computes_in({"bfloat16": {"enabled": said}}, bf16=True) == torch.bfloat16
    with patch.dict(os.environ, ACCELERATE_MIXED_PRECISION="bf16"):  # as `accelerate launch` sets it
        for more in ({}, {"bf16": {"enabled": "auto"}}):
            assert computes_in(more) == torch.bfloat16


@at_night
def test_a_config_that_cannot_be_followed_is_refused(folder):
    """Beside `test_public_configs.py`: what is known when the training begins, and another way to place."""
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 1}}
    by_epochs = configured(folder, {**zero(3), "scheduler": scheduler}, max_steps=-1, num_train_epochs=1)
    with pytest.raises(zf.errors.ConfigError, match="total_num_steps = 9, and the steps of the training is 8"):
        by_epochs.train()
    with pytest.raises(zf.errors.ConfigError, match="another way to place"):
        zero_trainer(folder, llama(), given={"deepspeed": zero(3)})


def _planned(name, heads=2):
    return model_named(name, seed=0, num_key_value_heads=heads, attn_implementation="eager")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2"])
@at_night
def test_models_are_cut_by_their_own_plans(folder, name):
    """In memory, and read into shards of a model on meta; with blocks that run again, and rows of unequal length."""
    start()
    tokens = Counting(length=8).tokens[:2]
    given = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    given["attention_mask"][0, 5:] = 0
    plain = _planned(name)
    plain(**given).loss.backward()
    wanted = {name: each.grad for name, each in plain.named_parameters()}
    zf.save_pretrained(zf.shard_params(_planned(name), axis()), folder)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
    config |= {"tensor_parallel": {"autotp_size": 2}, "activation_checkpointing": {"partition_activations": True}}
    for model, weights in ((_planned(name), None), (on_meta(folder), folder)):
        setup = zf.from_deepspeed(model, config, axis(), weights=weights)
        setup.scaled(setup.model(**given).loss).backward()
        for own, each in setup.model.named_parameters():
            torch.testing.assert_close(each.grad.full_tensor(), wanted[own], rtol=1e-4, atol=1e-6)
    if name == "llama":
        with pytest.raises(zf.errors.ConfigError, match="num_key_value_heads 1 over 2 ranks"):
            zf.from_deepspeed(_planned(name, heads=1), config, axis())


# -- models that are read into shards --------------------------------------------------------------------------------

AUTO = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 0.5}
LR = {"optimizer.params.lr": 1e-2, "optimizer.params.betas": [0.9, 0.95], "optimizer.params.eps": 1e-8}
IN_BF16 = {"auto": {"bf16.enabled": True, "fp16.enabled": False}}


def _trainer(folder, config, model, *, bf16=True, **given):
    return configured(folder, config, model, given, bf16=bf16, max_steps=3)


def _losses(setup):
    """Three steps of a loop of one's own."""
    found = []
    tokens = Counting().tokens[4 * dist.get_rank() :][:12].split(2)
    for step in range(3):
        loss = setup.model.train()(input_ids=tokens[step], labels=tokens[step]).loss
        setup.scaled(loss).backward()
        setup.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "tiers", ["none", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("host", "disk"))]
)
@on_two_ranks
def test_what_is_read_into_shards_trains_as_a_plain_model(folder, tiers):
    from zero_fn.integrations.transformers import placed

    disk = {"device": "nvme", "nvme_path": folder}
    config, dtype, options = {
        "none": (zero(3, stage3_param_persistence_threshold=40), torch.bfloat16, {}),
        "host": (zero(2, offload_optimizer=HOST), torch.float32, {"tie_word_embeddings": True}),
        "disk": (zero(3, offload_optimizer=disk, offload_param=disk), torch.bfloat16, {"tie_word_embeddings": True}),
    }[tiers]
    folder = f"{folder}/hf"
    written(folder, partial(llama, **options), dtype, max_shard_size="20KB")
    bf16 = dtype == torch.bfloat16
    trained = partial(_trainer, folder, config, bf16=bf16)
    wanted = numbers(trained(read(folder)))
    with placed(config, args=arguments(folder, bf16=bf16, max_steps=3)):
        model = read(folder)
    trainer = trained(model)
    assert trainer.model is model, "placed once"
    assert numbers(trainer) == wanted
    assert numbers(trained(on_meta(folder), weights=folder)) == wanted
    assert numbers(trained(llama(seed=1, **options), weights=folder)) == wanted, "read over initial values, too"
    assert numbers(trained(model, weights=folder)) == wanted, "and over those that a placed model has by now"
    with pytest.raises(
        zf.errors.StateError, match=r"on meta(.|\n)*zf.load_pretrained\(model, folder\), or weights=folder"
    ):
        numbers(trained(on_meta(folder)))

    dtypes = {"bf16.enabled": bf16, "fp16.enabled": False}
    auto = {**AUTO, **LR, "optimizer.params.weight_decay": 0.1, **dtypes}
    own = {**config, "optimizer": OWN["optimizer"]}
    setup = partial(zf.from_deepspeed, config=own, mesh=axis(), auto=auto)
    wanted_losses = _losses(setup(read(folder)))
    with placed(own, auto=dtypes):  # the rest is not known yet
        model = read(folder)
    assert _losses(setup(model)) == wanted_losses
    assert _losses(setup(on_meta(folder), weights=folder)) == wanted_losses
    later = setup(on_meta(folder))
    zf.load_pretrained(later.model, folder)
    assert _losses(later) == wanted_losses


@at_night
def test_what_was_placed_by_hand_has_to_be_what_the_config_says(folder):
    from zero_fn.integrations.transformers import placed

    written(folder, dtype=torch.float32, max_shard_size="20KB")
    host = zero(3, offload_optimizer=HOST)

    def loaded(place):
        with placed(place):
            return read(folder)

    def in_bf16(model, **options):
        return zf.precision(zf.shard_params(model, axis(), **options), compute=torch.bfloat16)

    def fitting(model):
        return zf.offload(in_bf16(model), optim=zf.cpu())

    wanted = numbers(_trainer(folder, host, read(folder)))
    assert numbers(_trainer(folder, host, loaded(fitting))) == wanted
    for other in (
        lambda model: zf.shard_grads(model, axis()),
        lambda model: zf.shard_params(model, axis()),  # another dtype
        lambda model: in_bf16(model, where=lambda name, _: name != "model.norm.weight"),
        fitting,  # another tier
    ):
        with pytest.raises(zf.errors.ConfigError, match="placed in another way"):
            _trainer(folder, zero(3), loaded(other))
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(zf.errors.MeshError):
        _trainer(folder, host, loaded(fitting), mesh=grid["b"])


@at_night
def test_adapters_of_a_placed_base_rest_as_the_config_says(folder):
    """Of a frozen base in 16 bits, after it was placed: over an axis that `placed` has made. They are saved alone, and loaded
    over such a base again."""
    from peft import PeftModel

    from zero_fn.integrations.transformers import placed

    written(folder, dtype=torch.bfloat16, max_shard_size="20KB")
    config = zero(3, offload_optimizer=HOST)
    qv = "q_proj", "v_proj"
    wanted = numbers(_trainer(folder, config, adapted(read(folder), *qv)))
    bases = []
    for _ in range(2):
        with placed(config, **IN_BF16, frozen=True):
            bases.append(read(folder))
    assert {parameter.dtype for parameter in bases[0].parameters()} == {torch.bfloat16}
    trainer = _trainer(folder, config, adapted(bases[0], *qv))
    assert numbers(trainer) == wanted
    for name, parameter in trainer.model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora" in name else torch.bfloat16), name
        assert parameter.placements[0].is_shard(), name
    trainer.save_model(f"{folder}/out")
    again = PeftModel.from_pretrained(bases[1], f"{folder}/out")
    require_equal(_adapters(again), _adapters(trainer.model))


def _adapters(model):
    return {name: full(parameter) for name, parameter in model.named_parameters() if "lora" in name}


@at_night
def test_a_config_that_does_not_place_is_refused_before_a_file_is_read(folder):
    from zero_fn.integrations.transformers import placed

    written(folder, dtype=torch.float32, max_shard_size="20KB")
    args = arguments(folder)
    for text, way, given in (
        (r"bf16\.enabled, fp16\.enabled", (zero(3),), {}),
        ("contradicts the arguments", ({**zero(3), "gradient_clipping": 2.0},), {"args": args}),
        ("and a function", (lambda model: zf.shard_params(model, axis()),), {"frozen": True}),
        ("cannot be read", (f"{folder}/absent.json",), {}),
        (r"got : TrainingArguments(.|\n)*args=args", (zero(3), args), {}),
    ):
        with pytest.raises(zf.errors.ConfigError, match=text), placed(*way, **given):
            read(folder)


def _unlaunched(folder):
    from zero_fn.integrations.transformers import placed

    os.environ.pop("RANK", None)
    llama().save_pretrained(folder)
    with placed({"zero_optimization": {"stage": 3}}):
        model = read(folder)
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.nightly
def test_a_process_that_nobody_launched_is_one_rank(tmp_path):
    assert in_new_process(_unlaunched, str(tmp_path))


MB = 1 << 20
BIG = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
"""24 M parameters: 46 MiB in bfloat16, and as much in the float32 shards of each of two ranks."""


def _anonymous_nbytes():
    """Resident memory but for pages of files that are mapped, which the kernel takes back when it needs them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def _grown(make):
    """By how much a process grows at most while a model is made, above its shards, but for files that it maps."""
    gc.collect()
    is_done, most = threading.Event(), [0]

    def watch():
        while not is_done.is_set():
            most[0] = max(most[0], _anonymous_nbytes())
            time.sleep(0.0005)

    before = _anonymous_nbytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model = make()
    finally:
        is_done.set()
        watcher.join()
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert shards > 40 * MB
    return most[0] - before - shards


def _peaks(folder):
    from zero_fn.integrations.transformers import placed

    start()
    give_memory_back()
    config = {**zero(3), **AUTO, "bf16": {"enabled": True}, "fp16": {"enabled": False}, "optimizer": {"type": "AdamW"}}

    def read_placed(source):
        with placed(config):
            return read(source)

    def set_up(source):
        return zf.from_deepspeed(on_meta(source), config, axis(), weights=source).model

    def in_trainer(source):
        return _trainer(source, config, on_meta(source), weights=source).model

    def plain(source):
        return zf.from_deepspeed(read(source).float(), config, axis(), donate=True).model

    found = {}
    for make in (read_placed, set_up, in_trainer, plain):
        make(f"{folder}/small")
        found[make.__name__] = _grown(partial(make, f"{folder}/big"))
    base = read_placed(f"{folder}/big")
    base.added = nn.Linear(2, 2)  # as adapters are
    found["placed_again"] = _grown(lambda: placed_by(settings_of(config, 2), axis(), base))
    return found


@pytest.mark.nightly
def test_no_rank_holds_more_than_its_shards_and_a_buffer(tmp_path):
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "small")
    llama(**BIG).to(torch.bfloat16).save_pretrained(tmp_path / "big")
    for found in zf.launch(_peaks, 2, str(tmp_path)):
        assert found.pop("plain") > 35 * MB, "a whole copy has to be seen"
        assert all(own < 16 * MB for own in found.values()), found


@pytest.mark.nightly
def test_the_entries_of_an_installed_deepspeed_are_those_that_were_written_down():
    """`.ci/test --all` puts it where only this test finds it: transformers would behave otherwise beside it."""
    where = Path(sys.prefix, "deepspeed")
    if not where.is_dir():
        pytest.skip("deepspeed is not in .venv/deepspeed: .ci/test --all puts it there")
    program = Path(made.__file__).with_name("keys_of_deepspeed.py")
    said = printed(sys.executable, program, PYTHONPATH=str(where), DS_ACCELERATOR="cpu")
    assert json.loads(said[said.index("{\n") :]) == made.GOLDEN
