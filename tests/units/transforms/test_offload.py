"""Parameters that rest in another tier: the bits of the same model without, bounded memory, typed errors on every rank."""

from __future__ import annotations

import copy
import errno
import io
import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import zero_fn as zf
from tests.support.eviction import evicted
from tests.support.groups import alone
from tests.support.models import Language, Odd
from tests.support.ranks import Ranks, axis
from tests.support.resident import forget_peak, in_new_process, peak_nbytes
from tests.units.storage.disks import answers, failing
from zero_fn.runtime.tier_tensor import TierTensor

MIB = 1 << 20


def whole(tensor: Tensor) -> Tensor:
    """The values of a parameter or state, wherever it rests, in memory."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def tokens(seed: int) -> Tensor:
    return torch.randint(37, (2, 5), generator=torch.Generator().manual_seed(seed))


def is_away(module: nn.Module) -> bool:
    """Whether every parameter of it rests in another tier."""
    return all(map(is_in_tier, module.parameters()))


def is_in_tier(tensor: Tensor | None) -> bool:
    return isinstance(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, TierTensor)


def trained(stage: str, path: str | None, states: str = "", *, last: bool = True) -> tuple[Any, ...]:
    """Losses, parameters and states after four steps with accumulation and clipping; offloaded if `path` is given.

    `states`: which of params, grads and optim. `last`: whether they are offloaded after they are sharded, or before.
    """
    torch.manual_seed(0)
    model: Any = Language()
    tiers: dict[str, Any] = {} if path is None else {name: zf.nvme(path) for name in states.split()}
    if tiers and not last:
        model = zf.offload(model, **tiers)
    model = getattr(zf, stage)(model, axis())
    if stage == "zero2":
        model = zf.precision(model, compute=torch.bfloat16)
    if tiers and last:
        model = zf.offload(model, **tiers)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if path is not None:
        optimizer = zf.streamed(optimizer, None if "optim" in tiers else zf.nvme(path), buffer="16KiB")
        zf.check(model, optimizer)
        assert is_away(model) == ("params" in tiers)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            loss = model(tokens(100 * step + 10 * axis().get_local_rank() + micro)).float().logsumexp(-1).mean()
            loss.backward()
        assert all(is_in_tier(p.grad) for p in model.parameters()) == ("grads" in tiers)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9 if step % 2 else 0.05)  # not reached; exceeded
        optimizer.step()
        losses.append(loss.detach())
    values = [whole(v) for state in optimizer.state_dict()["state"].values() for v in state.values() if v.dim()]
    return losses, [whole(p) for p in model.parameters()], values


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(one, other, strict=True)
    )  # fmt: skip


AWAY = {
    "replicate": [("grads", True), ("optim", True)],
    "zero1": [("params grads optim", False)],
    "zero2": [("params grads optim", True)],
    "zero3": [("params", True), ("params grads optim", False), ("grads", True), ("", True)],
}
"""What is offloaded, of a streamed optimizer, and whether after the model is sharded. Combinations are drawn by the laws."""


@pytest.mark.parametrize("stage", AWAY)
def test_offload_changes_no_bit_at_any_stage(ranks: Ranks, tmp_path: Path, stage: str) -> None:
    expected = ranks(2).run(trained, stage, None)
    for states, last in AWAY[stage]:
        assert all(map(same, ranks(2).run(trained, stage, str(tmp_path), states, last=last), expected))


def test_parameters_of_every_awkward_kind_are_offloaded(ranks: Ranks, tmp_path: Path) -> None:
    def gradients(path: str | None) -> list[Any]:
        torch.manual_seed(0)
        model: Any = zf.zero3(Odd(), axis())
        if path is not None:
            model = zf.checkpoint_activations(zf.offload(model, params=zf.nvme(path)), units=type(Odd().blocks[0]))
        for step in range(2):
            model(tokens(10 * step + axis().get_local_rank())).sum().backward()
        return [None if p.grad is None else whole(p.grad) for p in model.parameters()]

    for offloaded, expected in zip(ranks(3).run(gradients, str(tmp_path)), ranks(3).run(gradients, None), strict=True):
        for one, other in zip(offloaded, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def test_accumulation_whole_steps_and_unsharded_blocks_see_the_same(ranks: Ranks, tmp_path: Path) -> None:
    def program(path: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = zf.zero3(Language(), axis())
        if path is not None:
            model = zf.offload(model, params=zf.nvme(path))
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if path is not None:
            optimizer = zf.streamed(optimizer, zf.cpu())
        for step in range(3):
            optimizer.zero_grad()
            with zf.accumulate(model, unshard=step == 1):
                for micro in range(2):
                    model(tokens(100 * step + 10 * axis().get_local_rank() + micro)).square().mean().backward()
            optimizer.step()
            with zf.unsharded(model.head, writeback=True), torch.no_grad():
                model.head.weight.mul_(1.5)
            if path is not None and step == 1:
                evicted(model, optimizer).restore()
        return [whole(p) for p in model.parameters()]

    for offloaded, expected in zip(ranks(2).run(program, str(tmp_path)), ranks(2).run(program, None), strict=True):
        assert all(map(torch.equal, offloaded, expected))


# -- what else reads and writes parameters ---------------------------------------------------------------------------


@pytest.fixture(params=["plain", "zero3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A model, and the same offloaded."""
    torch.manual_seed(3)
    model, tier = Language(), zf.nvme(tmp_path)
    if request.param == "plain":
        yield model, lambda m: zf.offload(m, params=tier)
        return
    with alone() as mesh:
        yield model, lambda m: zf.offload(zf.zero3(m, mesh), params=tier)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(whole(a), whole(b)) and a.dtype == b.dtype for a, b in pairs)


