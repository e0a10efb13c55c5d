"""By intent, `test_fully_shard_comm.py` of FSDP2. Said elsewhere:

    test_all_gather_fp32, test_reduce_scatter   distributed/test_training.py::test_stages_equal_ddp_to_the_bit_on_two_ranks
    test_fully_shard_communication_count        distributed/test_verbs.py::test_bytes_sent_are_those_of_the_plan
    test_set_reduce_scatter_divide_factor       examples/test_docs.py::test_a_page_runs_on_ranks
    set_custom_all_gather, all-reduce hooks     examples/test_docs.py::test_a_page_runs_on_ranks
    test_backward_prefetch_unused_in_backward   acceptance/test_calls.py::test_g19_a_retained_graph_is_backed_through_again
    test_fully_shard_multi_module_unused_module acceptance/test_unused.py::test_g04_what_no_rank_uses_has_no_gradient
    test_unshard_without_lazy_init
        distributed/test_verbs.py::test_unsharded_gives_whole_parameters_and_writes_back_on_request

What is prefetched is in test_schedule.py. Streams, events, NCCL and symmetric memory are of CUDA.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.fsdp2.models import DIM, Stacked, run_all, stack, train
from tests.support.ranks import Ranks, axis
from tests.support.worlds import World, noise


def a_forward_may_run_several_times(world: World) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model(x), checkpoint(model, 2 * x, use_reentrant=False)
        y: Tensor = (first * second).mean()
        return y

    train(world, world.build(Stacked), loss)


def what_is_prefetched_may_be_wrong(world: World) -> None:
    """The order changes from step to step, and what was gathered ahead is not what is needed."""
    model = world.build(lambda: stack(4))
    orders = ([0, 1, 2, 3], [3, 1, 2, 0], [2, 2, 0, 1], [1], [0, 1, 2, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, order in enumerate(orders):
        x = noise(2, DIM, seed=step)
        for number in order:
            x = model[number](x)  # type: ignore[index]
        world.step(model, optimizer, x.square().mean())


def what_backward_prefetched_may_be_unused(world: World) -> None:
    """Two losses, one through half of the layers; a backward of each, in the other order."""
    model = world.build(lambda: stack(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        half = model[1](model[0](noise(2, DIM, seed=step)))  # type: ignore[index]
        whole = model[3](model[2](half))  # type: ignore[index]
        with world.accumulate(model):
            half.square().mean().backward(retain_graph=True)
            whole.square().mean().backward()
        world.reduce(model)
        world.note_model(model)
        optimizer.step()
        optimizer.zero_grad()


TRIALS = (a_forward_may_run_several_times, what_is_prefetched_may_be_wrong, what_backward_prefetched_may_be_unused)


def test_gathers_in_any_order_are_those_of_replicas(ranks: Ranks) -> None:
    assert ranks(2).run(run_all, TRIALS) == [[], []]


class Summed(nn.Module):
    """Communicates in its forward, beside the gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.weight = stack(2), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().clone()
        work = dist.all_reduce(seen, async_op=True)
        x = self.layers(x * self.weight)
        assert work is not None
        work.wait()
        y: Tensor = x + seen
        return y


def _inside_ddp() -> list[float]:
    losses = []
    for stage in (None, zf.zero3):
        torch.manual_seed(0)
        model = Summed()
        if stage is not None:
            model.layers = stage(model.layers, axis())
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                model, [name for name, _ in model.named_parameters() if name.startswith("layers")]
            )
        model_or_ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = model_or_ddp(noise(2, DIM, seed=step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


def test_sharded_parts_train_inside_ddp_that_ignores_them(ranks: Ranks) -> None:
    """Also the intent of `test_fully_shard_ignore_params.py`."""
    for one, other in ranks(2).run(_inside_ddp):
        assert abs(one - other) < 1e-6
