"""What people call first, on an accelerator: `from_deepspeed`, the Trainer, Accelerate, `from_pretrained`, `save` and `load`,
`generate`; and memory of the device that runs out.

`python -m tests.accelerator.entries DEVICE FOLDER` prints what became of each as soon as it has ended, and all of it as JSON.
The oracle is the same run with everything on the device and no transform: the Trainer of transformers, for ours.
"""

import copy
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from tests.accelerator import device
from tests.accelerator.programs import adamw, all_away, batches, net, require_same, trained, values
from tests.support.models import Stack
from zero_fn.runtime.door import runs_of
from zero_fn.transport.agree import Bits

__all__ = ["PROGRAMS", "main"]

VOCABULARY = 64
Program = Callable[[DeviceMesh, Path], None]


def tiers(folder):
    return device.host(), zf.nvme(folder)


def llama(**options):
    """Two layers, 32 wide, on the host. Its values are large enough that tokens differ from one another."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    common = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**common | sizes | special | {"initializer_range": 0.2} | options))


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count on by one, two or three."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        first, step = (torch.randint(1, high, (16, 1), generator=generator) for high in (VOCABULARY, 4))
        self.tokens = (first + step * torch.arange(12)) % VOCABULARY

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def from_deepspeed(mesh, folder):
    """A config in a file: ZeRO-3 with parameters and states on the host, or on a disk."""
    host = {"device": "cpu", "pin_memory": device.NAME == "cuda"}
    for way, place in {"host": host, "disk": {"device": "nvme", "nvme_path": str(folder)}}.items():
        config = {
            "train_batch_size": 4,
            "gradient_clipping": 1.5,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-2, "weight_decay": 1e-2, "fused": device.NAME == "cuda"},
            },
            "zero_optimization": {
                "stage": 3,
                "offload_param": place,
                "offload_optimizer": place,
                "stage3_param_persistence_threshold": 0,
            },
        }
        (folder / f"{way}.json").write_text(json.dumps(config))
        plain = net()
        setup = zf.from_deepspeed(net(), folder / f"{way}.json", mesh)
        assert zf.held(setup.model, setup.optimizer).on_device == 0, zf.held(setup.model, setup.optimizer)
        expected = trained(plain, adamw(plain), batches(2))
        found = []
        for tokens in batches(2):
            loss = F.cross_entropy(setup.model(tokens).flatten(0, 1), tokens.flatten())
            setup.scaled(loss).backward()
            norm = setup.step()
            assert norm is not None
            found += [loss.item(), norm]
        assert device.same(found, expected), (found, expected)
        assert device.same(values(setup.model), values(plain))


def checkpoints_on_the_host(mesh, folder):
    """What recomputed blocks keep leaves the device, and comes back block by block, however far the host is ahead: it kept
    the inputs of all blocks until the device had computed them."""
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    x = torch.ones(1024, 32).to(device.NAME)

    def kept(layers):
        """Bytes after the forward, and at most until the end of the backward."""
        model = Stack(32, 64, layers).to(device.NAME)
        model.layers.requires_grad_(False)  # gradients would grow with their number
        setup = zf.from_deepspeed(model, config, mesh)
        for _ in range(2):
            before = device.used()[0]
            loss = setup.model(x).square().mean()
            after = device.used()[0]
            setup.scaled(loss).backward()
            most = device.used()[1]
            setup.step()
        return after - before, most - before

    few, many = kept(4), kept(12)
    assert all(abs(one - other) <= device.SLACK_NBYTES for one, other in zip(few, many, strict=True)), (few, many)


def trainer(mesh, folder):
    """A ZeroTrainer with everything on the host trains, saves, and resumes from its middle as the Trainer trains."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    from zero_fn.integrations.transformers import ZeroTrainer

    def numbers(kind, name, resumed=None, **options):
        arguments = TrainingArguments(
            output_dir=str(folder / name), per_device_train_batch_size=2, max_steps=4, learning_rate=1e-2,
            lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.1, max_grad_norm=0.5, logging_steps=1,
            save_steps=2, report_to=[], disable_tqdm=True, seed=3, dataloader_pin_memory=device.NAME == "cuda",
        )  # fmt: skip
        made = kind(model=llama(), args=arguments, train_dataset=Counting(), **options)
        made.train(resume_from_checkpoint=resumed)
        log = made.state.log_history
        return made, [float(entry[key]) for entry in log for key in ("loss", "grad_norm") if key in entry]

    host = device.host()
    ours = {"place": lambda model: all_away(zf.zero3(model, mesh), host), "finish": zf.streamed}
    plain, expected = numbers(Trainer, "plain")
    made, found = numbers(ZeroTrainer, "ours", **ours)
    assert len(expected) == 8
    assert device.same(found, expected), (found, expected)
    require_on_device(plain.model)
    held = zf.held(made.model, made.optimizer.optimizer)
    assert held.parameters == held.optimizer == 0, held
    _, resumed = numbers(ZeroTrainer, "again", str(folder / "ours" / "checkpoint-2"), **ours)
    assert device.same(resumed, expected), (resumed, expected)
    made.save_model(str(folder / "final"))
    read = LlamaForCausalLM.from_pretrained(folder / "final")
    assert device.same(values(read), values(plain.model))


