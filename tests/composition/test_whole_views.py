"""What is written into views across shards, and by operations on whole tensors, arrives in every composition and tier."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_fn as zf
from tests.composition.grids import composed, loss_of
from tests.ranks import Ranks, axis
from tests.versions import IS_2_11, not_in_2_11
from tests.wholes import full

EDITS: dict[str, Callable[[Tensor], object]] = {
    "select": lambda t: t[-1].zero_(),
    "slice": lambda t: t[1:].mul_(2),
    "every other row": lambda t: t[::2].fill_(1.5),
    "detached": lambda t: t.detach()[0].neg_(),
    "slice of a slice": lambda t: t[1:][-1:].add_(1),
    "chunk": lambda t: t.chunk(2)[-1].clamp_(-0.1, 0.1),
    "split": lambda t: t.split([1, len(t) - 1])[1].sub_(0.5),
    "unbind": lambda t: [row.mul_(number) for number, row in enumerate(t)],
    "set": lambda t: t.__setitem__(slice(0, 2), 3),
    "set rows to rows": lambda t: t.__setitem__(0, t[-1]),
    "set to a plain tensor": lambda t: t.__setitem__(-1, torch.full(t.shape[1:], 0.25)),
    "set rows": lambda t: t.__setitem__(torch.tensor([0, -1]), 0.5),
    "set by mask": lambda t: t.__setitem__(torch.arange(len(t)) % 2 == 1, -1.0),
    "set by its own mask": lambda t: t.__setitem__(t > 0, 0.0),
    "copy": lambda t: t.copy_(torch.linspace(-1, 1, t.numel()).view(t.shape)),
    "index_fill": lambda t: t.index_fill_(0, torch.tensor([0]), 2.0),
    "index_add": lambda t: t.index_add_(0, torch.tensor([0, 1]), torch.ones(2, *t.shape[1:])),
    "scatter": lambda t: t.scatter_(0, torch.zeros(1, *t.shape[1:], dtype=torch.long), 4.0),
}
MATRICES: dict[str, Callable[[Tensor], object]] = {
    "diagonal": lambda t: t.diagonal().fill_(7),
    "a block": lambda t: t[:2, 1:].zero_(),
    "transposed": lambda t: t.t()[1].mul_(3),
    "transposed rows": lambda t: t[1:3].t().add_(1),
    "tril": lambda t: t.tril_(),
    "initialised": lambda t: nn.init.normal_(t[1:3]),
}
FLAT: dict[str, Callable[[Tensor], object]] = {
    "flattened": lambda t: t.flatten()[1:].mul_(2),
    "one column": lambda t: t.view(-1, 1)[2:5].fill_(0.75),
    "set in another shape": lambda t: t.view(1, -1).__setitem__((0, 2), -1.0),
}


EDITED = ("mix.weight", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight")


def _edited(composition: str) -> list[str]:
    """The edits after which a tensor is not what a plain one is."""
    model, row = composed(composition)
    wrong = []
    for number, (name, edit) in enumerate({**EDITS, **MATRICES}.items()):
        model.zero_grad()
        loss_of(model, number, row).backward()
        for parameter_name in EDITED:
            parameter = model.get_parameter(parameter_name)
            if parameter.dim() < 1 + (name in MATRICES) or (IS_2_11 and composition == "tp" and "transposed" in name):
                continue  # 2.11 transposes strided shards to placements that it does not know
            assert parameter.grad is not None
            for of, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
                plain = full(tensor.detach()).clone()
                with torch.no_grad():
                    for edited in (plain, tensor):
                        torch.manual_seed(number)
                        edit(edited)
                    if not torch.equal(full(tensor), plain):
                        wrong.append(f"{name} of the {of} of {parameter_name}")
                    tensor.clamp_(-1, 1)
    return wrong


@pytest.mark.parametrize("composition", ["replicate", "zero1", "zero3", "tp", "hybrid"])
def test_what_is_written_into_views_arrives(ranks: Ranks, composition: str) -> None:
    assert ranks(4).run(_edited, composition) == [[]] * 4


def _flattened() -> None:
    """A view of elements that lie apart on each rank."""
    model, _ = composed("tp")
    weight: Any = model.get_parameter("blocks.0.down.weight").detach()
    whole = full(weight)
    flat = weight.view(-1)
    assert torch.equal(full(flat[5:30]), whole.view(-1)[5:30])
    for edit in (
        lambda: flat[5:30].zero_(),
        lambda: flat.copy_(torch.ones(84)),
        lambda: flat.index_fill_(0, torch.tensor([1]), 0),
    ):
        with pytest.raises(zf.PlacementError, match="can be read only"):
            edit()
    assert torch.equal(full(weight), whole)


@not_in_2_11("it flattens no dims that are cut")
def test_a_view_of_elements_that_lie_apart_is_read_only(ranks: Ranks) -> None:
    ranks(4).run(_flattened)


def _uneven(transform: Callable[[nn.Module], nn.Module]) -> list[str]:
    """The edits after which a parameter or gradient is not what a plain one is: 7 rows on 2 ranks."""
    torch.manual_seed(0)
    model: Any = transform(nn.Linear(5, 7))
    wrong = []
    for name, edit in {**EDITS, **FLAT}.items():
        model(torch.ones(2, 5)).square().sum().backward()
        for tensor in (model.weight, model.weight.grad):
            plain = full(tensor.detach()).clone()
            with torch.no_grad():
                edit(tensor)
                edit(plain)
            if not torch.equal(full(tensor.detach()), plain):
                wrong.append(name)
        model.zero_grad()
    return wrong


def _on_a_disk(path: str) -> list[str]:
    return _uneven(lambda model: zf.offload(zf.zero3(model, axis()), params=zf.nvme(path), grads=zf.nvme(path)))


def test_edits_of_tensors_on_a_disk_arrive(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_on_a_disk, str(tmp_path)) == [[]] * 2


def _stages() -> list[list[str]]:
    return [_uneven(partial(stage, mesh=axis())) for stage in (zf.replicate, zf.zero1, zf.zero3)]


def test_edits_of_unevenly_cut_tensors_arrive(ranks: Ranks) -> None:
    """Views in another shape had raised, as DTensor does: `p.grad.view(-1)`, `parameters_to_vector`, L-BFGS."""
    assert ranks(2).run(_stages) == [[[]] * 3] * 2


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return zf.zero3(nn.Linear(4, 6), axis())


def _used_too_late() -> None:
    model = _linear()
    with torch.no_grad():
        row = model.weight[0]
        model.weight.mul_(2)
        row.zero_()


def test_a_view_of_before_a_change_is_refused(ranks: Ranks) -> None:
    with pytest.raises(zf.StateError, match="used after its elements had changed"):
        ranks(2).run(_used_too_late)


def _different_rows() -> None:
    with torch.no_grad():
        _linear().weight[torch.tensor([1, 4 - dist.get_rank()])] = 0.0


def test_ranks_that_edit_other_rows_are_told(ranks: Ranks) -> None:
    with pytest.raises(zf.DisagreementError, match=r"different operands of index_(put|fill)_\."):
        ranks(2).run(_different_rows)


def _goes_on() -> list[bool]:
    """Every rank of 2 x 2 raises, though half of them agree along each axis; then they go on, one of them late."""
    model, row = composed("hybrid")
    raised = []
    for differs in (dist.get_rank() == 0, dist.get_rank() > 1, False):
        try:
            with torch.no_grad():
                model.get_parameter("mix.weight")[torch.tensor([int(differs)])] = 0.5
            raised.append(False)
        except zf.DisagreementError:
            raised.append(True)
    if dist.get_rank() == 3:
        time.sleep(0.2)  # longer than a wait asks whether its peer has given up
    loss_of(model, 0, row).backward()
    return raised


def test_ranks_that_disagreed_go_on(ranks: Ranks) -> None:
    """Each had given up, so a later wait of more than 50 ms raised that a rank was lost."""
    assert ranks(4).run(_goes_on) == [[True, True, False]] * 4


def _one_rank_edits() -> None:
    model = _linear()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.weight[0].zero_()
    else:
        model(torch.ones(1, 4))


def test_a_rank_that_edits_alone_is_told(ranks: Ranks) -> None:
    with pytest.raises(zf.DisagreementError, match="are at different collectives"):
        ranks(2).run(_one_rank_edits)


def _read() -> None:
    """A view is read, copied and saved as the plain tensor is."""
    model = _linear()
    whole = full(model.weight.detach())
    with torch.no_grad():
        rows = model.weight[1:3]
        assert rows.full_tensor().numpy().tolist() == whole[1:3].tolist()  # type: ignore[attr-defined]
        assert rows.to_local().tolist() == whole[1:3].tolist()  # type: ignore[attr-defined]
        assert torch.equal(copy.deepcopy(rows.to_local()), whole[1:3])  # type: ignore[attr-defined]
        assert rows.sum().item() == whole[1:3].sum().item()
        file = io.BytesIO()
        torch.save(rows.to_local(), file)  # type: ignore[attr-defined]
        file.seek(0)
        assert torch.equal(torch.load(file), whole[1:3])
    assert torch.equal(full(model.weight.detach()), whole)
    rows = model.weight[1:3]
    (rows**2).sum().backward()  # a penalty
    with torch.no_grad():
        rows.zero_()
    assert not full(model.weight.detach())[1:3].any()
    assert torch.equal(full(model.weight.grad), torch.zeros(6, 4).index_copy(0, torch.tensor([1, 2]), 2 * whole[1:3]))


def test_views_are_read_as_plain_tensors_are(ranks: Ranks) -> None:
    ranks(2).run(_read)
