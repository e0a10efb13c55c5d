"""A config that cuts a model over more than data: tensor and sequence parallelism, experts, stages of a pipeline."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_fn as zf
from tests.support.messages import refused
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.wholes import full

WIDTH, ROWS, STEPS = 8, 4, 3
BASE = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "gradient_clipping": 0.1,
}


def noise(*shape, seed):
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Planned(nn.Module):
    """A model with a plan of tensor parallelism, in the words of transformers, and a tied head."""

    tp_plan = {"embed": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self, **plan):
        super().__init__()
        torch.manual_seed(0)
        self.tp_plan = {**self.tp_plan, **plan}
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        if "head" in plan:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model, step, rank):
    tokens = torch.randint(16, (ROWS, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def trained(setup, rank):
    norms = []
    for step in range(STEPS):
        setup.scaled(loss_of(setup.model, step, rank)).backward()
        norms.append(setup.step())
    return norms, {name: full(value) for name, value in setup.model.named_parameters()}


def agree(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_a_model_is_cut_by_its_own_plan_over_neighbours_of_the_axis():
    """Two ranks share a batch, so the numbers are those of two ranks with whole models."""
    config = {**BASE, "train_batch_size": 2 * ROWS, "zero_optimization": {"stage": 3}}
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "copies"))
    for plan in ({"head": "colwise_gather_output"}, {}):
        model = Planned(**plan)
        setup = zf.from_deepspeed(model, {**config, "tensor_parallel": {"autotp_size": 2}}, axis())
        assert not isinstance(model.blocks[0].up.weight, DTensor), "the model that was given is unchanged"
        assert (setup.mesh.size(), setup.mesh.get_local_rank()) == (2, dist.get_rank() // 2)
        assert setup.model.blocks[0].up.weight.to_local().numel() == 12 * WIDTH // 4
        assert ("head" in plan) == (setup.model.head.weight is setup.model.embed.weight)
        whole = zf.from_deepspeed(Planned(**plan), config, grid["dp"])
        agree(trained(setup, dist.get_rank() // 2), trained(whole, grid["dp"].get_local_rank()))


@on_ranks(4)
def test_an_axis_of_tensor_parallelism_that_is_there_is_taken():
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = {
        **BASE,
        "tensor_parallel": {"autotp_size": 2},
        "activation_checkpointing": {"partition_activations": True},
    }
    setup = zf.from_deepspeed(Planned(), {**config, "zero_optimization": {"stage": 2}}, grid["dp"])
    assert setup.mesh == grid["dp"]
    whole = zf.from_deepspeed(Planned(), {**BASE, "zero_optimization": {"stage": 2}}, grid["dp"])
    wanted = trained(whole, grid["dp"].get_local_rank())
    agree(trained(setup, grid["dp"].get_local_rank()), wanted)
    with refused("config_cuts_a_model_without_a_plan"):
        zf.from_deepspeed(Block(), config, grid["dp"])
    with pytest.raises(zf.errors.ConfigError, match="packed_colwise"):
        zf.from_deepspeed(Planned(head="packed_colwise"), config, grid["dp"])
    with refused("config_cuts_one_parameter_in_two_ways"):
        zf.from_deepspeed(Planned(head="rowwise"), config, grid["dp"])
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "rows"))
    model = parallelize_module(
        Planned(), named["rows"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    )
    setup = zf.from_deepspeed(model, {**config, "zero_optimization": {"stage": 2}}, named["dp"])
    agree(trained(setup, named["dp"].get_local_rank()), wanted)
    with refused("config_divides_two_axes"):
        zf.from_deepspeed(Planned(), {**BASE, "sequence_parallel_size": 2}, grid)


@on_ranks(4)
def test_gradients_are_summed_over_parts_of_sequences_and_averaged_over_batches():
    config = {**BASE, "train_batch_size": 2 * ROWS, "sequence_parallel_size": 2, "gradient_clipping": 0}
    plain = Planned()
    sum(loss_of(plain, 0, rank) for rank in range(4)).backward()
    for op, batches in (("mean", 2), ("sum", 1)):
        more = {"gradient_allreduce_op": op, "data_parallel_size": 2, "zero_optimization": {"stage": 3}}
        setup = zf.from_deepspeed(Planned(), {**config, **more}, axis())
        assert (setup.mesh.size(), setup.mesh.get_local_rank()) == (2, dist.get_rank() // 2)
        setup.scaled(loss_of(setup.model, 0, dist.get_rank())).backward()
        for own, other in zip(setup.model.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None and other.grad is not None
            agree(full(own.grad), other.grad / batches)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(noise(4, WIDTH, WIDTH, seed=7))

    def forward(self, x):
        up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        return x + torch.einsum("...d,edh->...h", x, up)


def with_experts(mesh):
    model = Planned()
    model.blocks.append(Experts())
    own = model.blocks[2]
    own.up = nn.Parameter(distribute_tensor(own.up.detach(), mesh, [Shard(0)]))
    return model


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(4)
def test_experts_are_left_on_their_axis_over_which_all_else_is_sharded(stage):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    cut = [zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params][stage]
    by_hand = cut(cut(with_experts(grid["ep"]), grid["dp"]), grid["ep"], where=lambda name, _: name != "blocks.2.up")
    zero = {**BASE, "zero_optimization": {"stage": stage}}
    for key in ({"moe": {"enabled": True, "ep_size": 2}}, {"expert_parallel": {"enabled": True, "autoep_size": 2}}):
        setup = zf.from_deepspeed(with_experts(grid["ep"]), {**zero, **key}, grid)
        assert str(zf.describe(setup.model)) == str(zf.describe(by_hand))
        setup.scaled(loss_of(setup.model, 0, dist.get_rank())).backward()
        assert setup.step() is not None
        assert zf.from_deepspeed(setup.model, {**zero, **key}, grid).model is setup.model
    with refused("config_of_experts_that_are_not_placed"):
        zf.from_deepspeed(Planned(), {**zero, "moe_expert_parallel_size": 2}, grid)
    with pytest.raises(zf.errors.MeshError):  # one axis
        zf.from_deepspeed(with_experts(grid["ep"]), {**zero, "moe_expert_parallel_size": 2}, grid["dp"])


def run_pipeline(setup, pipe, factor=1.0):
    index = pipe.get_local_rank()
    stage = PipelineStage(setup.model, index, 2, torch.device("cpu"), group=pipe.get_group())
    schedule = ScheduleGPipe(
        stage, 2, loss_fn=lambda out, goal: setup.scaled((out.float() - goal).square().mean()) * factor
    )
    x = noise(4, WIDTH, seed=setup.mesh.get_local_rank())
    with zf.accumulate(setup.model, unshard=True):
        schedule.step(*([x] if index == 0 else []), **({"target": x.flip(0)} if index == 1 else {}))
    return setup.step()


@on_ranks(4)
def test_stages_of_a_pipeline_clip_to_the_norm_of_the_whole_model_and_skip_the_same_steps():
    """In float16 only the last stage sees the loss, and in the second step only its gradients are infinite."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    config = {**BASE, "fp16": fp16, "zero_optimization": {"stage": 1}, "pipeline_parallel": {"pp_size": 2}}
    torch.manual_seed(0)
    blocks = [nn.Sequential(Block(), Block()) for _ in range(2)]
    setup = zf.from_deepspeed(blocks[grid["pp"].get_local_rank()], config, grid["dp"], pipeline=grid["pp"])
    norms = [None] * 4
    for factor in (1.0, float("inf"), 1.0):
        norm = run_pipeline(setup, grid["pp"], factor)
        dist.all_gather_object(norms, (norm, setup.scaler.get_scale(), setup.steps, setup.skipped_steps))
        assert len({str(each) for each in norms}) == 1, norms
        if setup.steps == 1:
            first = norm
    assert (setup.steps, setup.skipped_steps, setup.scaler.get_scale()) == (3, 1, 128.0)
    whole = nn.Sequential(*(block for part in blocks for block in part))
    for rank in range(2):
        x = noise(4, WIDTH, seed=rank)
        ((whole(x) - x.flip(0)).square().mean() / 2).backward()
    assert first == pytest.approx(float(nn.utils.get_total_norm([each.grad for each in whole.parameters()])), rel=1e-2)
