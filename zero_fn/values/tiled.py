"""Linears and embeddings that run in parts, so that their weight is never gathered whole. `zf.tile` puts them into a model.

    nn.Linear       weight "(parts rows) in"    each part computes its features of the output, which are concatenated
    nn.Embedding    weight "(parts rows) dim"   each part looks up the tokens that are in its rows

A part is called a *tile*. It is an ordinary linear or embedding, and always a unit of its own: like any other unit it is
gathered before it runs and freed after, in forward and backward.

Source: ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.3 (memory-centric tiling).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zero_fn.errors import PlacementError

__all__ = ["EmbeddingTile", "LinearTile", "Tiled", "TiledEmbedding", "TiledLinear", "is_tile"]

T = TypeVar("T", bound=nn.Module)


class LinearTile(nn.Linear):
    """Some rows of a linear: a unit of its own."""


class EmbeddingTile(nn.Embedding):
    """Some rows of an embedding: a unit of its own."""


def is_tile(module: nn.Module) -> bool:
    """Whether a module is a part of a tiled module."""
    return isinstance(module, LinearTile | EmbeddingTile)


class Tiled(nn.Module):
    """A module that holds its parameters in parts, cut by rows, in their order."""

    def __init__(self, tiles: list[nn.Module]) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)

    def rows(self) -> Iterator[tuple[nn.Module, int, int]]:
        """Each part with its first row and the number of its rows."""
        start = 0
        for tile in self.tiles:
            count = tile.out_features if isinstance(tile, LinearTile) else tile.num_embeddings
            assert isinstance(count, int)
            yield tile, start, count
            start += count

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that were cut, by name."""
        first = self.tiles[0]
        total = sum(count for _, _, count in self.rows())
        return {name: (total, *own.shape[1:]) for name, own in first.named_parameters(recurse=False)}

    def split_entries(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Replaces the entries of the whole module, as it was before `zf.tile`, by entries of the tiles. These are views.

        Changes `state_dict`. Entries of other shapes stay."""
        for attribute, shape in self.whole_shapes().items():
            entry = state_dict.get(f"{prefix}{attribute}")
            if isinstance(entry, Tensor) and tuple(entry.shape) == shape:
                del state_dict[f"{prefix}{attribute}"]
                for number, (_, start, count) in enumerate(self.rows()):
                    state_dict[f"{prefix}tiles.{number}.{attribute}"] = entry.narrow(0, start, count)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.split_entries(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class TiledLinear(Tiled):
    """A linear in tiles, each of which computes some features of the output."""

    def __init__(self, linear: nn.Linear, sizes: list[int]) -> None:
        super().__init__(
            [LinearTile(linear.in_features, n, bias=linear.bias is not None, device="meta") for n in sizes]
        )
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def forward(self, input: Tensor) -> Tensor:
        """Computes what `nn.Linear` does."""
        return torch.cat([_of_whole_width(tile(input), tile) for tile in self.tiles], dim=-1)

    def extra_repr(self) -> str:
        """The sizes of the whole."""
        return f"in_features={self.in_features}, out_features={self.out_features}, parts={len(self.tiles)}"


class TiledEmbedding(Tiled):
    """An embedding in tiles, each of which holds some rows. All tiles run for any tokens, so that all ranks do the same."""

    def __init__(self, embedding: nn.Embedding, sizes: list[int]) -> None:
        tiles: list[nn.Module] = []
        padding, start = embedding.padding_idx, 0
        for n in sizes:
            own = padding - start if padding is not None and start <= padding < start + n else None
            tiles.append(EmbeddingTile(n, embedding.embedding_dim, padding_idx=own, device="meta"))
            start += n
        super().__init__(tiles)
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.padding_idx = padding

    def forward(self, input: Tensor) -> Tensor:
        """Computes what `nn.Embedding` does."""
        output: Tensor | None = None
        for tile, start, count in self.rows():
            own = input - start
            inside = ((own >= 0) & (own < count)).unsqueeze(-1)
            # Tokens below the first row and above the last of the whole are not clamped: errors, as in `nn.Embedding`.
            lowest, highest = (0 if start else None), (count - 1 if start + count < self.num_embeddings else None)
            found = tile(own.clamp(lowest, highest))
            output = found if output is None else torch.where(inside, found, output)
        assert output is not None, "a tiled module has parts"
        return output

    def extra_repr(self) -> str:
        """The sizes of the whole."""
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, parts={len(self.tiles)}"


def _of_whole_width(output: Tensor, tile: nn.Module) -> Tensor:
    """The output of a tile, if it has all features of the tile.

    Raises:
        PlacementError: The output is cut over an axis. Outputs of tiles could not be concatenated in order.
    """
    if output.shape[-1] != tile.out_features:
        raise PlacementError(
            "The output of a tile is cut over an axis, and features would be in another order than without tiles.",
            tile=tile,
            got=f"{output.shape[-1]} features on this rank",
            fix='parallelize tiles by rows, or gather their outputs: {"head.tiles.*": '
            "ColwiseParallel(output_layouts=Replicate())}",
        )
    return output
