"""What happens while a transformed module runs: gathers, frees and reductions around each unit."""
