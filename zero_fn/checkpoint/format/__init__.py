"""The format of `zf.save`. See docs/checkpoint-format.md.

box       which elements of a tensor a rank holds, and which it writes
files     tensors and JSON in files, each byte under a digest
values    numbers, strings, lists and dicts as JSON
folders   which checkpoints there are; drafts, which become checkpoints by a rename
contents  what is in a checkpoint, whoever has written it
catalog   what is in a checkpoint that `zf.save` has written
"""
