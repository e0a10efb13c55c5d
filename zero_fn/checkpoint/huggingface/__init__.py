"""Folders of Hugging Face.

pretrained  `load_pretrained` reads them
exporting   `save_pretrained` writes them
"""
