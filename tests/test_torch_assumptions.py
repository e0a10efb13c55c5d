"""What we rely on in torch without its promise: one test each, so that a new torch says which one broke."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.tensor import DTensor, Replicate, Shard, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.support.groups import pretended
from tests.support.ranks import sent_by_value
from tests.support.versions import IS_BEFORE_2_14
from zero_fn.local.launcher import LocalRanks


@pytest.fixture(scope="module")
def mesh():
    with pretended(2) as axis:
        yield axis


def sharded(mesh, local):
    """A DTensor of twice the rows of `local`, which is its part on rank 0."""
    shape = torch.Size((2 * local.shape[0], *local.shape[1:]))
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(shape, tuple(local.stride()), local.dtype))
    return DTensor(local, spec, requires_grad=False)


# -- DTensor (dtensors.py) -------------------------------------------------------------------------------------------


def test_a_dtensor_aliases_the_local_tensor_it_is_made_of(mesh):
    local = torch.zeros(2, 3)
    tensor = sharded(mesh, local)
    assert tensor._local_tensor is local
    assert tuple(tensor.shape) == (4, 3)
    tensor._local_tensor[0, 0] = 5.0
    assert local[0, 0] == 5.0


def test_a_parameter_over_a_dtensor_shares_its_memory_and_is_a_dtensor(mesh):
    local = torch.zeros(2, 3)
    parameter = nn.Parameter(sharded(mesh, local))
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_leaf
    assert parameter._local_tensor.data_ptr() == local.data_ptr()
    assert not parameter._local_tensor.requires_grad


def test_a_flag_makes_a_dtensor_a_parameter_and_saves_a_detach(mesh):
    tensor = sharded(mesh, torch.zeros(2, 3))
    assert not isinstance(tensor, nn.Parameter)
    tensor._is_param = True
    tensor.requires_grad_()
    assert isinstance(tensor, nn.Parameter) and tensor.is_leaf
    assert vars(tensor).keys() == vars(nn.Parameter(sharded(mesh, torch.zeros(2, 3)))).keys()
    module = nn.Module()
    module.weight = tensor
    assert dict(module.named_parameters()) == {"weight": tensor}
    assert isinstance(copy.deepcopy(module).weight, nn.Parameter)


def test_the_local_tensor_of_a_parameter_may_be_replaced(mesh):
    parameter = nn.Parameter(sharded(mesh, torch.zeros(2, 3)))
    other = torch.ones(2, 3)
    parameter._local_tensor = other
    with torch.no_grad():
        parameter.add_(1.0)
    assert torch.equal(other, torch.full((2, 3), 2.0))


def test_modules_apply_a_function_to_their_parameters_and_to_their_children():
    """`runtime/module_edits.py` hides some parameters from it."""
    calls = []

    class Counted(nn.Linear):
        def _apply(self, fn, recurse=True):
            calls.append(self)
            return super()._apply(fn, recurse)

    inner = Counted(2, 2)
    outer = nn.Sequential(inner)
    del inner._parameters["bias"]
    inner.__dict__["bias"] = None
    assert outer.double()[0].weight.dtype == torch.float64
    assert calls == [inner]


def test_what_is_parametrized_is_set_to_itself_and_is_the_buffer_of_a_list():
    module = nn.Linear(2, 2)
    module._parameters["weight"] = plain = module.weight.detach()
    parametrize.register_parametrization(module, "weight", nn.Identity())
    assert plain._version > 0
    assert module.parametrizations["weight"]._buffers["original"] is plain
    parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    assert module._buffers["weight"] is plain


def test_a_gradient_that_is_a_dtensor_may_be_assigned(mesh):
    parameter = nn.Parameter(sharded(mesh, torch.zeros(2, 3)))
    parameter.grad = sharded(mesh, torch.ones(2, 3))
    assert isinstance(parameter.grad, DTensor)


def test_a_dtensor_may_have_an_empty_local_tensor(mesh):
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size((1, 3)), (3, 1), torch.float32))
    parameter = nn.Parameter(DTensor(torch.empty(0, 3), spec, requires_grad=False))
    assert parameter.shape == (1, 3)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: torch.optim.AdamW([p]), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.AdamW([p], foreach=True), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.AdamW([p], fused=True), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.Adagrad([p]), {"sum"}),
    ],
    ids=["AdamW", "AdamW-foreach", "AdamW-fused", "SGD-momentum", "Adagrad"],
)
def test_optimizer_states_follow_the_placement_of_their_parameter(mesh, make, states, placement):
    rows = 4 if placement == Shard(0) else 2
    spec = DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(torch.Size((rows, 3)), (3, 1), torch.float32))
    parameter = nn.Parameter(DTensor(torch.zeros(2, 3), spec, requires_grad=False))
    optimizer = make(parameter)
    parameter.grad = DTensor(torch.ones(2, 3), spec, requires_grad=False)
    optimizer.step()
    state = optimizer.state[parameter]
    assert states <= set(state)
    for name in states:
        assert isinstance(state[name], DTensor)
        assert state[name].placements == (placement,)
        assert state[name]._local_tensor.shape == (2, 3)
    assert not torch.equal(parameter._local_tensor, torch.zeros(2, 3))


def test_versions_do_not_tell_that_an_optimizer_stepped(mesh):
    """Why `runtime/optimizers.py` uses hooks: `_version` stays where it was under `foreach`."""
    parameter = nn.Parameter(sharded(mesh, torch.zeros(2, 3)))
    parameter.grad = sharded(mesh, torch.ones(2, 3))
    before = parameter._version
    torch.optim.SGD([parameter], lr=0.1, foreach=True).step()
    assert parameter._local_tensor[0, 0] != 0
    assert parameter._version == before


def test_hooks_for_all_optimizers_exist_and_can_be_removed():
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["pre", "post"]


def test_mixing_a_dtensor_and_a_plain_tensor_raises_with_these_words(mesh):
    """`runtime/access.py` knows the error by them, and the operation by the first one."""
    with pytest.raises(RuntimeError, match=r"^aten\.mm.* got mixed torch\.Tensor and DTensor"):
        torch.ones(5, 3) @ sharded(mesh, torch.ones(2, 3)).t()


# -- autograd (runtime/gather.py, runtime/backward.py, runtime/ending.py) ------------------------------------------------


class Twice(torch.autograd.Function):
    """Doubles; calls `during` in its backward. A leaf `token` hangs on every node."""

    during: Any = None

    @staticmethod
    def forward(ctx, x, token):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        if Twice.during is not None:
            Twice.during()
        return 2 * grad, None


@pytest.fixture
def during():
    """Functions to call in the backward of `Twice`; holds what they returned afterwards."""
    asked = []

    def call():
        asked[:] = [ask() if callable(ask) else ask for ask in asked]

    Twice.during = call
    yield asked
    Twice.during = None


def test_the_engine_says_whether_it_will_run_a_function_node(during):
    x, token = torch.ones(2, requires_grad=True), torch.zeros((), requires_grad=True)
    inside, outside = Twice.apply(x, token), Twice.apply(x, token)
    last = Twice.apply(inside, token)
    nodes = inside.grad_fn, outside.grad_fn
    during += [lambda: [torch._C._will_engine_execute_node(node) for node in nodes]]
    Twice.during, ask = None, Twice.during
    last.register_hook(lambda _: ask())  # before any node of `Twice` ran
    last.sum().backward()
    assert during == [[True, False]]


@pytest.mark.parametrize(("way", "expected"), [("backward", True), ("inputs", False), ("grad", False)])
def test_the_engine_visits_an_unasked_leaf_in_a_plain_backward_only(during, way, expected):
    x, token = torch.ones(2, requires_grad=True), torch.zeros((), requires_grad=True)
    token_node = get_gradient_edge(token).node
    during += [lambda: torch._C._will_engine_execute_node(token_node)]
    loss = Twice.apply(x, token).sum()
    if way == "backward":
        loss.backward()
    elif way == "inputs":
        loss.backward(inputs=[x])
    else:
        torch.autograd.grad(loss, [x])
    assert during == [expected]
    assert token.grad is None


def test_the_graph_task_is_minus_one_outside_backward_only(during):
    during += [torch._C._current_graph_task_id]
    loss = Twice.apply(torch.ones(2, requires_grad=True), torch.zeros((), requires_grad=True)).sum()
    assert torch._C._current_graph_task_id() == -1
    loss.backward()
    assert during[0] >= 0
    assert torch._C._current_graph_task_id() == -1


def test_create_graph_enables_grad_inside_backward_and_nothing_else_does(during):
    during += [torch.is_grad_enabled]
    x, token = torch.ones(2, requires_grad=True), torch.zeros((), requires_grad=True)
    Twice.apply(x, token).sum().backward()
    assert during == [False]
    during[:] = [torch.is_grad_enabled]
    torch.autograd.grad(Twice.apply(x, token).sum(), [x], create_graph=True)
    assert during == [True]


class Callback:
    """What is queued on the engine; `__weakref__` tells whether the engine still holds it."""

    def __init__(self, calls):
        self._calls = calls

    def __call__(self):
        self._calls.append("called")


def test_a_queued_callback_runs_once_at_the_end_of_backward(during):
    calls = []
    during += [lambda: Variable._execution_engine.queue_callback(Callback(calls))]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: calls.append("leaf"))
    Twice.apply(x, torch.zeros((), requires_grad=True)).sum().backward()
    assert calls == ["leaf", "called"]


def test_a_queued_callback_dies_with_a_backward_that_raises(during):
    alive = []
    calls = []

    def queue():
        callback = Callback(calls)
        alive.append(weakref.ref(callback))
        Variable._execution_engine.queue_callback(callback)

    def fail(_):
        assert alive[0]() is not None, "the engine holds the callback while backward runs"
        raise RuntimeError("in backward")

    during += [queue]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"):
        Twice.apply(x, torch.zeros((), requires_grad=True)).sum().backward()
    gc.collect()
    assert alive[0]() is None
    assert calls == []


def test_a_node_can_be_referenced_weakly_and_dies_with_its_graph():
    x, token = torch.ones(2, requires_grad=True), torch.zeros((), requires_grad=True)
    output = Twice.apply(x, token)
    loss = output.sum()
    node = weakref.ref(output.grad_fn)
    del output
    gc.collect()
    assert node() is not None, "the graph of the loss holds it"
    del loss
    gc.collect()
    assert node() is None


def test_a_node_survives_the_backward_that_frees_what_it_saved():
    """A second backward of the same graph is torch's error to raise: nodes live as long as the loss does."""
    output = Twice.apply(torch.ones(2, requires_grad=True), torch.zeros((), requires_grad=True))
    node = weakref.ref(output.grad_fn)
    loss = output.sum()
    del output
    loss.backward()
    assert node() is not None