def test_reading_a_parameter_reads_the_tier_and_writing_writes_it(pair: Any) -> None:
    model, offload = pair
    away = offload(model)
    for p in (*model.parameters(), *away.parameters()):
        with torch.no_grad():
            p.mul_(0.5)
            if p.dim() == 2:
                local = p.data.to_local() if isinstance(p, DTensor) else p.data
                local.t()[1:3].add_(1)  # a view of a view
    assert equal(away, model)
    assert torch.equal(away(tokens(0)), model(tokens(0)))
    for module in (model, away):
        penalty: Any = sum(p.square().sum() for p in module.parameters())
        penalty.backward()
    assert all(
        torch.equal(whole(a.grad), b.grad) for a, b in zip(away.parameters(), model.parameters(), strict=True)
    )  # fmt: skip


def test_a_complex_parameter_away_is_not_read_as_its_own_conjugate(tmp_path: Path) -> None:
    """A conjugate is a view with a flag, which what has no memory cannot carry."""
    plain = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    away = zf.offload(copy.deepcopy(plain), params=zf.nvme(tmp_path))
    for read in (Tensor.conj, lambda p: p.conj().imag, lambda p: torch.view_as_real(p)):
        with pytest.raises(zf.StateError, match="viewed as another dtype"):
            read(away.weight)
    assert torch.equal(away.weight.detach().clone().conj(), plain.weight.conj())
    assert torch.equal(away.weight.conj_physical(), plain.weight.conj())


