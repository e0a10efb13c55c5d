"""zero_fn below the libraries that people train with; `import zero_fn` imports none of them.

placing        models take the place of plain ones, and optimizers follow
states         whole values for files that others read; states on the ranks that own them
window         one reduction for microbatches that come one by one
accelerate     `ZeroAccelerator`
pretrained     `placed`: `from_pretrained` straight into what rests
transformers   `ZeroTrainer`, and `ZeroTrainerMixin` for any other Trainer
lightning      `ZeroStrategy`
"""
