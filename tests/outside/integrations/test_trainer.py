"""The Trainer of transformers over transformed models: the numbers of DDP, files that anybody reads, runs that go on."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.outside.integrations.architectures import inputs_of, model_named
from tests.outside.integrations.worlds import (
    COMMON,
    Counting,
    at_night,
    gpt2,
    import_all,
    llama,
    logits_of,
    lora,
    mixtral,
    numbers,
    on_two_ranks,
    place,
    require_close,
    require_equal,
    start,
    stock_trainer,
    zero_trainer,
)
from tests.support.programs import parameters
from zero_fn.integrations.model_placement import place_module
from zero_fn.owners import ByOwner
from zero_fn.values import watching
from zero_fn.values.chained_optimizer import as_one, members_of

# -- of every day ----------------------------------------------------------------------------------------------------


def _has_the_numbers_of_replicas(folder, build, stage="zero3", tolerance=2e-5, **options):
    theirs = {name: value for name, value in options.items() if not name.startswith("torch_compile")}
    wanted = numbers(stock_trainer(folder, build(), **theirs))
    ours = zero_trainer(folder, build(), stage, **options)
    require_close(numbers(ours), wanted, tolerance)
    assert zf.inspect.is_transformed(ours.model)
    assert hasattr(ours.model_wrapped, "_orig_mod") == ("torch_compile" in options)


@on_two_ranks
def test_a_trainer_has_the_numbers_of_replicas(folder):
    _has_the_numbers_of_replicas(folder, llama, eval_strategy="steps", eval_steps=2)


def _is_resumed_and_read(folder, build, stage="zero3"):
    """Two of four steps again, from the checkpoint; and the files of the model are what it holds, on every rank at once. With
    adapters: `test_adapters.py`; at another stage: below; on other ranks: `promises/test_resume.py`."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    ours = zero_trainer(folder, build(), stage, **options)
    wanted = numbers(ours)
    values = parameters(ours.model)
    with patch("zero_fn.integrations.model_files.whole_state", side_effect=AssertionError("the model is whole")):
        for _ in range(2):  # the second takes the place of the first
            ours.save_model(f"{folder}/out")
    files = {path.name for path in Path(folder, "out").iterdir()}
    assert files >= {"model.safetensors", "config.json", "training_args.bin"}
    assert torch.equal(logits_of(type(ours.model).from_pretrained(f"{folder}/out")), logits_of(ours.model))
    again = zero_trainer(folder, build(), stage, **options)
    assert numbers(again, resume_from_checkpoint=f"{folder}/checkpoint-2") == wanted
    require_equal(parameters(again.model), values)


@on_two_ranks
def test_a_run_is_resumed_to_the_bit_and_its_model_read_by_from_pretrained(folder):
    _is_resumed_and_read(folder, gpt2)


# -- at night --------------------------------------------------------------------------------------------------------

CASES = {
    "zero1": {"stage": "zero1"},
    "zero2": {"stage": "zero2"},
    "on a disk": {"stage": "disk"},
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 3},
    "bf16": {"bf16": True, "tolerance": 2e-3},
    "checkpointing": {"activation_checkpointing": True},
    "gpt2": {"build": gpt2},
    "lora": {"build": lora},
    "mixtral": {"build": mixtral},
    "without clipping": {"max_grad_norm": 0.0},
    "compiled": {"max_steps": 2, "torch_compile": True, "torch_compile_backend": "eager"},
    "noise on embeddings": {"neftune_noise_alpha": 5.0, "max_steps": 2},
    "smoothed labels": {"label_smoothing_factor": 0.1, "max_steps": 2},
    "epochs of uneven steps": {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3},
}


@pytest.mark.parametrize("case", CASES)
@at_night
def test_a_trainer_has_the_numbers_of_replicas_with_other_options(folder, case):
    _has_the_numbers_of_replicas(folder, **{"build": llama} | CASES[case])


@pytest.mark.parametrize(("build", "stage"), [(llama, "disk"), (mixtral, "zero3")])
@at_night
def test_a_run_of_other_models_and_tiers_is_resumed_and_read(folder, build, stage):
    _is_resumed_and_read(folder, build, stage)