def test_state_dicts_are_saved_and_loaded(pair: Any, tmp_path: Path) -> None:
    model, offload = pair
    away = offload(model)
    file = io.BytesIO()
    torch.save(away.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(torch.equal(whole(value), model.state_dict()[key]) for key, value in loaded.items())
    other = offload(Language())
    other.load_state_dict(away.state_dict())
    assert equal(other, model)
    for assign in (False, True):
        other = offload(Language())
        other.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(other(tokens(1)), model(tokens(1)))
        assert equal(other, model)
        assert is_away(other)
    dcp.save({"model": away.state_dict()}, checkpoint_id=tmp_path / "checkpoint")
    other = offload(Language())
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    other.load_state_dict(state["model"])
    assert equal(other, model)


def test_copies_and_casts_go_to_the_tier_again(pair: Any) -> None:
    model, offload = pair
    away = offload(model)
    twin = copy.deepcopy(away)
    with torch.no_grad():
        assert torch.equal(twin(tokens(0)), model(tokens(0)))
        for p in twin.parameters():
            p.zero_()
    assert equal(away, model)
    assert is_away(twin)
    parameters = list(away.parameters())
    expected = copy.deepcopy(model)
    for dtype in (torch.float64, torch.bfloat16):
        away.to(dtype)
        expected.to(dtype)
        optimizer = zf.streamed(torch.optim.AdamW(away.parameters(), lr=0.1), zf.cpu())
        stock = torch.optim.AdamW(expected.parameters(), lr=0.1)
        for module, stepped in ((away, optimizer), (expected, stock)):
            module(tokens(2)).float().logsumexp(-1).mean().backward()
            stepped.step()
            stepped.zero_grad()
        assert is_away(away)
        assert equal(away, expected)
    assert all(a is b for a, b in zip(away.parameters(), parameters, strict=True))
    assert zf.held(away).parameters == 0


def test_another_transform_keeps_what_was_asked(tmp_path: Path) -> None:
    tier = zf.nvme(tmp_path)
    with alone() as mesh:
        model = zf.offload(Language(), params=tier, where="blocks.*")
        model = zf.precision(zf.shard_params(model, mesh), compute=torch.bfloat16)
        assert {row.tier for row in zf.describe(model).rows if row.unit != "root"} == {f"params in {tier}"}
        assert {row.tier for row in zf.describe(model).rows if row.unit == "root"} == {"cpu"}
        assert is_away(model.blocks)
        with pytest.raises(zf.LayoutError, match="different tiers of params"):
            zf.offload(model, params=zf.nvme(tmp_path / "other"))


def test_nothing_of_the_place_before_is_carried_over(tmp_path: Path) -> None:
    """Parameters that were offloaded first and sharded then kept the room of before, and could not be copied."""
    with alone() as mesh:
        before = zf.offload(Language(), params=zf.nvme(tmp_path))
        room = weakref.ref(next(before.parameters()).record)  # type: ignore[attr-defined]
        model = zf.shard_params(before, mesh)
        del before
        assert room() is None
        twin = copy.deepcopy(model)
        with torch.no_grad():
            assert torch.equal(twin(tokens(0)), model(tokens(0)))
        assert zf.held(twin).parameters == 0


def test_the_host_is_the_own_memory_of_a_model_on_the_cpu() -> None:
    model = zf.offload(Language(), params=zf.cpu())
    assert not any(isinstance(p, TierTensor) for p in model.parameters())
    assert all(row.tier == "params in cpu(), the device's own" for row in zf.describe(model).rows)
    assert str(zf.describe(model)).count("the device's own") == 1
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(0)).sum().backward()
    optimizer.step()  # a stock one