def accelerator(mesh, folder):
    """A ZeroAccelerator with two microbatches a step, whose states come back in the middle."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from zero_fn.integrations.accelerate import ZeroAccelerator

    def steps(made, model, optimizer, scheduler, loader):
        for item in loader:
            with made.accumulate(model):
                loss = model(**item).loss
                made.backward(loss)
                if made.sync_gradients:
                    yield float(made.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield loss.item()

    def numbers(kind, place=None, tier=None):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        model, options = llama(), {} if place is None or tier is not None else {"place": place}
        made = kind(gradient_accumulation_steps=2, **options)
        if place is None:  # on "pretend" `to` makes other parameters, which accelerate does not notice
            model.to(device.NAME)
        if tier is not None and place is not None:
            model = all_away(place(model), tier)
        optimizer = adamw(model) if tier is None else zf.streamed(adamw(model))
        loader = torch.utils.data.DataLoader(Counting(), batch_size=4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        objects = made.prepare(model, optimizer, scheduler, loader)
        require_on_device(objects[0])
        found = list(steps(made, *objects))
        saved = str(folder / f"{kind.__name__}, {len([*folder.iterdir()])}")
        made.save_state(saved)
        found += steps(made, *objects)
        made.load_state(saved)
        assert device.same(list(steps(made, *objects)), found[6:]), "a loaded state trains on in another way"
        return found

    expected = numbers(Accelerator)
    assert len(expected) == 12
    for stage in (zf.zero1, zf.zero3):
        for tier in (None, *tiers(folder)):
            found = numbers(ZeroAccelerator, functools.partial(lambda stage, model: stage(model, mesh), stage), tier)
            assert device.same(found, expected), (found, expected)


def read_into_shards(mesh, folder):
    """Files of transformers are read straight into shards on the device, on the host and on a disk, and written from them."""
    plain, expected, tokens = llama_in_files(folder)
    for tier, place in placements(mesh, folder):
        with torch.device("meta"):
            model = type(plain)(plain.config)
        model = place(model)
        before = device.used()[0]
        zf.load_pretrained(model, folder / "plain")
        require_room(model, tier, before)
        assert device.same(model(tokens).logits, expected), tier
        zf.save_pretrained(model, folder / f"from {type(tier).__name__}")
        again = type(plain).from_pretrained(folder / f"from {type(tier).__name__}")
        assert device.same(values(again), values(plain)), tier


def placed(mesh, folder):
    """`from_pretrained` of transformers does so, too."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from zero_fn.integrations.transformers import placed

    if DistributedConfig().tp_size is None:
        raise ModuleNotFoundError(name="transformers>=5.24")
    _, expected, tokens = llama_in_files(folder)
    for tier, place in placements(mesh, folder):
        before = device.used()[0]
        with placed(place):
            model = LlamaForCausalLM.from_pretrained(folder / "plain")
        require_room(model, tier, before)
        assert device.same(model(tokens).logits, expected), tier


def llama_in_files(folder):
    """A model on the device that has been saved, its logits, and of which tokens."""
    model = llama()
    model.save_pretrained(folder / "plain")
    model, tokens = model.to(device.NAME), Counting().tokens[:2].to(device.NAME)
    return model, model(tokens).logits, tokens


def placements(mesh, folder):
    yield None, lambda model: zf.zero3(model, mesh)
    for tier in tiers(folder):
        yield tier, lambda model, tier=tier: zf.zero3(zf.offload(model, params=tier), mesh)


def require_room(model, tier, before):
    """Parameters rest on the device or in their tier, and no more of them than a unit has been on the device meanwhile."""
    most = device.used()[1] - before
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    held = zf.held(model)
    assert held.parameters == (nbytes if tier is None else 0), held
    assert most <= held.parameters + nbytes // 2 + device.SLACK_NBYTES, (tier, most, nbytes)


def save_and_load(mesh, folder):
    """What any stage and tier has saved, any other trains on from."""
    host, disk = tiers(folder)
    ways = {
        "plain": lambda model: model,
        "zero3": lambda model: zf.zero3(model, mesh),
        "zero3, host": lambda model: all_away(zf.zero3(model, mesh), host),
        "zero1, disk": lambda model: all_away(zf.zero1(model, mesh), disk),
        "host, bfloat16": lambda model: all_away(zf.precision(model), host),
    }

    def made(way):
        model = ways[way](net())
        return model, zf.streamed(adamw(model)) if {"host", "disk"} & set(way.split(", ")) else adamw(model)

    plain = net()
    plain_optimizer = adamw(plain)
    trained(plain, plain_optimizer)
    expected = values(plain)
    for way in ways:
        model, optimizer = made(way)
        trained(model, optimizer)
        zf.save(folder / "saved" / way, model, optimizer, extra={"step": 4, "rates": torch.ones(3)})
        saved = values(model)
        assert "bfloat16" in way or device.same(saved, expected), way
        for other in ways:
            model, optimizer = made(other)
            extra = zf.load(folder / "saved" / way, model, optimizer)
            assert extra is not None
            assert all(map(torch.equal, values(model), saved)), (way, other)
            if "bfloat16" in way + other:
                trained(model, optimizer, batches(1))
            else:
                oracle = net()
                oracle.load_state_dict(dict(zip(oracle.state_dict(), expected, strict=True)))
                oracle_optimizer = adamw(oracle)
                oracle_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
                require_same(model, optimizer, oracle, oracle_optimizer, functools.partial(batches, 1, 4))


