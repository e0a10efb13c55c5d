"""Checkpoints that cannot be torn: written by any ranks, read by any others. See docs/checkpoint-format.md.

boxes         which elements of a tensor a rank holds, and which it writes
files         tensors and JSON in files, each byte under a digest
values        numbers, strings, lists and dicts as JSON
folders       which checkpoints there are; drafts, which become checkpoints by a rename
together      what ranks agree on
leaves        tensors of a model and an optimizer: their names, and how they are read and written
passing       states of streamed optimizers, a chunk at a time
contents      what is in a checkpoint, whoever has written it
catalog       ... of `zf.save`
foreign       ... of another library
of_deepspeed  ... of DeepSpeed
of_dcp        ... of torch.distributed.checkpoint
pickles       files of `torch.save` as values, without running the code that they name
opening       which checkpoint a folder means, and which of these reads it
fit           how files fit a model, an optimizer and `extra`
saving        `save` and `save_async`
loading       `load`
pretrained    `load_pretrained`: reads folders of Hugging Face
exporting     `save_pretrained`: writes them
converting    writes a checkpoint anew in another format
command       `python -m zero_fn checkpoint`
"""

from zero_fn.checkpoint.exporting import save_pretrained
from zero_fn.checkpoint.folders import Checkpoint, checkpoints
from zero_fn.checkpoint.loading import load
from zero_fn.checkpoint.pretrained import load_pretrained
from zero_fn.checkpoint.saving import Saving, save, save_async

__all__ = ["Checkpoint", "Saving", "checkpoints", "load", "load_pretrained", "save", "save_async", "save_pretrained"]