def test_a_stock_optimizer_is_refused_before_it_updates(tmp_path: Path) -> None:
    model = zf.offload(Language(), params=zf.nvme(tmp_path))
    before = [whole(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens(0)).sum().backward()
    with pytest.raises(zf.StateError, match=r"(?s)SGD was to step.*zf\.streamed"):
        optimizer.step()
    assert all(torch.equal(whole(p), value) for p, value in zip(model.parameters(), before, strict=True))
    with pytest.raises(zf.PlacementError, match="The states of Muon cannot be streamed"):
        wide = zf.offload(nn.Linear(1 << 20, 2, bias=False), params=zf.nvme(tmp_path))
        zf.streamed(torch.optim.Muon(wide.parameters()), zf.nvme(tmp_path))


# -- memory ----------------------------------------------------------------------------------------------------------


def _growth_of_passes(path: str) -> int:
    with torch.device("meta"):
        model: Any = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    tier = zf.nvme(path)
    x = torch.ones(1, 1024)

    def passes(model: nn.Module) -> None:
        with torch.inference_mode():
            model(x)
            model(x)

    warm = zf.materialize(zf.offload(copy.deepcopy(model[:3]), params=tier), "cpu")
    passes(warm)
    del warm
    forget_peak()
    before = peak_nbytes()
    model = zf.materialize(zf.offload(model, params=tier), "cpu")
    passes(model)
    assert zf.held(model).parameters == 0
    return peak_nbytes() - before


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of memory")
def test_resident_memory_is_bounded_by_units_and_buffers(tmp_path: Path) -> None:
    """96 MiB of parameters in 24 units of 4 MiB: three gathered, a staging; 12.2 MiB were seen."""
    assert in_new_process(_growth_of_passes, str(tmp_path)) < 20 * MIB


def test_what_is_held_is_what_was_planned_to_the_page(tmp_path: Path) -> None:
    one, two = zf.nvme(tmp_path), zf.nvme(tmp_path, limit="1GiB")
    model: Any = zf.offload(Odd().float(), params=one, grads=two, optim=two)
    planned = zf.plan(model).held
    assert (planned.parameters, planned.gradients, planned.optimizer) == (0, 0, 0)
    optimizer = zf.streamed(torch.optim.AdamW(p for p in model.parameters() if not p.is_complex()))
    model(tokens(0)).sum().backward()
    held = zf.held(model, optimizer)
    states = sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
    assert (held.parameters, held.gradients) == (0, 0)
    assert held.buffers == planned.buffers + optimizer.buffers_nbytes
    assert held.tiers[str(one)] == planned.tiers[str(one)]
    assert planned.tiers[str(two)] - states + optimizer.tier_nbytes()[two] == held.tiers[str(two)]
    assert held.total == held.buffers
    assert f"params in {one}, grads in {two}, optim in {two}" in str(zf.describe(model))
    assert "chunks: " in str(zf.describe(model, optimizer))
    optimizer.step()


def test_the_optimizer_goes_where_the_verb_says(tmp_path: Path) -> None:
    tier = zf.nvme(tmp_path)
    model: Any = zf.offload(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), optim=tier, where="0.*")
    model = zf.offload(model, optim=zf.cpu(), where="1.*")
    model(torch.ones(300)).sum().backward()
    stock = torch.optim.AdamW(model.parameters())
    with pytest.raises(zf.StateError, match=f"optim in {re.escape(str(tier))}"):
        stock.step()
    optimizer = zf.streamed(stock)
    optimizer.step()
    assert set(optimizer.tier_nbytes()) == {tier, zf.cpu()}
    with pytest.raises(zf.LayoutError, match="fraction is the part"):
        zf.offload(model, params=tier, fraction=0.5)
    with pytest.raises(zf.LayoutError, match="at most 1"):
        zf.offload(nn.Linear(2, 2), optim=tier, fraction=1.5)
    half = zf.offload(nn.Linear(1024, 1024), optim=tier, fraction=0.5)
    half(torch.ones(1024)).sum().backward()
    optimizer = zf.streamed(torch.optim.AdamW(half.parameters()))
    optimizer.step()
    assert optimizer.tier_nbytes()[tier] == pytest.approx(4 * MIB, rel=0.1)


