"""What the four programs share: words and rules about them, and how a rank starts.

A prompt is a word of four letters and a colon, such as "face:". An answer has up to eight letters and ends with a newline. A
letter of the word is good, any other is bad. All prompts have one length, so no row is padded on its left.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

import zero_fn as zf

LETTERS = torch.tensor(list(b"abcdefghijklmnop"))
PAD, END, WORD, PROMPT, ANSWER = 0, ord("\n"), 4, 5, 9  # two bytes, and lengths; ANSWER with its newline


def start(stage: int) -> tuple[zf.distributed.StartedRank, Callable[[nn.Module], nn.Module]]:
    """This rank, and what places a model at a stage of ZeRO over all ranks."""
    here = zf.from_environment().start()  # under torchrun, Slurm, mpirun, Ray, Kubernetes, or alone
    mesh = init_device_mesh(here.device.type, (here.ranks,), mesh_dim_names=("dp",))
    transform = [zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params][stage]
    torch.manual_seed(0)  # every rank builds the same models
    return here, lambda model: transform(model, mesh["dp"])


def read(kind: Any, folder: str, place: Callable[..., Any], *, frozen: bool = False, new_head: bool = False) -> Any:
    """A model of a folder, of which each rank reads its shards; with a new head of one number, if the folder has none."""
    with torch.device("meta"):  # no memory yet
        model = kind(AutoConfig.from_pretrained(folder, **({"num_labels": 1} if new_head else {})))
    model = place(model.eval().requires_grad_(not frozen))  # in eval: without dropout
    zf.load_pretrained(model, folder, strict=not new_head)
    return model


def prompts(rows: int, draws: torch.Generator) -> Tensor:
    """Words of different letters, "row byte"."""
    order = torch.rand(rows, len(LETTERS), generator=draws).argsort(1)
    return F.pad(LETTERS[order[:, :WORD]], (0, 1), value=ord(":"))


def answered(asked: Tensor, good: float, draws: torch.Generator) -> Tensor:
    """Prompts with answers of 4 to 8 letters, of which a share is taken from the word and the rest from another one."""
    shape = len(asked), ANSWER
    own, other = (each.gather(1, torch.randint(WORD, shape, generator=draws)) for each in (asked, asked.roll(1, 0)))
    letters = torch.where(torch.rand(shape, generator=draws) < good, own, other)
    length, at = torch.randint(4, ANSWER, (len(asked), 1), generator=draws), torch.arange(ANSWER)
    return torch.cat((asked, letters.where(at < length, PAD).where(at != length, END)), 1)


def written(tokens: Tensor) -> Tensor:
    """Which bytes of the answers count: those up to the first newline, and it, "row byte"."""
    ends = (tokens[:, PROMPT:] == END).int()
    return (ends.cumsum(1) - ends == 0).float()


def rule(tokens: Tensor) -> Tensor:
    """The reward of each row: good letters less bad ones, of eight."""
    answers = tokens[:, PROMPT:]
    good = (answers[:, :, None] == tokens[:, None, :WORD]).any(-1)
    return (written(tokens) * (answers != END) * (2.0 * good - 1))[:, :-1].sum(1) / (ANSWER - 1)


@torch.no_grad()
def generate(model: Any, asked: Tensor) -> Tensor:
    """Prompts with answers that the model draws, all of one width."""
    drawn = model.generate(asked, max_new_tokens=ANSWER, do_sample=True, top_k=0, eos_token_id=END, pad_token_id=PAD)
    return F.pad(drawn, (0, PROMPT + ANSWER - drawn.shape[1]), value=PAD)


def log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each byte of the answers, given those before it."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """The share of this rank in a mean over what counts on all ranks: as a loss, its averaged gradients are right."""
    dist.all_reduce(count := mask.sum())
    return (values * mask).sum() * dist.get_world_size() / count


def over_ranks(value: Tensor) -> Tensor:
    """The mean over ranks."""
    dist.all_reduce(total := value.detach().clone())
    return total / dist.get_world_size()


def say_bytes(phase: str, found: dict[str, zf.inspect.Plan | zf.inspect.MemoryUse]) -> None:
    """Prints the bytes of training state on rank 0, as planned or as measured."""
    plan = zf.inspect.Plan
    parts = {name: (it.memory, it.padding) if isinstance(it, plan) else (it,) for name, it in found.items()}
    said = ", ".join(f"{name} {sum(part.on_device for part in each):,}" for name, each in parts.items())
    if dist.get_rank() == 0:
        print(f"{phase:>10}: {said}", flush=True)
