"""What most models do without."""