@at_night
def test_optimizers_of_users_follow_or_are_refused(folder):
    """The model that was transformed by the user, an optimizer built before the model was placed, and a stale one."""

    def given(model):
        return {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None)}

    plain = llama()
    wanted = numbers(stock_trainer(folder, plain, given(plain)))
    model = llama()
    require_close(numbers(zero_trainer(folder, model, given=given(model))), wanted)
    with patch.object(nn.Module, "to", side_effect=AssertionError("moved as a whole")):
        zero_trainer(folder, llama())
    model = place()(llama())
    require_close(numbers(zero_trainer(folder, model, given={"place": None} | given(model))), wanted)
    plain = llama()
    stale = given(plain)
    with pytest.raises(zf.errors.StaleError, match="built before its model was transformed"):
        zero_trainer(folder, place()(plain), given={"place": None} | stale)


@at_night
def test_what_cannot_work_is_refused(folder):
    from zero_fn.integrations.transformers import _refuse_arguments

    with pytest.raises(zf.errors.StateError, match="given a plain model"):
        zero_trainer(folder, llama(), given={"place": None})
    with pytest.raises(zf.errors.StateError, match="no transform has made"):
        zero_trainer(folder, llama(), given={"place": lambda model: model})
    with pytest.raises(zf.errors.ConfigError, match="auto_find_batch_size"):
        zero_trainer(folder, llama(), auto_find_batch_size=True)
    with pytest.raises(zf.errors.ConfigError, match=r"compute in float32, and scale no loss(.|\n)*bf16=True"):
        zero_trainer(folder, llama(), fp16=True)
    several = zero_trainer(folder, llama()).args
    several._n_gpu = 2
    with pytest.raises(zf.errors.ConfigError, match="several devices for one process"):
        _refuse_arguments(several)
    zero_trainer(folder, llama(), save_strategy="steps", save_steps=2, save_only_model=True).train()
    with pytest.raises(zf.errors.CheckpointError, match="holds no states"):
        zero_trainer(folder, llama()).train(resume_from_checkpoint=f"{folder}/checkpoint-2")


@pytest.mark.parametrize("case", ["Adafactor by its name", "Muon and AdamW, states on the host"])
@at_night
def test_optimizers_of_whole_tensors_have_the_numbers_of_replicas_and_go_on(folder, case):
    """By a name in the arguments, and given, with a `finish` of its own; saved, and resumed at another stage."""
    saving = {"optim": "adafactor", "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0}
    is_given = "Muon" in case

    def given(model, *, is_one):
        if not is_given:
            return {}
        hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
        two = torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=0.01)
        return {"optimizers": (as_one(two) if is_one else two, None)}  # a stock Trainer takes one

    def ours(stage):
        model = llama()
        finish = {"finish": lambda optimizer: zf.streamed(zf.by_owner(optimizer), zf.cpu())} if is_given else {}
        return zero_trainer(f"{folder}/ours", model, stage, given(model, is_one=False) | finish, **saving)

    plain = llama()
    wanted = numbers(stock_trainer(f"{folder}/theirs", plain, given(plain, is_one=True), **saving))
    trainer = ours("zero3")
    require_close(numbers(trainer), wanted)
    members = members_of(trainer.optimizer.optimizer)
    assert isinstance(members[0], ByOwner)
    if is_given:
        assert all(isinstance(each, ByOwner) and each.takes_from_tiers for each in members)
    half = len(wanted) // 2
    found = numbers(ours("zero1"), resume_from_checkpoint=f"{folder}/ours/checkpoint-2")
    require_close(found[-half:], wanted[-half:])


