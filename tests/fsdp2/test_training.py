"""By intent, `test_fully_shard_training.py` of FSDP2. Said elsewhere:

    test_train_parity_single_group_shard_dim0   distributed/test_training.py::test_stages_train_to_the_same_bits
    test_train_parity_single_worldsize1         acceptance/test_models.py::test_g45_one_rank_communicates_nothing_and_is_exact
    test_train_parity_multi_group               distributed/test_training.py::test_stages_equal_ddp_to_the_bit_on_two_ranks
    test_train_parity_multi_group_cpu_offload   transforms/test_offload.py::test_offload_changes_no_bit_at_any_stage
    test_train_parity_hsdp                      composition/test_two_axes.py::test_hybrid_shards_inside_and_replicates_outside
    test_train_parity_with_activation_checkpointing  acceptance/test_checkpointing.py::test_g22_a_recomputed_model_trains
    test_train_parity_with_shared_params        acceptance/test_sharing.py::test_g07_ties_in_a_unit_are_one_parameter
    test_train_shared_params_uneven_shard
        acceptance/test_sharing.py::test_g07_the_last_rank_updates_its_rows_of_a_tied_embedding
    test_shared_params_separate_fsdp_groups_error  acceptance/test_sharing.py::test_g08_ties_across_units_are_one_parameter
    test_non_root_forward_backward              acceptance/test_calls.py::test_g16_any_module_is_an_entry_in_any_order
    test_multi_forward_module                   acceptance/test_sharing.py::test_g06_what_runs_several_times_is_summed_once
    test_gradient_accumulation
        acceptance/test_accumulation.py::test_g01_accumulated_microbatches_are_reduced_once
    test_register_fsdp_forward_method           acceptance/test_edits.py::test_g36_declared_methods_gather_as_forward_does
    test_reset_iter_state_after_exception       acceptance/test_exceptions.py::test_g27_the_step_after_an_exception_is_exact
    test_to_float64_after_init
        acceptance/test_edits.py::test_g35_a_cast_before_the_first_step_or_with_its_states_is_exact
    test_unshard
        distributed/test_verbs.py::test_unsharded_gives_whole_parameters_and_writes_back_on_request
    test_2d_mlp_with_nd_mesh
        composition/test_tensor_parallel.py::test_every_stage_is_bitwise_the_replicas_of_a_tensor_parallel_model
    test_train_mixed_requires_grad
        acceptance/test_frozen.py::test_g09_frozen_parameters_keep_their_values_and_stale_gradients
    shard_placement_fn, reshard_after_forward=2 examples/test_docs.py::test_a_page_runs_on_ranks

Streams, events and CUDA graphs are of CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.fsdp2.models import DIM, Mlp, Stacked, run_all, stack, train
from tests.support.ranks import Ranks, axis
from tests.support.worlds import World, noise


class NoInputs(nn.Module):
    """Its root makes its own inputs, by a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(1)), Mlp()

    def forward(self) -> Tensor:
        y: Tensor = self.inner(self.scale * torch.ones(2, DIM))
        return y


def root_without_inputs(world: World) -> None:
    train(world, world.build(NoInputs), lambda model, x: (model() * x[:2]).mean())


def many_layers_are_gathered_ahead(world: World) -> None:
    train(world, world.build(lambda: stack(8)))


def one_forward_one_backward(world: World) -> None:
    """The forward of a microbatch runs before the backward of the one before."""
    model = world.build(Stacked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        losses = []
        with world.accumulate(model):
            for microbatch in range(3):
                losses.append(model(noise(2, DIM, seed=10 * step + microbatch)).square().mean() / 3)
                if len(losses) > 1:
                    losses.pop(0).backward()
            losses.pop().backward()
        world.reduce(model)
        world.note_model(model)
        optimizer.step()
        optimizer.zero_grad()


def some_parts_accumulate(world: World) -> None:
    """The others are reduced in each backward."""
    model = world.build(stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with world.accumulate(model[0], model[2]):  # type: ignore[index]
        for microbatch in range(2):
            model(noise(4, DIM, seed=microbatch)).mean().backward()
    world.reduce(model)
    for module in (model[0], model[2]):  # type: ignore[index]
        world.note_model(module)
    optimizer.step()


def parts_of_a_group_run_alone(world: World) -> None:
    """A layer inside the model, then on its own, then twice before a backward."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        layers: list[nn.Module] = list(model.layers)  # type: ignore[arg-type]
        alone = layers[1](layers[0](x))
        again = layers[1](x) + layers[1](layers[2](x))
        total: Tensor = model(x).square().mean() + alone.square().mean() + again.square().mean()
        return total

    model = world.build(Stacked)
    train(world, model, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        world.step(model, optimizer, layer(noise(2, DIM, seed=number)).square().mean())


def nested_units_run_twice_with_checkpoints(world: World) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        for layer in model.layers:  # type: ignore[union-attr]
            x = checkpoint(layer, layer(x), use_reentrant=False)
        y: Tensor = model.head(x).square().mean()  # type: ignore[operator]
        return y

    train(world, world.build(Stacked, units="*"), loss) if not world.is_replica else train(
        world, world.build(Stacked), loss
    )


def layers_are_transformed_one_by_one(world: World) -> None:
    """As they are built, each with another transform around it later."""
    torch.manual_seed(0)
    layers = [world.place(Mlp()) for _ in range(3)]
    train(world, nn.Sequential(*layers))


def a_chunked_loop_gathers_once(world: World) -> None:
    """FSDP2 toggles `set_reshard_after_backward`; here a block does."""
    model = world.build(Stacked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block = world.accumulate(model) if world.is_replica else zf.accumulate(model, unshard=True)
    with block:
        for chunk in noise(6, DIM, seed=0).chunk(3):
            (model(chunk).square().mean() / 3).backward()
    world.reduce(model)
    world.note_model(model)
    optimizer.step()


TRIALS = (
    root_without_inputs,
    many_layers_are_gathered_ahead,
    one_forward_one_backward,
    some_parts_accumulate,
    parts_of_a_group_run_alone,
    nested_units_run_twice_with_checkpoints,
    layers_are_transformed_one_by_one,
    a_chunked_loop_gathers_once,
)


def test_training_is_that_of_replicas(ranks: Ranks) -> None:
    assert ranks(2).run(run_all, TRIALS) == [[], []]


def _registered() -> None:
    model = zf.zero3(stack(), axis())
    before = dict(model.named_parameters())
    for _ in range(2):
        loss = model(noise(2, DIM, seed=0)).sum()
        assert all(isinstance(p, DTensor) and p is before[name] for name, p in model.named_parameters())
        loss.backward()
        assert all(isinstance(p, DTensor) and p is before[name] for name, p in model.named_parameters())


def test_sharded_parameters_are_registered_after_forward_and_backward(ranks: Ranks) -> None:
    ranks(2).run(_registered)
