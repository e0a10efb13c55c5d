"""Checkpoints that cannot be torn: written by any ranks, read by any others.

See docs/checkpoint-format.md.

format        files, folders and their digests
live          tensors of a running model and its optimizer
others        checkpoints that other libraries have written
huggingface   folders of Hugging Face
rank_meeting  what ranks agree on
writing       what a rank saves, and its files
saving        `save`
loading       `load`
mirror        `mirror`: copies in shared memory; `mirrored`: where they lie
resuming      `resume`: the newest of memory and disk
converting    writes a checkpoint anew in another format
command       `python -m zero_fn checkpoint`
"""

from zero_fn.checkpoint.format.folders import Checkpoint, checkpoints
from zero_fn.checkpoint.huggingface.read import load_pretrained
from zero_fn.checkpoint.huggingface.write import save_pretrained
from zero_fn.checkpoint.loading import load
from zero_fn.checkpoint.mirror import Mirror, mirror
from zero_fn.checkpoint.resuming import resume
from zero_fn.checkpoint.saving import Saving, save

__all__ = [
    "Checkpoint",
    "Mirror",
    "Saving",
    "checkpoints",
    "load",
    "load_pretrained",
    "mirror",
    "resume",
    "save",
    "save_pretrained",
]
