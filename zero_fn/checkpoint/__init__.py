"""Checkpoints that cannot be torn: written by any ranks, read by any others. See docs/checkpoint-format.md.

format        files, folders and their digests
live          tensors of a running model and its optimizer
others        checkpoints that other libraries have written
huggingface   folders of Hugging Face
rank_meeting  what ranks agree on
saving        `save`
loading       `load`
converting    writes a checkpoint anew in another format
command       `python -m zero_fn checkpoint`
"""

from zero_fn.checkpoint.format.folders import Checkpoint, checkpoints
from zero_fn.checkpoint.huggingface.read import load_pretrained
from zero_fn.checkpoint.huggingface.write import save_pretrained
from zero_fn.checkpoint.loading import load
from zero_fn.checkpoint.saving import Saving, save

__all__ = ["Checkpoint", "Saving", "checkpoints", "load", "load_pretrained", "save", "save_pretrained"]
