"""Checkpoints that other libraries have written.

find         finds the newest complete checkpoint in a folder, and what reads it
torch_files  values and tensors in files of `torch.save`, and a checkpoint that is made up of them
deepspeed    folders of DeepSpeed
dcp          folders of torch.distributed.checkpoint
"""