def generate(mesh, folder):
    """The tokens of the plain model on the device: greedy, by beams and drawn, one prompt and several."""
    plain = llama().to(device.NAME).eval()
    host, disk = tiers(folder)
    ways = {
        "host": lambda: zf.offload(llama().to(device.NAME), params=host),
        "disk": lambda: zf.offload(llama().to(device.NAME), params=disk),
        "zero3": lambda: zf.zero3(llama(), mesh),
        "zero3, host": lambda: zf.zero3(zf.offload(llama(), params=host), mesh),
    }
    prompts = Counting().tokens[:, :4].to(device.NAME)
    kinds = {
        "greedy": {"do_sample": False},
        "static cache": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
        "beams": {"do_sample": False, "num_beams": 2},
        "drawn": {"do_sample": True, "top_k": 5},
    }
    for way, make in ways.items():
        model = make().eval()
        for kind, options in kinds.items():
            for prompt in (prompts[:1], prompts[:3]):
                found = []
                for each in (model, plain):
                    torch.manual_seed(1)
                    found.append(each.generate(prompt, max_new_tokens=8, **options))
                assert found[1].shape == (len(prompt), 12)
                assert torch.equal(*found), (way, kind, *found)


def memory_runs_out(mesh, folder):
    """Wherever it does in a step, the error is torch's, and the step is taken once there is room again."""
    width = 512 if device.NAME == "pretend" else 2048

    def wide():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device.NAME)

    x = torch.ones(2, width, device=device.NAME)
    for tier in tiers(folder):
        model, plain = zf.zero3(all_away(wide(), tier), mesh), wide()
        optimizer, other = zf.streamed(adamw(model)), adamw(plain)
        failed = []
        for room in [*(part * 4 * width * width // 2 for part in range(7)), None]:
            try:
                with device.limited(room):
                    model(x).square().mean().backward()
            except torch.OutOfMemoryError:
                failed.append(room)
                model.zero_grad()
                model(x).square().mean().backward()
            plain(x).square().mean().backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            assert device.same(values(model), values(plain)), (tier, room, failed)
        assert 0 < len(failed) < 8, failed


def default_device(mesh, folder):
    """Under `torch.set_default_device`, as many programs for an accelerator begin: what is meant for the host stays there."""
    tokens, later = [*batches()], [*batches(2)]
    torch.set_default_device(device.NAME)
    try:
        for tier in (None, *tiers(folder)):
            plain, model = zf.precision(net()), zf.zero3(zf.precision(net()), mesh)
            if tier is None:
                optimizer, other = adamw(model), adamw(plain)
            else:
                model = all_away(model, tier)
                optimizer, other = zf.streamed(adamw(model)), adamw(plain)
                fused = all_away(net(), tier)
                trained(fused, zf.streamed(torch.optim.AdamW(fused.parameters(), fused=True)), iter(tokens))
            require_same(model, optimizer, plain, other, lambda: iter(tokens))
            saved = folder / type(tier).__name__
            zf.save(saved, model, optimizer)
            trained(model, optimizer, iter(later))
            zf.load(saved, model, optimizer)
            require_same(model, optimizer, plain, other, lambda: iter(later))
        (run,) = runs_of(zf.zero3(net(), mesh), verb="a test")
        sent = Bits(run.transport, [True], "a bit")
        assert sent._bits.device.type == "cpu", "a message of the host, which is pinned on a real device"
        assert sent.read() == [True]
    finally:
        torch.set_default_device(None)


def require_on_device(model):
    assert {parameter.device.type for parameter in model.parameters()} == {device.NAME}


PROGRAMS = (
    default_device,
    memory_runs_out,
    from_deepspeed,
    checkpoints_on_the_host,
    save_and_load,
    accelerator,
    trainer,
    read_into_shards,
    placed,
    generate,
)


def main(where, folder):
    device.choose(where)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if device.NAME == "pretend":
        os.environ["ACCELERATE_TORCH_DEVICE"] = device.NAME  # accelerate knows the real ones
    mesh = device.begin_group(f"{folder}/store of entries", 0, 1)
    found = {}
    for run in PROGRAMS:
        own = Path(folder) / run.__name__
        own.mkdir()
        found[run.__name__] = device.outcome(run.__name__, functools.partial(run, mesh, own))
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