def test_a_step_reads_each_gradient_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And writes none: 10 MiB of parameters are read and written, and as much of gradients read."""
    model: Any = zf.offload(nn.Linear(1024, 2560, bias=False), params=zf.nvme(tmp_path), grads=zf.nvme(tmp_path))
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.cpu())
    model(torch.ones(1024)).sum().backward()
    given = answers(monkeypatch, lambda _, result: result)
    optimizer.step()
    assert sum(given) == 30 * MIB


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["forward", "backward", "unsharded"])
def test_a_read_that_fails_on_one_rank_is_an_error_on_all_and_leaves_the_model(
    ranks: Ranks, tmp_path: Path, moment: str
) -> None:
    def read(path: str, moment: str) -> tuple[list[str], bool]:
        torch.manual_seed(0)
        model: Any = zf.offload(zf.zero3(Language(), axis()), params=zf.nvme(path))
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=0.01), zf.nvme(path))
        said = []
        for step in range(4):
            broken = failing(writes=False, where=step == 1 and axis().get_local_rank() == 1)
            optimizer.zero_grad()
            try:
                with broken if moment == "forward" else nullcontext():
                    loss = model(tokens(step)).logsumexp(-1).mean()
                with broken if moment == "backward" else nullcontext():
                    loss.backward()
                if moment == "unsharded" and step == 1:
                    with broken, zf.unsharded(model.blocks[1]):
                        pass
                optimizer.step()
            except zf.StorageError as error:
                said.append(error.summary)
        torch.manual_seed(0)
        expected: Any = zf.zero3(Language(), axis())
        stock = torch.optim.AdamW(expected.parameters(), lr=0.01)
        for step in (0, 2, 3):
            stock.zero_grad()
            expected(tokens(step)).logsumexp(-1).mean().backward()
            stock.step()
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        return said, all(torch.equal(whole(a), whole(b)) for a, b in pairs)

    (here, good), (there, good_there) = ranks(2).run(read, str(tmp_path), moment)
    assert re.fullmatch(r"Fetching unit [\w.]+ failed on rank 1 of axis 'dp' \(2\)\.", here[0])
    assert there[0].startswith("Reading from parameters in")
    assert len(here) == len(there) == 1
    assert good
    assert good_there


def trained_on_a_failing_disk(
    path: str, tiers: Sequence[str], refuses: Mapping[str, Any], *, clips_foreach: bool | None = None
) -> tuple[list[str], bool]:
    """What the ranks were told when the disk of rank 1 failed, and whether they train to the bit as if nothing had happened.

    The disk fails in the second of three steps, which is then taken again: in its backward and update, or, where gradients
    are clipped, from the clipping on.

    Args:
        path: Of the disk.
        tiers: The states that rest there: "params", "grads".
        refuses: Options of `failing`.
        clips_foreach: Option `foreach` of the clipping; None for none.
    """
    said: list[str] = []

    def train(model: nn.Module, optimizer: Optimizer, steps: Sequence[int], *, is_away: bool) -> list[Tensor]:
        for step in steps:
            breaks = is_away and step == 1 and not said and axis().get_local_rank() == 1
            optimizer.zero_grad()
            try:
                with failing(**refuses, where=breaks and clips_foreach is None):
                    model(tokens(step)).logsumexp(-1).mean().backward()
                with failing(**refuses, where=breaks):
                    if clips_foreach is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=clips_foreach)
                    optimizer.step()
            except zf.StorageError as error:
                said.append(error.summary)
        return [whole(parameter) for parameter in model.parameters()]

    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(zf.zero3(Language(), axis()))
    away = zf.offload(models[0], **dict.fromkeys(tiers, zf.nvme(path)))
    streamed = zf.streamed(torch.optim.AdamW(away.parameters(), lr=0.01), zf.cpu())
    found = train(away, streamed, (0, 1, 1, 2), is_away=True)
    expected = train(models[1], torch.optim.AdamW(models[1].parameters(), lr=0.01), (0, 1, 2), is_away=False)
    return said, all(map(torch.equal, found, expected))


def test_a_gradient_that_cannot_be_written_is_an_error_on_all_and_the_step_may_be_taken_again(
    ranks: Ranks, tmp_path: Path
) -> None:
    refuses = {"code": errno.ENOSPC, "reads": False}
    (here, good), (there, good_there) = ranks(2).run(
        trained_on_a_failing_disk, str(tmp_path), ["params", "grads"], refuses
    )
    assert here == ["Writing gradients failed on rank 1 of axis 'dp' (2)."]
    assert there[0].startswith("Writing to gradients in")
    assert (len(there), good, good_there) == (1, True, True)


@pytest.mark.parametrize(("moment", "foreach"), [("norm", False), ("scaling", True), ("norm", True)])
def test_a_disk_that_fails_while_gradients_are_clipped_is_an_error_on_all(
    ranks: Ranks, tmp_path: Path, moment: str, foreach: bool
) -> None:
    """Ranks whose disk is well once waited in torch's reduction of the norm, or stepped with other gradients."""
    refuses = {"writes": False} if moment == "norm" else {"reads": False}
    (here, good), (there, good_there) = ranks(2).run(
        trained_on_a_failing_disk, str(tmp_path), ["grads"], refuses, clips_foreach=foreach
    )
    names = {
        "norm": ("The norm of a gradient", "The norm of gradients"),
        "scaling": ("Scaling a gradient", "Scaling gradients"),
    }
    assert here == [f"{names[moment][foreach]} failed on rank 1 of axis 'dp' (2)."]
    assert there[0].startswith("Writing to gradients in" if moment == "scaling" else "Reading from gradients in")
    assert (len(there), good, good_there) == (1, True, True)


