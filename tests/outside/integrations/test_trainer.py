"""The Trainer of transformers over transformed models: the numbers of DDP, files that anybody reads, runs that go on."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.outside.integrations.worlds import (
    COMMON,
    Counting,
    arguments,
    gpt2,
    import_all,
    llama,
    lora,
    mixtral,
    numbers,
    on_two_ranks,
    place,
    require_close,
    start,
    tied,
    zero_trainer,
)
from zero_fn.integrations.placing import place_module
from zero_fn.values import watching
from zero_fn.values.chained_optimizer import as_one, members_of

CASES = {
    "zero3": (llama, "zero3", {}, 2e-5),
    "zero1": (llama, "zero1", {}, 2e-5),
    "accumulation": (llama, "zero3", {"gradient_accumulation_steps": 2, "max_steps": 3}, 2e-5),
    "bf16": (llama, "zero3", {"bf16": True}, 2e-3),
    "checkpointing": (llama, "zero3", {"activation_checkpointing": True}, 2e-5),
    "evaluation": (llama, "zero2", {"eval_strategy": "steps", "eval_steps": 2}, 2e-5),
    "gpt2": (gpt2, "zero3", {}, 2e-5),
    "lora": (lora, "zero3", {}, 2e-5),
    "without clipping": (llama, "zero3", {"max_grad_norm": 0.0}, 2e-5),
    "mixtral": (mixtral, "zero3", {}, 2e-5),
    "compiled": (llama, "zero3", {"max_steps": 2, "torch_compile": True, "torch_compile_backend": "eager"}, 2e-5),
    "on a disk": (llama, "disk", {}, 2e-5),
    "noise on embeddings": (llama, "zero3", {"neftune_noise_alpha": 5.0, "max_steps": 2}, 2e-5),
    "smoothed labels": (llama, "zero3", {"label_smoothing_factor": 0.1, "max_steps": 2}, 2e-5),
    "epochs of uneven steps": (
        llama,
        "zero3",
        {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3},
        2e-5,
    ),
}


@pytest.mark.parametrize("case", CASES)
@on_two_ranks
def test_a_trainer_has_the_numbers_of_replicas(folder, case):
    from transformers import Trainer

    start()
    build, stage, options, tolerance = CASES[case]
    data = {"train_dataset": Counting(), "eval_dataset": Counting(8)}
    theirs = {name: value for name, value in options.items() if not name.startswith("torch_compile")}
    wanted = numbers(Trainer(model=build(), args=arguments(folder, **theirs), **data))
    ours = zero_trainer(folder, build, stage, **options)
    require_close(numbers(ours), wanted, tolerance)
    assert zf.is_transformed(ours.model)
    assert hasattr(ours.model_wrapped, "_orig_mod") == (case == "compiled")


@on_two_ranks
def test_optimizers_of_users_follow_or_are_refused(folder):
    """The model that was transformed by the user, an optimizer built before the model was placed, and a stale one."""
    from transformers import Trainer

    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    data = {"train_dataset": Counting()}

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    plain = llama()
    wanted = numbers(Trainer(model=plain, args=arguments(folder), optimizers=(sgd(plain), None), **data))
    model = llama()
    ours = ZeroTrainer(model=model, args=arguments(folder), optimizers=(sgd(model), None), place=place(), **data)
    require_close(numbers(ours), wanted)
    with patch.object(nn.Module, "to", side_effect=AssertionError("moved as a whole")):
        ZeroTrainer(model=llama(), args=arguments(folder), place=place(), **data)
    model = place()(llama())
    ours = ZeroTrainer(model=model, args=arguments(folder), optimizers=(sgd(model), None), **data)
    require_close(numbers(ours), wanted)
    with pytest.raises(zf.StaleError, match="built before its model was transformed"):
        plain = llama()
        stale = sgd(plain)
        ZeroTrainer(model=place()(plain), args=arguments(folder), optimizers=(stale, None), **data)


@on_two_ranks
def test_what_cannot_work_is_refused(folder):
    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    with pytest.raises(zf.StateError, match="given a plain model"):
        ZeroTrainer(model=llama(), args=arguments(folder), train_dataset=Counting())
    with pytest.raises(zf.StateError, match="no transform has made"):
        ZeroTrainer(model=llama(), args=arguments(folder), train_dataset=Counting(), place=lambda model: model)
    with pytest.raises(zf.ConfigError, match="auto_find_batch_size"):
        ZeroTrainer(
            model=llama(), args=arguments(folder, auto_find_batch_size=True), train_dataset=Counting(), place=place()
        )
    several = ZeroTrainer(model=llama(), args=arguments(folder), train_dataset=Counting(), place=place())
    several.args._n_gpu = 2
    from zero_fn.integrations.transformers import _refuse_arguments

    with pytest.raises(zf.ConfigError, match="several devices for one process"):
        _refuse_arguments(several.args)


WHOLE = {
    "adafactor": "adafactor",
    "adafactor, given": None,
    "adafactor, states on the host": "adafactor",
    "Muon and AdamW, given": None,
    "Muon and AdamW, states on the host": None,
}


def _given(case, model, *, is_one):
    """The optimizers of a user, over a plain model; a stock Trainer takes them as one."""
    if case.startswith("adafactor"):
        return torch.optim.Adafactor(model.parameters(), lr=0.01)
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    two = torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=0.01)
    return as_one(two) if is_one else two


@pytest.mark.parametrize("case", WHOLE)
@on_two_ranks
def test_an_optimizer_of_whole_tensors_has_the_numbers_of_replicas_and_goes_on(folder, case):
    """By its name in the arguments, given, and with a `finish` of its own; saved, and resumed at another stage."""
    from transformers import Trainer

    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    saving = {"optim": "adafactor", "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0}

    def trainer(kind, stage, path):
        options = {} if kind is Trainer else {"place": place(stage)}
        if kind is ZeroTrainer and case.endswith("host"):
            options["finish"] = lambda optimizer: zf.streamed(zf.by_owner(optimizer), zf.cpu())
        model = llama()
        if WHOLE[case] is None:
            options["optimizers"] = _given(case, model, is_one=kind is Trainer), None
        return kind(model=model, args=arguments(path, **saving), train_dataset=Counting(), **options)

    wanted = numbers(trainer(Trainer, "", f"{folder}/theirs"))
    ours = trainer(ZeroTrainer, "zero3", f"{folder}/ours")
    require_close(numbers(ours), wanted)
    members = members_of(ours.optimizer.optimizer)
    assert isinstance(members[0], zf.ByOwner)
    if case.endswith("host"):
        assert all(isinstance(each, zf.ByOwner) and each.takes_from_tiers for each in members)
    other = trainer(ZeroTrainer, "zero1", f"{folder}/ours")
    require_close(
        numbers(other, resume_from_checkpoint=f"{folder}/ours/checkpoint-2")[-len(wanted) // 2 :],
        wanted[-len(wanted) // 2 :],
    )


@on_two_ranks
def test_a_seq2seq_trainer_generates_on_all_ranks(folder):
    """Its evaluation generates, and says itself whether ranks must wait for one another."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from zero_fn.integrations.transformers import ZeroTrainerMixin

    class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
        pass

    def t5():
        torch.manual_seed(0)
        return T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
        )

    start()
    options = {"max_steps": 2, "predict_with_generate": True, "generation_max_length": 6}
    args = Seq2SeqTrainingArguments(output_dir=folder, **(COMMON | options))
    data = {"train_dataset": Counting(), "eval_dataset": Counting(8)}
    plain = Seq2SeqTrainer(model=t5(), args=args, **data)
    ours = ZeroSeq2SeqTrainer(model=t5(), args=args, place=place(), **data)
    require_close(numbers(ours), numbers(plain))
    asked = []
    own = ours.model.generate
    ours.model.generate = lambda *args, **options: asked.append(options["synced_gpus"]) or own(*args, **options)
    found, wanted = (
        trainer.predict(Counting(7)) for trainer in (ours, plain)
    )  # of seven samples ranks have four and three
    assert (found.predictions == wanted.predictions).all()
    assert found.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], abs=1e-5)
    assert asked and all(asked)


