"""Operations that DTensor does wrong without a word: refused or mended here, and still wrong in torch alone."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.torch_version import TorchVersion

import zero_fn as zf
from tests.axes.grids import composed
from tests.simulation import axis as simulated_axis
from tests.support.groups import alone, pretended
from tests.support.messages import Headed, a_batch, refusals, refused
from tests.support.on_ranks import on_ranks
from tests.support.ranks import axis
from tests.support.resident import in_new_process
from tests.support.versions import IS_2_11
from tests.support.wholes import full
from zero_fn.dtensor.refused import ROWS
from zero_fn.runtime import resting_edits
from zero_fn.runtime.resting_edits import watch_edits


def _left(edit):
    def left(t, _):
        edit(t.detach())

    return left


def _written(view):
    return _left(lambda t: view(t).mul_(2))


def _drawn(draw):
    def drawn(t, _):
        torch.manual_seed(3)
        return draw(t.detach())

    return drawn


WRONG = {
    "normal_": _drawn(lambda t: t.normal_()),
    "uniform_": _drawn(lambda t: t.uniform_()),
    "bernoulli_": _drawn(lambda t: t.bernoulli_(0.5)),
    "exponential_": _drawn(lambda t: t.exponential_()),
    "log_normal_": _drawn(lambda t: t.log_normal_()),
    "cauchy_": _drawn(lambda t: t.cauchy_()),
    "geometric_": _drawn(lambda t: t.geometric_(0.5)),
    "bernoulli": _drawn(lambda t: torch.bernoulli(t.abs().clamp(0, 1))),
    "multinomial": _drawn(lambda t: torch.multinomial(t.abs(), 2)),
    "rand_like": _drawn(torch.rand_like),
    "randn_like": _drawn(torch.randn_like),
    "randint_like": _drawn(lambda t: torch.randint_like(t, 100)),
    "native_dropout": _drawn(lambda t: F.dropout(t, 0.5)),
    "rrelu_with_noise": _drawn(lambda t: F.rrelu(t, training=True)),
    "eye.m_out": _drawn(nn.init.eye_),
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": lambda t, anchor: F.soft_margin_loss(t, anchor.sign()),
    "binary_cross_entropy": lambda t, anchor: F.binary_cross_entropy(t.sigmoid(), anchor.sigmoid()),
    "binary_cross_entropy_with_logits": lambda t, a: F.binary_cross_entropy_with_logits(t, a.sigmoid()),
    "aminmax.default": lambda t, _: torch.aminmax(t, keepdim=True).max,
    "fill_.Scalar": lambda t, _: t.detach().sum(0).fill_(2),
    "cumsum.default": lambda t, _: t.cumsum(-2),
    "cumprod.default": lambda t, _: t.detach().cumprod(-2),
    "logcumsumexp.default": lambda t, _: t.logcumsumexp(-2),
    "sum.default": lambda t, _: torch.stack([t.norm(), (t**4).norm()]).sum(),
    "nansum.default": lambda t, _: torch.stack([t.norm(), (t**4).norm()]).nansum(),
    "sum.dim_IntList": lambda t, _: t.sum([], keepdim=True),
    "mean.dim": lambda t, _: t.mean((), keepdim=True),
    "amax.default": lambda t, _: t.amax(keepdim=True),
    "amin.default": lambda t, _: (-t).amin(keepdim=True),
    "_local_scalar_dense.default": lambda t, _: torch.tensor(t.sum().item()),
    "linalg_vector_norm.default": lambda t, _: t.norm(dim=0).sum(),
    "any.default": lambda t, _: (t > -5).any() * 2,
    "any.dim": lambda t, _: (t > -1).any(0) * 2,
    "any.dims": lambda t, _: torch.any(t > -5, (0, 1)) * 2,
    "select.int": _written(lambda t: t[-1]),
    "slice.Tensor": _written(lambda t: t[1:3]),
    "split.Tensor": _written(lambda t: t.split(3)[1]),
    "split_with_sizes.default": _written(lambda t: t.split([1, len(t) - 1])[1]),
    "diagonal.default": _written(lambda t: t.diagonal()),
}
"""By operation, as `ROWS` names it: what takes a tensor of 7 rows and 6 columns, and one placed alike. What it returns is
compared, and its gradient; if it returns None, the tensor."""

MORE = {
    "the backward of amax": lambda t, _: t.amax(),
    "the maximum norm of a difference": lambda t, _: (t.detach().max() - t.detach().norm()).norm(torch.inf),
    "the backward of the largest": lambda t, _: (2 * t).norm(torch.inf),
    "a slice of a slice": _written(lambda t: t[1:][-1:]),
    "a row of `data`": _written(lambda t: t.data[0]),
    "a block": _written(lambda t: t[:2, 1:]),
    "a column of the transpose": _written(lambda t: t.t()[:, 1]),
    "nn.init of a slice": _written(lambda t: nn.init.ones_(t.data[1:3])),
    "many at once": _left(lambda t: torch._foreach_mul_([t[0], t[1]], 2.0)),
    "a row as out": _left(lambda t: torch.add(t[0], 1, out=t[0])),
    "a row by a row": _left(lambda t: t[0].copy_(t[1])),
}
"""More of the same."""

EXAMPLES = {**WRONG, **MORE}

OLD = TorchVersion(torch.__version__) < "2.13"
"""Whether this torch is older than the table. It has no rule for some of the operations, and raises: that will do."""

MENDED = (
    "eye.m_out cumsum.default cumprod.default logcumsumexp.default linalg_vector_norm.default any.default any.dim any.dims "
    "sum.default nansum.default"
)
"""What torch 2.14.1 has right, or refuses. Their rows leave with torch 2.13."""

ELSEWHERE = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor stack.default view.default _unsafe_view.default copy_.default index.Tensor "
    "clamp_.default clamp_min_.default clamp_max_.default add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor sqrt_.default "
    "pow_.Scalar reciprocal_.default max.default min.default argmax.default argmin.default mean.default "
    "_foreach_norm.Scalar _foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_mul _foreach_mul_ "
    "_foreach_mul_.Tensor _foreach_mul_.Scalar _foreach_div _foreach_div_ _foreach_lerp _foreach_lerp_ "
    "_foreach_copy_.default _foreach_addcmul_ _foreach_addcdiv_"
)
"""What other tests here, `test_empty_shards.py` and `transforms/test_offload.py` look at."""


def test_every_operation_in_the_table_has_an_example_and_a_way_out():
    assert {name for row in ROWS for name in row.names.split()} == {*WRONG, *ELSEWHERE.split()}
    assert all(row.why and bool(row.fix or row.mend) for row in ROWS)


def _outcome(act, tensor, anchor):
    """What an example gives and leaves, whole."""
    value = act(tensor, anchor)
    found = [full(tensor.detach())] if value is None else [full(value.detach())]
    if value is not None and value.requires_grad:
        value.square().sum().backward()
        found.append(full(tensor.grad))
    return found


def _plain(rows):
    torch.manual_seed(1)
    return nn.Parameter(torch.randn(rows, 6)), torch.randn(rows, 6)


def _is_as_plain(name, act, tensor, anchor):
    expected = _outcome(act, *_plain(7))
    found = _outcome(act, tensor, anchor)
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    )


def _alone(name):
    plain, anchor = _plain(7)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("alone",))  # no transform is given it
    tensor = distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]).requires_grad_()
    return _is_as_plain(name, EXAMPLES[name], tensor, distribute_tensor(anchor, mesh, [Shard(0)]))


@pytest.mark.nightly  # it tells of torch, and not of this package
@pytest.mark.skipif(OLD, reason="the table is that of torch 2.13")
@pytest.mark.parametrize("name", EXAMPLES)
def test_torch_alone_is_still_wrong(ranks, name):
    """Once it is right or raises, its row can leave."""
    if name in MENDED.split() and TorchVersion(torch.__version__) >= "2.14.1":
        pytest.skip("torch has it right")
    assert ranks(2).run(_alone, name) == [False] * 2


@pytest.mark.skipif(OLD, reason="torch refuses the view")
@on_ranks(4)
def test_a_view_in_another_shape_that_gathers_is_not_written():
    model, _ = composed("tp")
    weight = model.get_parameter("blocks.0.down.weight").detach()
    assert weight.placements[-1] == Shard(1)
    before = full(weight)
    view = weight.view(2, -1)
    assert torch.equal(full(view), before.view(2, -1))
    with pytest.raises(zf.errors.ShardedAccessError):
        view.zero_()
    assert torch.equal(full(weight), before)


class Holder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


def _resting(rows, composition):
    plain, anchor = _plain(rows)
    weight = getattr(zf, composition)(Holder(plain), axis()).weight
    return weight, distribute_tensor(anchor, weight.device_mesh, weight.placements)


def _ours(name, composition):
    """The fix that was named, whether it is right, or None where an old torch refuses it."""
    weight, anchor = _resting(7, composition)
    before = full(weight.detach())
    try:
        return _is_as_plain(name, EXAMPLES[name], weight, anchor)
    except zf.errors.ShardedAccessError as error:
        assert torch.equal(full(weight.detach()), before), "it raised after the damage"
        return error.fix
    except (NotImplementedError, RuntimeError):
        if not OLD:
            raise
        assert torch.equal(full(weight.detach()), before), "it raised after the damage"
        return None


def _fix(name):
    """What the table says of an operation."""
    return next((row.fix for row in ROWS if name in row.names.split() and (row.fix or row.until is None)), "")


@pytest.mark.parametrize("composition", ["zero1", "zero3"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_refused_with_the_fix_or_right(ranks, name, composition):
    view = _fix("select.int")
    fix = _fix(name) if name in WRONG else "" if name.startswith("the ") else view
    allowed = [fix or True, None] if OLD else [fix or True]
    assert all(found in allowed for found in ranks(2).run(_ours, name, composition))


@pytest.mark.skipif(OLD, reason="torch has no rule for some of them")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "fill_.Scalar"])  # a sum is still a term
def test_one_rank_is_refused_nothing(name):
    with alone() as mesh:
        plain, anchor = _plain(7)
        weight = zf.shard_params(Holder(plain), mesh).weight
        assert _is_as_plain(name, EXAMPLES[name], weight, distribute_tensor(anchor, weight.device_mesh))


def _mixed():
    """How a plain loss beside a penalty is refused."""
    found = []
    for mix in (lambda a, b: a + b, lambda a, b: b - a, lambda a, b: a * b, lambda a, b: b / a):
        weight, _ = _resting(7, "zero3")
        plain = torch.ones(3, requires_grad=True)
        try:
            mix(plain.sum(), weight.square().sum())
        except zf.errors.ShardedAccessError as error:
            found.append(error.fix)
    return found


def test_a_sum_of_a_plain_loss_and_a_penalty_is_refused_where_it_is_made(ranks):
    (fix,) = {row.fix for row in ROWS if "add.Tensor" in row.names}
    assert ranks(2).run(_mixed) == [[fix] * 4] * 2


@on_ranks(2)
def test_clipping_gradients_beside_plain_ones_is_refused_before_damage():
    weight, _ = _resting(7, "zero3")
    other = nn.Parameter(torch.ones(3))
    weight.grad, other.grad = weight.detach() + 5, torch.ones(3)
    before = full(weight.grad)
    with refused("clip_over_a_plain_model_too"):
        nn.utils.clip_grad_norm_([weight, other], 1.0, foreach=False)
    assert torch.equal(full(weight.grad), before)


@on_ranks(2)
def test_views_are_read_as_plain_ones():
    """Views are read, copied and saved as those of the plain tensor."""
    weight, _ = _resting(7, "zero3")
    whole = full(weight.detach())
    rows = weight.detach()[1:3]
    assert rows.full_tensor().numpy().tolist() == whole[1:3].tolist()
    assert rows.to_local().tolist() == whole[1:3].tolist()
    assert type(copy.deepcopy(rows.to_local())) is Tensor
    assert (rows.sum().item(), rows[0, 1].item()) == (whole[1:3].sum().item(), whole[1, 1].item())
    file = io.BytesIO()
    torch.save(rows.to_local(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), whole[1:3])
    drop = lambda t: torch.native_dropout(t, 0.5, False)[0]  # noqa: E731
    for off in (drop,) if IS_2_11 else (drop, F.rrelu):  # they draw nothing
        assert torch.equal(full(off(weight.detach())), off(whole))
    weight[1:3].square().sum().backward()  # a penalty
    assert torch.equal(full(weight.grad), torch.zeros(7, 6).index_copy(0, torch.tensor([1, 2]), 2 * whole[1:3]))


def _one_rank_reads():
    model = zf.shard_params(nn.Linear(4, 4), axis())
    if torch.distributed.get_rank() == 0:
        model.weight.sum().item()
    else:
        model(torch.ones(1, 4))


def test_a_rank_that_reads_a_number_alone_is_told(ranks):
    with pytest.raises(
        zf.errors.DisagreementError, match=r"Reading the value of a sum over shards|are at different collectives"
    ):
        ranks(2).run(_one_rank_reads)


def _clip_adaptively(model):
    """What timm's adaptive gradient clipping does (arXiv:2102.06171)."""
    model(torch.ones(4, 6)).square().sum().backward()
    for p in model.parameters():
        norms = (lambda t: t.norm(2.0)) if p.ndim <= 1 else (lambda t: t.norm(2.0, dim=1, keepdim=True))
        largest = norms(p.detach()).clamp_(min=1e-3).mul_(0.01)
        norm = norms(p.grad.detach())
        clipped = p.grad.detach() * (largest / norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(norm < largest, p.grad.detach(), clipped))


