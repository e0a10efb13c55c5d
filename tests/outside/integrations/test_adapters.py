"""Adapters of peft over transformed models: the numbers of replicas, at every stage and tier; saved, merged, switched."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.outside.integrations.worlds import (
    Counting,
    adapted,
    at_night,
    llama,
    logits_of,
    lora,
    needs,
    numbers,
    on_two_ranks,
    place,
    read,
    require_equal,
    start,
    written,
    zero_trainer,
)
from tests.support.programs import parameters
from tests.support.ranks import axis
from tests.support.worlds import differences, mean_of_ranks, trained

_TARGETS = ["q_proj", "v_proj", "up_proj"]


def with_adapter(kind):
    """A small model with an adapter of a kind, whose values are none of its initial zeros."""
    import peft

    if kind == "one matrix frozen":
        return lora()
    configs = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, use_dora=True),
        "parameters": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"]),
        "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "lora on int8 and nf4": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS),
        "tables": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
        "head beside": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, modules_to_save=["lm_head"]),
    }
    model = llama(vocab_size=67, tie_word_embeddings=True) if kind == "tables" else llama()
    torch.manual_seed(3)
    model = peft.get_peft_model(model, configs[kind]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name and "lm_head" not in name:
                parameter.normal_(1.0 if kind == "ia3" else 0.0, 0.05)
    if kind == "lora on int8 and nf4":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_, to_nf4

        bases = {name: base for name, base in model.named_modules() if name.endswith("base_layer")}
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name in bases and "up_proj" not in name)
        for name, base in bases.items():
            if "up_proj" in name:
                base.weight = nn.Parameter(to_nf4(base.weight.detach(), 32, 16), requires_grad=False)
        model = zf.transforms.flatten_subclasses(model)
        assert {torch.int8, torch.uint8} <= {parameter.dtype for parameter in model.parameters()}
    return model


def _batch(step=0):
    tokens = Counting().tokens[4 * step + 2 * dist.get_rank() :][:2]
    return {"input_ids": tokens, "labels": tokens}


def _program(model, run, step):
    loss = model(**_batch(step)).loss
    run.backward(loss)
    return loss


def _is_trained_as_by_replicas(folder, kind):
    def found(stages, tolerance=0.0, **how):
        trial = trained(lambda: with_adapter(kind), _program, optimizer="adamw", **how)
        return differences(trial, stages=stages, tolerance=tolerance)

    disk = zf.nvme(folder)
    lines = found(("zero1", "zero2", "zero3"))
    lines += found(
        ["zero3"], 1e-5, transform=partial(zf.offload, params=disk, grads=disk, optim=disk), stream=zf.streamed
    )
    assert not lines, lines


@on_two_ranks
def test_an_adapter_is_trained_as_by_replicas(folder):
    _is_trained_as_by_replicas(folder, "lora")


@pytest.mark.parametrize(
    "kind",
    [
        *("dora", "parameters", "ia3", "prompts", "tables", "head beside"),
        pytest.param("lora on int8 and nf4", marks=needs("torchao")),
    ],
)
@at_night
def test_other_adapters_are_trained_as_by_replicas(folder, kind):
    _is_trained_as_by_replicas(folder, kind)


def _losses(model, *, is_replica):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step in range(3):
        loss = model(**_batch(step)).loss
        loss.backward()
        for parameter in model.parameters() if is_replica else ():
            if parameter.grad is not None:
                parameter.grad = mean_of_ranks(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@at_night
def test_every_element_of_an_adapter_over_a_base_that_was_read_into_shards_is_trained(folder):
    from zero_fn.integrations.transformers import placed

    written(folder)
    plain = adapted(read(folder), *_TARGETS)
    _losses(plain, is_replica=True)
    wanted = parameters(plain)
    for stage in ("zero1", "zero3"):
        with placed(place(stage)):
            base = read(folder)
        model = place(stage)(adapted(base, *_TARGETS))
        before = parameters(model)
        _losses(model, is_replica=False)
        after = parameters(model)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(after[name], wanted[name], atol=1e-5, rtol=1e-5, msg=name)
            assert bool((after[name] != before[name]).all()) == parameter.requires_grad, name


@at_night
def test_adapters_are_switched_and_merged():
    """Two adapters: switched, off, merged and taken apart again, as in the plain model."""
    import peft

    def two():
        model = with_adapter("lora")
        torch.manual_seed(5)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
        return model

    start()
    plain, ours = two(), place()(two())

    def require_same():
        assert torch.equal(logits_of(ours), logits_of(plain))
        trained = [{name for name, p in model.named_parameters() if p.requires_grad} for model in (ours, plain)]
        assert trained[0] == trained[1]

    for name in ("other", "default"):
        for model in (plain, ours):
            model.set_adapter(name)
        require_same()
        with plain.disable_adapter(), ours.disable_adapter():
            require_same()
    for change in ("merge_adapter", "unmerge_adapter"):
        with zf.unsharded(ours, writeback=True):
            getattr(ours, change)()
        getattr(plain, change)()
        require_same()


def _is_saved_alone_and_loaded(folder, kind):
    """A Trainer trains, saves the adapter alone; it is loaded into a plain base and one before a transform; resumed."""
    import peft

    options = {"save_strategy": "steps", "save_steps": 2}
    ours = zero_trainer(folder, with_adapter(kind), **options)
    wanted = numbers(ours)
    resumed = zero_trainer(folder, with_adapter(kind), **options)
    assert numbers(resumed, resume_from_checkpoint=f"{folder}/checkpoint-2") == wanted
    ours.save_model(f"{folder}/out")
    assert "model.safetensors" not in [path.name for path in Path(folder, "out").iterdir()]
    plain = peft.PeftModel.from_pretrained(llama(), f"{folder}/out")
    assert torch.equal(logits_of(plain), logits_of(ours.model))
    values = dict(plain.named_parameters())
    is_trained = {name: values[name] for name, p in ours.model.named_parameters() if p.requires_grad}
    require_equal({name: value for name, value in parameters(ours.model).items() if name in is_trained}, is_trained)
    again = place()(peft.PeftModel.from_pretrained(llama(), f"{folder}/out", is_trainable=kind != "prompts"))
    assert torch.equal(logits_of(again), logits_of(plain))


@on_two_ranks
def test_an_adapter_is_saved_alone_and_loaded(folder):
    _is_saved_alone_and_loaded(folder, "dora")


@pytest.mark.parametrize("kind", ["prompts", "head beside", "one matrix frozen"])
@at_night
def test_other_adapters_are_saved_alone_and_loaded(folder, kind):
    _is_saved_alone_and_loaded(folder, kind)


@at_night
def test_what_was_made_for_another_kind_of_model_is_refused_with_the_way(folder):
    """Checkpoints of adapters and of whole models that are taken for one another; a merge that takes modules out."""
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    zero_trainer(f"{folder}/adapters", with_adapter("lora"), **options).train()
    zero_trainer(f"{folder}/whole", llama(), **options).train()
    for model, kind, fix in (
        (llama(), "adapters", "PeftModel.from_pretrained"),
        (with_adapter("lora"), "whole", "get_peft_model"),
    ):
        with pytest.raises(zf.errors.CheckpointError, match=fix):
            zero_trainer(f"{folder}/other", model).train(resume_from_checkpoint=f"{folder}/{kind}/checkpoint-1")
    merged = place()(with_adapter("lora")).merge_and_unload()
    with pytest.raises(zf.errors.PlacementError, match=r"merge_adapter\(\)"):
        merged(**_batch())


_READ = {
    "dora": {"use_dora": True},
    "olora": {"init_lora_weights": "olora"},
    "pissa": {"init_lora_weights": "pissa"},
    "rows": {"trainable_token_indices": {"embed_tokens": [3, 5]}},
    "copies": {"modules_to_save": ["lm_head"]},
}
"""Adapters whose initial values are made of the base."""


@at_night
def test_adapters_that_are_computed_from_a_placed_base_want_it_whole():
    """They are refused over shards, and are those of replicas where the base is whole, which freezes it for good, too."""
    start()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for kind, options in _READ.items():
        wanted = _losses(adapted(llama(), "q_proj", **options), is_replica=True)
        with pytest.raises((zf.errors.PlacementError, zf.errors.ShardedAccessError), match="before the transform"):
            zf.shard_params(adapted(zf.shard_params(llama(), mesh), "q_proj", **options), mesh)
        if kind != "copies":
            base = zf.shard_params(llama(), mesh)
            with zf.unsharded(base, writeback=True):
                model = adapted(base, "q_proj", **options)
            found = _losses(zf.shard_params(model, mesh), is_replica=False)
            torch.testing.assert_close({kind: found}, {kind: wanted}, atol=1e-5, rtol=1e-5)


@at_night
def test_adapters_on_meta_are_not_drawn_as_the_model_would_draw_them():
    """Theirs begin at 0."""
    start()
    with torch.device("meta"):
        model = zf.shard_params(adapted(llama(), "q_proj"), axis())
    with pytest.raises(zf.errors.StateError, match=r"module +: Linear \(base_model.*lora_B"):
        zf.materialize(model, "cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
