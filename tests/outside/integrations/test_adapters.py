"""Adapters of peft over transformed models: the numbers of replicas, at every stage and tier; saved, merged, switched."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf
from tests.outside.integrations.worlds import (
    STAGES,
    Counting,
    adapted,
    llama,
    lora,
    needs,
    numbers,
    on_a_disk,
    on_two_ranks,
    place,
    read,
    start,
    written,
    zero_trainer,
)
from tests.support.ranks import axis
from tests.support.wholes import full

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
        model = zf.flatten_subclasses(model)
        assert {torch.int8, torch.uint8} <= {parameter.dtype for parameter in model.parameters()}
    return model


def _steps(model, optimizer, *, averaged):
    tokens = Counting(8).tokens[2 * dist.get_rank() :][:2]
    found = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if averaged:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "kind",
    [
        *("lora", "dora", "parameters", "ia3", "prompts", "tables", "head beside"),
        pytest.param("lora on int8 and nf4", marks=needs("torchao")),
    ],
)
@on_two_ranks
def test_an_adapter_is_trained_as_by_replicas(folder, kind):
    def adam(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    start()
    plain = with_adapter(kind)
    wanted = _steps(plain, adam(plain), averaged=True)
    ways = {**{stage: place(stage) for stage in STAGES}, "on a disk": on_a_disk(folder)}
    for way, transform in ways.items():
        model = transform(with_adapter(kind))
        optimizer = adam(model)
        found = _steps(model, zf.streamed(optimizer) if way == "on a disk" else optimizer, averaged=False)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, msg=lambda text, way=way: f"{way}: {text}")


@on_two_ranks
def test_every_element_of_an_adapter_over_a_base_that_was_read_into_shards_is_trained(folder):
    from zero_fn.integrations.transformers import placed

    written(folder)
    plain, values = adapted(read(folder), *_TARGETS), []
    for stage in (None, "zero1", "zero3"):
        if stage is None:
            model = plain
        else:
            with placed(place(stage)):
                base = read(folder)
            model = place(stage)(adapted(base, *_TARGETS))
        before = [full(p).clone() for p in model.parameters()]
        _steps(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), averaged=stage is None)
        values.append([full(p) for p in model.parameters()])
        for (name, parameter), old, new, wanted in zip(
            model.named_parameters(), before, values[-1], values[0], strict=True
        ):
            torch.testing.assert_close(new, wanted, atol=1e-5, rtol=1e-5, msg=name)
            assert bool((new != old).all()) == parameter.requires_grad, name


def _logits(model):
    with torch.no_grad():
        logits = model(input_ids=Counting(4).tokens[:2]).logits
    return logits


@on_two_ranks
def test_adapters_are_switched_and_merged():
    """Two adapters: switched, off, merged and taken apart again, as in the plain model."""
    import peft

    def two():
        model = with_adapter("lora")
        torch.manual_seed(5)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
        return model.eval()

    start()
    plain, ours = two(), place()(two())
    for model in (plain, ours):
        model.set_adapter("other")
    assert torch.equal(_logits(ours), _logits(plain))
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == {
        n for n, p in plain.named_parameters() if p.requires_grad
    }
    with plain.disable_adapter(), ours.disable_adapter():
        assert torch.equal(_logits(ours), _logits(plain))
    for model in (plain, ours):
        model.set_adapter("default")
    assert torch.equal(_logits(ours), _logits(plain))
    with zf.unsharded(ours, writeback=True):
        ours.merge_adapter()
    plain.merge_adapter()
    assert torch.equal(_logits(ours), _logits(plain))
    with zf.unsharded(ours, writeback=True):
        ours.unmerge_adapter()
    plain.unmerge_adapter()
    assert torch.equal(_logits(ours), _logits(plain))


@pytest.mark.parametrize("kind", ["dora", "prompts", "head beside", "one matrix frozen"])
@on_two_ranks
def test_an_adapter_is_saved_alone_and_loaded(folder, kind):
    """A Trainer trains, saves the adapter alone; it is loaded into a plain base and one before a transform; resumed."""
    import peft

    options = {"save_strategy": "steps", "save_steps": 2}
    ours = zero_trainer(folder, lambda: with_adapter(kind), "zero3", **options)
    trained = numbers(ours)
    resumed = zero_trainer(folder, lambda: with_adapter(kind), "zero3", **options)
    assert numbers(resumed, resume_from_checkpoint=f"{folder}/checkpoint-2") == trained
    ours.save_model(f"{folder}/out")
    assert "model.safetensors" not in [path.name for path in Path(folder, "out").iterdir()]
    wanted = _logits(ours.model.eval())
    plain = peft.PeftModel.from_pretrained(llama(), f"{folder}/out").eval()
    assert torch.equal(_logits(plain), wanted)
    values = dict(plain.named_parameters())
    assert all(
        torch.equal(p.full_tensor(), values[name]) for name, p in ours.model.named_parameters() if p.requires_grad
    )
    again = place()(peft.PeftModel.from_pretrained(llama(), f"{folder}/out", is_trainable=kind != "prompts")).eval()
    assert torch.equal(_logits(again), wanted)


@on_two_ranks
def test_what_was_made_for_another_kind_of_model_is_refused_with_the_way(folder):
    """Checkpoints of adapters and of whole models that are taken for one another; a merge that takes modules out."""
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}

    def trainer(kind, build):
        return zero_trainer(f"{folder}/{kind}", build, "zero3", **options)

    numbers(trainer("adapters", lambda: with_adapter("lora")))
    numbers(trainer("whole", llama))
    for build, kind, fix in (
        (llama, "adapters", "PeftModel.from_pretrained"),
        (lambda: with_adapter("lora"), "whole", "get_peft_model"),
    ):
        with pytest.raises(zf.CheckpointError, match=fix):
            trainer("other", build).train(resume_from_checkpoint=f"{folder}/{kind}/checkpoint-1")
    merged = place()(with_adapter("lora")).merge_and_unload()
    with pytest.raises(zf.PlacementError, match=r"merge_adapter\(\)"):
        merged(input_ids=Counting(4).tokens)


_READ = {
    "dora": {"use_dora": True},
    "olora": {"init_lora_weights": "olora"},
    "pissa": {"init_lora_weights": "pissa"},
    "rows": {"trainable_token_indices": {"embed_tokens": [3, 5]}},
    "copies": {"modules_to_save": ["lm_head"]},
}
"""Adapters whose initial values are made of the base."""


@on_two_ranks
def test_adapters_that_are_computed_from_a_placed_base_want_it_whole():
    """They are refused over shards, and are those of replicas where the base is whole, which freezes it for good, too."""
    start()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))

    def adapters(model, kind):
        return adapted(model, "q_proj", **_READ[kind])

    def trained(model, *, averaged):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return _steps(model, optimizer, averaged=averaged)

    for kind in _READ:
        wanted = trained(adapters(llama(), kind), averaged=True)
        with pytest.raises((zf.PlacementError, zf.ShardedAccessError), match="before the transform"):
            zf.zero3(adapters(zf.zero3(llama(), mesh), kind), mesh)
        if kind != "copies":
            base = zf.zero3(llama(), mesh)
            with zf.unsharded(base, writeback=True):
                model = adapters(base, kind)
            found = trained(zf.zero3(model, mesh), averaged=False)
            torch.testing.assert_close({kind: found}, {kind: wanted}, atol=1e-5, rtol=1e-5)


@on_two_ranks
def test_adapters_on_meta_are_not_drawn_as_the_model_would_draw_them():
    """Theirs begin at 0."""
    start()
    with torch.device("meta"):
        model = zf.zero3(adapted(llama(), "q_proj"), axis())
    with pytest.raises(zf.StateError, match=r"module +: Linear \(base_model.*lora_B"):
        zf.materialize(model, "cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
