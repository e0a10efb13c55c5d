"""Checkpoints that other libraries have written.

opening       finds the newest complete checkpoint in a folder, and what reads it
foreign       what is in a checkpoint of another library
of_deepspeed  ... of DeepSpeed
of_dcp        ... of torch.distributed.checkpoint
pickles       files of `torch.save` as values, without running the code that they name
"""
