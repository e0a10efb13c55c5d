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
    adapted,
    at_night,
    gpt2,
    llama,
    logits_of,
    mixtral,
    needs,
    on_two_ranks,
    place,
    read,
    require_equal,
    start,
    written,
)
from tests.support.programs import gradients, parameters
from tests.support.ranks import axis
from tests.support.worlds import mean_of_ranks


def tied():
    """One matrix under two names, of which files hold one."""
    return llama(tie_word_embeddings=True)


def _is_the_one_that_is_loaded_whole(folder, build, stage, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    from zero_fn.integrations.transformers import placed

    written(folder, build, dtype, max_shard_size="20KB")
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with placed(place(stage)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    zf.check(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not hasattr(model.config, "distributed_config")
    assert all(isinstance(parameter, DTensor) and not parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits_of(model), logits_of(wanted))
    assert torch.equal(logits_of(copy.deepcopy(model)), logits_of(wanted))
    tokens = Counting().tokens[:2]
    for each in (wanted, model):
        each.train()(input_ids=tokens, labels=tokens).loss.backward()
    require_equal(parameters(model), parameters(wanted))
    require_equal(dict(model.named_buffers()), dict(wanted.named_buffers()))
    torch.testing.assert_close(gradients(model), gradients(wanted))


@on_two_ranks
def test_a_placed_model_is_the_one_that_is_loaded_whole(folder):
    _is_the_one_that_is_loaded_whole(folder, mixtral, "zero3")


@pytest.mark.parametrize("case", [
    (llama, "zero1"),
    (tied, "zero3"),
    (mixtral, "zero1"),
    (llama, "zero3", torch.bfloat16),  # it may rest in another dtype than its files
])  # fmt: skip
@at_night
def test_other_models_that_are_placed_are_those_that_are_loaded_whole(folder, case):
    _is_the_one_that_is_loaded_whole(folder, *case)


@needs("torchao")
@at_night
def test_a_base_that_torchao_quantises_is_placed(folder):
    """Weights that are quantised as they are read, and a folder that was saved quantised; then adapters over them."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    from zero_fn.integrations.transformers import placed

    written(folder, llama, torch.float32)
    options = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "dtype": torch.float32}
    plain = AutoModelForCausalLM.from_pretrained(folder, **options)
    if dist.get_rank() == 0:
        plain.save_pretrained(f"{folder}/quantised")
    dist.barrier()
    for source, more in ((folder, options), (f"{folder}/quantised", {"dtype": torch.float32})):
        with placed(place()):
            model = AutoModelForCausalLM.from_pretrained(source, **more)
        assert torch.equal(logits_of(model), logits_of(plain)), source
        quantised = [parameter for parameter in model.parameters() if parameter.dtype == torch.int8]
        assert quantised and all(parameter.to_local().numel() * 2 == parameter.numel() for parameter in quantised)
    with pytest.raises(zf.errors.CheckpointError, match="A quantised model is not saved"):
        zf.save_pretrained(model, f"{folder}/exported")

    def with_adapters(model):
        return adapted(model, "q_proj", "up_proj", init_lora_weights=False).train()

    with placed(lambda model: place()(with_adapters(model))):
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    plain = with_adapters(plain)
    tokens = Counting(8).tokens[2 * dist.get_rank() :][:2]
    for each in (plain, model):
        each(input_ids=tokens, labels=tokens).loss.backward()
    found, trained = gradients(model), [(name, p) for name, p in plain.named_parameters() if "lora" in name]
    assert trained
    for name, parameter in trained:
        torch.testing.assert_close(found[name], mean_of_ranks(parameter.grad), msg=name)


@needs("bitsandbytes")
@at_night
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
                pytest.raises(zf.errors.ConfigError, match=r"placed\(\) cannot load weights that are quantised"),
                placed(place()),
            ):
                AutoModelForCausalLM.from_pretrained(source, **more)
    with pytest.raises(zf.errors.PlacementError, match=r"fix +: quantise with torchao"):
        zf.transforms.flatten_subclasses(plain)


@pytest.mark.parametrize("build", [tied, gpt2, mixtral])
@at_night
def test_a_folder_that_was_written_from_shards_is_read_by_transformers_and_into_shards(folder, build):
    start()
    model = zf.shard_params(build(), axis())
    zf.save_pretrained(model, folder, max_shard="20KB")
    zf.save_pretrained(model, f"{folder}/half", dtype=torch.bfloat16)
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    wanted = logits_of(model)
    assert torch.equal(logits_of(loaded), wanted)
    half = type(model).from_pretrained(f"{folder}/half", dtype="auto")
    require_equal(parameters(half), {name: value.to(torch.bfloat16) for name, value in parameters(model).items()})
    if build is mixtral:
        return  # whose experts have other names in files: `placed` reads them
    with torch.device("meta"):
        again = build()
    again = zf.shard_params(again, axis())
    zf.load_pretrained(again, folder)
    assert torch.equal(logits_of(again), wanted)
    require_equal(dict(again.named_buffers()), dict(loaded.named_buffers()))


@at_night
def test_what_placed_cannot_load_is_refused(folder):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
    from transformers.distributed import DistributedConfig

    from zero_fn.integrations.transformers import placed

    written(folder, llama, torch.float32)
    before = PreTrainedModel.from_pretrained, PreTrainedModel.maybe_distribute_model
    with pytest.raises(zf.errors.StateError, match="Nothing was loaded"), placed(place()):
        gpt2()
    with pytest.raises(zf.errors.ConfigError, match="told to distribute"), placed(place()):
        AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    with pytest.raises(zf.errors.StateError, match="no transform has made"), placed(lambda model: model):
        read(folder)
    with pytest.raises(zf.errors.CheckpointError, match="lack parameters"), placed(place()):
        AutoModelForSequenceClassification.from_pretrained(folder)
    assert before == (PreTrainedModel.from_pretrained, PreTrainedModel.maybe_distribute_model)
    assert not zf.inspect.is_transformed(read(folder))