# -- saved tensors (runtime/saved_tensor_hooks.py) --------------------------------------------------------------------


def test_the_hooks_on_top_can_be_read():
    def pack(tensor):
        return tensor

    def unpack(tensor):
        return tensor

    top = torch._C._autograd._top_saved_tensors_default_hooks
    assert top(False) is None
    with saved_tensors_hooks(pack, unpack):
        assert top(False) == (pack, unpack)
        with saved_tensors_hooks(unpack, pack):
            assert top(False) == (unpack, pack)
    assert top(False) is None


def test_only_the_innermost_hooks_are_called():
    packed = []

    def packs(name):
        return lambda tensor: (packed.append(name), tensor)[1]

    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(packs("outer"), lambda t: t), saved_tensors_hooks(packs("inner"), lambda t: t):
        x.exp()
    assert packed == ["inner"]


def test_data_is_the_same_memory_with_a_version_of_its_own():
    """Gathered tensors are `.data` of one buffer: refilling the buffer must not look like an edit of what was saved."""
    buffer = torch.zeros(4)
    view = buffer.as_strided((2, 2), (2, 1), 0).data
    assert view.data_ptr() == buffer.data_ptr()
    before = view._version
    buffer.fill_(3.0)
    assert torch.equal(view, torch.full((2, 2), 3.0))
    assert view._version == before
    view.add_(1.0)
    assert view._version == before + 1


