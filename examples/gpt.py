"""A Llama-style GPT over bytes, and the text that it learns. Nothing here knows of ranks.

    bytes -> Embedding -> Block x layers -> RMSNorm -> Linear -> logits of the next byte
                          |
                          `-- x + Attention(RMSNorm(x)), then x + SwiGLU(RMSNorm(x))

Every module that owns parameters or buffers has `reset_parameters`, so the model may start on the `meta` device: memory that
it is given later holds garbage, until the weights are drawn and the rotary tables are computed.

The default text needs no download: the source of Python's own standard library, some 11 MB. Whole files go to the
training or to the validation split, so that no line of a validation file was ever trained on. The batch of a step is the same
for every number of ranks and microbatches; each takes its rows::

    rows of a step:  "(rank microbatch row) time"     row `rank`, then one microbatch after the other

Source: Llama, Touvron et al. 2023; rotary positions, Su et al. 2021; SwiGLU, Shazeer 2020.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "Block", "Config", "Corpus", "generate", "next_byte_loss", "rows"]

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_BETWEEN_FILES = b"\0"


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a model.

    Attributes:
        layers: Number of blocks.
        dim: Width of the residual stream.
        heads: Attention heads; divides `dim` into even parts.
        seq: Longest sequence, in bytes.
        vocab: Number of symbols; 256 for bytes.
        checkpoint_activations: Keep only the input of each block for the backward and compute the rest again.
    """

    layers: int = 4
    dim: int = 176
    heads: int = 4
    seq: int = 256
    vocab: int = 256
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "seq", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"heads={self.heads} does not divide dim={self.dim} into heads of even width "
                f"(rotary positions turn pairs): dim must be a multiple of {2 * self.heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: 8/3 of `dim`, rounded up to a multiple of 16."""
        return -(-8 * self.dim // 3 // 16) * 16


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    Shapes: tokens "batch seq" of int64 -> logits "batch seq vocab", seq at most `config.seq`.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim)
        self.rope = Rotary(config.seq, config.head_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = Linear(config.dim, config.vocab, std=0.5 * config.dim**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        turns = self.rope(tokens.shape[1])
        for block in self.blocks:
            if self.config.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                x = block(x, turns)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then the feed-forward layer, each reading the normalized stream and adding to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.dim, 3 * config.dim, std=config.dim**-0.5)
        self.out = Linear(config.dim, config.dim, std=(2 * config.layers * config.dim) ** -0.5)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # "batch seq 3 head width"
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each "batch head seq width"
        mixed = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.hidden, std=config.dim**-0.5)
        self.down = Linear(config.hidden, config.dim, std=(2 * config.layers * config.hidden) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Rotary(nn.Module):
    """Tables of the angles by which positions turn pairs of features.

    Shapes: turns "2 seq width": cosines, then sines.
    """

    turns: Tensor

    def __init__(self, seq: int, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("turns", torch.empty(2, seq, head_dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Computes the tables again, in place: what `to_empty` leaves in a buffer is garbage."""
        _, seq, width = self.turns.shape
        device = self.turns.device
        inv_freq = self.base ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), inv_freq).repeat(1, 2)
        with torch.no_grad():
            self.turns.copy_(torch.stack((angles.cos(), angles.sin())))

    def forward(self, seq: int) -> Tensor:
        return self.turns[:, :seq]


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turns the feature pairs (i, i + width/2) of each position by its angle; "... seq width" in and out."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = turns
    turned: Tensor = x * cos + torch.cat((-second, first), dim=-1) * sin
    return turned.to(x.dtype)


class RMSNorm(nn.Module):
    """Scales the last dim to unit mean square, then by a learned weight."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts as the plain normalization."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Module):
    """A matrix without bias, drawn from a normal distribution of the given standard deviation."""

    def __init__(self, inputs: int, outputs: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights again."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """One row of features per symbol."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the rows again, at the scale that the blocks add to."""
        nn.init.normal_(self.weight, std=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of each next byte, in nats; "row (seq + 1)" -> 0-d."""
    logits: Tensor = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, length: int, *, window: int, temperature: float = 0.6, seed: int = 0
) -> Tensor:
    """Continues a prompt, one byte at a time, through the model's own forward.

    Every rank that runs it draws the same bytes, so it may be called on a sharded model, by all ranks together.

    Shapes: prompt "time" of int64 -> "time + length".

    Args:
        model: Tokens "1 seq" to logits "1 seq vocab".
        prompt: At least one byte.
        length: Bytes to add.
        window: The model sees the last `window` bytes.
        temperature: Above 0; lower is safer text.
        seed: Of the draws.

    Returns:
        The prompt with its continuation; `prompt` is unchanged.
    """
    draws = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(length):
        logits: Tensor = model(tokens[None, -window:])[0, -1]
        odds = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        tokens = torch.cat((tokens, torch.multinomial(odds, 1, generator=draws).to(tokens.device)))
    return tokens


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two splits of a text.

    Attributes:
        source: Where it came from, to be printed.
        train: Bytes to train on, uint8, 1-D.
        validation: Bytes of other files.
    """

    source: str
    train: Tensor
    validation: Tensor

    @staticmethod
    def load(text: str | None, seq: int) -> Corpus:
        """Reads the standard library, or a file or folder of the user's.

        Args:
            text: A file, a folder (every file in it that is text), or None for the standard library.
            seq: Length of the sequences to be drawn; each split must hold more than one.

        Returns:
            The same corpus on every machine that has the same files.

        Raises:
            ValueError: No such path, no text in it, or fewer than `seq + 1` bytes in a split.
        """
        if text is None:
            return Corpus.split("Python's standard library", dict(_standard_library()), seq)
        path = Path(text).expanduser()
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}")
        files = {path.name: path.read_bytes()} if path.is_file() else dict(_text_files(path))
        return Corpus.split(str(path), files, seq)

    @staticmethod
    def split(source: str, files: dict[str, bytes], seq: int, fraction: float = 0.1) -> Corpus:
        """Gives whole files to the validation split, in the order of a hash of their names, until it has its fraction.

        A single file is cut: its end validates.
        """
        total = sum(map(len, files.values()))
        train, validation = bytearray(), bytearray()
        if len(files) == 1:
            (text,) = files.values()
            cut = round(len(text) * (1 - fraction))
            train, validation = bytearray(text[:cut]), bytearray(text[cut:])
        else:
            for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
                part = validation if len(validation) < fraction * total else train
                part += files[name] + _BETWEEN_FILES
        if min(len(train), len(validation)) <= seq:
            raise ValueError(
                f"the text is too short: {source} holds {len(train):,} bytes to train on and {len(validation):,} to "
                f"validate on, and each must be longer than a sequence of {seq:,} bytes"
            )
        return Corpus(
            source, torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)
        )


def rows(text: Tensor, batch: int, seq: int, *, step: int, seed: int) -> Tensor:
    """The batch of a step: sequences from random places, each with one byte more to predict.

    Shapes: text "bytes" -> "batch (seq + 1)" of int64.

    Args:
        text: One split of a corpus.
        batch: Sequences, over all ranks and microbatches.
        seq: Length of a sequence.
        step: With `seed`, the only thing that the draw depends on.
        seed: Of the run.

    Returns:
        The same rows on every rank.
    """
    draws = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - seq, (batch, 1), generator=draws)
    return text[starts + torch.arange(seq + 1)].long()


def _standard_library() -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the modules of Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _SKIPPED.intersection(name.parts):
            yield name.as_posix(), path.read_bytes()


def _text_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            text = path.read_bytes()
            if text and b"\0" not in text:
                yield name.as_posix(), text
