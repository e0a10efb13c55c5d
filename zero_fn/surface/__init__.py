"""What users call beside transforms: one-line stages, checks, descriptions, what is held."""
