"""The Accelerator of accelerate over transformed models: the numbers of DDP, or of `from_deepspeed` with a DeepSpeed config;
one reduction, states that come back."""

import csv
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_fn as zf
from tests.outside.integrations.worlds import (
    OWN,
    Counting,
    Overflowing,
    at_night,
    llama,
    logits_of,
    on_meta,
    on_two_ranks,
    place,
    read,
    require_equal,
    start,
    written,
    zero,
)
from tests.support.programs import gradients, parameters
from tests.support.ranks import axis
from tests.units.checkpoint.test_atomic import left_by_a_kill
from zero_fn.owners import ByOwner
from zero_fn.streamed import Streamed
from zero_fn.values import watching


def _accelerator(ours=True, **options):
    from accelerate import Accelerator

    from zero_fn.integrations.accelerate import ZeroAccelerator

    start()
    if not ours:
        return Accelerator(cpu=True, **options)
    ways = {} if {"deepspeed", "deepspeed_plugin"} & options.keys() else {"place": place()}
    return ZeroAccelerator(cpu=True, **ways | options)


def _parts(accelerator, model, *, in_two=False):
    """What a script prepares, in its order, in one call or two: the optimizer is built before, for the plain model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    others = optimizer, _loader(), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    if in_two:
        return (accelerator, accelerator.prepare(model), *accelerator.prepare(*others))
    return (accelerator, *accelerator.prepare(model, *others))


def _loader():
    return torch.utils.data.DataLoader(Counting(), batch_size=2)


def _train(parts, microbatches=8, max_norm=None):
    """Microbatches as accelerate teaches them; the loss of each, and the norm of each step if the program clips."""
    accelerator, model, optimizer, loader, scheduler = parts
    found = []
    for loss in _backwards(accelerator, model, loader, microbatches):
        found.append(loss)
        if accelerator.sync_gradients and max_norm is not None:
            found.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return found


def _backwards(accelerator, model, loader, microbatches):
    """The loss of each microbatch; what follows is in its `accumulate`."""
    for _, batch in zip(range(microbatches), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            yield loss.item()


@on_two_ranks
def test_prepared_models_have_the_numbers_of_replicas():
    calls = []
    for microbatches in (1, 2):
        options = {"gradient_accumulation_steps": microbatches}
        wanted = _train(_parts(_accelerator(False, **options), llama()), 4, 0.5)
        parts = _parts(_accelerator(**options), llama(), in_two=microbatches == 2)
        assert zf.inspect.is_transformed(parts[1])
        with zf.traffic() as sent:
            found = _train(parts, 4, 0.5)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        calls.append(sent.calls["reduce-scatter"])
    assert calls[0] == 2 * calls[1] > 0, "two microbatches are reduced once"


def _muon_and_adamw(model):
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=1e-2)


def _train_two(accelerator, model, optimizers, loader, microbatches=4):
    found = []
    for loss in _backwards(accelerator, model, loader, microbatches):
        found.append(loss)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return found


@at_night
def test_two_optimizers_have_the_numbers_of_replicas_and_go_on(folder):
    """Prepared each by itself, or as a sequence whose Muon has its owners already; and by a config."""

    def parts(accelerator, seed=0, *, apart, owned=False):
        model = llama(seed)
        muon, adamw = _muon_and_adamw(model)
        muon = zf.by_owner(muon) if owned else muon
        if apart:
            model, muon, adamw, loader = accelerator.prepare(model, muon, adamw, _loader())
            return accelerator, model, (muon, adamw), loader
        model, both, loader = accelerator.prepare(model, (muon, adamw), _loader())
        return accelerator, model, (both,), loader

    wanted = _train_two(*parts(_accelerator(False), apart=True))
    for apart in (True, False):
        ours = parts(_accelerator(), apart=apart, owned=not apart)
        assert not apart or isinstance(ours[2][0].optimizer, ByOwner)
        torch.testing.assert_close(_train_two(*ours), wanted, atol=2e-5, rtol=2e-5)
        ours[0].save_state(f"{folder}/{apart}")
        goes_on = _train_two(*ours)
        again = parts(_accelerator(), 7, apart=not apart)
        again[0].load_state(f"{folder}/{apart}")
        assert _train_two(*again) == goes_on
    said = {name: value for name, value in _said(3).items() if name not in ("optimizer", "scheduler")}
    losses, _ = _by_hand(said, llama(), optimizer=_muon_and_adamw)
    configured = {"deepspeed": said, "mixed_precision": "bf16", "gradient_accumulation_steps": 2}
    assert _train_two(*parts(_accelerator(**configured), apart=False), 8) == losses
    fix = r"accelerator.prepare\(model, \(muon, adamw\)"
    with pytest.raises(zf.errors.ConfigError, match=rf"given several optimizers(.|\n)*{fix}"):
        parts(_accelerator(**configured), apart=True)


def _is_loaded_to_the_bit(folder, prepared):
    parts = prepared(0)
    _train(parts, 6)
    for _ in range(2):  # the second takes the place of the first
        parts[0].save_state(folder)
    dist.barrier()  # rank 0 has removed the first
    assert [path.name for path in Path(folder, "zero_fn").glob("*-*")] == ["save-2"]
    saved, wanted = _scale(parts), _train(parts, 4)
    parts = prepared(5)
    parts[0].load_state(folder)
    assert _scale(parts) == saved
    assert _train(parts, 4) == wanted
    return parts[0], saved


def _scale(parts):
    return None if parts[0].scaler is None else parts[0].scaler.get_scale()


@on_two_ranks
def test_a_state_is_loaded_to_the_bit(folder):
    accelerator, _ = _is_loaded_to_the_bit(folder, lambda seed: _parts(_accelerator(), llama(seed)))
    dist.barrier()
    shutil.rmtree(Path(folder, "zero_fn"), ignore_errors=True)
    dist.barrier()
    with pytest.raises(zf.errors.CheckpointError, match="holds no states"):
        accelerator.load_state(folder)


@at_night
def test_a_state_of_a_config_is_loaded_to_the_bit(folder):
    """Also its rates, masters of 16-bit weights on a disk, and the scale of losses, which has moved."""
    said = _said(3, offload_optimizer={"device": "nvme", "nvme_path": folder})

    def prepared(seed):
        return _configured(said, Overflowing(llama(seed).bfloat16(), 0 if seed else 4, 1), dtype="fp16")

    _, scale = _is_loaded_to_the_bit(folder, prepared)
    assert scale not in (None, 256.0), "no step was skipped"


@at_night
def test_plain_models_are_saved_beside_transformed_ones(folder):
    """Each with its optimizer, saved and loaded together, in folders that accelerate names."""
    from accelerate.utils import ProjectConfiguration

    named = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = _accelerator(project_config=named)
    ours = accelerator.prepare(llama())
    accelerator.place = None
    plain = nn.Linear(3, 3)
    theirs = accelerator.prepare(plain)
    optimizers = accelerator.prepare(*(torch.optim.AdamW(model.parameters(), lr=0.1) for model in (theirs, ours)))
    tokens = Counting().tokens[:2]

    def step():
        accelerator.backward(ours(input_ids=tokens, labels=tokens).loss + theirs(torch.ones(1, 3)).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    accelerator.save_state()
    values = parameters(ours) | parameters(theirs)
    step()
    assert not torch.equal(plain.weight, values["weight"])
    accelerator.load_state()
    require_equal(parameters(ours) | parameters(theirs), values)
    assert list(Path(folder, "checkpoints", "checkpoint_0", "zero_fn").iterdir())
    frozen = nn.Linear(3, 3).requires_grad_(False)
    assert accelerator.prepare_model(frozen, evaluation_mode=True) is frozen


def _killed(folder):
    """What is loaded of a save that is killed before each call of the system: all of one step, or nothing."""
    accelerator = _accelerator()
    models = [accelerator.prepare(nn.Linear(2, 2)) for _ in range(2)]
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) for model in models]
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizers[0].optimizer, lambda step: float(step)))

    def at(step):
        for model in models:
            for parameter in model.parameters():
                parameter.data.fill_(step)
        schedule.scheduler.last_epoch = step

    def loaded(left):
        at(0)
        try:
            accelerator.load_state(str(left / "last"))
        except zf.errors.CheckpointError as error:
            assert {float(p.full_tensor().mean()) for model in models for p in model.parameters()} == {0.0}
            return str(error).partition(":")[0]
        steps = {float(p.full_tensor().unique()) for model in models for p in model.parameters()}
        assert steps == {schedule.scheduler.last_epoch}
        return int(schedule.scheduler.last_epoch)

    at(1)
    accelerator.save_state(f"{folder}/runs/last")
    at(2)
    lefts = left_by_a_kill(
        Path(folder, "runs"), Path(folder, "kept"), lambda: accelerator.save_state(f"{folder}/runs/last")
    )
    return [loaded(left) for left in lefts[::3]]


@pytest.mark.nightly
def test_a_save_that_is_killed_leaves_one_step_or_is_refused(prepared, tmp_path):
    (found,) = prepared(1, deadline_s=240).run(_killed, str(tmp_path))
    assert list(dict.fromkeys(found)) == [1, "A save into this folder was killed", 2]


@at_night
def test_the_state_dict_of_a_model_is_whole_on_the_main_process(folder):
    accelerator, model, *_ = parts = _parts(_accelerator(), llama(tie_word_embeddings=True))
    _train(parts, 2)
    state = accelerator.get_state_dict(model)
    assert bool(state) == accelerator.is_main_process
    how = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state, **how)
    accelerator.wait_for_everyone()
    assert torch.equal(logits_of(read(folder)), logits_of(model))


@at_night
def test_gradients_that_are_given_up_are_in_no_step():
    """What was accumulated before an exception, or before `free_memory`, is in no later step."""
    accelerator, model, _, loader, _ = _parts(_accelerator(gradient_accumulation_steps=2), llama())
    batch = next(iter(loader))
    with pytest.raises(RuntimeError, match="of the user"), accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        raise RuntimeError("of the user")
    assert all(p.grad is None for p in model.parameters())
    with accelerator.no_sync(model):
        accelerator.backward(model(**batch).loss)
    accelerator.free_memory()
    assert all(p.grad is None for p in model.parameters())
    accelerator.gradient_state._set_sync_gradients(True)
    accelerator.backward(model(**batch).loss)
    other = place()(llama())
    (other(**batch).loss / 2).backward()
    require_equal(gradients(model), gradients(other))


@at_night
def test_what_does_not_fit_is_refused(folder):
    accelerator = _accelerator()
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zf.errors.StaleError, match="built before its model was transformed"):
        accelerator.prepare(place()(model), optimizer)
    model(input_ids=Counting().tokens[:2], labels=Counting().tokens[:2]).loss.backward()
    optimizer.step()
    with pytest.raises(zf.errors.StateError, match="took steps before its model was transformed"):
        accelerator.prepare(model, optimizer)
    for place_of, message in ((lambda _: None, "returned nothing"), (lambda m: m, "that no transform has made")):
        accelerator.place = place_of
        with pytest.raises(zf.errors.StateError, match=message):
            accelerator.prepare(llama())
    accelerator = _accelerator()
    one, other = accelerator.prepare(nn.Linear(8, 8), nn.Linear(8, 8))
    accelerator.prepare(torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1))
    with pytest.raises(zf.errors.StateError, match="steps several models"):
        accelerator.save_state(folder)
    with pytest.raises(
        zf.errors.ConfigError, match=r'compute in float32, and scale no loss(.|\n)*mixed_precision="bf16"'
    ):
        _accelerator(mixed_precision="fp16")


def _threads_beside_accelerate():
    from accelerate import PartialState

    start()
    PartialState(cpu=True)
    return torch.get_num_threads()


@pytest.mark.nightly
def test_a_rank_keeps_its_threads_when_accelerate_comes(ranks):
    """It gives a rank all cores unless it is told otherwise, and sums of two threads are not those of one."""
    assert ranks(1, deadline_s=240).run(_threads_beside_accelerate) == [1]


# -- by a config -------------------------------------------------------------------------------------------------------

HOST = {"device": "cpu"}
ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
SAID = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-2, "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_max_lr": 1e-2,
    "scheduler.params.warmup_num_steps": 1, "scheduler.params.total_num_steps": 4,
}  # fmt: skip
"""What accelerate makes of `"auto"` in the program below, by hand."""


def _said(stage, **more):
    return {**zero(stage, **more), "optimizer": ADAM, "scheduler": OWN["scheduler"]}


def _configured(said, model, *, dtype="bf16", stand_ins=True, **options):
    """What a script prepares beside a config."""
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

    way = "deepspeed_plugin" if isinstance(said, DeepSpeedPlugin) else "deepspeed"
    accelerator = _accelerator(mixed_precision=dtype, gradient_accumulation_steps=2, **{way: said}, **options)
    if stand_ins:
        optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 0))
    return (accelerator, *accelerator.prepare(model, optimizer, _loader(), scheduler))


def _by_hand(said, model, dtype="bf16", optimizer=None):
    """Losses and norms of `from_deepspeed`, on the batches that accelerate deals."""
    from accelerate import Accelerator

    start()
    loader = Accelerator(cpu=True).prepare(_loader())
    dtypes = {f"{name}.enabled": name == dtype for name in ("bf16", "fp16")}
    unused = ("optimizer", "scheduler") if optimizer is not None else ()
    auto = {path: value for path, value in (SAID | dtypes).items() if not path.startswith(unused)}
    setup = zf.from_deepspeed(model, said, axis(), auto=auto, optimizer=optimizer)
    batches, losses, norms = iter(loader), [], []
    is_whole = said["zero_optimization"]["stage"] < 2  # at stages 2 and 3 each microbatch is reduced, as by DeepSpeed
    for _ in range(4):
        with zf.accumulate(setup.model) if is_whole else nullcontext():
            for _ in range(setup.accumulation_steps):
                loss = setup.model(**next(batches)).loss
                setup.scaled(loss).backward()
                losses.append(loss.item())
        norms.append(setup.step())
    if setup.reporter is not None:
        setup.reporter.close()
    return losses, [norm for norm in norms if norm is not None]


@at_night
def test_reports_end_with_the_training_and_count_on_after_a_load(folder):
    """They were never closed, and began at step 1 again. Gradients are summed, as the config says."""
    written(folder)
    said = _said(2) | {"gradient_allreduce_op": "sum"}
    reported = said | {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}
    parts = _configured(reported, read(folder))
    assert _train(parts, 4) == _by_hand(said, read(folder))[0][:4]
    parts[0].save_state(f"{folder}/state")
    parts[0].free_memory()
    assert watching.watchers == ()
    parts = _configured(reported, read(folder))
    parts[0].load_state(f"{folder}/state")
    _train(parts, 4)
    with patch.object(type(parts[0].state), "destroy_process_group"):  # the other tests need it
        parts[0].end_training()
    assert watching.watchers == ()
    dist.barrier()
    if not dist.get_rank():
        rows = list(csv.DictReader(Path(folder, "job.csv").read_text().splitlines()))
        assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
        assert {row["zero_fn/skipped_steps_total"] for row in rows} == {"0.0"}, "the first step is seen, too"


def _has_the_numbers_of_from_deepspeed(folder, said):
    written(folder, dtype=torch.bfloat16)
    losses, norms = _by_hand(said, read(folder))
    parts = _configured(said, read(folder))
    assert _train(parts) == losses
    accelerator, model, optimizer, _, scheduler = parts
    assert scheduler.get_last_lr() == [pytest.approx(0.01 / 2)], "one step of the config's rates a step"
    assert accelerator.gradient_accumulation_steps == 2
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    is_away = "offload_optimizer" in said["zero_optimization"]
    assert isinstance(optimizer.optimizer, Streamed) == is_away
    wanted = [each for pair in zip(losses[::2], losses[1::2], norms, strict=True) for each in pair]
    assert _train(_configured(said, read(folder)), max_norm=1.0) == wanted
    return losses


@on_two_ranks
def test_the_numbers_are_those_of_from_deepspeed(folder):
    _has_the_numbers_of_from_deepspeed(folder, _said(2))


@at_night
def test_the_numbers_are_those_of_from_deepspeed_wherever_a_model_rests_and_comes_from(folder):
    """In tiers; placed before; on meta; and by a plugin of accelerate. Its Muon goes by names. With adapters:
    `test_deepspeed_config.py`."""
    from accelerate.utils import DeepSpeedPlugin

    from zero_fn.integrations.transformers import placed

    disk = {"device": "nvme", "nvme_path": folder}
    muon = _said(3, offload_optimizer=HOST) | {"optimizer": ADAM | {"type": "Muon"}}
    parts = _configured(muon, llama())
    assert [group["use_muon"] for group in parts[2].param_groups] == [True, False]
    assert _train(parts) == _by_hand(muon, llama())[0]
    said = _said(3, offload_optimizer=disk, offload_param=disk)
    losses = _has_the_numbers_of_from_deepspeed(folder, said)
    with placed(said, auto={"bf16.enabled": True, "fp16.enabled": False}):
        model = read(folder)
    parts = _configured(said, model)
    assert parts[1] is model
    again = parts[0].prepare(*parts[1:])  # as after `find_executable_batch_size`
    assert all(one is other for one, other in zip(again, parts[1:], strict=True))
    assert _train(parts) == losses
    parts = _configured(said, on_meta(folder))
    zf.load_pretrained(parts[1], folder)
    assert _train(parts) == losses
    plugin = DeepSpeedPlugin(hf_ds_config=said, gradient_accumulation_steps=2, gradient_clipping=1.0)
    assert _train(_configured(plugin, read(folder))) == losses


@at_night
def test_fields_of_a_plugin_are_read():
    """Of a plugin without a file, from its arguments and from the environment; optimizers of the program."""
    from accelerate.utils import DeepSpeedPlugin

    said = {**zero(3, offload_optimizer=HOST), "gradient_clipping": 0.5, "gradient_accumulation_steps": 1}
    wanted = _train(_configured(said, llama(), stand_ins=False))
    fields = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 0.5}
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=1, zero3_save_16bit_model=True, **fields)
    parts = _configured(plugin, llama(), stand_ins=False)
    assert _train(parts) == wanted
    dtypes = {value.dtype for value in parts[0].get_state_dict(parts[1]).values()}
    assert dtypes == ({torch.bfloat16} if dist.get_rank() == 0 else set())
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }
    with patch.dict(os.environ, environment):
        parts = _configured(None, llama(), stand_ins=False)
        assert _train(parts) == wanted
    assert {value.dtype for value in parts[0].get_state_dict(parts[1]).values()} <= {torch.float32}


@at_night
def test_what_contradicts_a_config_is_refused():
    from accelerate.utils import DeepSpeedPlugin

    for ways in ({"deepspeed": zero(3)}, {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}):
        with pytest.raises(zf.errors.ConfigError, match="several ways to place"):
            _accelerator(place=place(), **ways)
    own = {"type": "AdamW", "params": {"lr": 1e-3}}
    for text, said, stand_ins in (  # of accelerate, which a program has in place of an optimizer and a scheduler
        (r"two ways to make the optimizer(.|\n)*deepspeed\.DummyOptim", {**zero(3), "optimizer": own}, False),
        ("two ways to make the scheduler", {**zero(3), "scheduler": {"type": "WarmupLR"}}, False),
        ("DummyOptim stands for the optimizer", zero(3), True),
        ("DummyScheduler stands for the scheduler", {**zero(3), "optimizer": ADAM}, True),
        ("contradicts the mixed_precision", {**_said(3), "bf16": {"enabled": False}}, True),
    ):
        with pytest.raises(zf.errors.ConfigError, match=text):
            _configured(said, llama(), stand_ins=stand_ins)
    with pytest.raises(zf.errors.ConfigError, match=r"clips gradients, and the program(.|\n)*1\.0(.|\n)*0\.5"):
        _train(_configured(_said(3), llama()), max_norm=0.5)
    with pytest.raises(zf.errors.ConfigError, match=r"train_micro_batch_size_per_gpu(.|\n)*auto"):
        _accelerator(deepspeed=zero(3)).prepare(llama())
    with pytest.raises(zf.errors.ConfigError, match="placed in another way"):
        _accelerator(deepspeed=zero(3) | {"train_micro_batch_size_per_gpu": 2}).prepare(place("zero1")(llama()))
