"""`generate` of transformers over transformed models: the tokens of the plain model, at every stage and on disks."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import zero_fn as zf
from tests.outside.integrations.architectures import model_named
from tests.outside.integrations.worlds import (
    VOCABULARY,
    Counting,
    adapted,
    at_night,
    gpt2,
    llama,
    on_two_ranks,
    place,
    start,
)
from tests.support.ranks import axis
from zero_fn.integrations.model_placement import place_module


def with_adapters():
    return adapted(llama(), "q_proj")


def prompts():
    """Other ones, of another length, on each rank."""
    return Counting(8).tokens[2 * dist.get_rank() :][:2, : 4 + 3 * dist.get_rank()]


KINDS = {
    "greedy": {"do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "beams": {"do_sample": False, "num_beams": 2},
    "sampled": {"do_sample": True, "top_k": 5},
}


def tokens_of(model, seed=1, **options):
    """Ranks want other numbers of tokens, so that one is done before the other."""
    torch.manual_seed(seed + dist.get_rank())
    given = {"input_ids": prompts(), "max_new_tokens": 3 + 4 * dist.get_rank()} | options
    return model.generate(**given)


def _are_those_of_the_plain_model(build, ways, kinds=KINDS):
    start()
    for way, transform in ways.items():
        ours, plain = transform(build().eval()), build().eval()
        if way == "in bfloat16":
            plain = plain.bfloat16()
        for kind in kinds:
            wanted = tokens_of(plain, **KINDS[kind])
            assert torch.equal(tokens_of(ours, **KINDS[kind]), wanted), f"{way}, {kind}"
            with zf.unsharded(ours):
                if dist.get_rank() == 1:  # alone: nothing is gathered
                    assert torch.equal(tokens_of(ours, **KINDS[kind]), wanted), f"{way}, {kind}"


@on_two_ranks
def test_tokens_are_those_of_the_plain_model():
    _are_those_of_the_plain_model(llama, {"zero3": place()})


@pytest.mark.parametrize("build", [llama, gpt2, with_adapters])
@at_night
def test_tokens_are_those_of_the_plain_model_wherever_it_rests(folder, build):
    disk = zf.nvme(folder)
    _are_those_of_the_plain_model(build, {
        "zero1": place("zero1"),
        "replicas": place("replicate"),
        "stages 3 and 2": lambda model: zf.shard_grads(zf.shard_params(model, axis(), where="*mlp*"), axis()),
        "on a disk": lambda model: zf.offload(place()(model), params=disk),
    })  # fmt: skip
    _are_those_of_the_plain_model(build, {
        "zero2": place("zero2"),
        "replicas on a disk": lambda model: zf.offload(place("replicate")(model), params=disk),
        "in bfloat16": lambda model: zf.precision(place()(model), output=torch.float32),
    }, ["greedy"])  # fmt: skip


@at_night
def test_ranks_whose_forwards_send_nothing_wait_for_nobody():
    """Once replicas have told one another that forwards change no buffers."""
    start()
    model = zf.replicate(llama().eval(), axis())
    tokens_of(model)
    if dist.get_rank() == 0:
        with zf.traffic() as sent, zf.distributed.set_deadline(10):
            assert torch.equal(tokens_of(model), tokens_of(llama().eval()))
        assert not sent.calls


@at_night
def test_a_rank_that_is_done_needs_no_room_and_asks_only_its_peers():
    """It went on with its own cache, whose next position the model lacked, and asked all processes there are."""
    start()
    rank = dist.get_rank()
    prompt = torch.randint(3, VOCABULARY, (1, 7 if rank else 60), generator=torch.Generator().manual_seed(rank))
    options = {"input_ids": prompt, "max_new_tokens": 12 if rank else 4, "do_sample": False}
    ours, plain = place("zero3")(gpt2(eos_token_id=None).eval()), gpt2(eos_token_id=None).eval()
    with patch.object(dist, "all_reduce", side_effect=AssertionError):
        found = tokens_of(ours, **options)
    assert torch.equal(found, tokens_of(plain, **options))


@at_night
def test_encoders_and_assistants_generate_too():
    def t5():
        return model_named("t5", seed=0).eval()

    start()
    ours, plain = place("zero3")(t5()), t5()
    for kind in ("greedy", "beams"):
        assert torch.equal(tokens_of(ours, **KINDS[kind]), tokens_of(plain, **KINDS[kind])), kind
    ours, plain = place("zero3")(llama().eval()), llama().eval()
    options = {"input_ids": prompts()[:1], "assistant_model": llama(num_hidden_layers=1).eval(), "do_sample": False}
    assert torch.equal(tokens_of(ours, **options), tokens_of(plain, **options))


@at_night
def test_compiled_blocks_are_the_graphs_of_the_plain_model_and_generate():
    """A Trainer's model told the compiler that each module is one of FSDP, and a block fell into several graphs."""
    start()
    graphs, found = [], []
    for model in (llama(), place_module(place("zero3"), llama())[0]):
        torch._dynamo.reset()  # it compiles a function a few times only
        made = []
        layers = model.get_submodule("model.layers")
        for layer in layers:
            layer.compile(backend=lambda graph, _, made=made: made.append(graph) or graph.forward)
        with torch.no_grad():
            model.eval()(prompts())
        graphs.append(len(made))
        found.append([tokens_of(model, **options) for options in KINDS.values()])
    assert graphs == [2, 2]
    assert all(map(torch.equal, *found))
