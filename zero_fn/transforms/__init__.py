"""The verbs: each a function from a module to a new module."""