def test_autograd_accepts_a_buffer_refilled_between_forward_and_backward():
    buffer = torch.full((2,), 3.0)
    x = torch.ones(2, requires_grad=True)
    product = x * buffer.as_strided((2,), (1,), 0).data
    buffer.fill_(5.0)
    product.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 5.0))


# -- modules (runtime/entry_point.py, runtime/slot.py) ---------------------------------------------------------------------


def test_an_instance_attribute_shadows_a_registered_parameter():
    linear = nn.Linear(2, 2)
    registered = linear.weight
    linear.__dict__["weight"] = shadow = torch.zeros(2, 2)
    assert linear.weight is shadow
    assert dict(linear.named_parameters())["weight"] is registered
    del linear.__dict__["weight"]
    assert linear.weight is registered


def test_calling_a_module_finds_forward_in_the_instance():
    linear = nn.Linear(2, 2)
    linear.__dict__["forward"] = lambda x: "ours"
    assert linear(torch.zeros(2)) == "ours"


def test_deepcopy_keeps_what_the_memo_names():

    linear = nn.Linear(2, 2)
    twin = copy.deepcopy(linear, {id(linear.weight): linear.weight})
    assert twin.weight is linear.weight
    assert twin.bias is not linear.bias


# -- waiting (transport/waiting.py, line.py) ---------------------------------------------------------------------------