@pytest.mark.parametrize("what", ["full_tensor", "redistribute", "gradient", "operand"])
def test_a_disk_that_fails_while_a_tensor_is_redistributed_is_an_error_on_all(
    ranks: Ranks, tmp_path: Path, what: str
) -> None:
    """Ranks whose disk is well once waited in the collective of torch. 3 rows on 2 ranks: one of them pads first."""

    def redistributed(path: str, what: str) -> tuple[list[str], bool]:
        torch.manual_seed(0)
        stock = nn.Linear(4, 3)
        x = torch.ones(4)
        stock(x).square().sum().backward()
        disk = zf.nvme(path)
        model: Any = zf.offload(zf.zero3(stock, axis()), params=disk, grads=disk)
        model(x).square().sum().backward()
        tensor: Any = model.weight.grad if what == "gradient" else model.weight.detach()
        expected: Any = stock.weight.grad if what == "gradient" else stock.weight.detach()
        said = []

        def whole_of() -> Tensor:
            if what == "redistribute":
                return tensor.redistribute(placements=[Shard(1)]).full_tensor()  # type: ignore[no-any-return]
            if what == "operand":  # torch gathers it, to take its softmax along the dim that is cut
                return tensor.softmax(0).full_tensor()  # type: ignore[no-any-return]
            return tensor.full_tensor()  # type: ignore[no-any-return]

        try:
            with failing(where=axis().get_local_rank() == 1):
                whole_of()
        except zf.StorageError as error:
            said.append(error.summary)
        return said, torch.equal(whole_of(), expected.softmax(0) if what == "operand" else expected)

    (here, good), (there, good_there) = ranks(2).run(redistributed, str(tmp_path), what)
    assert here == ["Reading a tensor to redistribute it failed on rank 1 of axis 'dp' (2)."]
    assert there[0].startswith("Reading from gradients in" if what == "gradient" else "Reading from parameters in")
    assert (len(there), good, good_there) == (1, True, True)


def test_a_disk_that_fails_while_states_are_saved_is_an_error_on_all_that_have_a_part(
    ranks: Ranks, tmp_path: Path
) -> None:
    def saved(path: str, stage: str) -> list[str]:
        said = []
        model: Any = getattr(zf, stage)(Language(dim=30), axis())
        optimizer = zf.streamed(torch.optim.AdamW(model.parameters()), zf.nvme(path), buffer="12KiB")
        model(tokens(0)).sum().backward()
        optimizer.step()
        try:
            with failing(where=axis().get_local_rank() == 1):
                optimizer.state_dict()
        except zf.StorageError as error:
            said.append(error.summary)
        optimizer.state_dict()
        return said

    here, there = ranks(2).run(saved, str(tmp_path), "zero1")
    assert here == ["Reading the states of an optimizer failed on rank 1 of axis 'dp' (2)."]
    assert there[0].startswith("Reading from states of")
    here, there = ranks(2).run(saved, str(tmp_path), "replicate")
    assert here == [] and there[0].startswith("Reading from states of")
