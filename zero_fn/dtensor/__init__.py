"""Operations of DTensor that are refused over resting tensors,
because torch gets them wrong without a word."""