@on_two_ranks
def test_ranks_skip_no_layers_at_random():
    """A model that skips layers at random, on ranks with random numbers of their own."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    start()
    heads = {"num_attention_heads": 2, "num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 16}
    front = {"conv_dim": (16,), "conv_stride": (2,), "conv_kernel": (4,), "num_conv_pos_embeddings": 4}
    config = Wav2Vec2Config(layerdrop=0.5, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, **heads, **front)
    torch.manual_seed(0)
    model, _ = place_module(place("zero3"), Wav2Vec2Model(config).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(6):
        loss = model(torch.ones(2, 64)).last_hidden_state.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@on_two_ranks
def test_callbacks_stop_a_run_where_they_stop_that_of_replicas(folder):
    """Evaluation before training, callbacks that stop, batches by length; then the best model is there again."""
    from transformers import EarlyStoppingCallback, Trainer

    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1.0,
        "load_best_model_at_end": True, "max_steps": 8, "train_sampling_strategy": "group_by_length",
    }  # fmt: skip
    stopped = []
    for kind, more in ((Trainer, {}), (ZeroTrainer, {"place": place()})):
        args = arguments(f"{folder}/{kind.__name__}", **options)
        callbacks = [EarlyStoppingCallback(2)]
        data = {"train_dataset": Counting(), "eval_dataset": Counting(8)}
        trainer = kind(model=llama(), args=args, callbacks=callbacks, **data, **more)
        if kind is ZeroTrainer:  # the Trainer would train a model that it has evaluated before without DDP
            assert trainer.evaluate()["eval_loss"] > 4
        stopped.append(numbers(trainer))
        assert trainer.state.global_step < 8
        losses = [value for name, value in stopped[-1] if name == "eval_loss"]
        assert min(losses) < losses[-1], "the last is not the best, or the test says nothing"
        assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)
    require_close(stopped[1], stopped[0])


def _over_two_axes(folder):
    """HSDP; and tensor parallelism, whose ranks would get different samples: refused before anything is trained."""
    from accelerate import Accelerator
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import Trainer

    from zero_fn.integrations.accelerate import ZeroAccelerator
    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    data, args = {"train_dataset": Counting()}, arguments(folder, max_steps=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    wanted = numbers(Trainer(model=llama(), args=args, **data))
    hybrid = ZeroTrainer(
        model=llama(), args=args, place=lambda m: zf.hybrid(m, mesh, shard="inner", replicate="outer"), **data
    )
    require_close(numbers(hybrid), wanted)

    def cut(model):
        plan = {"model.layers.*.mlp.up_proj": ColwiseParallel(), "model.layers.*.mlp.gate_proj": ColwiseParallel()}
        plan["model.layers.*.mlp.down_proj"] = RowwiseParallel()
        return zf.zero3(parallelize_module(model, mesh["inner"], plan), mesh["outer"])

    with pytest.raises(zf.MeshError, match="must share them"):
        ZeroTrainer(model=llama(), args=args, place=cut, **data)
    with pytest.raises(zf.MeshError, match="must share them"):
        ZeroTrainer(model=llama(), args=args, place=lambda model: zf.offload(model, params=zf.cpu()), **data)
    start()
    accelerator = ZeroAccelerator(cpu=True, place=cut)
    assert isinstance(accelerator, Accelerator)
    with pytest.raises(zf.MeshError, match="must share them"):
        accelerator.prepare(llama(), torch.utils.data.DataLoader(Counting(), batch_size=2))
    accelerator.prepare(llama())  # with a loader of the user's own


def test_two_data_axes_are_trained_and_model_axes_refused(prepared, tmp_path):
    prepared(4, deadline_s=240).run(import_all)
    prepared(4, deadline_s=240).run(_over_two_axes, str(tmp_path))


@pytest.mark.parametrize(("build", "stage"), [(llama, "disk"), (gpt2, "zero3"), (mixtral, "zero3")])
@on_two_ranks
def test_a_run_is_resumed_to_the_bit_and_its_model_read_by_from_pretrained(folder, build, stage):
    """Two of four steps again, from the checkpoint; and the files of the model are what it holds, on every rank at once. With
    adapters: `test_adapters.py`; at other stages: below."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    ours = zero_trainer(folder, build, stage, **options)
    wanted = numbers(ours)
    values = {name: p.full_tensor() for name, p in ours.model.named_parameters()}
    with patch("zero_fn.integrations.transformers.whole_state", side_effect=AssertionError("the model is whole")):
        for _ in range(2):  # the second takes the place of the first
            ours.save_model(f"{folder}/out")
    files = {path.name for path in Path(folder, "out").iterdir()}
    assert files >= {"model.safetensors", "config.json", "training_args.bin"}
    loaded = type(ours.model).from_pretrained(f"{folder}/out")
    tokens = Counting().tokens[:2]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, ours.model.eval()(input_ids=tokens).logits)
    again = zero_trainer(folder, build, stage, **options)
    assert numbers(again, resume_from_checkpoint=f"{folder}/checkpoint-2") == wanted
    assert all(torch.equal(p.full_tensor(), values[name]) for name, p in again.model.named_parameters())


