"""`generate` of transformers over transformed models: the tokens of the plain model, at every stage and on disks."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import zero_fn as zf
from tests.outside.integrations.worlds import (
    STAGES,
    VOCABULARY,
    Counting,
    adapted,
    gpt2,
    llama,
    on_two_ranks,
    place,
    start,
    zero_trainer,
)
from tests.support.ranks import axis
from zero_fn.integrations.placing import place_module


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
    tokens = model.generate(**given)
    return tokens


@pytest.mark.parametrize("build", [llama, gpt2, with_adapters])
@on_two_ranks
def test_tokens_are_those_of_the_plain_model(folder, build):
    start()
    disk = zf.nvme(folder)
    transforms = {
        **{stage: place(stage) for stage in STAGES},
        "replicas": lambda model: zf.replicate(model, axis()),
        "stages 3 and 2": lambda model: zf.shard_grads(zf.shard_params(model, axis(), where="*mlp*"), axis()),
        "on a disk": lambda model: zf.offload(zf.zero3(model, axis()), params=disk),
        "replicas on a disk": lambda model: zf.offload(zf.replicate(model, axis()), params=disk),
        "in bfloat16": lambda model: zf.precision(zf.zero3(model, axis()), output=torch.float32),
    }
    for way, transform in transforms.items():
        ours = transform(build().eval())
        plain = build().eval()
        if way == "in bfloat16":
            plain = plain.bfloat16()
        for kind, options in KINDS.items():
            if kind != "greedy" and way in ("in bfloat16", "zero2", "replicas on a disk"):
                continue
            wanted = tokens_of(plain, **options)
            assert torch.equal(tokens_of(ours, **options), wanted), f"{way}, {kind}"
            with zf.unsharded(ours):
                if dist.get_rank() == 1:  # alone: nothing is gathered
                    assert torch.equal(tokens_of(ours, **options), wanted), f"{way}, {kind}"


@on_two_ranks
def test_weights_stay_in_the_folder_of_transformers(folder):
    """Read there by one process, and by two that hold a part each; beside others in memory, and as codes."""
    start()
    plain = llama().eval().to(torch.bfloat16)
    if dist.get_rank() == 0:
        plain.save_pretrained(f"{folder}/llama")
    dist.barrier()
    config = plain.config
    for place_it in (lambda model: model, place("zero3")):
        for resident in (0.0, 0.3):
            with torch.device("meta"):
                model = type(plain)._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
            model = zf.offload(place_it(model), params=zf.nvme(folder), resident=resident)
            zf.load_pretrained(model, f"{folder}/llama", copy=False)
            for kind in KINDS.values():
                assert torch.equal(tokens_of(model, **kind), tokens_of(plain, **kind)), (resident, kind)


@on_two_ranks
def test_ranks_whose_forwards_send_nothing_wait_for_nobody():
    """Once replicas have told one another that forwards change no buffers."""
    start()
    model = zf.replicate(llama().eval(), axis())
    tokens_of(model)
    if dist.get_rank() == 0:
        with zf.traffic() as sent, zf.guard(deadline_s=10):
            assert torch.equal(tokens_of(model), tokens_of(llama().eval()))
        assert not sent.calls


@on_two_ranks
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


@on_two_ranks
def test_encoders_and_assistants_generate_too():
    from transformers import T5Config, T5ForConditionalGeneration

    def t5():
        torch.manual_seed(0)
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)).eval()

    start()
    ours, plain = place("zero3")(t5()), t5()
    for kind in ("greedy", "beams"):
        assert torch.equal(tokens_of(ours, **KINDS[kind]), tokens_of(plain, **KINDS[kind])), kind
    ours, plain = place("zero3")(llama().eval()), llama().eval()
    options = {"input_ids": prompts()[:1], "assistant_model": llama(num_hidden_layers=1).eval(), "do_sample": False}
    assert torch.equal(tokens_of(ours, **options), tokens_of(plain, **options))


@on_two_ranks
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


@on_two_ranks
def test_a_trainer_generates_between_steps(folder):
    """Generation between two steps of a Trainer changes nothing of what it trains."""
    from transformers import TrainerCallback

    prompt = Counting(8).tokens[:2, :4]
    tokens = []

    class Generates(TrainerCallback):
        def on_step_end(self, args, state, control, **options):
            model = options["model"]
            model.eval()
            tokens.append(model.generate(prompt, max_new_tokens=2 + 3 * dist.get_rank(), do_sample=False))
            model.train()

    losses = []
    for callbacks in ([], [Generates()]):
        trainer = zero_trainer(folder, llama, "zero3", max_steps=3)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert len(tokens) == 3