def test_gloo_waits_no_longer_than_it_is_told_and_says_so():
    """`zero_fn.transport.waiting` tells a late peer from a lost one by these words."""

    def words():
        group = c10d._get_default_group()
        if dist.get_rank() == 1:
            return "", 0.0
        began_s = time.monotonic()
        try:
            group.recv([torch.zeros(1)], 1, 5).wait(timedelta(seconds=0.3))
        except RuntimeError as error:
            return str(error), time.monotonic() - began_s
        return "nothing", 0.0

    with LocalRanks(2) as fresh, sent_by_value(words):
        (text, seconds), _ = fresh.run(words, timeout_s=30)
    assert "Timed out" in text
    assert 0.25 < seconds < 3


# -- torch.compile (uncompiled.py) -----------------------------------------------------------------------------------


def test_marked_code_is_skipped_by_the_compiler_and_what_it_calls_if_so_marked():
    from zero_fn.runtime.uncompiled import left_alone, uncompiled

    compiling = []

    def inner(x):
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    @uncompiled
    def alone(x):
        return inner(x)

    @left_alone
    def outside(x):
        compiling.append(torch.compiler.is_compiling())
        return x.mul(2).add(1)

    def both(x):
        return outside(alone(x * 2)) * 2

    torch._dynamo.reset()
    assert torch.equal(torch.compile(both, backend="eager")(torch.ones(2)), both(torch.ones(2)))
    assert compiling == [False] * 4


def test_the_compiler_takes_a_local_tensor_on_the_slice_of_a_storage(mesh):
    """(resting.alone) It is a storage of its own over the same memory. One at an offset raised until 2.13."""
    buffer = torch.arange(8.0)
    alias = torch.empty(0).set_(buffer.untyped_storage()[16:32], 0, (2, 2), (2, 1))
    parameter = nn.Parameter(sharded(mesh, torch.zeros(2, 2)))
    run = torch.compile(lambda p: 2 * p.to_local(), backend="eager", fullgraph=True)
    parameter._local_tensor = buffer[4:].view(2, 2)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="storage") if IS_BEFORE_2_14 else nullcontext():
        run(parameter)
    parameter._local_tensor = alias
    assert torch.equal(run(parameter), torch.tensor([[8.0, 10.0], [12.0, 14.0]]))
    buffer[7] = 0.0
    assert alias[1, 1] == 0.0


def test_dlpack_puts_a_view_on_a_storage_of_its_own():
    """(resting.rested)"""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        buffer = torch.arange(40).to(dtype)
        view = buffer.as_strided((2, 3, 2), (1, 2, 10), 5)
        alone = torch._C._from_dlpack(torch._C._to_dlpack(view))
        assert (alone.stride(), alone.storage_offset(), alone.dtype) == (view.stride(), 0, dtype)
        assert alone.data_ptr() == view.data_ptr()
        assert alone.untyped_storage()._cdata != buffer.untyped_storage()._cdata
        held = weakref.ref(buffer.untyped_storage())  # lives as long as the memory, not as the object in Python
        expected = view.clone()
        del buffer, view
        gc.collect()
        assert held() is not None
        assert torch.equal(alone, expected)
        del alone
        assert held() is None


def test_a_dtensor_has_no_storage_to_ask_the_address_of(mesh):
    """So saved-tensor hooks look at its local tensor; whoever saves tensors by their memory finds none (docs/limits.md)."""
    tensor = sharded(mesh, torch.ones(2, 3))
    with suppress(RuntimeError):  # which later versions may raise
        assert tensor.data_ptr() == 0
    with pytest.raises(RuntimeError):
        tensor.untyped_storage().data_ptr()
    assert tensor._local_tensor.untyped_storage().data_ptr()


def test_a_dtensor_saved_for_backward_reaches_the_hooks_and_may_come_back_as_another(mesh):
    weight = sharded(mesh, torch.ones(2, 3)).requires_grad_()
    packed = []

    def pack(tensor):
        assert isinstance(tensor, DTensor)
        packed.append(tensor.detach())
        return len(packed) - 1

    def unpack(number):
        kept = packed[number]
        return DTensor(2 * kept._local_tensor, kept._spec, requires_grad=False)

    with saved_tensors_hooks(pack, unpack):
        square = weight * weight
    square.sum().to_local().backward()
    assert packed
    assert isinstance(weight.grad, DTensor)
    assert torch.equal(weight.grad._local_tensor, torch.full((2, 3), 4.0))