def _project(model):
    """What PCGrad leaves of two tasks (arXiv:2001.06782), as its loops flatten, project and write back."""
    tasks = []
    for task in range(2):
        model.zero_grad()
        (model(torch.randn(4, 6)) - 3 * task).square().mean().backward()
        tasks.append(torch.cat([p.grad.detach().flatten() for p in model.parameters() if p.grad is not None]))
    first, second = tasks
    if (product := first.dot(second)) < 0:
        first = first - product / second.norm() ** 2 * second
    for p, values in zip(model.parameters(), first.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad.data.copy_(values.view_as(p))


@pytest.mark.parametrize("edit", [_clip_adaptively, _project])
@pytest.mark.parametrize("composition", ["replicate", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_gradients_that_a_loop_edits_are_those_of_a_plain_model(composition, edit):
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    found = getattr(zf, composition)(plain, axis())
    for model in (plain, found):
        torch.manual_seed(4)
        edit(model)
    for one, other in zip(plain.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(full(other.grad), one.grad)


WRITES = (("clamp_", 3.0), ("sub_", 1.0), ("sqrt_",), ("pow_", 3))
"""Some of the operations in the row."""


@on_ranks(2)
def test_norms_and_sums_are_written_in_place_where_nothing_else_has_their_memory():
    """In place, as out of place: norms of a parameter, and sums of its columns. Torch refuses what has an alias."""
    weight = _resting(7, "zero3")[0].detach()
    for value in (lambda: weight.norm(), lambda: weight.square().sum(0)):
        expected = full(value())
        for write, *by in WRITES:
            found = value()
            getattr(found, write)(*by)
            torch.testing.assert_close(full(found), getattr(expected.clone(), write)(*by))
    for alias in (lambda t: t.detach(), lambda t: t[...]):
        norm = weight.norm()
        with pytest.raises(RuntimeError, match="in-place operations that require placement changes"):
            alias(norm).clamp_(min=100.0)


@on_ranks(2)
def test_lists_of_dtensors_and_plain_tensors_are_done_apart():
    """Rows of DTensors and of plain tensors in one call; a row of both kinds is an error of torch."""
    weight = _resting(7, "zero3")[0].detach()
    ones = torch.ones(3)

    def lists():
        return [[ones.clone(), weight.clone(), ones.clone(), weight.clone()] for _ in range(3)]

    for act in (
        lambda a, b, c: torch._foreach_copy_(a, b),
        lambda a, b, c: torch._foreach_sub_(a, b, alpha=2),
        lambda a, b, c: torch._foreach_add_(a, [1, 2, 3, 4]),
        lambda a, b, c: torch._foreach_div_(a, 3.0),
        lambda a, b, c: torch._foreach_addcdiv_(a, b, c),
        lambda a, b, c: torch._foreach_add(b, torch._foreach_mul(a, 2.0)),
        lambda a, b, c: torch._foreach_sub(a, b if IS_2_11 else torch._foreach_lerp(b, c, 0.5), alpha=3),
    ):
        given, plain = lists(), [[full(tensor) for tensor in one] for one in lists()]
        for one in (given, plain):
            torch._foreach_add_(one[1], [1, 2, 3, 4])
        found, expected = act(*given) or given[0], act(*plain) or plain[0]
        assert all(torch.equal(full(one), other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(RuntimeError, match="got mixed"):
        torch._foreach_add_([ones.clone(), weight.clone()], [ones, full(weight)])


FLAT = [
    lambda t: t.view(-1),
    lambda t: t.flatten(),
    lambda t: t.reshape(-1),
    lambda t: t.view(1, -1),
    lambda t: torch.cat([t.flatten(), t.view(-1)]),
    lambda t: t.detach().ravel(),
    lambda t: nn.utils.parameters_to_vector([t, t]),
]
if not IS_2_11:
    FLAT.append(lambda t: t.t().reshape(-1))


def _flattened():
    """Views as one row, of rows that the ranks do not divide and of a single one; their gradients; sums with shards."""
    for shape in ((7, 6), (1, 6), (5,), (1,)):
        plain = nn.Parameter(torch.randn(shape))
        weight = zf.shard_params(Holder(nn.Parameter(plain.detach().clone())), axis()).weight
        for flat in FLAT:
            found, expected = flat(weight), flat(plain)
            assert torch.equal(full(found.detach()), expected)
            if not expected.requires_grad:
                continue
            found.square().sum().backward()
            expected.square().sum().backward()
            assert torch.equal(full(weight.grad), plain.grad)
            weight.grad = plain.grad = None
        for p in (weight, plain):
            with torch.no_grad():
                other = 1 + p.detach().square().view(-1).view_as(p)
                p.copy_(other).add_(other, alpha=2).mul_(other).sub_(other).div_(other)
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p]) + 1, [p])
        assert torch.equal(full(weight.detach()), plain)
        if plain.ndim > 1:  # else the view is of the shard
            with pytest.raises(zf.errors.ShardedAccessError):
                weight.detach().view(-1).zero_()


def test_what_is_flattened_is_whole_where_the_ranks_do_not_divide_its_rows(ranks):
    """torch refuses, also to add a row of a whole tensor to the only row of a cut one."""
    for n in (2, 3):
        ranks(n).run(_flattened)


@on_ranks(2)
def test_parameters_are_not_made_of_resting_ones():
    """What libraries write that make new parameters of those at rest, as PEFT does; torch dies of SIGSEGV at the first."""
    weight = zf.shard_params(nn.Linear(4, 4), axis()).weight
    plain = nn.Parameter(torch.zeros(4, 4))
    with refused("plain_data_was_assigned_a_resting_tensor"):
        plain.data = weight.data
    assert torch.equal(plain, torch.zeros(4, 4))
    plain.data = weight.full_tensor().data
    assert torch.equal(plain, full(weight))
    with refused("resting_parameter_is_read_at_positions"):
        weight[[1, 3]]
    assert torch.equal(weight.full_tensor()[[1, 3]], plain[[1, 3]])


@on_ranks(2)
def test_a_norm_is_formatted_as_a_number():
    weight = _resting(7, "zero3")[0]
    weight.grad = torch.ones_like(weight)
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    assert f"{norm:.3f}" == f"{42**0.5:.3f}"
    assert f"{norm}" == str(norm)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{weight:.3f}"


def _seen_after_a_forward_without_a_mesh():
    """Whether a write is refused while a forward is open, and after it."""
    zf.checkpoint_activations(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))(torch.ones(1, 4))
    found = []
    with pretended(2) as mesh:
        model = zf.shard_params(nn.Linear(4, 4), mesh)
        for is_open in (True, False):
            watch_edits(model, is_open=is_open)
            try:
                model.weight.detach()[1:3].zero_()
                found.append("went")
            except zf.errors.ShardedAccessError:
                found.append("refused")
    return found


def test_a_forward_before_the_first_mesh_takes_no_refusal_away():
    """The table of handlers of an open forward was made then, and lacked those that came with the mesh."""
    assert in_new_process(_seen_after_a_forward_without_a_mesh) == ["refused", "refused"]


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + self.bias


def _read_whole_in_a_forward(model):
    model.head.register_forward_pre_hook(lambda *_: next(model.layers.parameters()).full_tensor())
    model(a_batch())


def _lead_back_from_shards(two):
    model = zf.shard_params(Shifted(), two)
    model(torch.ones(2, 4)).sum().backward(model.bias.detach().sum())


test_refusals = refusals(
    {
        "resting_parameters_are_shared": lambda model: model.share_memory(),
        "weight_is_asked_for_its_storage": lambda two: zf.shard_params(Headed(), two).head.weight.storage(),
        "weight_is_made_whole_in_a_forward": _read_whole_in_a_forward,
        "row_of_a_resting_parameter_is_written": lambda two: (
            zf.shard_params(nn.Linear(4, 4), two).weight.detach()[1:3].zero_()
        ),
        "resting_parameter_is_drawn": lambda two: nn.init.orthogonal_(zf.shard_params(nn.Linear(6, 4), two).weight),
        "gradient_of_a_plain_loss_in_shards": _lead_back_from_shards,
    }
)


def penalised():
    torch.manual_seed(0)
    model = zf.shard_params(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), simulated_axis())
    for _ in range(2):
        penalty = sum((p * p).sum() for p in model.parameters())
        (model(torch.ones(2, 4)).sum() + 0.01 * penalty.full_tensor()).backward()
        model.zero_grad()


def test_threads_that_open_forwards_lose_no_row_of_one_another(simulated):
    """Each rank is a thread here. What torch has wrong was then given as torch gives it."""
    with alone() as mesh:
        zf.shard_params(nn.Linear(4, 4), mesh)(torch.ones(2, 4))
    before = {*resting_edits._stock}
    for schedule in ([], [1], [0, 1]):
        simulated(2, schedule=schedule).run(penalised)
    assert before <= {*resting_edits._stock} and before <= {*resting_edits._watching}