@at_night
def test_a_seq2seq_trainer_generates_on_all_ranks(folder):
    """Its evaluation generates, between steps too, and says itself whether ranks must wait for one another."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from zero_fn.integrations.transformers import ZeroTrainerMixin

    class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
        pass

    def t5():
        return model_named("t5", seed=0)

    start()
    options = {"max_steps": 2, "predict_with_generate": True, "generation_max_length": 6}
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    args = Seq2SeqTrainingArguments(output_dir=folder, **(COMMON | options))
    data = {"train_dataset": Counting(), "eval_dataset": Counting(8)}
    plain = Seq2SeqTrainer(model=t5(), args=args, **data)
    ours = ZeroSeq2SeqTrainer(model=t5(), args=args, place=place(), **data)
    require_close(numbers(ours), numbers(plain))
    asked = []
    own = ours.model.generate
    ours.model.generate = lambda *args, **options: asked.append(options["synced_gpus"]) or own(*args, **options)
    found, wanted = (trainer.predict(Counting(7)) for trainer in (ours, plain))  # ranks have four and three samples
    assert (found.predictions == wanted.predictions).all()
    assert found.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], abs=1e-5)
    assert asked and all(asked)


@at_night
def test_ranks_skip_no_layers_at_random():
    """A model that skips layers at random, on ranks with random numbers of their own."""
    start()
    model, _ = place_module(place(), model_named("wav2vec2", seed=0, layerdrop=0.5, num_hidden_layers=4))
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(6):  # a rank that skipped a layer would wait for its peer in another
        model(**inputs_of("wav2vec2", 0)).loss.backward()
        assert all(parameter.grad is not None for parameter in model.wav2vec2.encoder.layers.parameters())
        model.zero_grad()


@at_night
def test_callbacks_stop_a_run_where_they_stop_that_of_replicas(folder):
    """Evaluation before training, callbacks that stop, batches by length; then the best model is there again."""
    from transformers import EarlyStoppingCallback

    options = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0,
        "load_best_model_at_end": True, "max_steps": 8, "train_sampling_strategy": "group_by_length",
    }  # fmt: skip
    stopped = []
    for make in (stock_trainer, zero_trainer):
        given = {"callbacks": [EarlyStoppingCallback(2)]}
        trainer = make(f"{folder}/{make.__name__}", llama(), given=given, **options)
        if make is zero_trainer:  # the Trainer would train a model that it has evaluated before without DDP
            assert trainer.evaluate()["eval_loss"] > 4
        stopped.append(numbers(trainer))
        assert trainer.state.global_step < 8
        losses = [value for name, value in stopped[-1] if name == "eval_loss"]
        assert min(losses) < losses[-1], "the last is not the best, or the test says nothing"
        assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)
    require_close(stopped[1], stopped[0])


def _over_two_axes(folder):
    """HSDP; and tensor parallelism, whose ranks would get different samples: refused before anything is trained."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from zero_fn.integrations.accelerate import ZeroAccelerator

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    wanted = numbers(stock_trainer(folder, llama(), max_steps=2))
    given = {"place": lambda model: zf.hybrid(model, mesh, shard="inner", replicate="outer")}
    require_close(numbers(zero_trainer(folder, llama(), given=given, max_steps=2)), wanted)

    def cut(model):
        plan = {"model.layers.*.mlp.up_proj": ColwiseParallel(), "model.layers.*.mlp.gate_proj": ColwiseParallel()}
        plan["model.layers.*.mlp.down_proj"] = RowwiseParallel()
        return zf.shard_params(parallelize_module(model, mesh["inner"], plan), mesh["outer"])

    for place_it in (cut, lambda model: zf.offload(model, params=zf.cpu())):
        with pytest.raises(zf.errors.MeshError, match="must share them"):
            zero_trainer(folder, llama(), given={"place": place_it})
    start()
    accelerator = ZeroAccelerator(cpu=True, place=cut)
    with pytest.raises(zf.errors.MeshError, match="must share them"):
        accelerator.prepare(llama(), torch.utils.data.DataLoader(Counting(), batch_size=2))
    accelerator.prepare(llama())  # with a loader of the user's own


@pytest.mark.nightly
def test_two_data_axes_are_trained_and_model_axes_refused(prepared, tmp_path):
    case = prepared(4, deadline_s=240)
    case.run(import_all)
    case.run(_over_two_axes, str(tmp_path))


@at_night
def test_numbers_of_metrics_are_in_what_the_trainer_logs(folder):
    options = {"logging_steps": 2, "report_to": "tensorboard", "eval_strategy": "steps", "eval_steps": 2}
    trainer = zero_trainer(folder, llama(), given={"metrics": {"on_spike": "report"}}, **options)
    trainer.train()
    losses = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["zero_fn/steps_total"] for row in losses] == [2, 4]
    assert all(row["zero_fn/step_seconds/mean"] > 0 and row["zero_fn/sent_bytes_total/dp"] > 0 for row in losses)
    assert not any("zero_fn/steps_total" in row for row in trainer.state.log_history if "eval_loss" in row)
    assert watching.watchers == ()
    if dist.get_rank() == 0:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        files = Path(folder).rglob("events.*")
        tags = [tag for path in files for tag in EventAccumulator(str(path)).Reload().scalars.Keys()]
        assert "train/zero_fn/step_seconds/mean" in tags
