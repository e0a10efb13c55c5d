"""Checkpoints that cannot be torn: written by any ranks, read by any others.

See docs/checkpoint-format.md.

format         files, folders and their digests
live           tensors of a running model and its optimizer: what is saved, and where it is loaded
others         checkpoints that other libraries have written
huggingface    folders of Hugging Face
agreement      ranks agree on what they are about to do, and on how it went
rank_files     which part of the tensors a rank writes, and its files
saving         `save`
loading        `load`
shared_memory  `memory_copies`: checkpoints in shared memory
hosts          which ranks share memory, and which host keeps the files of which
file_transfer  files from host to host
missing_files  gets the files of a copy that another host has
resuming       `resume`: the newest of memory and disk
conversion     writes a checkpoint anew in another format
command        `python -m zero_fn checkpoint`
"""

from zero_fn.checkpoint.format.folders import Checkpoint, checkpoints
from zero_fn.checkpoint.huggingface.read import load_pretrained
from zero_fn.checkpoint.huggingface.write import save_pretrained
from zero_fn.checkpoint.loading import load
from zero_fn.checkpoint.resuming import resume
from zero_fn.checkpoint.saving import Saving, save
from zero_fn.checkpoint.shared_memory import MemoryCopies, memory_copies

__all__ = [
    "Checkpoint",
    "MemoryCopies",
    "Saving",
    "checkpoints",
    "load",
    "load_pretrained",
    "memory_copies",
    "resume",
    "save",
    "save_pretrained",
]