def _half(folder, stage, microbatches, **resumed):
    batch = 4 // (microbatches * torch.distributed.get_world_size())
    options = {"gradient_accumulation_steps": microbatches, "per_device_train_batch_size": batch}
    saves = {} if resumed else {"save_strategy": "steps", "save_steps": 2}
    return numbers(zero_trainer(folder, llama, stage, **options, **saves), **resumed)


def test_a_run_resumes_on_other_ranks_and_at_another_stage(prepared, tmp_path):
    wanted = prepared(2, deadline_s=240).run(_half, str(tmp_path), "zero3", 1)[0]
    for n, stage, microbatches in ((2, "zero2", 2), (1, "zero1", 1), (1, "zero3", 2)):
        prepared(n, deadline_s=240).run(import_all)
        again = {"resume_from_checkpoint": f"{tmp_path}/checkpoint-2"}
        require_close(prepared(n, deadline_s=240).run(_half, str(tmp_path), stage, microbatches, **again)[0], wanted)


@on_two_ranks
def test_who_saves_tensors_by_their_memory_is_told_how_to_save(folder):
    """Whoever writes a file from the memory of each tensor is told what to call; and that works."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers import Trainer

    model = zero_trainer(folder, llama, "zero3").model
    ways = {
        "safetensors": lambda: save_file(model.state_dict(), f"{folder}/weights"),
        "transformers": lambda: model.save_pretrained(folder),
        "a plain Trainer": lambda: Trainer(model=model, args=arguments(folder)).save_model(),
        "an attribute": lambda: model.lm_head.weight.storage(),
    }
    for way in ways.values():
        if torch.distributed.get_rank() == 0:
            with pytest.raises(zf.ShardedAccessError, match="no memory that a file could be written from"):
                way()
    torch.distributed.barrier()
    model = place()(tied())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=dict(whole))  # which it empties
        loaded = type(model).from_pretrained(f"{folder}/whole")
        assert all(torch.equal(value, tied().state_dict()[name]) for name, value in loaded.state_dict().items())
    assert torch.nn.Linear(2, 2).weight.storage().size() == 4


@on_two_ranks
def test_a_checkpoint_without_states_is_not_resumed_in_silence(folder):
    ours = zero_trainer(folder, llama, "zero3", **{"save_strategy": "steps", "save_steps": 2, "save_only_model": True})
    ours.train()
    again = zero_trainer(folder, llama, "zero3")
    with pytest.raises(zf.CheckpointError, match="holds no states"):
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")


@on_two_ranks
def test_numbers_of_metrics_are_in_what_the_trainer_logs(folder):
    from zero_fn.integrations.transformers import ZeroTrainer

    start()
    args = arguments(folder, logging_steps=2, report_to="tensorboard", eval_strategy="steps", eval_steps=2)
    data = {"train_dataset": Counting(), "eval_dataset": Counting(8)}
    trainer = ZeroTrainer(model=llama(), args=args, place=place(), metrics={"on_spike": "report"}, **data)
    trainer.train()
    losses = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["zero_fn/steps_total"] for row in losses] == [2, 4]
    assert all(row["zero_fn/step_seconds/mean"] > 0 and row["zero_fn/sent_bytes_total/dp"] > 0 for row in losses)
    assert not any("zero_fn/steps_total" in row for row in trainer.state.log_history if "eval_loss" in row)
    assert watching.watchers == ()
    if dist.get_rank() == 0:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        tags = [
            tag
            for path in Path(folder).rglob("events.*")
            for tag in EventAccumulator(str(path)).Reload().scalars.Keys()
        ]
        assert "train/zero_fn/step_seconds/mean" in tags
