"""Checkpoints that cannot be torn: written by any ranks, read by any others. See docs/checkpoint-format.md.

boxes      which elements a rank holds, and which it writes
files      tensors and JSON in files, each byte under a digest
values     numbers, strings, lists and dicts as JSON
folders    what checkpoints there are; drafts, which become one by a rename
together   what ranks agree on
leaves     tensors of a model and an optimizer, with their way in and out
contents   a checkpoint that is read, whoever has written it: where each element is
catalog    ... that is ours
pickles    files of `torch.save` as values, without running what is in them
foreign    what a checkpoint of another library has
of_deepspeed    ... that is DeepSpeed
of_dcp     ... that is torch.distributed.checkpoint
converting one checkpoint written anew in another format
command    `python -m zero_fn checkpoint`
opening    which checkpoint a folder means, and who can read it
passing    states of streamed optimizers
fit        how files fit a model, an optimizer and anything else
saving     `save` and `save_async`
loading    `load`
pretrained `load_pretrained`: folders of Hugging Face
exporting  `save_pretrained`: writes them
"""

from zero_fn.checkpoint.exporting import save_pretrained
from zero_fn.checkpoint.folders import Checkpoint, checkpoints
from zero_fn.checkpoint.loading import load
from zero_fn.checkpoint.pretrained import load_pretrained
from zero_fn.checkpoint.saving import Saving, save, save_async

__all__ = ["Checkpoint", "Saving", "checkpoints", "load", "load_pretrained", "save", "save_async", "save_pretrained"]
