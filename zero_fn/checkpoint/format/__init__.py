"""The format of `zf.save`. See docs/checkpoint-format.md.

files       tensors and JSON in files, each byte under a digest
writer      writes the files of one rank
values      numbers, strings, lists and dicts as JSON
folders     which checkpoints there are; drafts, which become checkpoints by a rename
contents    tensors and values of a checkpoint, whoever has written it
own_folder  reads a checkpoint that `zf.save` has written
"""
