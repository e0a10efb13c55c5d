"""Folders of Hugging Face.

read       `load_pretrained`
in_place   parameters that stay in the files
write      `save_pretrained`
own_names  whether files have the names of the model
"""
