"""What people call first, on an accelerator: `from_deepspeed`, the Trainer, `from_pretrained`, compiled
blocks, a loss scale.

`python -m tests.accelerator.entries DEVICE FOLDER` prints what became of each as soon as it has ended, and all of
it as JSON. The oracle is the same run with everything on the device and no transform: the Trainer of transformers, for ours.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import zero_fn as zf
from tests.accelerator import device
from tests.accelerator.programs import adamw, all_away, batches, net, require_same, trained, values
from tests.support.models import Stack

__all__ = ["PROGRAMS", "main"]

VOCABULARY = 64


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
        assert zf.memory(setup.model, setup.optimizer).on_device == 0, zf.memory(setup.model, setup.optimizer)
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
            save_steps=2, gradient_accumulation_steps=2, report_to=[], disable_tqdm=True, seed=3,
            dataloader_pin_memory=device.NAME == "cuda",
        )  # fmt: skip
        made = kind(model=llama(), args=arguments, train_dataset=Counting(), **options)
        made.train(resume_from_checkpoint=resumed)
        log = made.state.log_history
        return made, [float(entry[key]) for entry in log for key in ("loss", "grad_norm") if key in entry]

    host = device.host()
    ours = {"place": lambda model: all_away(zf.shard_params(model, mesh), host), "finish": zf.streamed}
    plain, expected = numbers(Trainer, "plain")
    made, found = numbers(ZeroTrainer, "ours", **ours)
    assert len(expected) == 8
    assert device.same(found, expected), (found, expected)
    require_on_device(plain.model)
    held = zf.memory(made.model, made.optimizer.optimizer)
    assert held.parameters == held.optimizer == 0, held
    _, resumed = numbers(ZeroTrainer, "again", str(folder / "ours" / "checkpoint-2"), **ours)
    assert device.same(resumed, expected), (resumed, expected)
    made.save_model(str(folder / "final"))
    read = LlamaForCausalLM.from_pretrained(folder / "final")
    assert device.same(values(read), values(plain.model))


def read_into_shards(mesh, folder):
    """Files of transformers are read straight into shards on the device, on the host and on a disk, and written from them.
    `from_pretrained` of transformers does so, too."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    from zero_fn.integrations.transformers import placed

    plain = llama()
    plain.save_pretrained(folder / "plain")
    plain, tokens = plain.to(device.NAME), Counting().tokens[:2].to(device.NAME)
    expected = plain(tokens).logits

    def loaded(place):
        with torch.device("meta"):
            model = place(LlamaForCausalLM(plain.config))
        zf.load_pretrained(model, folder / "plain")
        return model

    def from_pretrained(place):
        with placed(place):
            return LlamaForCausalLM.from_pretrained(folder / "plain")

    for tier, place in placements(mesh, folder):
        is_new = DistributedConfig().tp_size is not None  # in older ones it reads whole tensors
        for read in (loaded, from_pretrained) if is_new else (loaded,):
            before = device.used()[0]
            model = read(place)
            require_room(model, tier, before)
            assert device.same(model(tokens).logits, expected), (tier, read)
        zf.save_pretrained(model, folder / f"from {type(tier).__name__}")
        again = type(plain).from_pretrained(folder / f"from {type(tier).__name__}")
        assert device.same(values(again), values(plain)), tier


def placements(mesh, folder):
    yield None, lambda model: zf.shard_params(model, mesh)
    for tier in tiers(folder):
        yield tier, lambda model, tier=tier: zf.shard_params(zf.offload(model, params=tier), mesh)


def require_room(model, tier, before):
    """Parameters rest on the device or in their tier, and no more of them than a unit has been on the device meanwhile."""
    most = device.used()[1] - before
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    held = zf.memory(model)
    assert held.parameters == (nbytes if tier is None else 0), held
    assert most <= held.parameters + nbytes // 2 + device.SLACK_NBYTES, (tier, most, nbytes)


def compiled(mesh, folder):
    """Blocks, and the whole, compiled after the transform; what is compiled rounds less often to bfloat16."""
    backend = "aot_eager" if device.NAME == "pretend" else "inductor"
    for stage, dtype, is_away in (
        ("zero1", torch.float32, False),
        ("zero3", torch.float32, False),
        ("zero3", torch.float32, True),
        ("zero3", torch.bfloat16, True),
    ):
        models = [zf.precision(net(), compute=dtype) for _ in range(2)]
        model = getattr(zf, stage)(models[0], mesh)
        model = all_away(model, device.host()) if is_away else model
        for each in (model, models[1]):
            for block in each.blocks:
                block.compile(backend=backend)
        optimizer = zf.streamed(adamw(model)) if is_away else adamw(model)
        require_same(model, optimizer, models[1], adamw(models[1]))
    model, plain = zf.shard_params(net(), mesh), net()
    optimizer = adamw(model)
    found = trained(torch.compile(model, backend=backend), optimizer)
    assert device.same(found, trained(plain, adamw(plain)))


def in_float16(mesh, folder):
    """A loss scale that begins too large: steps are skipped on every rank, then train."""
    if device.NAME == "pretend":
        raise device.Unmeasured  # its operations are not cast
    results = []
    for place in (lambda model: model, lambda model: zf.shard_params(model, mesh)):
        model = place(net())
        optimizer, scaler = adamw(model), torch.amp.GradScaler(device.NAME, init_scale=2.0**20)
        found = []
        for tokens in batches(8):
            with torch.autocast(device.NAME, torch.float16):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [loss.item(), scaler.get_scale()]
        results.append(found)
    assert results[0][1::2] == results[1][1::2], results
    assert device.same(*results), results


def require_on_device(model):
    assert {parameter.device.type for parameter in model.parameters()} == {device.NAME}


PROGRAMS = (compiled, from_deepspeed, checkpoints_on_the_host, trainer, read_into_shards, in_float16)


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