def test_a_dtensor_made_without_its_init_is_whole(mesh):
    """`resting.on_spec` leaves `DTensor.__init__` out."""
    known = sharded(mesh, torch.arange(6.0).view(2, 3))
    made = DTensor.__new__(DTensor, known._local_tensor, known._spec, requires_grad=False)
    assert made.__dict__.keys() == known.__dict__.keys()
    assert torch.equal((made + 1).full_tensor(), (known + 1).full_tensor())


@pytest.mark.parametrize("ranks", [2, 3])
def test_chunk_cat_lays_out_what_each_rank_receives(ranks):
    """Rows of any shape and strides. Reductions of small gradients rest on it where the backend sums."""
    rows = [torch.arange(12.0).view(6, 2), torch.arange(6.0), torch.arange(24.0).view(4, 6).t()]
    expected = torch.stack([torch.cat([t.chunk(ranks)[r].reshape(-1) for t in rows]) for r in range(ranks)])
    assert torch.equal(torch._chunk_cat(rows, 0, ranks), expected)


def test_split_with_sizes_copy_writes_what_ranks_sent_into_strided_wholes():
    message = torch.arange(10.0).view(2, 5)
    wholes = [torch.zeros(4), torch.zeros(6)]
    torch.split_with_sizes_copy(message, [2, 3], 1, out=[wholes[0].view(2, 2), wholes[1].view(2, 3)])
    assert wholes[0].tolist() == [0, 1, 5, 6]
    assert wholes[1].tolist() == [2, 3, 4, 7, 8, 9]


def test_a_storage_counts_what_refers_to_it():
    memory = torch.empty(8)
    storage = memory.untyped_storage()

    def count():
        return torch._C._storage_Use_Count(storage._cdata)

    before = count()
    view = memory.as_strided((2,), (1,), 4)
    assert count() == before + 1
    other = view.data
    assert count() == before + 2
    del view, other
    assert count() == before


def test_views_see_the_memory_that_a_storage_is_given_again():
    memory = torch.ones(8)
    view, storage = memory[4:], memory.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(32)
    memory.fill_(3.0)
    assert view.tolist() == [3.0] * 4


def test_a_storage_that_numpy_has_seen_says_that_it_cannot_be_resized():
    memory = torch.ones(8)
    assert memory.untyped_storage().resizable()
    memory.numpy()
    assert not memory.untyped_storage().resizable()


def test_a_tensor_counts_who_holds_it_outside_of_python():
    leaf = torch.ones(2, requires_grad=True)
    before = leaf._use_count()
    saved = leaf * leaf
    assert leaf._use_count() > before
    del saved
    assert leaf._use_count() == before


def test_a_node_without_saved_tensors_runs_in_any_number_of_backwards():
    class VisibleParameters(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given, leaf):
            return tuple(given)

        @staticmethod
        def backward(ctx, *grads):
            return None, sum(grads)

    leaf = torch.ones(2, requires_grad=True)
    shown = VisibleParameters.apply([torch.ones(2), torch.ones(2)], leaf)
    for times in (1, 2):
        (shown[0] + 2 * shown[1]).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [3.0 * times] * 2


def test_redistributions_of_dtensors_meet_in_one_function_of_two_modules(mesh, monkeypatch):
    """`runtime.refused` stands before it: explicit ones look it up in one, those of operands in the other."""
    seen = []
    for module in (_redistribute, _dispatch):
        stock = vars(module)["redistribute_local_tensor"]

        def noted(*args, stock=stock, name=module.__name__, **kwargs):
            seen.append(name.rpartition(".")[2])
            return stock(*args, **kwargs)

        monkeypatch.setattr(module, "redistribute_local_tensor", noted)
    tensor = sharded(mesh, torch.ones(2, 3))
    tensor.full_tensor()
    tensor.redistribute(placements=[Shard(1)])
    tensor.softmax(0)
    assert seen == ["_redistribute", "_redistribute", "_dispatch"]


def test_a_file_that_is_read_without_bytes_says_where_they_are(tmp_path):
    """dtype, shape and strides, and under a private name the first byte of the storage: what `torch_files.py` reads."""
    x = torch.arange(24.0).view(4, 6)
    torch.save({"x": x, "y": x.t()[1:], "z": torch.ones(3)}, tmp_path / "x.pt")
    with FakeTensorMode():
        found = torch.load(tmp_path / "x.pt", weights_only=True)
    raw = (tmp_path / "x.pt").read_bytes()
    assert found["y"].stride() == (1, 6) and found["y"].storage_offset() == 1
    at = found["x"].untyped_storage()._checkpoint_offset
    assert found["y"].untyped_storage()._checkpoint_offset == at
    assert raw[at : at + 96] == x.numpy().tobytes()
