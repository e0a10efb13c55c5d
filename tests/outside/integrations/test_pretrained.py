"""`placed`: a checkpoint of transformers straight into what rests, to the bits of loading it whole."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.outside.integrations.worlds import (
    Counting,
    gpt2,
    llama,
    mixtral,
    needs,
    on_two_ranks,
    place,
    start,
    tied,
    written,
)
from tests.support.ranks import axis


@pytest.mark.parametrize(
    ("build", "stage", "dtype"),
    [
        *((build, stage, torch.float32) for build in (llama, tied, mixtral) for stage in ("zero1", "zero3")),
        (llama, "zero3", torch.bfloat16),  # it may rest in another dtype than its files
    ],
)
@on_two_ranks
def test_a_placed_model_is_the_one_that_is_loaded_whole(folder, build, stage, dtype):
    from transformers import AutoModelForCausalLM

    from zero_fn.integrations.transformers import placed

    written(folder, build, dtype, max_shard_size="20KB")
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with placed(place(stage)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert zf.is_transformed(model)
    zf.check(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not hasattr(model.config, "distributed_config")
    assert all(isinstance(parameter, DTensor) and not parameter.is_meta for parameter in model.parameters())
    tokens = Counting().tokens[:2]
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, wanted(input_ids=tokens).logits)
        assert torch.equal(copy.deepcopy(model)(input_ids=tokens).logits, wanted(input_ids=tokens).logits)
    for each in (wanted, model):
        each.train()
        each(input_ids=tokens, labels=tokens).loss.backward()
    for (name, parameter), plain in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), plain), name
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.grad, msg=name)
    assert dict(model.named_buffers()).keys() == dict(wanted.named_buffers()).keys()
    for (name, buffer), plain in zip(model.named_buffers(), wanted.buffers(), strict=True):
        assert torch.equal(buffer, plain), name


@needs("torchao")
@on_two_ranks
def test_a_base_that_torchao_quantises_is_placed(folder):
    """Weights that are quantised as they are read, and a folder that was saved quantised; then adapters over them."""
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    from zero_fn.integrations.transformers import placed

    def adapted(model):
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
        return model.train()

    written(folder, llama, torch.float32)
    options = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "dtype": torch.float32}
    plain = AutoModelForCausalLM.from_pretrained(folder, **options)
    if dist.get_rank() == 0:
        plain.save_pretrained(f"{folder}/quantised")
    dist.barrier()
    tokens = Counting(8).tokens[2 * dist.get_rank() :][:2]
    with torch.no_grad():
        wanted = plain(input_ids=tokens).logits
    for source, more in ((folder, options), (f"{folder}/quantised", {"dtype": torch.float32})):
        with placed(place()):
            model = AutoModelForCausalLM.from_pretrained(source, **more)
        with torch.no_grad():
            assert torch.equal(model(input_ids=tokens).logits, wanted), source
        quantised = [parameter for parameter in model.parameters() if parameter.dtype == torch.int8]
        assert quantised and all(local.numel() * 2 == p.numel() for p in quantised for local in [p.to_local()])
    with pytest.raises(zf.CheckpointError, match="A quantised model is not saved"):
        zf.save_pretrained(model, f"{folder}/exported")
    with placed(lambda model: place()(adapted(model))):
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    plain = adapted(plain)
    for each in (plain, model):
        each(input_ids=tokens, labels=tokens).loss.backward()
    named = dict(model.named_parameters())
    trained = [(name, p) for name, p in plain.named_parameters() if p.requires_grad and "lora" in name]
    for name, parameter in trained:
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(named[name].grad.full_tensor(), parameter.grad / dist.get_world_size(), msg=name)
    assert trained


@needs("bitsandbytes")
@on_two_ranks
def test_a_base_that_others_quantise_is_refused_unread(folder):
    """Refused before a file is read; and what the error says instead."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

    from zero_fn.integrations.transformers import placed

    written(folder, llama, torch.float32)
    four_bits = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    plain = AutoModelForCausalLM.from_pretrained(folder, **four_bits)
    if dist.get_rank() == 0:
        plain.save_pretrained(f"{folder}/quantised")
    dist.barrier()
    with patch.object(PreTrainedModel, "_load_pretrained_model", side_effect=AssertionError("read")):
        for source, more in ((folder, four_bits), (f"{folder}/quantised", {})):
            with (
                pytest.raises(zf.ConfigError, match=r"placed\(\) cannot load weights that are quantised"),
                placed(place()),
            ):
                AutoModelForCausalLM.from_pretrained(source, **more)
    with pytest.raises(zf.PlacementError, match=r"fix +: quantise with torchao"):
        zf.flatten_subclasses(plain)


@pytest.mark.parametrize("build", [llama, tied, gpt2, mixtral])
@on_two_ranks
def test_a_folder_that_was_written_from_shards_is_read_by_transformers_and_into_shards(folder, build):
    start()
    model = zf.zero3(build(), axis())
    zf.save_pretrained(model, folder, max_shard="20KB")
    zf.save_pretrained(model, f"{folder}/half", dtype=torch.bfloat16)
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    tokens = Counting().tokens[:2]
    with torch.no_grad():
        wanted = model.eval()(input_ids=tokens).logits
        assert torch.equal(loaded(input_ids=tokens).logits, wanted)
    half = type(model).from_pretrained(f"{folder}/half", dtype="auto")
    assert half.dtype == torch.bfloat16
    for name, value in half.named_parameters():
        assert torch.equal(value, dict(model.named_parameters())[name].full_tensor().to(torch.bfloat16))
    if build is mixtral:
        return  # whose experts have other names in files: `placed` reads them
    with torch.device("meta"):
        again = build()
    again = zf.zero3(again, axis())
    zf.load_pretrained(again, folder)
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=tokens).logits, wanted)
    for (name, buffer), plain in zip(again.named_buffers(), loaded.buffers(), strict=True):
        assert torch.equal(buffer, plain), name
    again.train()(input_ids=tokens, labels=tokens).loss.backward()


@on_two_ranks
def test_what_placed_cannot_load_is_refused(folder):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
    from transformers.distributed import DistributedConfig

    from zero_fn.integrations.transformers import placed

    written(folder, llama, torch.float32)
    before = PreTrainedModel.from_pretrained, PreTrainedModel.maybe_distribute_model
    with pytest.raises(zf.StateError, match="Nothing was loaded"), placed(place()):
        gpt2()
    with pytest.raises(zf.ConfigError, match="told to distribute"), placed(place()):
        AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    with pytest.raises(zf.StateError, match="no transform has made"), placed(lambda model: model):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(zf.CheckpointError, match="lack parameters"), placed(place()):
        AutoModelForSequenceClassification.from_pretrained(folder)
    assert before == (PreTrainedModel.from_pretrained, PreTrainedModel.maybe_distribute_model)
    assert not zf.is_transformed(AutoModelForCausalLM.from_pretrained(folder))
